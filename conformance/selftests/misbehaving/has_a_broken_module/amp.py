"""Exits when it is imported."""

import sys

sys.exit("amp is not for this machine")
