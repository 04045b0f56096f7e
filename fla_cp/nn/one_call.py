"""A layer's call as one autograd.Function, each direction of which is replayed (fla_cp/replay.py).

If a layer calls its modules, the host spends several times as long on modules, autograd nodes,
checks and shapes as on launches. Here a repeated call of the whole layer is one recorded program. A
layer runs in this way only if nobody can notice a difference, see `one_call`. Otherwise, for
example if a hook watches one of its modules or if ranks exchange states, it calls its modules.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fla_cp import remat
from fla_cp.arguments import PLAIN_TENSORS
from fla_cp.context import FLACPContext
from fla_cp.custom_op import kept_plan, make_plan, packing_of
from fla_cp.kernels import resolve
from fla_cp.nn.modules import GatedRMSNorm, ShortConvolution, transformed
from fla_cp.nn.projections import Projections, watched
from fla_cp.nn.whole_layer import Call, Facts, Values, Weights
from fla_cp.once_differentiable import once_differentiable
from fla_cp.ops.checks import FLOATS
from fla_cp.ops.conv_rows import Place
from fla_cp.ops.known import Known, remember
from fla_cp.ops.wide_heads import block_width
from fla_cp.pipeline import Plan
from fla_cp.program import Flat
from fla_cp.recent import Recent
from fla_cp.replay import access, autocasts
from fla_cp.rule import accumulator

MAX_KNOWN = 256
"""How many kinds of calls are remembered."""

_known: Recent[tuple, Known] = Recent(MAX_KNOWN)


class _OneCall(torch.autograd.Function):
    """(call, x [B, T, hidden], *Weights) -> y [B, T, hidden]"""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *weights: Tensor | None) -> Tensor:
        inputs, w = (x, *weights), Weights(*weights)  # type: ignore[arg-type]
        # A program holds the tensor `reach`, so no other tensor can get this address.
        reach = call.place.where.reach.data_ptr()
        own = reach, call.halo, *[None if t is None else access(t) for t in inputs]
        y, *saved = call.known.kind.forward(call.plan, own, inputs, lambda: call.forward(x, w))
        ctx.call, ctx.own = call, own
        ctx.save_for_backward(*inputs, *saved)
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Flat:
        call, inputs, wants_dx = ctx.call, (*ctx.saved_tensors, dy), ctx.needs_input_grad[1]

        def run() -> Flat:
            n = 1 + len(Weights._fields)
            x, w, saved = inputs[0], Weights(*inputs[1:n]), inputs[n:-1]
            v = Values(*saved[: len(Values._fields)])
            return call.backward(x, w, v, saved[len(v) :], dy, wants_dx)

        # What the forward saved has the same layout in each call, so it is not part of the key.
        own = wants_dx, access(dy), ctx.own
        return None, *call.known.kind.backward(call.plan, own, inputs, run)


def one_call(
    layer: Any, project: Projections, cu_seqlens: Tensor | None, context: FLACPContext | None
) -> Tensor | None:
    """The layer's result for x, or None if its modules have to be called. They have to be called

    - if the class of the layer or of its core is not `supported`;
    - unless all parameters are plain tensors that require gradients, in x's dtype (A_log and
      dt_bias: in the accumulator's);
    - if one could notice that modules are not called: with hooks on them or on saved tensors, in a
      checkpoint, or under autocast, torch.func and torch.compile;
    - if gradients are not recorded, or if ranks exchange tokens or states;
    - for packed sequences, which differ from batch to batch;
    - if the operator splits heads (fla_cp/ops/wide_heads.py).
    """
    x = project.x
    if not (supported(layer) and project.joined and cu_seqlens is None) or _observed(x):
        return None
    if context is not None and (
        context.world_size > 1
        or context.packing.frame is not None
        or (context.halo is not None and context.halo.needed)
    ):
        return None
    modules = layer._modules  # faster than attributes, which torch.nn.Module looks up in Python
    core, conv, norm, out = (modules[name] for name in ("core", "qkv_conv", "o_norm", "o_proj"))
    kinds = conv.__class__, norm.__class__, out.__class__
    if kinds != (ShortConvolution, GatedRMSNorm, nn.Linear) or not supported(core):
        return None
    if watched(core) or watched(conv) or watched(norm) or watched(out):
        return None
    weights = _weights(layer)
    if weights is None or _split(layer, x):
        return None
    facts = Facts(
        layer.num_heads,
        layer.num_v_heads,
        layer.head_dim,
        layer.head_v_dim,
        layer.per_head,
        1.0 + layer.allow_neg_eigval if layer.has_beta else None,
        getattr(core, "gate_lower_bound", None),
        conv.kernel_size,
        norm.eps,
        norm.activation,
        core.impl,
    )
    y: Tensor = _OneCall.apply(_call(facts, x, weights.conv, context), x, *weights)
    return y


def _split(layer: Any, x: Tensor) -> bool:
    """Whether the operator splits the heads of the layer for this input."""
    size, removal = x.shape[0] * x.shape[1] * layer.num_v_heads, "k" if layer.has_beta else "none"
    K, V, impl = layer.head_dim, layer.head_v_dim, layer.core.impl
    width = block_width(removal, layer.per_head, K, V, size, impl, x.device, x.dtype)
    return width is not None


def supported(module: nn.Module) -> bool:
    """Whether the module's class itself, and not only a base class, declares that `one_call`
    computes the same as its forward."""
    return bool(module.__class__.__dict__.get("in_one_call"))


def _call(facts: Facts, x: Tensor, weight: Tensor, context: FLACPContext | None) -> Call:
    """The call for x [B, T, hidden]. weight: the convolution's. The plan is made once for each kind
    of call and packing."""
    (B, T, hidden), (_, HV, K, V) = x.shape, facts[:4]
    backend = resolve(facts.impl, x.device, x.dtype)
    key = facts, B, T, hidden, x.dtype, x.device, id(backend)  # `Known` keeps the id taken
    known = _known.use(key)
    if known is None:
        known = remember(None, facts.rule(), backend, want_final=False, want_h=False)
        _known.keep(key, known)
    offsets = tuple(range(0, B * T + 1, T))
    chunk = backend.chunk_for(T, x.dtype)
    packing = packing_of(offsets, chunk) if context is None else context.packing
    rows = x.view(-1, hidden) if x.is_contiguous() else x.reshape(-1, hidden)
    place = Place.of(facts.impl, rows, weight, context, B)

    def build() -> Plan:
        return make_plan(known.rule, packing, context, backend, (HV, K, V, x.device))

    plan = kept_plan(packing, context, ("layer", known.number), build)
    return Call(facts, known, plan, place, len(place.where.halo))


def _observed(x: Tensor) -> bool:
    """Whether modules have to be called for a reason other than the modules and parameters."""
    return (
        not torch.is_grad_enabled()
        or x.dtype not in FLOATS
        or autocasts(x.device.type)
        or remat.active()
        or remat.in_backward()
        or transformed()
        # torch.utils.checkpoint sets such hooks, too; no public call tells (torch 2.10 to 2.13)
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def _weights(layer: Any) -> Weights | None:
    """The layer's parameters, if all are as `one_call` needs them, else None. The weights that read
    x have been checked before: they are plain, and have x's dtype."""
    m = layer._modules
    gate, gate_up, gate_bias = _low_rank(m["g_proj"])
    decay, decay_up, decay_bias = _low_rank(m[layer.decay_name])
    core, conv, out = (m[name]._parameters for name in ("core", "qkv_conv", "o_proj"))
    if not (decay_bias is out["bias"] is m["qkv_conv"].bias is None):
        return None
    q, k, v = (m[name]._parameters["weight"] for name in ("q_proj", "k_proj", "v_proj"))
    beta = m["b_proj"]._parameters["weight"] if layer.has_beta else None
    rest = conv["weight"], m["o_norm"]._parameters["weight"], out["weight"]
    rates = core["A_log"], core["dt_bias"]
    found = Weights(q, k, v, gate, decay, beta, gate_up, gate_bias, decay_up, *rest, *rates)
    dtype = q.dtype
    for t in found[:-2]:
        if t is None:
            continue
        if t.__class__ not in PLAIN_TENSORS or t.dtype != dtype or not t.requires_grad:
            return None
    wide = accumulator(dtype)
    for t in rates:
        if t.__class__ not in PLAIN_TENSORS or t.dtype != wide or not t.requires_grad:
            return None
    return found


def _low_rank(module: nn.Module) -> tuple[Any, Any, Any]:
    """The weight that reads x, and the weight and bias of the module after it, if there is one."""
    if not isinstance(module, nn.Sequential):
        return module.weight, None, None
    first, up = module
    if up.__class__ is not nn.Linear or watched(up):
        return first.weight, up, None  # not a tensor: `_weights` refuses it
    return first.weight, up.weight, up.bias
