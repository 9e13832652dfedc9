"""Never ends being imported."""

import time

time.sleep(3600)
