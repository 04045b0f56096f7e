"""A small decoder language model: embedding, blocks, output head.

A block is a token mixer, followed by SwiGLU or by experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fla_cp import FLACPContext
from fla_cp.nn import RoutingStatistics, SwiGLU
from fla_cp.nn.experts import Experts, ExpertWeights
from fla_cp.nn.initial import Constant, Initial, Normal, Uniform
from fla_cp.remat import Offloaded, selective_checkpoint
from fla_cp.train.balance import Balance, rates
from fla_cp.train.config import ModelConfig, UserError
from fla_cp.train.distributed import exact_parts, gathered
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.loss import chunked_cross_entropy, token_scores
from fla_cp.train.mixers import make_mixer
from fla_cp.train.pattern import block_mixers
from fla_cp.train.waiting_bars import show_compilations
from fla_cp.train.weights import give_memory, initialise, on_meta

INIT_STD = 0.02
INTO_RESIDUAL = ("mixer.o_proj", "ffn.down", "ffn.experts", "ffn.shared.down")
"""The names of the modules whose matrix writes into the residual stream; of experts, `down`."""
# No module here draws random numbers. Saving the generators' states would make the host wait.
NO_DROPOUT: dict[str, Any] = {"preserve_rng_state": False}


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder.

    num_heads, head_dim: those of recurrent layers. value_heads: their value heads for each key
    head. attention_width: channels of a head of attention, as a multiple of head_dim.
    queries_per_key: how many query heads share a key head, if num_heads is a multiple of it.
    ffn_ratio: inner width of SwiGLU over hidden_size. With 8/3, its 3 matrices have as many
    elements as 2 matrices with a ratio of 4. norm_eps: that of all norms except those of latents.
    experts and the fields after it: see `ModelConfig`; with experts=None there are none.
    """

    layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    tie_embeddings: bool
    value_heads: int = 1
    attention_width: int = 1
    queries_per_key: int = 4
    ffn_ratio: float = 8 / 3
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    experts: int | None = None
    experts_per_token: int = 2
    shared_experts: int = 0
    expert_size: int | None = None
    routing_scale: float = 1.0
    routing: str = "softmax"
    dense_layers: int = 0

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.hidden_size}, "
            f"{self.num_heads} heads of {self.head_dim}, "
            f"{'tied' if self.tie_embeddings else 'untied'} head"
        )

    @property
    def ffn_size(self) -> int:
        """Inner width of SwiGLU: ffn_ratio times hidden_size, rounded up to a multiple of 64.

        A ratio of n / hidden_size gives n, if n is a multiple of 64, whatever rounding did to it.
        """
        blocks = self.hidden_size * self.ffn_ratio / 64
        return 64 * math.ceil(blocks * (1 - 1e-12))

    @property
    def expert_width(self) -> int:
        """Inner width of an expert. By default, the experts of a token together are as wide as
        SwiGLU."""
        if self.expert_size is not None:
            return self.expert_size
        return 64 * math.ceil(self.ffn_size / (self.experts_per_token + self.shared_experts) / 64)

    @property
    def attention_head_dim(self) -> int:
        """Channels of a head of attention."""
        return self.attention_width * self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Key heads of attention."""
        return self.num_heads // math.gcd(self.num_heads, self.queries_per_key)


KIMI_LINEAR = Shape(
    layers=27,
    hidden_size=2304,
    num_heads=32,
    head_dim=128,
    tie_embeddings=False,
    ffn_ratio=4,
    experts=256,
    experts_per_token=8,
    shared_experts=1,
    expert_size=1024,
    routing_scale=2.446,
    routing="sigmoid",
    dense_layers=1,
)
"""Kimi Linear 48B-A3B."""

QWEN3_NEXT = Shape(
    layers=48,
    hidden_size=2048,
    num_heads=16,
    head_dim=128,
    tie_embeddings=False,
    value_heads=2,
    attention_width=2,
    queries_per_key=8,
    ffn_ratio=2.5,
    rope_theta=1e7,
    norm_eps=1e-6,
    experts=512,
    experts_per_token=10,
    shared_experts=1,
    expert_size=512,
)
"""Qwen3-Next 80B-A3B."""

SHAPES = {
    "tiny": Shape(layers=2, hidden_size=128, num_heads=2, head_dim=64, tie_embeddings=True),
    "340M": Shape(layers=24, hidden_size=1024, num_heads=8, head_dim=128, tie_embeddings=False),
    "1.3B": Shape(layers=24, hidden_size=2048, num_heads=16, head_dim=128, tie_embeddings=False),
    "kimi-linear-small": replace(
        KIMI_LINEAR, layers=12, hidden_size=768, num_heads=8, experts=32, expert_size=384
    ),
    "qwen3-next-small": replace(
        QWEN3_NEXT, layers=12, hidden_size=1024, num_heads=8, experts=64, expert_size=256
    ),
    "kimi-linear": KIMI_LINEAR,
    "qwen3-next": QWEN3_NEXT,
}


def shape_of(config: ModelConfig) -> Shape:
    """The shape of the named size, in which the configuration's dimensions replace others."""
    size = SHAPES[config.size]
    names = [f.name for f in fields(size) if hasattr(config, f.name)]
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    shape = replace(size, **given)
    return shape if shape.experts else replace(shape, experts=None)


def vocabulary(config: ModelConfig, data: int) -> int:
    """How many rows the embedding has. data: the size of the data's vocabulary. Raises UserError if
    the configured number is smaller."""
    if config.vocab_size is None:
        return data
    if config.vocab_size < data:
        raise UserError(
            f"--model.vocab-size must be at least {data}, the tokens that the data have, got "
            f"{config.vocab_size}"
        )
    return config.vocab_size


def _initial_values(module: nn.Module, std: float) -> dict[str, Initial]:
    """Initial values of this module's own parameters. std: for the matrix of a linear layer."""
    if isinstance(module, nn.Linear):
        bound = 1 / math.sqrt(module.in_features)  # torch draws a bias in this way
        return {"weight": Normal(std), "bias": Uniform(-bound, bound)}
    if isinstance(module, nn.Embedding):
        return {"weight": Normal(INIT_STD)}
    if isinstance(module, nn.RMSNorm):
        return {"weight": Constant(1.0)}
    if isinstance(module, ExpertWeights):
        return {"gate_up": Normal(INIT_STD), "down": Normal(std)}
    own = getattr(module, "initial_values", dict)
    return own() if not isinstance(module, Decoder) else {}


def _feed_forward(shape: Shape, layer_idx: int) -> nn.Module:
    """The network after the token mixer of a block. Shared experts have a gate with softmax
    routing, as in Qwen3-Next. If a token has one expert, its weight is not normalised, because it
    would always be 1."""
    if shape.experts is None or layer_idx < shape.dense_layers:
        return SwiGLU(shape.hidden_size, shape.ffn_size)
    return Experts(
        shape.hidden_size,
        shape.expert_width,
        shape.experts,
        shape.experts_per_token,
        routing=shape.routing,
        normalize=shape.experts_per_token > 1,
        scale=shape.routing_scale,
        shared_experts=shape.shared_experts,
        shared_gate=shape.routing == "softmax" and shape.shared_experts > 0,
    )


class Block(nn.Module):
    """Pre-norm residual block: token mixer, then SwiGLU or experts."""

    def __init__(self, mixer: str, config: ModelConfig, shape: Shape, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mixer = make_mixer(mixer, config, shape, layer_idx)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = _feed_forward(shape, layer_idx)

    def forward(self, x: Tensor, context: FLACPContext) -> tuple[Tensor, RoutingStatistics | None]:
        """The residual stream after this block, and the statistics of its experts, if any."""
        x = x + self.mixer(self.mixer_norm(x), cp_context=context)
        y, statistics = self.ffn(self.ffn_norm(x)), None
        if isinstance(self.ffn, Experts):
            y, statistics = y
        return x + y, statistics


class Decoder(LanguageModel):
    """A language model over the tokens that this rank owns.

    config: sizes and options. vocab_size: how many token ids there are. shape: dimensions, in place
    of those that config names. `build_model` sets all weights, and build.py those of a rank's
    shard.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape_of(config) if shape is None else shape
        self.remat, self.offload = config.remat, config.offload
        self.embedding = nn.Embedding(vocab_size, self.shape.hidden_size)
        mixers = block_mixers(config.pattern or config.mixer or "kda", self.shape.layers)
        self.blocks = nn.ModuleList(
            Block(mixer, config, self.shape, layer_idx) for layer_idx, mixer in enumerate(mixers)
        )
        self.norm = nn.RMSNorm(self.shape.hidden_size, eps=self.shape.norm_eps)
        self.head = nn.Linear(self.shape.hidden_size, vocab_size, bias=False)
        if self.shape.experts is not None:
            self.balance = Balance(
                len(self.expert_layers()),
                self.shape.experts,
                self.shape.experts_per_token,
                **rates(config, self.shape.routing),
            )
        self.tie_weights()

    def exact_parts(self) -> list[nn.Module]:
        return exact_parts(self.blocks)

    def expert_layers(self) -> list[Experts]:
        """The mixtures of experts, in the order of the blocks."""
        layers = (block.get_submodule("ffn") for block in self.blocks)
        return [layer for layer in layers if isinstance(layer, Experts)]

    def active_parameters(self) -> int:
        """How many parameters take part in a token's result: all except those of the experts that
        it does not take."""
        idle = 0
        for layer in self.expert_layers():
            each = sum(p.numel() for p in layer.experts.parameters()) // layer.router.num_experts
            idle += each * (layer.router.num_experts - layer.router.experts_per_token)
        return sum(p.numel() for p in self.parameters()) - idle

    def move_biases(self) -> None:
        """Moves the routers' biases by the loads of the step; see `Balance`."""
        if self.balance is not None:
            self.balance.move_biases([layer.router for layer in self.expert_layers()])

    def tie_weights(self) -> None:
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def initial_values(self) -> dict[str, Initial]:
        """Initial values of each parameter, by its full name.

        Matrices have a standard deviation of 0.02. For those that write into the residual stream it
        is divided by sqrt(2 * layers), so that the variance of the stream does not grow with depth.
        """
        residual = 1 / math.sqrt(2 * self.shape.layers)
        values = {}
        for name, module in self.named_modules():
            std = INIT_STD * (residual if name.endswith(INTO_RESIDUAL) else 1.0)
            for parameter, value in _initial_values(module, std).items():
                values[f"{name}.{parameter}"] = value
        return values

    def forward(
        self,
        tokens: Tensor,
        context: FLACPContext,
        labels: Tensor | None = None,
        each: bool = False,
    ) -> Tensor:
        """The summed cross-entropy of the labels, or the logits if there are no labels.

        tokens, labels: [1, T_local] int64, this rank's part under `context`. A label of -100 is not
        counted.
        Returns a scalar (nats, summed over this rank's targets; float64 for float64, else float32),
        or the logits [1, T_local, vocab]. With experts, the scalar's gradient contains that of the
        load-balancing loss. With `each` it returns [2, T_local] fp32 without gradients: the loss of
        each label, and 1 where the label is the likeliest token, otherwise 0.
        """
        x, statistics = self.embedding(tokens), []
        with gathered(self.exact_parts()):
            for block in self.blocks:
                x, found = self.run_block(block, x, context)
                statistics.append(found)
        x = self.norm(x)
        if labels is None:
            return self.head(x)
        if each:
            return torch.stack(token_scores(x[0], self.head.weight, labels[0]))
        loss = chunked_cross_entropy(x.flatten(0, 1), self.head.weight, labels.flatten())
        if self.balance is None or not torch.is_grad_enabled():
            return loss
        return self.balance.counted(loss, [s for s in statistics if s is not None], labels)

    def run_block(
        self, block: nn.Module, x: Tensor, context: FLACPContext
    ) -> tuple[Tensor, RoutingStatistics | None]:
        """The block's results. `remat` and `offload` decide what is kept for its backward, and
        where."""
        if not torch.is_grad_enabled():
            return block(x, context)
        with Offloaded(x.device, block) if self.offload else nullcontext():
            if self.remat == "none":
                return block(x, context)
            if self.remat == "selective":
                return selective_checkpoint(block, x, context, offload=self.offload, **NO_DROPOUT)
            return checkpoint(block, x, context, use_reentrant=False, **NO_DROPOUT)


def build_model(config: ModelConfig, vocab_size: int, seed: int) -> Decoder:
    """A whole decoder in float32 on the CPU, with the weights of `seed`."""
    with on_meta():
        model = Decoder(config, vocab_size)
    give_memory(model, torch.device("cpu"))
    initialise(model, seed)
    return model


def has_compiled_blocks(model: nn.Module) -> bool:
    """Whether `compile_blocks` has been called for the model."""
    return isinstance(model, Decoder) and any("forward" in b.__dict__ for b in model.blocks)


COMPILE_OPTIONS: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
"""Options of Inductor. Exchanges between ranks start as early as possible, and are waited for as
late as possible, so that projections and gradients of weights run in the meantime."""


def compile_blocks(model: Decoder) -> None:
    """Compiles each block's forward. FSDP's hooks are not compiled and run as before. All blocks
    share one code object, so that each shape is compiled once."""
    show_compilations()
    for block in model.blocks:
        run = torch.compile(block.forward, fullgraph=True, options=COMPILE_OPTIONS)
        rows = getattr(block.mixer, "rows", 1)
        block.forward = run if rows == 1 else _with_rows(run, rows)


def _with_rows(run: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """A compiled block whose mixer has several rows for each token. The context of the rows is
    built before each call, because a graph cannot build it."""

    def forward(x: Tensor, context: FLACPContext) -> Any:
        context.repeated(rows)
        return run(x, context)

    return forward


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups of the optimiser. Matrices have weight decay; vectors and per-head constants
    have none."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        constant = parameter.ndim < 2 or name.endswith(("A_log", "dt_bias", "bias"))
        (kept if constant else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
