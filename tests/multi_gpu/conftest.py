"""Pools of 2, 4 and 8 ranks: on GPUs over NCCL if there are enough, else processes over gloo."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool

ON_CPU = (2, 4)
"""Sizes that run without GPUs."""


@pytest.fixture(
    scope="session",
    params=[2, pytest.param(4, marks=pytest.mark.wide), pytest.param(8, marks=pytest.mark.wide)],
    ids=lambda n: f"{n}-ranks",
)
def run(request, gloo_pool) -> Callable[..., list[Any]]:
    """`RankPool.run` of a pool with this number of ranks; see tests/support/ranks.py."""
    size, gpus = request.param, torch.cuda.device_count()
    if gpus == 0:
        if size not in ON_CPU:
            pytest.skip(f"{size} ranks need {size} GPUs, this machine has none")
        yield partial(gloo_pool.run, world_size=size)
        return
    if gpus < size:
        pytest.skip(f"{size} ranks need {size} GPUs, this machine has {gpus}")
    pool = RankPool(size, "cuda")
    try:
        yield pool.run
    finally:
        pool.close()
