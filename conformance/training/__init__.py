"""A real model on real text, trained with torch's mixed-precision components and with the subject's.

A byte-level GPT (`gpt`) learns the source of Python's own standard library (`corpus`), which every machine has.
One loop (`trainer`) takes autocast, the scaler and clipping from a library, so that nothing else can differ.
`judge` compares the subject's curves with torch's. `python -m conformance.training --help` explains the command.
"""
