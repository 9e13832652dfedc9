"""Lacks a module that it claims."""

from right import clipping

nn = clipping()
