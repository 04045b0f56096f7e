"""A model of transformers in the trainer: --model hf:DIR.

It is made on the meta device from DIR/config.json, parallelized, and sharded like our own decoder.
stock_weights.py fills it. transformers computes hidden states; the head's loss is chunked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fla_cp import FLACPContext
from fla_cp.integrations.rates import Exact, set_apart
from fla_cp.integrations.stock_layout import tied_names
from fla_cp.integrations.stock_model import open_stock, weights_of
from fla_cp.integrations.transformers import parallelize
from fla_cp.nn import RoutingStatistics
from fla_cp.remat import selective_contexts
from fla_cp.train.balance import Balance, check_micro_batches
from fla_cp.train.config import ModelConfig, TrainConfig, UserError
from fla_cp.train.distributed import Ranks, compute_dtype, gathered
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.loss import chunked_cross_entropy
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.stock_weights import compute_buffers, initialise_stock, load_stock
from fla_cp.train.weights import allocate

_ROUTER = re.compile(r"Top[kK]Router$")


class StockModel(LanguageModel):
    """A causal language model of transformers over the tokens that this rank owns.

    stock: what `open_stock` returns. config: whose impl and remat count.
    """

    def __init__(self, stock: Any, config: ModelConfig) -> None:
        super().__init__()
        self.impl = config.impl
        # Not as config.json says: transformers never ties the head of Kimi Linear.
        self.tied = bool(tied_names(stock))
        set_apart(stock)
        self.stock = stock
        self.routers = _routers(stock)
        self._found: list[RoutingStatistics] | None = None
        if self.routers:
            self.balance = _balance(self.routers, stock.config)
            for router in self.routers:
                router.register_forward_hook(self._observe)
        # Its own labels are not used, so its loss over experts would not be, either.
        stock.config.output_router_logits = False
        if config.remat != "none":
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            if config.remat == "selective":
                options["context_fn"] = selective_contexts
            stock.activation_checkpointing_enable(activation_checkpointing_kwargs=options)

    @property
    def shape(self) -> str:
        """The model's dimensions, in words."""
        config = self.stock.config
        tied = "tied" if self.tied else "untied"
        return (
            f"{type(self.stock).__name__}, {config.num_hidden_layers} layers of width "
            f"{config.hidden_size}, {tied} head"
        )

    def block_list(self) -> list[nn.Module]:
        return list(self.stock.model.layers)

    def exact_parts(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, Exact)]

    def tie_weights(self) -> None:
        if self.tied:
            self.stock.lm_head.weight = self.stock.model.embed_tokens.weight

    def forward(
        self, tokens: Tensor, context: FLACPContext, labels: Tensor | None = None
    ) -> Tensor:
        """Summed cross-entropy of the labels, or logits without labels; see `LanguageModel`."""
        with gathered(self.exact_parts()), self._routing() as found:
            out = self.stock.model(input_ids=tokens, cp_context=context, impl=self.impl)
        x, head = out.last_hidden_state, self.stock.lm_head
        if labels is None:
            return head(x)
        loss = chunked_cross_entropy(x.flatten(0, 1), head.weight, labels.flatten())
        if self.balance is None or not torch.is_grad_enabled():
            return loss
        return self.balance.counted(loss, found, labels)

    @contextmanager
    def _routing(self) -> Iterator[list[RoutingStatistics]]:
        """Collects what routers report in the block, but not when a backward runs them again."""
        found: list[RoutingStatistics] = []
        self._found = found
        try:
            yield found
        finally:
            self._found = None

    def _observe(self, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Sums up a router's choices. It also runs in a recomputation, because that must save the
        same tensors."""
        logits, _, experts = outputs
        zeros = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)
        chosen = experts.flatten()
        counts = zeros.scatter_add(0, chosen, torch.ones_like(chosen))
        probabilities = logits.softmax(-1, dtype=torch.float32).sum(0)
        if self._found is not None:
            self._found.append(RoutingStatistics(counts, probabilities))


def _routers(stock: nn.Module) -> list[Any]:
    return [module for module in stock.modules() if _ROUTER.search(type(module).__name__)]


def _aux_loss(config: Any) -> float:
    """The factor of the load-balancing loss; 0 if transformers would not add this loss."""
    asked = getattr(config, "output_router_logits", False)
    return getattr(config, "router_aux_loss_coef", 0.0) if asked else 0.0


def _balance(routers: list[Any], config: Any) -> Balance:
    """Loads of the stock routers."""
    first, factor = routers[0], _aux_loss(config)
    return Balance(len(routers), first.num_experts, first.top_k, aux_loss=factor, bias_rate=0.0)


def opened(folder: str) -> Any:
    """`open_stock`, whose convolutions must have as many taps as the trainer's contexts, and whose
    weights must not be empty, since FSDP2 cannot shard them."""
    stock = open_stock(folder)
    for name, weight in stock.named_parameters():
        if not weight.numel():
            raise ValueError(
                f"{name} must have elements, because FSDP2 cannot shard it otherwise, got shape "
                f"{tuple(weight.shape)}"
            )
    for name, module in stock.named_modules():
        size = getattr(module, "conv_kernel_size", CONV_SIZE)
        if size != CONV_SIZE:
            raise ValueError(f"the convolution of {name} must have {CONV_SIZE} taps, got {size}")
    return stock


def _check_widths(stock: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for experts of widths that transformers' grouped product does not take."""
    config, bytes_each = stock.config, dtype.itemsize
    grouped = config._experts_implementation == "grouped_mm" and dtype != torch.float64
    # On older GPUs, transformers multiplies the matrices of one expert after the other.
    older = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if not _routers(stock) or not grouped or older:
        return
    for name in ("hidden_size", "moe_intermediate_size"):
        width = getattr(config, name)
        if width * bytes_each % 16:
            raise ValueError(
                f"{name} must be a multiple of {16 // bytes_each}, 16 bytes in "
                f"{str(dtype).removeprefix('torch.')}, for the grouped product of experts, got "
                f"{width}"
            )


def check_stock(
    config: TrainConfig, vocab_size: int, device: torch.device, *, weights: bool
) -> None:
    """Raises UserError if --model hf:DIR cannot be trained on tokens of this vocabulary or on this
    device, and as `check_micro_batches` does.

    weights: whether the folder's weights will be loaded; a checkpoint needs none of them.
    """
    folder = config.model.folder
    assert folder is not None
    flag = f"--model hf:{folder}"
    try:
        stock = opened(folder)
        _check_widths(stock, compute_dtype(config.parallel.dtype, device), device)
        if weights and config.model.init == "weights":
            weights_of(stock, folder)
        parallelize(stock)
    except (ValueError, ImportError) as error:
        raise UserError(f"{flag}: {error}") from error
    if vocab_size > stock.config.vocab_size:
        raise UserError(
            f"--data must have at most the {stock.config.vocab_size} tokens of {flag}, got "
            f"{vocab_size}"
        )
    if _routers(stock):
        origin = f"the router_aux_loss_coef of {flag}"
        check_micro_batches(config, _aux_loss(stock.config), origin)


def build_stock(
    config: ModelConfig, seed: int | None, ranks: Ranks, dtype: torch.dtype
) -> StockModel:
    """A model of transformers of which this rank allocates and reads only its own shard.

    seed: None leaves the weights zero, for a checkpoint to fill; otherwise they are the folder's,
    or with init="random" those of this seed. dtype: see `allocate`. Raises UserError for
    weights that do not fit.
    """
    folder = config.folder
    assert folder is not None
    stock = opened(folder)
    weights = None
    if seed is not None and config.init == "weights":
        try:
            weights = weights_of(stock, folder)
        except ValueError as error:
            raise UserError(f"--model hf:{folder}: {error}") from error
    if dtype == torch.float64:
        stock.config._experts_implementation = "eager"  # grouped products refuse float64
    model = StockModel(parallelize(stock), config)
    allocate(model, ranks, dtype)
    compute_buffers(model)
    if weights is not None:
        load_stock(model, *weights)
    elif seed is not None:
        initialise_stock(model, seed)
    return model
