"""Replacements of modules in `torch.cpu`."""
