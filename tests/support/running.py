"""Runs an operator on a case; returns outputs and all gradients, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fla_cp import chunk_kda, fused_recurrent_kda
from fla_cp.context import FLACPContext
from fla_cp.reference import recurrence
from tests.support.cases import PACKED, Case

ORACLE_IGNORES = ("safe_gate", "use_exp2", "disable_recompute")


def weights(case: Case) -> tuple[Tensor, Tensor]:
    """Fixed gradients of o and final_state in fp64. They are multiples of 1/8, exact in every
    dtype.
    """
    gen = torch.Generator().manual_seed(1)
    o = torch.randint(-16, 17, (case.B, case.T, case.HV, case.V), generator=gen)
    state = torch.randint(-16, 17, (case.sequences, case.HV, case.K, case.V), generator=gen)
    return o.double() / 8, state.double() / 8


def _collect(
    inputs: dict[str, Tensor], call: Callable[..., tuple[Tensor, Tensor]], do: Tensor, dS: Tensor
) -> dict[str, Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
    o, final = call(*(leaves[n] for n in PACKED), **_rest(leaves))
    torch.autograd.backward([o, final], [do.to(o.dtype), dS.to(final.dtype)])
    gradients = {f"d{n}": t.grad for n, t in leaves.items()}
    return {"o": o.detach(), "final_state": final.detach(), **gradients}


def _rest(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in leaves.items() if n not in PACKED}


def oracle(case: Case, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The token recurrence in fp64, with the case's inputs or the given ones."""
    known = {n: v for n, v in case.keywords.items() if n not in ORACLE_IGNORES}
    cu = None if case.cu_seqlens is None else list(case.cu_seqlens)
    return _collect(
        case.inputs() if inputs is None else inputs,
        lambda *x, **o: recurrence(*x, **o, **known, cu_seqlens=cu),
        *weights(case),
    )


def run(
    case: Case,
    dtype: torch.dtype = torch.float64,
    impl: str = "torch",
    device: str = "cpu",
    inputs: dict[str, Tensor] | None = None,
    **more: object,
) -> dict[str, Tensor]:
    """`chunk_kda` on one device, with the case's inputs or the given ones."""
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=device)
    inputs = case.inputs(dtype=dtype) if inputs is None else inputs
    inputs = {n: t.to(device) for n, t in inputs.items()}

    def call(*x: Tensor, **o: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_kda(
            *x, **o, **case.keywords, **more, cu_seqlens=cu, output_final_state=True, impl=impl
        )

    return _collect(inputs, call, *(w.to(device) for w in weights(case)))


def run_recurrent(
    case: Case,
    dtype: torch.dtype = torch.float64,
    impl: str = "torch",
    device: str = "cpu",
    inputs: dict[str, Tensor] | None = None,
    v_first: bool = False,
) -> dict[str, Tensor]:
    """o and final_state [N, HV, K, V] of `fused_recurrent_kda`."""
    known = {n: v for n, v in case.keywords.items() if n not in ("safe_gate", "disable_recompute")}
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=device)
    inputs = case.inputs(dtype=dtype) if inputs is None else inputs
    inputs = {n: t.to(device) for n, t in inputs.items()}
    if v_first and "initial_state" in inputs:
        inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    o, final = fused_recurrent_kda(
        *(inputs[n] for n in PACKED),
        **_rest(inputs),
        **known,
        cu_seqlens=cu,
        output_final_state=True,
        state_v_first=v_first,
        impl=impl,
    )
    return {"o": o, "final_state": final.mT if v_first else final}


def run_pooled(
    case: Case, impl: str, device: str, inputs: dict[str, Tensor], *, v_first: bool, drafts: bool
) -> dict[str, Tensor]:
    """o and the states [.., K, V] of `fused_recurrent_kda` with states in a pool: the final ones,
    or with drafts those after each token."""
    inputs = {n: t.to(device) for n, t in inputs.items()}
    first = inputs.pop("initial_state")
    N, columns = len(first), case.T if drafts else 1
    places = torch.arange(N * columns, device=device).flip(0).view(N, columns)
    first = first.mT.contiguous() if v_first else first
    pool = first.new_full((N * columns + 1, *first.shape[1:]), 7.0)
    pool[places[:, 0]] = first
    o, states = fused_recurrent_kda(
        *(inputs[n] for n in PACKED),
        **_rest(inputs),
        **case.keywords,
        initial_state=pool,
        inplace_final_state=True,
        ssm_state_indices=places.int() if drafts else places[:, 0].int(),
        state_v_first=v_first,
        impl=impl,
    )
    assert (states[-1] == 7.0).all()
    states = states[places.flatten()]
    return {"o": o, "final_state": states.mT if v_first else states}


def run_sharded(
    case: Case,
    context: FLACPContext,
    dtype: torch.dtype = torch.float64,
    impl: str = "torch",
    device: str = "cpu",
    v_first: bool = False,
) -> dict[str, Tensor]:
    """`chunk_kda` under a context, on this rank's tokens.

    v_first: pass states as [V, K] to the operator; arguments and results here stay [K, V].
    """
    inputs = {n: t.to(device) for n, t in case.inputs(dtype=dtype).items()}
    local = {n: context.shard(t) if n in PACKED else t for n, t in inputs.items()}
    do, dS = (w.to(device) for w in weights(case))

    def call(*x: Tensor, **o: Tensor) -> tuple[Tensor, Tensor]:
        if v_first and "initial_state" in o:
            o["initial_state"] = o["initial_state"].mT.contiguous()
        found, final = chunk_kda(
            *x,
            **o,
            **case.keywords,
            cp_context=context,
            output_final_state=True,
            state_v_first=v_first,
            impl=impl,
        )
        return found, final.mT if v_first else final

    return _collect(local, call, context.shard(do), dS)
