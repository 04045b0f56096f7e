"""The exchanges inside compiled graphs, for the timer and the trace.

A compiled graph starts its exchanges and waits for them by torch's functional collectives, where
the compiler sees them and can put other work between the two. None of our code runs there. So while
a step is measured, the ops that such graphs call go through functions of this module, which note
when an exchange began and how long the wait for it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fla_cp.comm.timing import Moment, exchange_begins, exchange_wait

STARTS = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "reduce_scatter_tensor",
)
"""The collectives `_c10d_functional::` that graphs start."""

WHAT = "exchange in a compiled block"


def _op(name: str) -> Any:
    """What a graph calls. Eager calls go past it, so those of FSDP and others are not seen."""
    return getattr(torch.ops._c10d_functional, name).default


def visible() -> bool:
    """Whether this torch lets `watch_graphs` see the collectives of graphs."""
    return all("_op" in vars(_op(name)) for name in (*STARTS, "wait_tensor"))


def _address(x: Any) -> int:
    """Where a tensor's memory is; 0 if it has none, as when a compiler traces the collective."""
    if x.__class__ is not Tensor or x.is_meta or torch._is_functional_tensor(x):
        return 0
    return x.data_ptr()


@contextmanager
def watch_graphs() -> Iterator[None]:
    """In the block, `measure_exchange` and the profiler's trace contain the exchanges of compiled
    graphs, in all threads. Without effect where a graph's collectives are not `visible`."""
    if not visible():
        yield
        return
    began: dict[int, Moment | None] = {}

    def start(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            out = call(*given, **named)
            if place := _address(out):
                began[place] = exchange_begins(out.device)
            return out

        return run

    def wait(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            place = _address(x)
            if place not in began:
                return call(x)
            with exchange_wait(x.device, WHAT, began.pop(place)):
                return call(x)

        return run

    with ExitStack() as stack:
        for name in STARTS:
            stack.enter_context(_replaced(_op(name), start))
        stack.enter_context(_replaced(_op("wait_tensor"), wait))
        yield


@contextmanager
def _replaced(op: Any, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """In the block, `op` calls what `by` makes of its function."""
    before = op._op
    op._op = by(before)
    try:
        yield
    finally:
        op._op = before
