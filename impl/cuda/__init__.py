"""Replacements of modules in `torch.cuda`."""
