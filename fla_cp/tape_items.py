"""What a tape holds: tensors by where they come from, and what happens to them, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Root(NamedTuple):
    """Where a tensor's memory comes from.

    number: of the root on its tape. kind: "input", "table", "memory", "result", "constant", or
    "value" for an object that is no tensor. what: the index of an input, the `Column` of a table,
    (dtype, device) of memory, or the constant itself.
    """

    number: int
    kind: str
    what: Any
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class Ref(NamedTuple):
    """A tensor on the tape. offset: elements from the root's first one."""

    root: Root
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Column(NamedTuple):
    """A column of a device table. owner: the expression that finds the object with the table."""

    owner: str
    build: Any
    dtype: torch.dtype
    place: int


class Named(NamedTuple):
    """An object of the plan. expression: finds it in a program, for example `plan.links`."""

    expression: str


class Value(NamedTuple):
    """An object that a step returned. number: of its root."""

    number: int


class ByAddress(Protocol):
    """Makes an argument of a kernel, or with `many` several, from an address. found: those that it
    has made and keeps, by address."""

    many: bool
    found: dict[int, Any]

    def __call__(self, address: int) -> Any: ...


class OfAddress(NamedTuple):
    """An argument of a kernel that is made from a tensor's address, such as a descriptor."""

    base: Tensor
    make: ByAddress


class Pointed(NamedTuple):
    """`OfAddress`, on a tape."""

    base: Ref
    make: ByAddress


class Launch(NamedTuple):
    """A launch of a kernel. stream: its number on the tape; 0 is the call's own. kernel: Triton's
    launcher, and what the launcher takes between the stream and the kernel's arguments. args: the
    kernel's arguments, with a `Ref` for each tensor."""

    stream: int
    kernel: tuple[Any, tuple]
    grid: tuple[int, int, int]
    args: tuple


class Op(NamedTuple):
    """A torch op, or a step (`fla_cp.tape.step`). results: the roots of what it returns, in the
    same structure; None for what nobody uses."""

    run: Callable[..., Any]
    args: tuple
    kwargs: dict
    results: Any
    is_step: bool = False


class Fork(NamedTuple):
    """A side stream waits for the call's own stream. side: its number on the tape. make: a function
    that returns the `fla_cp.kernels.triton.streams.Fork` of the stream with a given address; or the
    side stream itself, if the step before returned it and already made it wait."""

    side: int
    make: Callable[[int], Any] | Value


class Join(NamedTuple):
    """The call's own stream waits for a side stream. side: its number on the tape. waits: False if
    the step before already made it wait."""

    side: int
    waits: bool = True


Item = Launch | Op | Fork | Join
