"""Accelerate's state of a process, made anew for a test."""

import os
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fresh_state(rank=0, world_size=1):
    """accelerate without a state before and after the block. With several ranks, these are the
    processes of a pool, with the environment that a launcher would give them."""
    from accelerate.state import AcceleratorState, GradientState

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate warns where it is missing
    if world_size > 1:
        assert dist.get_world_size() == world_size, "accelerate takes the whole pool"
        names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name, value in zip(names, (rank, world_size), strict=True):
            os.environ |= dict.fromkeys(name, str(value))
    reset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        reset()
