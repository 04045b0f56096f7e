"""CUDA streams for kernels that run at the same time as those of the current stream.

Work on another stream does not allocate there. Its memory is allocated before, on the current
stream, and is held until the current stream has waited for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch

URGENT = -1
"""Priority of a stream whose programs get SMs before those of the current stream."""


@functools.lru_cache
def side_stream(device: torch.device, current: int, priority: int = 0) -> torch.cuda.Stream:
    """The stream for work that runs at the same time as the stream numbered `current`."""
    return torch.cuda.Stream(device, priority)


def start(
    run: Callable[[], None], device: torch.device, *held: object, concurrent: bool
) -> Callable[[], None]:
    """Runs the launches of `run` after the work that the current stream has now. With `concurrent`
    they run at the same time as its later work, otherwise in the stream itself. The call that is
    returned makes the current stream wait for them. held: tensors that they read."""
    side = None
    if concurrent:
        stream = torch.cuda.current_stream(device)
        side = side_stream(device, stream.stream_id)
        side.wait_stream(stream)
    with nullcontext() if side is None else torch.cuda.stream(side):
        run()
    reads = [held]

    def wait() -> None:
        if side is not None:
            torch.cuda.current_stream(device).wait_stream(side)
        reads.clear()

    return wait


def first_then(few: Callable[[], None], many: Callable[[], None], device: torch.device) -> None:
    """Runs both at the same time. The few long programs of the first are on a stream of high
    priority, so that they get SMs before the many short ones of the second. The current stream
    waits for both."""
    if device.type != "cuda":
        few()
        many()
        return
    stream = torch.cuda.current_stream(device)
    urgent = side_stream(device, stream.stream_id, URGENT)
    urgent.wait_stream(stream)
    ready = urgent.record_event()
    with torch.cuda.stream(urgent):
        few()
    stream.wait_event(ready)
    many()
    stream.wait_stream(urgent)
