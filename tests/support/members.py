"""The members of the family, calls of them, and their outputs and gradients by name.

tests/support/running.py does the same for KDA alone, from the cases that benchmarks share.
"""

import dataclasses
from typing import NamedTuple

import torch

import fla_cp
from fla_cp.reference import recurrence

F64 = torch.float64


class Member(NamedTuple):
    """A member of the family.

    name: suffix of its operators. per_head: one decay a head, or one a channel. beta, p: whether it
    has these arguments. steps: Householder steps. dplr: whether it has a and b, and g is gk.
    """

    name: str
    per_head: bool = True
    beta: bool = True
    p: bool = False
    steps: int = 1
    dplr: bool = False

    @property
    def arguments(self):
        if self.dplr:
            return ["q", "k", "v", "a", "b", "gk"]
        found = ["q", "k", "v", *(["p"] if self.p else []), "g"]
        return found + (["beta"] if self.beta else [])

    @property
    def extra(self):
        return (self.steps,) if "product" in self.name else ()


MEMBERS = [
    Member("kda", per_head=False),
    Member("gated_delta_rule"),
    Member("comba", p=True),
    Member("dplr_delta_rule", per_head=False, beta=False, dplr=True),
    Member("gla", per_head=False, beta=False),
    Member("simple_gla", beta=False),
    *(Member("gated_delta_product", steps=n) for n in (1, 2, 3, 4)),
]
BY_NAME = {f"{m.name}{m.steps if 'product' in m.name else ''}": m for m in MEMBERS}


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and options of one call. cu: offsets of packed sequences, or None for B rows."""

    T: int = 150
    B: int = 1
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 6
    cu: tuple[int, ...] | None = None
    inside: bool = False
    decay: float = 0.2
    states: bool = True
    options: tuple = ()

    @property
    def sequences(self):
        return self.B if self.cu is None else len(self.cu) - 1

    def offsets(self):
        return self.cu or tuple(range(0, self.B * self.T + 1, self.T))


CALLS = {
    "plain": Call(),
    "packed": Call(T=200, cu=(0, 1, 65, 65, 130, 200)),
    "rows": Call(T=70, B=3, HV=2),
    "one-token": Call(T=1),
    "slow": Call(T=200, decay=1e-3),
    "strong": Call(T=100, decay=30.0),
    "no-states": Call(T=66, states=False),
    "inside": Call(inside=True),
    "kept": Call(inside=True, options=(("disable_recompute", True),)),
    "exp": Call(inside=True, options=(("use_exp2", False), ("scale", 0.7))),
}


def draw(member, call, dtype=F64):
    """Inputs by name, the keywords, and the weights of the loss."""
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=F64)

    B, T, H, HV, K, V = call.B, call.T, call.H, call.HV, call.K, call.V
    rows = T * member.steps
    x = {"q": randn(B, T, H, K), "k": randn(B, rows, H, K), "v": randn(B, rows, HV, V)}
    x["g"] = randn(B, T, HV) if member.per_head else randn(B, T, HV, K)
    if member.p:
        x["p"] = randn(B, rows, H, K)
    if member.beta:
        x["beta"] = randn(B, rows, HV)
    if member.dplr:  # b takes away half of what a reads, and moves some of it to other channels;
        # without decay the state grows if these are many: K = 128, 1000 tokens: 14 times
        x["a"], rate, other = randn(B, T, H, K), randn(B, T, H, K).sigmoid(), randn(B, T, H, K)
        x["a"] = torch.nn.functional.normalize(x["a"], dim=-1)
        x["b"] = -x["a"] * rate + 0.1 * other
        x["gk"] = x.pop("g")
    g = "gk" if member.dplr else "g"
    keywords = dict(call.options)
    if call.inside:
        keywords |= {"use_gate_in_kernel": True}
        keywords |= {} if member.dplr else {"use_qk_l2norm_in_kernel": True}
        x["A_log"] = 0.5 * randn(HV)
        x["dt_bias"] = randn(HV if member.per_head else HV * K)
        if member.beta:
            keywords |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    else:
        x[g] = -x[g].abs() * call.decay
        for name in ("k", "p"):
            if name in x:
                x[name] = torch.nn.functional.normalize(x[name], dim=-1)
        if member.beta:
            x["beta"] = x["beta"].sigmoid()
    if call.states:
        x["initial_state"] = randn(call.sequences, HV, K, V)
    weights = randn(B, T, HV, V), randn(call.sequences, HV, K, V)
    return {n: t.to(dtype) for n, t in x.items()}, keywords, weights


def collect(call, x, weights):
    """Outputs and gradients, by name."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    o, final = call(leaves)
    torch.autograd.backward([o, final], [w.to(o.dtype) for w in weights])
    grads = {f"d{n}": t.grad for n, t in leaves.items()}
    return {"o": o.detach(), "final_state": final.detach(), **grads}


def operator(member, form, leaves, **keywords):
    packed = [leaves[n] for n in member.arguments]
    rest = {n: t for n, t in leaves.items() if n not in member.arguments}
    op = getattr(fla_cp, f"{form}_{member.name}")
    return op(*packed, *member.extra, **rest, output_final_state=True, **keywords)


def run(member, call, dtype=F64, impl="torch", form="chunk", **more):
    x, keywords, weights = draw(member, call, dtype)
    cu = None if call.cu is None else torch.tensor(call.cu)

    def f(leaves):
        return operator(member, form, leaves, **keywords, **more, cu_seqlens=cu, impl=impl)

    if form == "chunk":
        return collect(f, x, weights)
    with torch.no_grad():
        return dict(zip(("o", "final_state"), f(x), strict=True))


def oracle(member, call, dtype=F64):
    """The recurrence in fp64, with inputs rounded to `dtype`."""
    x, keywords, weights = draw(member, call, dtype)
    ignored = ("disable_recompute", "use_exp2", "safe_gate", "precision")
    keywords = {n: v for n, v in keywords.items() if n not in ignored}
    cu = None if call.cu is None else list(call.cu)

    def f(leaves):
        named = {"g" if n == "gk" else n: t for n, t in leaves.items()}
        return recurrence(
            **named, **keywords, cu_seqlens=cu, num_householder=member.steps, removal=member.beta
        )

    return collect(f, {n: t.double() for n, t in x.items()}, weights)
