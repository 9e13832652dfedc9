"""What torch has at `torch.cpu` and we replace."""
