"""A peer's kernels, compiled side by side before they are tuned.

Triton's autotuner compiles a configuration, times it and goes on to the next one, so that tuning
FLA's model takes more than five minutes on one core while the others wait. What is timed, how, and
which configuration wins stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton import AsyncCompileMode, Config
from triton.runtime.autotuner import Autotuner


@contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """In the block, Triton's autotuner compiles the configurations of a kernel on all cores before
    it times them. One that cannot be compiled fails again when it is timed, as it does outside."""
    stock = Autotuner.prune_configs

    def prune_configs(self: Autotuner, keywords: Mapping[str, Any]) -> list[Config]:
        configs = stock(self, keywords)
        if len(configs) > 1:
            _compile(self, configs, keywords)
        return configs

    with patch.object(Autotuner, "prune_configs", prune_configs):
        yield


def _compile(tuner: Autotuner, configs: list[Config], keywords: Mapping[str, Any]) -> None:
    given = {**keywords, "warmup": True}
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            tuner.fn.run(*tuner.nargs.values(), **given, **config.all_kwargs())
