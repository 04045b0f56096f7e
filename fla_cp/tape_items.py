"""The records on a tape: where tensors come from, and what happens to them, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Root(NamedTuple):
    """Where a tensor's memory comes from.

    number: the root's index on its tape. kind: "input", "table", "memory", "result", "constant", or
    "value" for an object that is no tensor. what: the index of an input, the `Column` of a table,
    (dtype, device) of memory, or the constant itself; otherwise None.
    """

    number: int
    kind: str
    what: Any
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class Ref(NamedTuple):
    """A tensor on the tape, as a view of its root. offset: how many elements it starts after the
    root."""

    root: Root
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Column(NamedTuple):
    """A column of a device table. owner: the Python expression that finds the object which keeps
    the table. build, dtype: see `device_tables.Tabled.table`. place: the column's index."""

    owner: str
    build: Any
    dtype: torch.dtype
    place: int


class Named(NamedTuple):
    """An object of the plan. expression: how a program finds it, for example `plan.links`."""

    expression: str


class Value(NamedTuple):
    """An object, other than a tensor, that a step returned. number: that of its root."""

    number: int


class ByAddress(Protocol):
    """Makes a kernel argument from an address, or several with `many`. found: the arguments that it
    has made before and keeps, by address."""

    many: bool
    found: dict[int, Any]

    def __call__(self, address: int) -> Any: ...


class OfAddress(NamedTuple):
    """A kernel argument that `make` forms from the address of `base`, such as a TMA descriptor."""

    base: Tensor
    make: ByAddress


class Pointed(NamedTuple):
    """An `OfAddress` as a tape notes it."""

    base: Ref
    make: ByAddress


class Launch(NamedTuple):
    """A launch of a kernel. stream: the stream's number on the tape; 0 is the call's own stream.
    kernel: Triton's launcher, and what it takes between the stream and the kernel's arguments.
    args: the kernel's arguments, with a `Ref` in place of each tensor."""

    stream: int
    kernel: tuple[Any, tuple]
    grid: tuple[int, int, int]
    args: tuple


class Op(NamedTuple):
    """A torch op, or a step (`fla_cp.tape.step`). results: the roots of what it returns, in the
    same structure, with None for a result that no program needs."""

    run: Callable[..., Any]
    args: tuple
    kwargs: dict
    results: Any
    is_step: bool = False


class Fork(NamedTuple):
    """A side stream waits for the call's own stream. side: the side stream's number on the tape.
    make: a function that takes the address of the call's own stream and returns its
    `fla_cp.kernels.triton.streams.Fork`. If the step before returned the side stream and already
    made it wait, `make` is the side stream itself."""

    side: int
    make: Callable[[int], Any] | Value


class Join(NamedTuple):
    """The call's own stream waits for a side stream. side: the side stream's number on the tape.
    waits: False if the step before already did the wait."""

    side: int
    waits: bool = True


Item = Launch | Op | Fork | Join
