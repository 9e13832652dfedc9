"""What Hypothesis draws: plain descriptions, from which each library is given its own fresh tensors."""
