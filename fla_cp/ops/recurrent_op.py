"""The recurrence under torch.compile: an op, which a graph calls without tracing its loop over
tokens. It is forward only, because a graph that needs gradients runs the same call in chunks
(recurrent.py)."""

from typing import Any

import torch
from torch import Tensor

from fla_cp.custom_op import RULE
from fla_cp.kernels import resolve
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Pool, Sequences
from fla_cp.rule import DeltaRule

_INPUTS = len(Inputs._fields)


def traced_recurrent(
    rule: DeltaRule,
    impl: str,
    x: Inputs,
    first: Tensor | None,
    final: Tensor | None,
    sequences: Sequences,
) -> Tensor:
    """`Backend.recurrent` in a compiled graph. impl: the name of the backend."""
    in_place = first is not None and first is final
    pool: tuple[Any, ...] = sequences.pool or (None, None, False, 1)
    final = x.v.new_empty(0) if final is None else final
    given = None if in_place else first, final, in_place, *rule, impl, *sequences[:3], *pool
    out: Tensor = _recurrent_op(*x, *given)
    return out


def _run(*args: Any) -> Tensor:
    first, written, in_place, *rest = args[_INPUTS:]
    final = written if written.numel() else None
    fields = len(DeltaRule._fields)
    impl, number, offsets, host, *pool = rest[fields:]
    x, rule = Inputs(*args[:_INPUTS]), DeltaRule(*rest[:fields])
    sequences = Sequences(number, offsets, host, None if pool[0] is None else Pool(*pool))
    backend = resolve(impl, x.q.device, x.q.dtype)
    return backend.recurrent(rule, x, final if in_place else first, final, sequences)


_recurrent_op: Any = torch.library.custom_op(
    "fla_cp::recurrent",
    _run,
    mutates_args=("final",),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
        f"Tensor? p, Tensor? first, Tensor(a!) final, bool in_place, {RULE}, str impl, "
        "SymInt number, Tensor? offsets, Tensor? host, Tensor? places, Tensor? accepted, "
        "bool drafts, int rows) -> Tensor"
    ),
)
"""o [T, HV, V]. Writes the final states to `final`, from which it also reads the first ones with
in_place; an empty tensor stands for states that are not wanted. number, offsets, host: fields of
`Sequences`. places, accepted, drafts, rows: those of `Pool`; places is None without a pool."""


@_recurrent_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape)
