"""State dicts of the model and the optimizer: saving, loading, and the exchange of tensors between ranks.

A tensor of a parameter's shape is divided in two ways. A *shard* is what a rank owns. In a flat parameter it is a
contiguous *piece* of the parameter's *slot*. In `torch.chunk` order it is a *chunk* of rows. A *run* is a range of
elements.

    flat parameter   | slot of a (6 elements) | slot of b (4) |
    shards           | rank 0: 5 elements | rank 1: 5         |
    pieces of a      | 5 on rank 0        | 1 on rank 1       |
    chunks of a      | row 0 of [2, 3]    | row 1 of [2, 3]   |
"""
