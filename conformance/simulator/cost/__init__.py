"""Simulation of the cost of a training step on accelerators that are not here, by shapes and a table of hardware.

    python -m conformance.simulator.cost                           # Llama 3.1 8B on 8 ranks, beside what was published
    python -m conformance.simulator.cost --ranks 8,64,512,4096 --accelerator h200 --picture steps.svg

The real program runs: the sharding of torch and impl, on the simulated device as rank 0 of the requested number of
ranks, with streams, events and an allocator. No operator computes and no memory is touched (`trace.py`). Each
operator gets a duration from `hardware.toml` (`durations.py`). Each stream then does its work in order, as early as
events and the host allow (`timeline.py`). The memory in use follows from that.

Not modelled: kernels and collectives at the same time slow each other down, ranks differ, and other jobs use the
links. An operator on a list of tensors (`_foreach_…`) is one kernel a tensor. The reserved memory is a lower bound:
memory that was freed while other streams use it, as by torch's FSDP, is allocated again at once. One figure is fitted
to a published one, the share of the peak that matrix products reach (`calibration.py`). It absorbs the mean of these
effects.
"""
