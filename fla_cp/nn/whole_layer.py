"""Forward and backward of a whole layer, from its input and its parameters, without its modules.

    x -> product (projections) -> mixed (convolution) -> o (operator) -> z (gated norm) -> y

Everything here runs without autograd, on [N, ..] with N = B * T tokens. one_call.py makes a
differentiable call of it. linear_attention.py and kda.py define what a layer computes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp import pipeline
from fla_cp.kernels.torch.conv import ConvInputs
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.nn.projections import joint_gradients, joint_product, split_product
from fla_cp.ops.conv_rows import Place, conv_announced
from fla_cp.ops.family import gate_of
from fla_cp.ops.gated_norm import norm_announced
from fla_cp.ops.known import Known
from fla_cp.pipeline import Plan, Saved, announcement
from fla_cp.program import Flat
from fla_cp.rule import DeltaRule


class Facts(NamedTuple):
    """The properties of a layer. beta_factor: None without beta. bound: the lower bound of the
    gate's log decay, or None. taps: W of the convolution. The other names are those of
    `LinearAttention` and `GatedRMSNorm`."""

    H: int
    HV: int
    K: int
    V: int
    per_head: bool
    beta_factor: float | None
    bound: float | None
    taps: int
    eps: float
    activation: str
    impl: str

    def rule(self) -> DeltaRule:
        """The operator's options."""
        return DeltaRule(
            scale=self.K**-0.5,
            gate=gate_of(True, self.bound),
            lower_bound=self.bound,
            safe_gate=self.bound is not None,
            qk_l2norm=True,
            beta_factor=self.beta_factor,
            per_head=self.per_head,
            removal="none" if self.beta_factor is None else "k",
        )


class Weights(NamedTuple):
    """A layer's parameters. gate and decay read x. If their projections have a low rank, gate_up
    (with gate_bias) and decay_up follow them. out: the weight of o_proj."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    decay: Tensor
    beta: Tensor | None
    gate_up: Tensor | None
    gate_bias: Tensor | None
    decay_up: Tensor | None
    conv: Tensor
    norm: Tensor
    out: Tensor
    A_log: Tensor
    dt_bias: Tensor

    @property
    def joint(self) -> list[Tensor]:
        """The weights that read x."""
        first = self.q, self.k, self.v, self.gate, self.decay
        return [*first] if self.beta is None else [*first, self.beta]

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of the product: those of q, k and v together, and those of each other weight
        that reads x."""
        sizes = [w.shape[0] for w in self.joint]
        return sum(sizes[:3]), *sizes[3:]


class Values(NamedTuple):
    """What the forward saves, besides the tensors that the backend keeps.

    product: [N, ..], that of x with `Weights.joint`. mixed: [N, D], the output of the convolution.
    gate: [N, HV * V], and g: [N, HV * K], the output gate and the raw decays; None without a low
    rank, when they are part of the product. o, z: [N, HV, V]. carried, transition: see
    `fla_cp.pipeline.Saved`.
    """

    product: Tensor
    mixed: Tensor
    gate: Tensor | None
    g: Tensor | None
    o: Tensor
    z: Tensor
    carried: Tensor
    transition: Tensor | None


class Call(NamedTuple):
    """One call of a layer. known, plan: the operator's. place: the convolution's. halo: how many
    halo rows the convolution has under a context."""

    facts: Facts
    known: Known
    plan: Plan
    place: Place
    halo: int

    def operands(self, w: Weights, v: Values) -> Inputs:
        """The operator's inputs, [N, ..]."""
        q, k, values = self._heads(v.mixed)
        _, _, g, *beta = split_product(v.product, w.widths)
        g = g if v.g is None else v.g
        g = g if self.facts.per_head else g.view(-1, self.facts.HV, self.facts.K)
        return Inputs(q, k, values, g, beta[0] if beta else None, w.A_log, w.dt_bias)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, HV, K, V = self.facts[:4]
        q, k, v = mixed.split([H * K, H * K, HV * V], 1)
        return q.view(-1, H, K), k.view(-1, H, K), v.view(-1, HV, V)

    def convolution(self, w: Weights, product: Tensor) -> ConvInputs:
        qkv = product[:, : w.widths[0]]
        empty = torch.zeros if self.halo else torch.empty  # zeros of no rows would launch a kernel
        halo = empty(self.halo, qkv.shape[1], dtype=qkv.dtype, device=qkv.device)
        return ConvInputs(qkv, halo, self.place.where, w.conv, None, True)

    def norm(self, w: Weights, v: Values) -> tuple[Tensor, Tensor, Tensor, float, str]:
        """The arguments of `Backend.gated_norm`."""
        gate = split_product(v.product, w.widths)[1] if v.gate is None else v.gate
        return v.o, gate.view(v.o.shape), w.norm, self.facts.eps, self.facts.activation

    def forward(self, x: Tensor, w: Weights) -> Flat:
        """y [B, T, hidden] and what is saved: `Values` and what the backend keeps."""
        backend, rows = self.plan.backend, x.reshape(-1, x.shape[-1])
        product = joint_product(rows, w.joint)
        _, gate, decay, *_ = split_product(product, w.widths)
        c = self.convolution(w, product)
        with conv_announced(backend, c, with_backward=True):
            mixed = backend.conv(c)
        up = None if w.gate_up is None else _linear(gate, w.gate_up, w.gate_bias)
        g = None if w.decay_up is None else _linear(decay, w.decay_up, None)
        # `mixed` stands for o, z and carried, which follow below.
        found = Values(product, mixed, up, g, mixed, mixed, mixed, None)
        operands = self.operands(w, found)
        with announcement(self.plan, operands, None, with_backward=True):
            o, _, _, (kept, carried, transition) = pipeline.forward(
                self.plan, operands, None, want_final=False, want_h=False
            )
        found = found._replace(o=o, carried=carried, transition=transition)
        given = self.norm(w, found)
        with norm_announced(backend, *given, with_backward=True):
            z = backend.gated_norm(*given)
        y = torch.mm(z.flatten(1), w.out.t()).view(*x.shape[:2], w.out.shape[0])
        # Detached, because autograd does not let the caller change a Function's view in place.
        return y.detach(), *found._replace(z=z), *kept

    def backward(self, x: Tensor, w: Weights, v: Values, kept: Flat, dy: Tensor, dx: bool) -> Flat:
        """The gradients of x (None unless dx) and of the weights. kept: what the backend kept."""
        backend, rows = self.plan.backend, x.reshape(-1, x.shape[-1])
        dy = dy.reshape(-1, dy.shape[-1])
        dout = torch.mm(dy.t(), v.z.flatten(1))
        dz = torch.mm(dy, w.out).view(v.z.shape)
        do, dgate, dnorm = backend.gated_norm_bwd(*self.norm(w, v), dz)
        _, gate, decay, *_ = split_product(v.product, w.widths)
        dgate, dgate_up, dgate_bias = _linear_bwd(dgate.flatten(1), gate, w.gate_up, w.gate_bias)
        saved, operands = Saved(kept, v.carried, v.transition), self.operands(w, v)
        o = v.o if backend.reads_output else None
        with announcement(self.plan, operands, None, with_backward=True):
            grads, _ = pipeline.backward(
                self.plan, operands, None, saved, o, do, None, want_dinitial=False
            )
        ddecay, ddecay_up, _ = _linear_bwd(grads.g.flatten(1), decay, w.decay_up, None)
        dmixed = torch.cat([d.flatten(1) for d in (grads.q, grads.k, grads.v)], 1)
        dqkv, _, dconv, _ = backend.conv_bwd(self.convolution(w, v.product), dmixed)
        beta = () if grads.beta is None else (grads.beta,)
        parts = dqkv.to(x.dtype), dgate, ddecay, *beta
        drows, joint = joint_gradients(rows, w.joint, w.widths, parts, dx, True)
        return (
            None if drows is None else drows.view(x.shape),
            *(joint if beta else (*joint, None)),
            dgate_up,
            dgate_bias,
            ddecay_up,
            dconv.to(w.conv.dtype),
            dnorm,
            dout,
            grads.A_log,
            grads.dt_bias,
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _linear_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias. Without a weight, the first is dy itself."""
    if weight is None:
        return dy, None, None
    return torch.mm(dy, weight), torch.mm(dy.t(), x), None if bias is None else dy.sum(0)
