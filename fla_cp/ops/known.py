"""What is decided once for all eager calls with one key: checks, the rule, the backend, and where
possible the plan."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fla_cp.arguments import PLAIN_TENSORS
from fla_cp.autograd import Kind
from fla_cp.context import FLACPContext
from fla_cp.kernels import Backend, resolve
from fla_cp.ops.options import TENSORS, Options, Tensors
from fla_cp.pipeline import Plan
from fla_cp.recent import Recent
from fla_cp.replay import Replayed, layout
from fla_cp.rule import DeltaRule

Shape = tuple[int, int, int, torch.device]
"""HV, K, V and the device of a call."""


class Packed(NamedTuple):
    """What decides how calls with offsets of sequences are planned, besides the offsets. states:
    whether states are given or wanted. dtype: of q. offsets: the dtype of cu_seqlens if kernels can
    read them, or None."""

    states: bool
    tokens: int
    shape: Shape
    device: torch.device
    dtype: torch.dtype
    offsets: torch.dtype | None


@dataclass(slots=True, eq=False)
class Known:
    """What is decided for all calls with one `key_of`. number: a unique number, for the keys of
    caches. plan: the plan of all these calls, if they have neither offsets of sequences nor a
    context; otherwise None. packed: given if they have offsets, but no context."""

    number: int
    rule: DeltaRule
    backend: Backend
    kind: Kind
    plan: Plan | None = None
    packed: Packed | None = None


MAX_KNOWN = 1024
"""The most keys that are remembered."""

known_calls: Recent[tuple, Known] = Recent(MAX_KNOWN)
_numbers = itertools.count()


def remember(
    key: tuple | None, rule: DeltaRule, backend: Backend, *, want_final: bool, want_h: bool
) -> Known:
    """A new `Known` for calls with this key. It is not remembered if the key is None."""
    kind = Kind(want_final, want_h, Replayed(), Replayed())
    known = Known(next(_numbers), rule, backend, kind)
    if key is not None:
        known_calls.keep(key, known)
    return known


OFFSETS = ("cu_seqlens", "cu_seqlens_cpu")
"""Options whose length may differ from call to call."""


def _offsets(x: torch.Tensor) -> tuple:
    """Everything that decides whether offsets of sequences are of the right kind. Of their number,
    only whether it is below two matters."""
    return x.ndim, x.dtype, x.device, x.is_contiguous(), x.numel() < 2


_CONSTANTS = {bool, int, float, str, type(None)}
"""Types of options that are compared by value."""
_LAYOUTS = frozenset(Options._fields[TENSORS])
"""Options that are compared by layout. A scale is compared by value, so a tensor as scale has to be
read in each call."""


def key_of(
    member: tuple, x: Tensors, options: Mapping[str, Any], rows: int
) -> tuple[object, ...] | None:
    """Everything that decides how an eager call runs and whether its arguments are right, except
    the values of tensors. None if an argument has an unusual type; such a call is checked each
    time.

    `chunk` checks in every call what depends on values: the offsets of sequences, and how many
    initial states there must be.
    """
    parts: list[Any] = [member, rows, *options]
    try:
        for t in x:
            if t is None and t is not x.q:
                parts.append(None)
            elif t.__class__ in PLAIN_TENSORS and t.layout is torch.strided and not t.is_nested:
                parts += layout(t)
            else:
                return None
        for name, value in options.items():
            kind = value.__class__
            if kind in _CONSTANTS:
                parts += (kind, value)
            elif kind is FLACPContext:
                parts += (kind, value.local_tokens, value.max_sequences is None)
            elif name not in _LAYOUTS:
                return None
            elif kind in PLAIN_TENSORS and value.layout is torch.strided and not value.is_nested:
                parts += _offsets(value) if name in OFFSETS else layout(value)
            else:
                return None
        backend = resolve(options.get("impl", "auto"), x.q.device, x.q.dtype)
    except (ValueError, RuntimeError):  # a wrong impl; a tensor without an address (torch.func)
        return None  # the checks and autograd say what is wrong
    return (id(backend), *parts)  # no other object gets this id: `Known` holds the backend
