"""What is saved and loaded: the model's and the optimizer's state dicts, and how their tensors move between ranks."""
