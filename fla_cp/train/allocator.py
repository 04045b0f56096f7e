"""How torch's allocator takes memory from a GPU in the trainer's processes."""

import os

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables with which users set torch's allocator."""

GROWING = "expandable_segments:True"
"""Lets a segment of memory grow in place. Otherwise each large tensor that fits into no gap takes a
segment of its own, and the gaps add up. A CUDA graph keeps the gaps of its step as long as it
exists."""


def let_segments_grow() -> None:
    """Chooses `GROWING`, unless the user has set one of `VARIABLES`. Torch reads them when it first
    uses a GPU, so this comes before."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0]] = GROWING
