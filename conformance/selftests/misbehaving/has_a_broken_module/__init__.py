"""One of its modules cannot be imported."""

from right import clipping

nn = clipping()
