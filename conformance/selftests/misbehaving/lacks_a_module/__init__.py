"""Lacks a module, and claims nothing of it."""

from right import clipping

nn = clipping()
