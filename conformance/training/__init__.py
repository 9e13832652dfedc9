"""A real model on real text, trained with torch's mixed-precision parts and with the subject's.

A byte-level GPT (`gpt`) learns the source of Python's own standard library (`corpus`), which every machine has.
One loop (`trainer`) takes autocast, the scaler and clipping from a library, so that nothing else can differ;
`judge` holds the subject's curves to torch's. As an example for users: `python -m conformance.training --help`.
"""
