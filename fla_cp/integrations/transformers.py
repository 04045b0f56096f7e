"""Models of transformers under a context: their recurrences, convolutions and attention run on each
rank's tokens, packed documents apart from each other.

    model = parallelize(AutoModelForCausalLM.from_pretrained(..))
    context = build_cp_context(cu_seqlens, group, conv1d_kernel_size=4)
    out = model(input_ids=context.shard(ids), labels=context.shard(labels), cp_context=context)
    out.loss.backward()     # then sum the gradients over the group

docs/transformers.md says which models and which arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_cp.context import FLACPContext
from fla_cp.integrations.mixers import KINDS, ParallelForward
from fla_cp.integrations.rates import shard_rates as shard_rates
from fla_cp.integrations.stock_folder import ROPE_RULE, varying_rope_type
from fla_cp.ops.checks import check_context
from fla_cp.partition.device_tables import to_device
from fla_cp.partition.key_rows import pieces

FIRST_VERSION = (5, 23)

_HEADS = (
    "KimiLinearForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "OlmoHybridForCausalLM",
)
_TEXT_MODELS = (
    "KimiLinearModel",
    "Qwen3NextModel",
    "Qwen3_5TextModel",
    "Qwen3_5MoeTextModel",
    "OlmoHybridModel",
)
_LAYERS = (
    "KimiLinearDecoderLayer",
    "Qwen3NextDecoderLayer",
    "Qwen3_5DecoderLayer",
    "Qwen3_5MoeDecoderLayer",
    "OlmoHybridAttentionDecoderLayer",
    "OlmoHybridLinearAttentionDecoderLayer",
)
_MIXERS = ("linear_attn", "self_attn")
"""Names of a layer's part that mixes tokens."""

_OWN_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords that describe packed documents to transformers."""

_Model = TypeVar("_Model", bound=nn.Module)
_ACTIVE: ContextVar[FLACPContext | None] = ContextVar("active context", default=None)


def parallelize(model: _Model) -> _Model:
    """The same model, which can now be called with `cp_context`, or inside `under`. Calls without a
    context stay as they were, in every bit, and so do other models.

    model: a causal language model of kimi_linear, qwen3_next, qwen3_5, qwen3_5_moe or olmo_hybrid
        of transformers 5.23 or later, or the text model inside. Call this before anything that
        wraps the model or its layers: PEFT, DDP, FSDP, accelerate's hooks.

    Under a context, every rank of its group calls the model:
    input_ids [1, local_tokens] (or inputs_embeds): this rank's tokens, context.shard of all.
    position_ids: if left out, each document's tokens count from 0. Otherwise this rank's, as
        transformers takes them.
    labels: this rank's tokens, not shifted: context.shard of all. The last token of a document
        predicts nothing. The loss is this rank's share of the batch's mean. The shares of all ranks
        add up to it, and so do the gradients.
    shift_labels, num_items_in_batch: as transformers has them. shift_labels are this rank's.
    impl, precision: as for the operators (`chunk_kda`).
    Logits and all other results for each token are those of this rank's tokens.

    Raises ImportError without transformers 5.23 or later, and ValueError for another model, for a
    kind of layer that is not known, for layers whose `forward` was already replaced, and for rotary
    positions of the types dynamic and longrope. A call raises ValueError for what it does not
    support: caches, attention masks, packings that are passed in addition to the context, attention
    with dropout, and router losses and logits_to_keep over several ranks.
    """
    _check_version()
    text = _text_model(model)
    _check_rotary(text)
    found = [_mixer(i, layer) for i, layer in enumerate(text.layers)]
    forwards = [ParallelForward(mixer) for mixer in found]
    for mixer, forward in zip(found, forwards, strict=True):
        mixer.forward = forward
    if model is not text:
        model.register_forward_pre_hook(_enter_head, with_kwargs=True)
    text.register_forward_pre_hook(_enter_text_model, with_kwargs=True)
    return model


def is_parallelized(module: nn.Module) -> bool:
    """Whether `parallelize` was called with this module, or with the language model around it."""
    return _enter_text_model in module._forward_pre_hooks.values()


@contextmanager
def under(context: FLACPContext) -> Iterator[FLACPContext]:
    """Calls of parallelized models in this block, and in this thread, run under `context`, unless
    they get another one as `cp_context`. Backward passes may follow outside the block.

    Raises ValueError unless `context` is a FLACPContext.
    """
    check_context(context)
    token = _ACTIVE.set(context)
    try:
        yield context
    finally:
        _ACTIVE.reset(token)


def _check_version() -> None:
    needs = f"transformers {'.'.join(map(str, FIRST_VERSION))} or later"
    try:
        from transformers import __version__ as found
    except ImportError as error:
        raise ImportError(f"parallelize needs {needs}: pip install 'fla_cp[hf]'") from error
    if tuple(int(part) for part in found.split(".")[:2]) < FIRST_VERSION:
        raise ImportError(f"parallelize needs {needs}, got {found}: pip install 'fla_cp[hf]'")


def _name(module: object) -> str:
    """A class of transformers without its module, any other with it."""
    kind = type(module)
    if kind.__module__.startswith("transformers.models."):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _text_model(model: nn.Module) -> Any:
    text = model.model if _name(model) in _HEADS else model
    if _name(text) not in _TEXT_MODELS:
        known = ", ".join((*_HEADS, *_TEXT_MODELS))
        raise ValueError(f"model must be one of {known}, got {_name(model)}")
    return text


def _check_rotary(text: nn.Module) -> None:
    """Frequencies must not depend on the largest position of a call, which is a rank's own."""
    for name, module in text.named_modules():
        kind = varying_rope_type(getattr(module, "rope_type", None))
        if kind is not None:
            raise ValueError(f"{name}'s rope_type must be {ROPE_RULE}; got {kind!r}")


def _mixer(i: int, layer: nn.Module) -> nn.Module:
    """The part of the i-th layer that mixes tokens."""
    if _name(layer) not in _LAYERS:
        raise ValueError(f"layer {i} must be one of {', '.join(_LAYERS)}, got {_name(layer)}")
    parts = [getattr(layer, name) for name in _MIXERS if hasattr(layer, name)]
    if [part for part in parts if _name(part) in KINDS] != parts or len(parts) != 1:
        got = " and ".join(map(_name, parts)) or "nothing"
        raise ValueError(f"layer {i} must mix tokens with one of {', '.join(KINDS)}, got {got}")
    (mixer,) = parts
    if "forward" in vars(mixer):
        raise ValueError(
            f"the forward of layer {i}'s {_name(mixer)} must be that of its class, but it was "
            "replaced: parallelize once, and before anything else that changes it"
        )
    for name in ("sliding_window", "attn_logit_softcapping"):
        if getattr(mixer, name, None) is not None:
            raise ValueError(
                f"layer {i}'s {_name(mixer)} must have no {name}, got {getattr(mixer, name)}"
            )
    return mixer


def _context(keywords: dict[str, Any]) -> FLACPContext | None:
    """The context of a call: the one it was given, or that of `under`. Unless it is None, it is put
    into the keywords."""
    given = keywords.pop("cp_context", None)
    context: FLACPContext | None = _ACTIVE.get() if given is None else given
    if context is not None:
        check_context(context)
        keywords["cp_context"] = context
    return context


def _enter_head(
    model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = _context(keywords)
    return (args, keywords) if context is None else _prepare_head(context, model, args, keywords)


@torch.compiler.disable  # not traced into a graph: Dynamo warns about most of this code
def _prepare_head(
    context: FLACPContext, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _check_call(context, args, keywords)
    router = keywords.get("output_router_logits")
    router = getattr(model.config, "output_router_logits", False) if router is None else router
    if router and context.world_size > 1:
        raise ValueError(
            "output_router_logits must be False under a context of several ranks, because the "
            f"loss over experts is not a sum over tokens, got {router}"
        )
    kept = keywords.get("logits_to_keep", 0)
    if context.world_size > 1 and not (isinstance(kept, int) and kept == 0):
        raise ValueError(
            "logits_to_keep must be 0 under a context of several ranks, because it counts the "
            f"tokens of one rank, got {kept}"
        )
    if keywords.get("labels") is not None:
        _take_labels(context, keywords)
    return args, keywords


def _enter_text_model(
    model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    context = _context(keywords)
    return (args, keywords) if context is None else _prepare_text(context, model, args, keywords)


@torch.compiler.disable
def _prepare_text(
    context: FLACPContext, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = _check_call(context, args, keywords)
    if keywords.get("position_ids") is None:
        keywords["position_ids"] = _positions(context, x.device)
    # With an entry for each kind of layer, transformers makes no masks, which would take T * T.
    keywords["attention_mask"] = dict.fromkeys(model.config.layer_types)
    keywords["use_cache"] = False
    return args, keywords


def _check_call(
    context: FLACPContext, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Tensor:
    """The call's tokens or embeddings, after checks of its arguments."""
    if len(args) > 1:
        raise ValueError(
            f"only input_ids may be passed by position under a context, got {len(args)} arguments"
        )
    tokens = tuple(sum(hi - lo for lo, hi in ranges) for ranges in context.token_ranges)
    if 0 in tokens:
        raise ValueError(
            f"every rank must have tokens, because transformers cannot reshape none, got {tokens} "
            "tokens by rank"
        )
    for name in ("attention_mask", *_OWN_PACKING):
        if keywords.get(name) is not None:
            raise ValueError(f"{name} must be left out: the context has the documents")
    if keywords.get("past_key_values") is not None or keywords.get("use_cache"):
        raise ValueError("use_cache and past_key_values must be left out under a context")
    named = dict(keywords, input_ids=args[0]) if args else keywords
    given = [name for name in ("input_ids", "inputs_embeds") if named.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"one of input_ids and inputs_embeds must be given, got {given}")
    labels = [name for name in ("labels", "shift_labels") if named.get(name) is not None]
    for name in (*given, *labels):
        x = named[name]
        if tuple(x.shape[:2]) != (1, context.local_tokens):
            raise ValueError(
                f"{name} must have this rank's tokens, [1, {context.local_tokens}], which "
                f"context.shard gives; got shape {tuple(x.shape)}"
            )
    positions = keywords.get("position_ids")
    if positions is not None and positions.shape[-1] != context.local_tokens:
        raise ValueError(
            f"position_ids must be those of this rank's {context.local_tokens} tokens, got shape "
            f"{tuple(positions.shape)}"
        )
    found: Tensor = named[given[0]]
    return found


def _positions(context: FLACPContext, device: torch.device) -> Tensor:
    """[1, local_tokens], int64: the place of each token in its document."""

    def build() -> Tensor:
        own = pieces(context.global_cu_seqlens, context.token_ranges[context.rank])
        runs = [torch.arange(p.lo - p.begin, p.hi - p.begin, device="cpu") for p in own]
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        return to_device(torch.cat([empty, *runs]), torch.int64, device)[None]

    found: Tensor = context.plans.cached(("positions", device), build)
    return found


def _take_labels(context: FLACPContext, keywords: dict[str, Any]) -> None:
    """Shifts labels, also from rank to rank, and counts the labels of the whole batch."""
    ignored = keywords.get("ignore_index", -100)
    shifted = keywords.get("shift_labels")
    whole = context.unshard(keywords["labels"] if shifted is None else shifted)
    if shifted is None:
        whole = F.pad(whole[:, 1:], (0, 1), value=ignored)
        whole = whole.index_fill(1, _last_tokens(context, whole.device), ignored)
        keywords["shift_labels"] = context.shard(whole)
    if keywords.get("num_items_in_batch") is None:
        keywords["num_items_in_batch"] = (whole != ignored).sum()


def _last_tokens(context: FLACPContext, device: torch.device) -> Tensor:
    """The position of each document's last token in the whole batch, int64."""

    def build() -> Tensor:
        last = tuple(hi - 1 for lo, hi in pairwise(context.global_cu_seqlens) if hi > lo)
        return to_device(last, torch.int64, device)

    found: Tensor = context.plans.cached(("last tokens", device), build)
    return found
