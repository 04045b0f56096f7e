"""A model that is called with whole batches and computes this rank's part of them.

Ranks of a cp group behave as one: each is called with the same batch [B, T] and returns its loss.
In between, the batch becomes one row of documents, and each rank takes a part of this row.
"""

from __future__ import annotations

import atexit
import inspect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fla_cp.comm import collectives
from fla_cp.context import FLACPContext, build_cp_context
from fla_cp.integrations.documents import LENGTHS, NAMES, Documents, documents_of
from fla_cp.integrations.transformers import is_parallelized, parallelize
from fla_cp.nn import Attention, MultiHeadLatentAttention
from fla_cp.nn.modules import ShortConvolution
from fla_cp.partition.key_rows import pieces
from fla_cp.partition.token_ranges import contiguous_token_ranges, zigzag_token_ranges

LAYOUTS = ("auto", "contiguous", "zigzag")
LESS = 0.95
""""auto" takes zig-zag ranges if the busiest rank then has less than this share of the softmax
attention that it has with contiguous ones."""
IGNORED = -100
"""A label that is not counted."""


_PLACES: WeakValueDictionary[int, Place] = WeakValueDictionary()


@atexit.register
def _let_go() -> None:
    """As in fla_cp/context.py: nothing may hold a group when the interpreter ends."""
    for place in [*_PLACES.values()]:
        vars(place).clear()


@dataclass
class Place:
    """This rank among those that share a sequence.

    group: None for one rank. layout: one of LAYOUTS. exchange: as for `build_cp_context`. width:
    how many tokens the model's convolutions read; None: found in the model. softmax: whether some
    layers of the model are known to be softmax attention. context: the context of the last call.
    """

    group: dist.ProcessGroup | None
    layout: str = "auto"
    exchange: str = "auto"
    width: int | None = None
    softmax: bool = False
    context: FLACPContext | None = None

    def __post_init__(self) -> None:
        _PLACES[id(self)] = self

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def context_of(self, documents: Documents, device: torch.device) -> FLACPContext:
        offsets = torch.tensor(documents.offsets, dtype=torch.int32, device="cpu")
        self.context = build_cp_context(
            offsets.to(device),
            self.group,
            conv1d_kernel_size=self.width,
            cu_seqlens_cpu=offsets,
            token_ranges=self._ranges(documents.offsets),
            exchange=self.exchange,
            check=False,  # `_compare` has done it
        )
        return self.context

    def _ranges(self, offsets: Sequence[int]) -> list[list[tuple[int, int]]]:
        """The token ranges of all ranks for a batch with these documents."""
        contiguous = contiguous_token_ranges(offsets[-1], self.size)
        if self.layout == "contiguous" or self.size == 1:
            return contiguous
        zigzag = zigzag_token_ranges(offsets[-1], self.size)
        if self.layout == "zigzag":
            return zigzag
        most = [max(map(partial(_pairs, offsets), x)) for x in (contiguous, zigzag)]
        return zigzag if self.softmax and most[1] < LESS * most[0] else contiguous


def _pairs(offsets: Sequence[int], ranges: Iterable[tuple[int, int]]) -> int:
    """How many scores of softmax attention a rank with these ranges computes for each head."""
    found = 0
    for piece in pieces(offsets, ranges):
        queries, before = piece.hi - piece.lo, piece.lo - piece.begin
        found += queries * before + queries * (queries + 1) // 2
    return found


def take_whole_batches(model: nn.Module, place: Place) -> None:
    """Lets the model be called with whole batches, see `CPAccelerator.prepare`.

    Raises ValueError for a model that neither `parallelize` knows nor takes `cp_context`.
    """
    names = inspect.signature(model.forward).parameters
    own = "cp_context" in names
    if not own and not any(is_parallelized(part) for part in model.modules()):
        try:
            parallelize(model)
        except ValueError as error:
            raise ValueError(f"{error}; or its forward must take cp_context") from error
    if place.width is None:
        place.width = _width(model)
    softmax = Attention | MultiHeadLatentAttention
    place.softmax |= any(isinstance(x, softmax) or is_parallelized(x) for x in model.modules())

    def enter(
        module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = _by_name(names, args, keywords)
        given["cp_context"] = _cut(given, place, names if own else {})
        return (), given

    def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return _with_joined_loss(out, place.group)

    # before the hook of `parallelize`, which gets the results of this one
    model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(leave)


def _width(model: nn.Module) -> int | None:
    """The width of the model's convolutions. Raises ValueError if they have several widths."""
    parts = list(model.modules())
    found = {part.kernel_size[0] for part in parts if isinstance(part, nn.Conv1d)}
    found |= {part.kernel_size for part in parts if isinstance(part, ShortConvolution)}
    if len(found) > 1:
        raise ValueError(
            f"convolutions of several widths, {sorted(found)}: give CPAccelerator the "
            "conv1d_kernel_size of those that run under the context"
        )
    return next(iter(found), None)


def _by_name(
    names: Mapping[str, inspect.Parameter], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of a call, by name."""
    if len(args) > len(names):
        raise ValueError(f"at most {len(names)} arguments may be passed by position")
    given = dict(zip(names, args, strict=False))
    twice = given.keys() & keywords.keys()
    if twice:
        raise TypeError(f"several values for {', '.join(sorted(twice))}")
    return given | dict(keywords)


def _cut(given: dict[str, Any], place: Place, wanted: Mapping[str, object]) -> FLACPContext:
    """Puts this rank's part of each tensor into `given`; returns the context.

    wanted: names of arguments that the model's own forward takes, besides those that it is given.
    """
    if given.get("cp_context") is not None:
        raise ValueError("cp_context must be left out: the prepared model makes it")
    batch = next((x for x in given.values() if isinstance(x, Tensor) and x.ndim >= 2), None)
    for name in ("inputs_embeds", "input_ids"):
        batch = given[name] if given.get(name) is not None else batch
    if batch is None:
        raise ValueError("the model must be called with tokens [B, T], got no such tensor")
    told = {name: given.pop(name) for name in NAMES if name in given}
    for name in LENGTHS:
        given.pop(name, None)
    _check_unpatched()
    error, documents = None, Documents((0, 0), (0,))
    try:
        documents = documents_of(batch.shape, told)
        tensors = _folded(given, batch, documents)
    except ValueError as found:
        error, tensors = found, {}
    _compare(place, documents, tensors, batch.device, error)
    targets = tensors.get("shift_labels")
    if targets is None and "labels" in tensors:
        targets = _shifted(tensors["labels"], documents)
    if targets is not None and "shift_labels" in wanted:
        tensors["shift_labels"] = targets
        if "labels" in tensors and "labels" not in wanted:
            del given["labels"], tensors["labels"]
    counted = given.get("num_items_in_batch") is not None
    if targets is not None and "num_items_in_batch" in wanted and not counted:
        given["num_items_in_batch"] = (targets != IGNORED).sum()
    if "position_ids" in wanted and told.get("position_ids") is not None:
        positions = told["position_ids"].expand(batch.shape[0], -1)
        tensors["position_ids"] = documents.fold(positions)
    context = place.context_of(documents, batch.device)
    given |= {name: context.shard(x) for name, x in tensors.items()}
    return context


def _check_unpatched() -> None:
    """Raises ValueError inside torch's context_parallel, which replaces a function of torch."""
    module = getattr(F.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed"):
        raise ValueError(
            "torch's context_parallel must not be active: it cuts sequences into heads and tails, "
            "and knows nothing of recurrences; leave it out, the prepared model cuts its batches"
        )


def _folded(given: Mapping[str, Any], batch: Tensor, documents: Documents) -> dict[str, Tensor]:
    """The tensors of the call as one row without padding."""
    tensors = {}
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            continue
        if x.shape[:2] != batch.shape[:2]:
            raise ValueError(
                f"{name} must have a value for each token, {tuple(batch.shape[:2])}, got shape "
                f"{tuple(x.shape)}"
            )
        tensors[name] = documents.fold(x)
    ignored = given.get("ignore_index", IGNORED)
    for name in ("labels", "shift_labels"):
        if name not in tensors:
            continue
        if bool((documents.padding(given[name]) != ignored).any()):
            raise ValueError(
                f"{name} must be {ignored} where attention_mask is 0: padding is left out, so it "
                "cannot be predicted"
            )
    return tensors


def _shifted(labels: Tensor, documents: Documents) -> Tensor:
    """[1, tokens]: each token's target; IGNORED for the last of a document."""
    found = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    last = torch.tensor(documents.offsets[1:], dtype=torch.int64, device="cpu") - 1
    return found.index_fill(1, last.to(found.device), IGNORED)


def _digest(x: Tensor) -> Tensor:
    """A number from the bits of a tensor [1, tokens, ..], int64."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.detach().contiguous().view(kinds[x.element_size()])
    each = bits.reshape(x.shape[1], -1).sum(1, dtype=torch.int64)
    factors = torch.arange(1, 2 * len(each), 2, dtype=torch.int64, device=x.device)
    return (each * (factors * 0x9E3779B97F4A7C1)).sum()


def _compare(
    place: Place,
    documents: Documents,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    error: ValueError | None,
) -> None:
    """One small collective. Raises ValueError, on all ranks, unless they have the same batch, and
    `error` if there is one."""
    if place.group is not None:
        text = repr((documents.offsets, sorted(tensors), error is None))
        mine = [torch.tensor(zlib.crc32(text.encode()), dtype=torch.int64, device=device)]
        mine += [_digest(tensors[name]) * (i + 1) for i, name in enumerate(sorted(tensors))]
        facts = torch.stack([mine[0], sum(mine[1:], torch.zeros_like(mine[0]))])
        wire = facts.to(collectives.wire_device(place.group, device))
        gathered, work = collectives.all_gather(wire, place.group)
        work.wait()
        rows = gathered.tolist()
        odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if odd and error is None:
            raise ValueError(
                "every rank of a cp group must call the model with the same whole batch, but "
                f"ranks {odd} of this group differ from its first: prepare the data loader, leave "
                "dispatch_batches off, draw no random numbers that differ by rank in the data "
                "set, and cut no sequences (torch's context_parallel does)"
            )
    if error is not None:
        raise error


class _Joined(torch.autograd.Function):
    """The sum of the shares of all ranks. All ranks compute the same from it, so the gradient of a
    share is that of every rank's sum together."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = dist.get_world_size(group)
        return collectives.all_reduce(share.detach().clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


def _with_joined_loss(out: Any, group: dist.ProcessGroup | None) -> Any:
    """A call's result with the loss of the whole batch in place of this rank's share."""
    if group is None:
        return out

    def joined(loss: Any) -> Any:
        scalar = isinstance(loss, Tensor) and loss.ndim == 0
        return _Joined.apply(loss, group) if scalar else loss

    if isinstance(out, tuple) and out:
        return (joined(out[0]), *out[1:])
    if isinstance(out, dict) and "loss" in out:
        out["loss"] = joined(out["loss"])
        return out
    return joined(out)
