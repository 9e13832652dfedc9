/* What the loader asks for first, so that it never calls a library that was built from other sources. */

#include <stdint.h>

int64_t tandem_interface(void) { return 5; }
