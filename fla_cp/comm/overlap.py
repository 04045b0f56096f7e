"""Work that a layer does while an exchange is under way.

A convolution or an operator starts its exchange and waits for it inside one call. Before the call,
the caller hands over the work that can be done in the meantime:

    with Overlap(lambda: self.g_proj(x)) as gate:
        o = self.core(...)
    y = self.o_norm(o, gate())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.timing import exchange_begins, exchange_wait, named

Found = TypeVar("Found")


class _Handed(threading.local):
    """The work that the next exchange of this thread may run."""

    def __init__(self) -> None:
        self.work: list[Overlap] = []


_handed = _Handed()


class Overlap(Generic[Found]):
    """Runs f once: during the first exchange in the block, or else when the result is asked for.

    In a batch that needs no exchange, f runs where the exchange would have been, so that ranks of
    different context-parallel groups run their modules in the same order. f runs with the gradient
    and autocast modes that were set when the block was entered.
    """

    def __init__(self, f: Callable[[], Found]):
        self._f = f
        self._found: list[Found] = []

    def __enter__(self) -> Overlap[Found]:
        if not torch.compiler.is_compiling():  # a compiler moves work by itself
            self._grad = torch.is_grad_enabled()
            self._autocast = [
                (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
                for device in ("cpu", "cuda")
            ]
            _handed.work.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self in _handed.work:
            _handed.work.remove(self)

    def __call__(self) -> Found:
        if not self._found:
            self._found.append(self._f())
        return self._found[0]

    def run(self) -> None:
        with ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(device):
                    modes.enter_context(torch.autocast(device, dtype, enabled))
            self()


def run_overlap(wait: Callable[[], Found]) -> Found:
    """Runs the work that was handed over, and then returns what `wait` returns. If the work fails,
    the exchange is waited for nevertheless, because it still writes to its memory."""
    work, _handed.work = _handed.work, []
    try:
        for one in work:
            one.run()
    finally:
        found = wait()
    return found


class Arriving:
    """Rows that are under way between the ranks. send, receive: how many rows go to each rank, and
    come from it. what: the name of the rows, which traces and warnings of long waits show."""

    def __init__(
        self,
        x: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: dist.ProcessGroup,
        what: str,
    ):
        self.what = what
        with named(f"start of exchange of {what}"):
            self.under_way = [collectives.all_to_all(x, list(send), list(receive), group)]
        self.began = exchange_begins(x.device)

    def wait(self) -> Tensor:
        """The rows that arrive, [sum(receive), n] in rank order. It may be called only once, and
        keeps no reference to the rows."""
        out, work = self.under_way.pop()
        with exchange_wait(out.device, f"exchange of {self.what}", self.began):
            work.wait()
        return out


def exchanged(
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup | None,
    what: str,
) -> Tensor:
    """Exchanges x [sum(send), n] for [sum(receive), n], and runs the work that was handed over in
    the meantime. Without a group it returns x itself."""
    if group is None:
        return x
    return run_overlap(Arriving(x, send, receive, group, what).wait)
