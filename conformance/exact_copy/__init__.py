"""The installed torch's own source as a subject: the same code in modules of its own.

    python -m pytest conformance --subject conformance.exact_copy

Made when it is imported, from what is installed; nothing of torch is stored. It must be judged green: what torch does
suffices. `copying.py` says what leads to the copies and what stays torch's.
"""

from __future__ import annotations

import sys

from conformance.exact_copy import copying

if not any(isinstance(finder, copying.Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, copying.Finder())
