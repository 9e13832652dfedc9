"""Bugs planted in nn_utils_clip_grad."""
