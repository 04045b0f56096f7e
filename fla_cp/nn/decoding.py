"""A decoding step of a block: one more token of each sequence, with few kernel launches.

With so few tokens, the time of a layer is that of reading its weights and of its launches. Modules
that read the same input are therefore one product, over weights that lie one after the other in
memory. An RMSNorm before a product, SwiGLU after it and the sum with the residual stream are part
of the product (`Backend.step_product`). The convolution updates its window in place, and the
operator its states; where all kinds of modules are known, they and the gated norm are one stage
(`Backend.step_mixer`). Modules of other kinds are called as usual.

Where a backend has kernels for layers that follow each other (`Backend.step_layers`), blocks run
together (`steps_of`): one row in one launch, many rows in kernels that overlap.

Nothing here waits for the device, and shapes do not change from step to step, so that a CUDA graph
can repeat a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fla_cp.kernels import resolve
from fla_cp.kernels.torch.decoding import Deferred, StepLayer, StepMixer, StepProduct, StepRun
from fla_cp.nn.cache import LayerCache, RecurrentCache
from fla_cp.nn.kda import KDACore
from fla_cp.nn.linear_attention import Core, LinearAttention
from fla_cp.nn.modules import GatedRMSNorm, ShortConvolution, SwiGLU
from fla_cp.nn.one_call import supported
from fla_cp.nn.projections import is_low_rank, joins, product_weight, watched
from fla_cp.ops.checks import MAX_DIM
from fla_cp.ops.family import GATED_DELTA_RULE, GLA, KDA, SIMPLE_GLA, gate_of
from fla_cp.rule import DeltaRule

ONE_STAGE = {member.name: member for member in (KDA, GATED_DELTA_RULE, GLA, SIMPLE_GLA)}
"""The operators that are one stage with the convolution and the gated norm around them."""

STEPPED = "forward", "read_qkv", "rates", "gated"
"""Methods of a layer that a step replaces, so that no class may override them."""


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """The rows of several weights [R, C] as one tensor [sum of R, C].

    It takes no additional memory: each weight becomes a part of this tensor and keeps its values.
    Weights that already lie one after the other stay where they are.
    """
    first, rows = weights[0], sum(len(w) for w in weights)
    end, memory = first.storage_offset(), first.untyped_storage().data_ptr()
    for w in weights:
        beside = w.untyped_storage().data_ptr() == memory and w.storage_offset() == end
        if not (beside and w.is_contiguous()):
            break
        end += w.numel()
    else:
        return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))
    whole = torch.cat([w.detach() for w in weights])
    for w, part in zip(weights, whole.split([len(w) for w in weights]), strict=True):
        w.data = part
    return whole


def one_stage_rule(layer: LinearAttention) -> DeltaRule | None:
    """The rule of a layer whose convolution, operator and norm are one stage; None if they are not.
    They are not if the layer or one of its modules has another class or hooks, or if each call
    casts parameters (see `StepMixer`)."""
    core, member = layer.core, ONE_STAGE.get(layer.core.name)
    plain = core.__class__ in (Core, KDACore) and layer.o_norm.__class__ is GatedRMSNorm
    plain = plain and supported(layer)  # a class of the caller's may override what lies between
    if member is None or not plain or watched(core) or watched(layer.o_norm):
        return None
    if layer.rows > 1 or max(layer.head_dim, layer.head_v_dim) > MAX_DIM:
        return None
    options, conv = core.options(True), layer.qkv_conv
    taps, bias = conv._parameters_in(layer.o_proj.weight.dtype)
    if taps is not conv.weight or bias is not conv.bias:
        return None
    if options["A_log"] is not core.A_log or options["dt_bias"] is not core.dt_bias:
        return None
    bound = options.get("lower_bound")
    return DeltaRule(
        scale=layer.head_dim**-0.5,
        gate=gate_of(True, bound),
        lower_bound=bound,
        qk_l2norm=True,
        beta_factor=1.0 + core.allow_neg_eigval if core.has_beta else None,
        per_head=member.per_head,
        removal=member.removal,
    )


class RecurrentStep:
    """x [B, hidden] += layer(norm(x)) for one more token of each sequence.

    The constructor moves the layer's weights, see `stacked`. A call updates a cache in place, which
    must have seen a token. impl: "auto", "torch" or "triton", for the products.
    """

    def __init__(self, layer: LinearAttention, norm: nn.RMSNorm, impl: str = "auto") -> None:
        self.layer, self.norm, self.impl = layer, norm, impl
        modules: list[Any] = layer.input_projections()[3:]
        low_rank = [m for m in modules if is_low_rank(m)]
        self.groups: list[list[Any]] = [
            list(group) for _, group in groupby(low_rank, lambda m: m[1].weight.shape)
        ]
        """Low-rank modules, grouped by the shape of their second matrices."""
        self.plain = [m for m in modules if not is_low_rank(m)]
        qkv: list[Any] = [layer.q_proj, layer.k_proj, layer.v_proj]
        weights = [m.weight for m in qkv]
        weights += [m[0].weight for group in self.groups for m in group]
        weights += [m.weight for m in self.plain]
        self.into = stacked(weights)[None]
        self.widths = [sum(len(m.weight) for m in qkv)]
        self.widths += [sum(len(m[0].weight) for m in group) for group in self.groups]
        self.widths += [len(m.weight) for m in self.plain]
        self.second = [
            stacked([m[1].weight for m in group]).unflatten(0, (len(group), -1))
            for group in self.groups
        ]
        self.biases = [_biases([m[1] for m in group]) for group in self.groups]
        self.rule = one_stage_rule(layer)

    @staticmethod
    def fits(layer: nn.Module, norm: nn.Module) -> bool:
        """Whether the norm and all modules of the layer are of the plain kinds that a step can
        join."""
        if not isinstance(layer, LinearAttention) or watched(layer) or watched(layer.qkv_conv):
            return False
        out = product_weight(layer.o_proj)
        if out is None or not is_plain_norm(norm):
            return False
        second = [m[1] for m in layer.input_projections() if isinstance(m, nn.Sequential)]
        return (
            joins(out.data, layer.input_projections())
            and all(m.__class__ is nn.Linear and m.weight.dtype == out.dtype for m in second)
            and not any(watched(m) for m in second)
            and layer.qkv_conv.__class__ is ShortConvolution
            and all(getattr(type(layer), n) is getattr(LinearAttention, n) for n in STEPPED)
        )

    def __call__(self, x: Tensor, cache: RecurrentCache) -> None:
        backend = resolve(self.impl, x.device, x.dtype)
        both = backend.step_product(_behind(self.norm, x, self.into))
        qkv, *rest = both.split(self.widths, 1)
        found: dict[nn.Module, Tensor] = {}
        for group, weight, bias in zip(self.groups, self.second, self.biases, strict=True):
            y = backend.step_product(StepProduct(rest.pop(0), weight, bias=bias))
            found |= zip(group, y.chunk(len(group), 1), strict=True)
        found |= zip(self.plain, rest, strict=True)
        o = (
            self._modules(qkv, found, cache)
            if self.rule is None
            else self._mixer(qkv, found, cache)
        )
        backend.step_product(StepProduct(o, self.layer.o_proj.weight.data[None], onto=x))

    def _mixer(self, qkv: Tensor, found: dict[nn.Module, Tensor], cache: RecurrentCache) -> Tensor:
        """o [B, HV * V], normalised and gated. found: the results of the other projections."""
        layer, options = self.layer, self.layer.core.options(True)
        state = cache.take()
        assert self.rule is not None and cache.conv is not None and state is not None
        taps, bias = layer.qkv_conv._parameters_in(qkv.dtype)
        norm: Any = layer.o_norm
        mixer = StepMixer(
            rule=self.rule,
            qkv=qkv,
            window=cache.conv,
            taps=taps,
            bias=bias,
            state=state,
            decay=found[getattr(layer, layer.decay_name)],
            gate=found[layer.g_proj],
            beta=found[layer.b_proj] if layer.has_beta else None,
            A_log=options["A_log"],
            dt_bias=options["dt_bias"],
            norm=norm.weight,
            eps=norm.eps,
            activation=norm.activation,
        )
        return resolve(layer.core.impl, qkv.device, qkv.dtype).step_mixer(mixer)

    def columns(self, module: nn.Module) -> tuple[int, Tensor | None, Tensor | None]:
        """Where the columns of a module begin in the product with `into`, and for a low rank its
        second weight and bias."""
        at = [sum(self.widths[:n]) for n in range(1, len(self.widths))]
        for group, start, weight, bias in zip(
            self.groups, at, self.second, self.biases, strict=False
        ):
            if module in group:
                n, rank = group.index(module), weight.shape[2]
                found = None if bias is None else bias.view(len(group), -1)[n]
                return start + n * rank, weight[n], found
        return at[len(self.groups) + self.plain.index(module)], None, None

    def _modules(
        self, qkv: Tensor, found: dict[nn.Module, Tensor], cache: RecurrentCache
    ) -> Tensor:
        """The same by calls of the layer's modules."""
        layer = self.layer
        assert cache.conv is not None
        y, cache.conv = layer.qkv_conv.step(qkv[:, None], None, cache.conv, True)
        q, k, v = (
            part.unflatten(2, each)
            for part, each in zip(
                y.split([H * K for H, K in layer.conv_heads()], 2), layer.conv_heads(), strict=True
            )
        )
        decay, beta = found[getattr(layer, layer.decay_name)], None
        if layer.has_beta:
            beta = found[layer.b_proj]
        o = layer.core(*layer.operands(q, k, v, decay, beta), cache=cache)
        return layer.o_norm(o, found[layer.g_proj]).view(len(qkv), -1)


class SwiGLUStep:
    """x [B, hidden] += ffn(norm(x)). The constructor moves the weights of gate and up, see
    `stacked`."""

    def __init__(self, ffn: SwiGLU, norm: nn.RMSNorm, impl: str = "auto") -> None:
        self.ffn, self.norm, self.impl = ffn, norm, impl
        self.into = stacked([ffn.gate.weight, ffn.up.weight])[None]

    @staticmethod
    def fits(ffn: nn.Module, norm: nn.Module) -> bool:
        """Whether the norm and all modules of the network are of the plain kinds that a step can
        join."""
        if ffn.__class__ is not SwiGLU or watched(ffn) or not is_plain_norm(norm):
            return False
        up = product_weight(ffn.up)
        return up is not None and joins(up.data, [ffn.gate, ffn.up, ffn.down])

    def __call__(self, x: Tensor) -> None:
        backend = resolve(self.impl, x.device, x.dtype)
        inner = backend.step_product(_behind(self.norm, x, self.into)._replace(swiglu=True))
        backend.step_product(StepProduct(inner, self.ffn.down.weight.data[None], onto=x))


class BlockStep:
    """x [B, hidden] += mixer(norm(x)), then += ffn(norm(x)), for one more token of each sequence.

    block: has the modules mixer_norm, mixer, ffn_norm and ffn. All parameters have one dtype,
    except those that always stay fp32. impl: as in `RecurrentStep`.
    """

    def __init__(self, block: nn.Module, impl: str = "auto") -> None:
        part: Any = block
        self.block, self.mixer, self.ffn = part, None, None
        if RecurrentStep.fits(part.mixer, part.mixer_norm):
            self.mixer = RecurrentStep(part.mixer, part.mixer_norm, impl)
        if SwiGLUStep.fits(part.ffn, part.ffn_norm):
            self.ffn = SwiGLUStep(part.ffn, part.ffn_norm, impl)

    def __call__(self, x: Tensor, cache: LayerCache) -> None:
        block = self.block
        if self.mixer is not None:
            assert isinstance(cache, RecurrentCache)
            self.mixer(x, cache)
        else:
            x += block.mixer(block.mixer_norm(x)[:, None], cache=cache)[:, 0]
        if self.ffn is not None:
            self.ffn(x)
        else:
            y = block.ffn(block.ffn_norm(x)[:, None])
            x += (y[0] if isinstance(y, tuple) else y)[:, 0]  # experts return statistics, too

    def layer(self, cache: LayerCache, x: Tensor) -> StepLayer | None:
        """The block as one layer, for an x of this dtype; None if its parts are not such stages."""
        mixer, ffn = self.mixer, self.ffn
        if mixer is None or ffn is None or mixer.rule is None:
            return None
        assert isinstance(cache, RecurrentCache)
        state = cache.up_to_date()
        assert cache.conv is not None and state is not None
        layer, options = mixer.layer, mixer.layer.core.options(True)
        backends = [resolve(impl, x.device, x.dtype) for impl in (mixer.impl, layer.core.impl)]
        if backends[0] is not backends[1]:
            return None
        norm: Any = layer.o_norm
        taps, bias = layer.qkv_conv._parameters_in(x.dtype)
        of_decay: Any = getattr(layer, layer.decay_name)
        if is_low_rank(of_decay) and of_decay[1].bias is not None:
            return None
        decay, decay_up, _ = mixer.columns(of_decay)
        gate, gate_up, gate_bias = mixer.columns(layer.g_proj)
        return StepLayer(
            rule=mixer.rule,
            norm=mixer.norm.weight,
            eps=_eps(mixer.norm, x),
            into=mixer.into[0],
            window=cache.conv,
            taps=taps,
            bias=bias,
            state=state,
            decay=decay,
            decay_up=decay_up,
            gate=gate,
            gate_up=gate_up,
            gate_bias=gate_bias,
            beta=mixer.columns(layer.b_proj)[0] if layer.has_beta else None,
            A_log=options["A_log"],
            dt_bias=options["dt_bias"],
            o_norm=norm.weight,
            o_eps=norm.eps,
            activation=norm.activation,
            out=layer.o_proj.weight.data,
            ffn_norm=ffn.norm.weight,
            ffn_eps=_eps(ffn.norm, x),
            up=ffn.into[0],
            down=ffn.ffn.down.weight.data,
        )


class LayersStep:
    """Blocks that follow each other, run together while their caches stay where they are."""

    def __init__(
        self,
        blocks: Sequence[BlockStep],
        caches: Sequence[Any],
        layers: Sequence[StepLayer],
        run: StepRun,
    ) -> None:
        self.blocks, self.caches, self.layers, self.run = blocks, caches, layers, run
        none: Sequence[Deferred | None] = [None] * len(layers)
        self.deferred = run.deferred or none

    def __call__(self, x: Tensor) -> None:
        if all(c.has(s.window, s.state) for c, s in zip(self.caches, self.layers, strict=True)):
            for cache, deferred in zip(self.caches, self.deferred, strict=True):
                cache.defer(deferred)
            self.run(x)
            return
        for block, cache in zip(self.blocks, self.caches, strict=True):
            block(x, cache)


def steps_of(
    blocks: Sequence[BlockStep], caches: Sequence[LayerCache], like: Tensor, impl: str = "auto"
) -> list[Callable[[Tensor], None]]:
    """What a step calls one after the other with x [B, hidden]. caches: those of the blocks, which
    have seen a token. like: has the dtype and device of x. impl: as in `RecurrentStep`."""
    layers = [block.layer(cache, like) for block, cache in zip(blocks, caches, strict=True)]
    backend = resolve(impl, like.device, like.dtype)
    found: list[Callable[[Tensor], None]] = []
    numbered = groupby(enumerate(layers), lambda item: None if item[1] is None else item[1].kind)
    for _, group in numbered:
        places, alike = zip(*group, strict=True)
        run = None if alike[0] is None else backend.step_layers(alike)
        own, held = [blocks[n] for n in places], [caches[n] for n in places]
        if run is None:
            found += (partial(block, cache=cache) for block, cache in zip(own, held, strict=True))
        else:
            found.append(LayersStep(own, held, alike, run))
    return found


def head_logits(x: Tensor, norm: nn.Module, head: nn.Module, impl: str = "auto") -> Tensor:
    """head(norm(x)) for x [B, hidden]. Both are called unless they are of the plain kinds that a
    step can join."""
    weight = product_weight(head)
    if weight is None or not (is_plain_norm(norm) and joins(x, [head])):
        logits: Tensor = head(norm(x))
        return logits
    backend = resolve(impl, x.device, x.dtype)
    return backend.step_product(_behind(norm, x, weight.data[None]))


def likeliest(logits: Tensor, impl: str = "auto") -> Tensor:
    """[B] int64, the token with the largest of the logits [B, vocabulary]."""
    return resolve(impl, logits.device, logits.dtype).argmax(logits)


def is_plain_norm(norm: nn.Module) -> TypeGuard[nn.RMSNorm]:
    """Whether a product of a step may compute the norm: it has torch's class, a weight, and no
    hooks."""
    weight = norm._parameters.get("weight")
    return norm.__class__ is nn.RMSNorm and weight is not None and not watched(norm)


def _behind(norm: nn.RMSNorm, x: Tensor, weight: Tensor) -> StepProduct:
    """The product of norm(x) and a weight [1, R, C]."""
    return StepProduct(x, weight, norm.weight, _eps(norm, x))


def _eps(norm: nn.RMSNorm, x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if norm.eps is None else norm.eps


def _biases(modules: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of all modules, zero where one has none; None if none has."""
    biases: list[Any] = [m.bias for m in modules]
    if all(bias is None for bias in biases):
        return None
    zeros = (m.weight.new_zeros(len(m.weight)) for m in modules)
    return torch.cat([z if b is None else b.detach() for z, b in zip(zeros, biases, strict=True)])
