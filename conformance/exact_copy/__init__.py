"""A subject that is a copy of the installed torch's source in separate modules.

    python -m pytest conformance --subject conformance.exact_copy

The copy is made during the import, and nothing of torch is stored. The suite must judge it green, because the behaviour
of torch conforms. `copying.py` describes which names refer to the copies and which to torch.
"""

from __future__ import annotations

import sys

from conformance.exact_copy import copying

if not any(isinstance(finder, copying.Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, copying.Finder())
