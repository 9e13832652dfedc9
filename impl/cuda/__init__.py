"""What torch has at `torch.cuda` and we replace."""
