"""CUDA streams for kernels that run at the same time as those of the current stream.

Work on another stream does not allocate there. Its memory is allocated before, on the current
stream, and is held until the current stream has waited for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fla_cp.tape import active

URGENT = -1
"""Priority of a stream whose programs get SMs before those of the current stream."""


class Fork:
    """A stream beside the one that is current, and the two events between them. Events are used
    again: one that is recorded once more stands for later work of the same stream, so that a wait
    for it is never too short."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.main = torch.cuda.current_stream(device)
        self.side = torch.cuda.Stream(device, priority)
        self._from_main, self._from_side = torch.cuda.Event(), torch.cuda.Event()

    def side_waits(self) -> None:
        """Makes the side stream wait for what the main one has now."""
        self._from_main.record(self.main)
        self.side.wait_event(self._from_main)

    def main_waits(self) -> None:
        """Makes the main stream wait for what the side stream has now."""
        self._from_side.record(self.side)
        self.main.wait_event(self._from_side)


@functools.lru_cache
def fork_of(device: torch.device, priority: int, stream: int) -> Fork:
    """The fork of the current stream, whose address is `stream`."""
    return Fork(device, priority)


def open_fork(device: torch.device, priority: int) -> Fork:
    """The fork of the current stream. Its side starts after what the stream has now."""
    stream = torch.cuda.current_stream(device).cuda_stream
    fork, tape = fork_of(device, priority, stream), active()
    fork.side_waits()
    if tape is not None:
        make = functools.partial(fork_of, device, priority)
        tape.add_fork(stream, fork.side.cuda_stream, make)
    return fork


def close_fork(fork: Fork) -> None:
    """Makes the main stream wait for the side."""
    fork.main_waits()
    tape = active()
    if tape is not None:
        tape.add_join(fork.side.cuda_stream)


def start(
    run: Callable[[], None], device: torch.device, *held: object, concurrent: bool
) -> Callable[[], None]:
    """Runs the launches of `run` after the work that the current stream has now. With `concurrent`
    they run at the same time as its later work, otherwise in the stream itself. The call that is
    returned makes the current stream wait for them. held: tensors that they read."""
    if not concurrent:
        run()
        return lambda: None
    fork = open_fork(device, 0)
    with torch.cuda.stream(fork.side):
        run()
    reads = [held]

    def wait() -> None:
        close_fork(fork)
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
    fork = open_fork(device, URGENT)
    close_fork(fork)  # the second starts when the first may
    with torch.cuda.stream(fork.side):
        few()
    many()
    close_fork(fork)
