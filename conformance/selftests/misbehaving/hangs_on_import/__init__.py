"""Its import never ends, and holds Python's lock."""

import ctypes

ctypes.PyDLL(None).sleep(3600)
