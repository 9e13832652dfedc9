"""Hypothesis strategies. They draw plain descriptions, from which each library gets its own fresh tensors."""
