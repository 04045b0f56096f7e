"""Decides which calls run normally, are recorded (tape.py), or replay a program (program.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fla_cp.program import Flat, Program, program
from fla_cp.recent import Recent
from fla_cp.tape import NotReplayable, Tape

MAX_PROGRAMS = 64
"""The most programs that one kind of call keeps in a direction."""


def access(x: Tensor) -> tuple:
    """What else decides how a tensor of known shape, dtype and device is read: its strides, and its
    address modulo 16, because kernels are compiled for aligned addresses."""
    return x.stride(), x.data_ptr() % 16


def access_of_all(tensors: Sequence[Tensor | None]) -> tuple:
    """`access` of several tensors as one flat tuple, which is quick to hash and to compare."""
    found: list[Hashable] = [x if x is None else x.stride() for x in tensors]
    addresses = [0 if x is None else x.data_ptr() & 15 for x in tensors]
    return (*found, *addresses) if any(addresses) else tuple(found)


def layout(x: Tensor) -> tuple:
    """Everything that decides how a tensor is read, apart from its address itself; see `access`."""
    return x.shape, x.dtype, x.device, x.stride(), x.data_ptr() % 16


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a type of device. Torch (2.13) has no autocast for "meta", the
    device on which fla_cp/train/block_memory.py runs layers."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turns autocast off if it is on. To enter `torch.autocast` in every call would take 10 us."""
    if autocasts(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class Replayed:
    """One direction of a kind of call. The first call with a key runs normally, the second is also
    recorded, and later ones run the program, unless the call cannot be replayed.

    known: for each key its program, or a string that says why there is none. With FLA_CP_REPLAY=0
    in the environment nothing is recorded.
    """

    def __init__(self) -> None:
        self.known: Recent[Hashable, Program | str] = Recent(MAX_PROGRAMS)
        self.enabled = os.environ.get("FLA_CP_REPLAY", "1") != "0"

    def __call__(
        self, plan: Any, own: Hashable, inputs: Sequence[Tensor | None], run: Callable[[], Flat]
    ) -> Flat:
        """Returns what `run` returns, or the same from a program. `run` must compute it from plan
        and inputs alone; it runs without autocast.

        plan: a `fla_cp.pipeline.Plan`. own: what decides what the call does, besides the kind of
        call and plan.key. In particular, `own` must have the layouts of the inputs if the kind does
        not have them.
        """
        first = inputs[0]
        assert first is not None
        if autocasts(first.device.type):
            with torch.autocast(first.device.type, enabled=False):
                return self(plan, own, inputs, run)
        stream = plan.backend.replay_stream(first.device) if self.enabled else None
        # Modes that watch torch ops, as selective checkpoints do, must see them in every call.
        if stream is None or _get_current_dispatch_mode() is not None:
            return run()
        return self._run((plan.key, own), plan, inputs, run, stream)

    def _run(
        self,
        key: Hashable,
        plan: Any,
        inputs: Sequence[Tensor | None],
        run: Callable[[], Flat],
        stream: int,
    ) -> Flat:
        """Runs the program that the key has, or else runs the call, and records it if the key was
        seen once before and the call can be recorded."""
        found, first = self.known.use(key), inputs[0]
        assert first is not None
        if isinstance(found, Program):
            return found.run(plan, inputs, stream)
        if found is None:
            self.known.keep(key, "seen once")
        if found != "seen once" or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
            return run()
        given = [id(x) for x in inputs if x is not None]
        if len(set(given)) < len(given):  # a tape could not tell two uses of one tensor apart
            return run()
        tape = Tape(inputs, plan.objects, exact=plan.packing.frame is None)
        for x in plan.backend.replay_constants(first):
            tape.constant(x)
        with tape:
            results = run()
        try:
            self.known.keep(key, program(tape, results))
        except NotReplayable as error:
            self.known.keep(key, str(error))
        return results
