"""Simulation of the cost of a training step on accelerators that are not here, by shapes and a table of hardware.

    python -m conformance.simulator.cost                           # Llama 3.1 8B on 8 ranks, beside what was published
    python -m conformance.simulator.cost --ranks 8,64,512,4096 --accelerator h200 --picture steps.svg

The program that is costed is the real one: torch's and impl's sharding run on the simulated device as rank 0 of as many
ranks as asked for, with streams, events and an allocator, but no operator computes and no memory is touched
(`trace.py`). Each operator then gets a duration from `hardware.toml` (`durations.py`), each stream does its work in
order as early as events and the host allow (`timeline.py`), and what memory was in use when follows from that.

What it does not know: kernels that share the accelerator slow one another down, and so do collectives that overlap
with them; ranks differ; links are shared with others. Lists of tensors (`_foreach_…`) are a kernel a tensor. What is
reserved is the least: memory that was freed while other streams use it, as by torch's FSDP, is given out again at once.
One figure is fitted to one that was published, the part of the peak that matrix products reach (`calibration.py`), and
takes the mean of all that.
"""
