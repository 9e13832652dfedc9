"""Bugs planted in amp_grad_scaler."""
