"""The CPU library, for tests of it."""

from conformance.judge.judgement import unavailable
from impl.kernels import _native


def the_library() -> _native.NativeLibrary:
    library = _native.library()
    if library is None:
        unavailable("the CPU library was not built")
    return library
