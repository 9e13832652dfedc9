"""One of its modules never ends being imported."""

from right import clipping

nn = clipping()
