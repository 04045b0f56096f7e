"""Named inputs that tests and benchmarks share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PACKED = ("q", "k", "v", "g", "beta")
"""Arguments that hold tokens, in the operators' order."""


@dataclass(frozen=True)
class Case:
    """Shape, packing and options of one KDA call.

    cu_seqlens: None for B rows of T tokens. decay: size of the log decay per step, where it is
    given. beta_spread: factor on beta before its sigmoid; 30 moves beta to the ends of its range.
    cancelling: keys are nearly parallel, queries near them and decays slow, so that o is a small
    difference of large terms. options: keywords of `chunk_kda`.
    """

    name: str
    T: int = 130
    B: int = 1
    H: int = 2
    HV: int = 2
    K: int = 8
    V: int = 6
    cu_seqlens: tuple[int, ...] | None = None
    decay: float = 0.3
    beta_spread: float = 1.0
    states: bool = True
    cancelling: bool = False
    options: tuple[tuple[str, object], ...] = ()

    @property
    def sequences(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def keywords(self) -> dict:
        return dict(self.options)

    def offsets(self) -> tuple[int, ...]:
        """cu_seqlens of the batch with its rows folded into one."""
        return self.cu_seqlens or tuple(range(0, self.B * self.T + 1, self.T))

    def inputs(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Arguments of `chunk_kda` by name. All heads differ."""
        gen = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        B, T, H, HV, K, V, o = self.B, self.T, self.H, self.HV, self.K, self.V, self.keywords
        x = {
            "q": draw(B, T, H, K),
            "k": draw(B, T, H, K),
            "v": draw(B, T, HV, V),
            "g": draw(B, T, HV, K),
            "beta": draw(B, T, HV) * self.beta_spread,
        }
        if self.cancelling:
            x["q"], x["k"] = x["q"] + 1, 10 * x["k"] - 50
        if not o.get("use_qk_l2norm_in_kernel"):
            x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
        if o.get("use_gate_in_kernel"):
            x["A_log"], x["dt_bias"] = draw(HV) * 0.5, draw(HV * K)
            if self.cancelling:  # dt_bias: softplus gives 1e-3 to 1e-1
                x["A_log"] = torch.linspace(1, 8, HV, dtype=torch.float64).log()
                dt = torch.rand(HV * K, generator=gen, dtype=torch.float64)
                x["dt_bias"] = torch.exp(dt * math.log(100) + math.log(1e-3)).expm1().log()
        else:
            x["g"] = -x["g"].abs() * self.decay
            if o.get("safe_gate"):
                x["g"] = x["g"].clamp(min=o["lower_bound"])
        if not o.get("use_beta_sigmoid_in_kernel"):
            x["beta"] = x["beta"].sigmoid()
        if self.states:
            x["initial_state"] = draw(self.sequences, HV, K, V)
        half = dtype in (torch.bfloat16, torch.float16)
        return {n: t.to(torch.float32 if half and n not in PACKED else dtype) for n, t in x.items()}


def options(**keywords: object) -> tuple[tuple[str, object], ...]:
    return tuple(keywords.items())


INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
"""Gate, norm and beta's sigmoid inside the operator, as the layer calls it."""

CASES = [
    Case("one-token", T=1),
    Case("63-tokens", T=63),
    Case("one-chunk", T=64),
    Case("65-tokens", T=65),
    Case("rows", B=3, T=70),
    Case("no-states", T=100, states=False),
    Case("packed", T=200, cu_seqlens=(0, 1, 64, 64, 130, 200)),
    Case("all-empty-but-one", T=5, cu_seqlens=(0, 0, 0, 5, 5)),
    Case("grouped-heads", H=2, HV=6, K=8, V=5),
    Case("odd-dims", H=1, HV=2, K=13, V=7),
    Case("slow-decay", T=260, decay=1e-3),
    Case("no-decay", T=130, decay=0.0),
    Case("strong-decay", T=130, decay=30.0),
    Case("inside", options=options(**INSIDE)),
    Case("inside-grouped", HV=4, options=options(**INSIDE, allow_neg_eigval=True, scale=0.7)),
    Case("inside-bounded", options=options(**INSIDE, lower_bound=-5.0)),
    Case("inside-safe", options=options(**INSIDE, lower_bound=-4.0, safe_gate=True)),
    Case("beta-ends", beta_spread=30.0),
    Case("beta-ends-2", beta_spread=30.0, options=options(**INSIDE, allow_neg_eigval=True)),
    Case("exp", options=options(**INSIDE, use_exp2=False)),
    Case("kept", options=options(**INSIDE, disable_recompute=True)),
    Case(
        "cancelling", cancelling=True, options=options(**INSIDE, lower_bound=-5.0, safe_gate=True)
    ),
    Case("given-safe", decay=5.0, options=options(safe_gate=True, lower_bound=-5.0)),
]
BY_NAME = {case.name: case for case in CASES}


def named(name: str, **changes: object) -> Case:
    """A case of the list with some fields changed."""
    return replace(BY_NAME[name], **changes)
