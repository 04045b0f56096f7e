"""Floating-point operations of a training step, and the share of the GPUs' peak that they make.

A product of an m x k and a k x n matrix counts as 2mnk operations. Counted are:

- every linear layer (those of the mixers, SwiGLU and the head, tied or not); its backward has two
  products of the same size
- routers, and of a mixture's experts those that a token takes
- the operator's chunk form with chunks of C = 64 rows (docs/design.md): scores, inverse, operands,
  states and output, with the adjoints that the algebra needs
- softmax attention: the products of each query with the keys and values that it reads, and their
  adjoints

Not counted are the embedding, norms, gates, activations, the short convolution (8 operations a
channel and token), the loss behind the logits, and the optimiser. Nothing that is computed a second
time to save memory counts either, neither the operator's own recomputation nor --remat.

The count is the number of operations that the model's definition needs. Kernels may run more, for
example on zeros above the diagonal of a triangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from fla_cp.kernels.torch.attention import BLOCK
from fla_cp.nn import Attention, MultiHeadLatentAttention
from fla_cp.nn.experts import Experts
from fla_cp.nn.linear_attention import LinearAttention
from fla_cp.rule import CHUNK
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.model import Decoder

PEAK_FLOP_S = 989e12
"""Operations a second of one H100 or H200 (SXM) in bf16 without sparsity, as NVIDIA states it."""


class Products(NamedTuple):
    """Operations of one part of a step.

    forward, backward: what the model needs. extra: what the torch backend runs besides. In its
    backward it forms operands and states again, and it multiplies rows that are known to be zero.
    """

    forward: float
    backward: float
    extra: float = 0.0

    @property
    def needed(self) -> float:
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        return self.needed + self.extra

    def plus(self, other: Products) -> Products:
        """The sum of both, field by field."""
        return Products(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Products(0.0, 0.0)


class Recurrence(NamedTuple):
    """A recurrent mixer. heads: of values, of K key and V value channels. removes: whether it is a
    delta rule. per_head: one decay a head, not a channel. rows: of a token."""

    heads: int
    K: int
    V: int
    removes: bool = True
    per_head: bool = True
    rows: int = 1


class Softmax(NamedTuple):
    """Softmax attention. K: channels of queries and keys; V: of values."""

    heads: int
    K: int
    V: int


class Routed(NamedTuple):
    """A mixture of experts, each a SwiGLU of inner width ffn, and its router."""

    experts: int
    experts_per_token: int
    hidden: int
    ffn: int


class Layer(NamedTuple):
    """A block's parts: linear layers of the mixer and of what follows it, experts, and mixer."""

    projections: Sequence[nn.Linear]
    ffn: Sequence[nn.Linear]
    routed: Sequence[Routed]
    mixer: Recurrence | Softmax


def linears(module: nn.Module) -> list[nn.Linear]:
    """All linear layers inside a module."""
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def step_flops(
    model: LanguageModel, tokens: int, documents: Sequence[int] | None = None
) -> dict[str, Products]:
    """The operations of one forward and backward over a batch, by part.

    The parts are projections, scores (Akk and Aqk), inverse (T), operands (w and u), states,
    output, attention, ffn and head.

    model: a decoder or a model of transformers; one on the meta device will do. tokens: of the
    whole batch. documents: the documents' lengths, whose sum is `tokens`. With them, the rows that
    fill a document's last chunk count too, because the backends process whole chunks. Without them
    they do not count, which is right for the utilisation of a GPU; softmax attention then counts as
    over one document.
    Raises ValueError if the lengths do not add up, or for a mixer that has no formula.
    """
    if documents is not None and sum(documents) != tokens:
        raise ValueError(f"documents must have {tokens} tokens in all, got {sum(documents)}")
    head, layers = _described(model)
    parts: dict[str, Products] = {"head": _linear(head, tokens)}

    def add(name: str, products: Products) -> None:
        parts[name] = parts.get(name, NOTHING).plus(products)

    lengths = [tokens] if documents is None else documents
    for layer in layers:
        for name, found in (("projections", layer.projections), ("ffn", layer.ffn)):
            for linear in found:
                add(name, _linear(linear, tokens))
        for routed in layer.routed:
            add("ffn", _experts(routed, tokens))
        mixer = layer.mixer
        if isinstance(mixer, Softmax):
            add("attention", _attention(mixer, lengths))
            continue
        chunks = [length * mixer.rows / CHUNK for length in lengths]
        if documents is not None:
            chunks = [float(-(-length * mixer.rows // CHUNK)) for length in lengths]
        for name, products in _operator(mixer, sum(chunks)).items():
            add(name, products)
    return parts


def _described(model: LanguageModel) -> tuple[nn.Linear, list[Layer]]:
    """The head and the blocks."""
    if isinstance(model, Decoder):
        return model.head, [_own_layer(block) for block in model.block_list()]
    from fla_cp.train.stock_flops import described

    return described(model)


def _own_layer(block: nn.Module) -> Layer:
    mixer, ffn = block.get_submodule("mixer"), block.get_submodule("ffn")
    routed = []
    for module in block.modules():
        if isinstance(module, Experts):
            E, hidden, width = module.experts.down.shape
            routed.append(Routed(E, module.router.experts_per_token, hidden, width))
    return Layer(linears(mixer), linears(ffn), routed, _own_mixer(mixer))


def _own_mixer(mixer: nn.Module) -> Recurrence | Softmax:
    if isinstance(mixer, Attention):
        return Softmax(mixer.num_heads, mixer.head_dim, mixer.head_dim)
    if isinstance(mixer, MultiHeadLatentAttention):
        return Softmax(mixer.num_heads, mixer.qk_head_dim, mixer.v_head_dim)
    if isinstance(mixer, LinearAttention):
        sizes = mixer.num_v_heads, mixer.head_dim, mixer.head_v_dim
        return Recurrence(*sizes, mixer.has_beta, mixer.per_head, mixer.rows)
    raise ValueError(f"there is no formula for the mixer {type(mixer).__name__}")


def needed(parts: dict[str, Products]) -> float:
    """Operations of all parts, without recomputation."""
    return sum(part.needed for part in parts.values())


def utilisation(
    operations: float, seconds: float, gpus: int = 1, peak: float = PEAK_FLOP_S
) -> float:
    """Model FLOPs utilisation (MFU): the share, in [0, 1], of the GPUs' peak.

    operations: of a whole step, over all GPUs; see `needed`. seconds: of the step. peak: operations
    a second of one GPU.
    """
    return operations / (seconds * gpus * peak)


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of a GPU whose rate is known here, in bf16; else None."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return PEAK_FLOP_S if "H200" in name or ("H100" in name and "PCIe" not in name) else None


class Meter:
    """The utilisation of a run's steps.

    model: may be sharded. gpus: of the run. peak: operations a second of each; None: unknown. For
    an unknown peak and for mixers without a formula, there is no utilisation.
    """

    def __init__(self, model: nn.Module, gpus: int, peak: float | None) -> None:
        self.gpus, self.peak = gpus, peak
        self.a_token, self.softmax = 0.0, list[Softmax]()
        if peak is None or not isinstance(model, LanguageModel):
            self.peak = None
            return
        try:
            parts = step_flops(model, CHUNK)
        except ValueError:
            self.peak = None
            return
        parts.pop("attention", None)
        self.a_token = needed(parts) / CHUNK
        _, layers = _described(model)
        self.softmax = [layer.mixer for layer in layers if isinstance(layer.mixer, Softmax)]

    def share(self, tokens: int, lengths: Sequence[int], seconds: float) -> float | None:
        """MFU of a step that took so many seconds. tokens: of the whole step. lengths: of some of
        its documents, which stand for all in softmax attention."""
        if self.peak is None:
            return None
        operations = self.a_token * tokens
        if self.softmax:
            shown = sum(_attention(mixer, lengths).needed for mixer in self.softmax)
            operations += shown * tokens / max(1, sum(lengths))
        return utilisation(operations, seconds, self.gpus, self.peak)


def _linear(layer: nn.Linear, tokens: int) -> Products:
    forward = 2.0 * tokens * layer.in_features * layer.out_features
    return Products(forward, 2 * forward)


def _experts(layer: Routed, tokens: int) -> Products:
    """The router, and the products of the experts that a token takes."""
    each = layer.experts + layer.experts_per_token * 3 * layer.ffn
    forward = 2.0 * tokens * layer.hidden * each
    return Products(forward, 2 * forward)


def _operator(mixer: Recurrence, chunks: float) -> dict[str, Products]:
    """The products of one operator call by part. chunks: of each value head."""
    C, K, V = CHUNK, mixer.K, mixer.V
    each = chunks * mixer.heads
    removes = int(mixer.removes)
    read = 1 / mixer.rows  # the share of the rows whose query is not zero
    # With one decay a channel the torch backend forms only what is below the diagonal.
    gram = each * (2 * C * C if mixer.per_head else C * (C - 1)) * K
    square_k, square_v, state = (2 * each * n for n in (C * C * K, C * C * V, C * K * V))
    out = state + square_v

    scores = (removes + read) * gram
    operands = removes * (square_k + square_v)
    states = (removes + 1) * state
    # A mixer that removes nothing has w = 0. The torch backend multiplies by it in three scans.
    zeros = 0 if removes else 3 * state
    return {
        "scores": Products(scores, 2 * scores, 3 * (1 - read) * gram),
        # The adjoint of T needs one product, y v_new^T with y = T^T dv_new.
        "inverse": Products(removes * each * C * (C - 1) * (C - 2) / 3, removes * square_v),
        # u and w share one adjoint, y; their gradients follow from it without a product with T.
        "operands": Products(operands, removes * square_v, operands),
        "states": Products(states, 2 * states, states + zeros),
        "output": Products(read * out, 2 * read * out, 3 * (1 - read) * out),
    }


def _attention(mixer: Softmax, lengths: Sequence[int]) -> Products:
    """The products of softmax attention over documents of these lengths."""
    H, K, V = mixer
    pairs = 2.0 * H * sum(n * (n + 1) / 2 for n in lengths)
    forward = pairs * (K + V)
    # The torch backend multiplies blocks of queries with all keys up to the block's end, forms the
    # scores again in the backward, and sums do * o of each query as a product.
    ends = (min(lo + BLOCK, n) for n in lengths for lo in range(0, n, BLOCK))
    blocks = 2.0 * H * sum((end - (end - 1) // BLOCK * BLOCK) * end for end in ends)
    executed = blocks * (4 * K + 3 * V) + 2.0 * H * V * sum(lengths)
    return Products(forward, 2 * forward, executed - 3 * forward)
