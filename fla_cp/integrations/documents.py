"""Documents of a batch [B, T], as data loaders for transformers describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
"""Names of offsets int [N+1] of the documents, from 0 to the number of tokens."""

NAMES = ("attention_mask", "position_ids", "seq_lens", "seq_idx", *OFFSETS)
"""Names of all arguments that describe documents or padding."""

LENGTHS = ("max_length_q", "max_length_k")
"""Names of arguments that may come with offsets. They follow from the offsets and are not read."""


class Documents(NamedTuple):
    """The batch's rows, one after the other, without their padding.

    offsets: where documents begin, from 0 to the number of tokens. rows: how many tokens each row
    has before its padding.
    """

    offsets: tuple[int, ...]
    rows: tuple[int, ...]

    def fold(self, x: Tensor) -> Tensor:
        """[B, T, ..] -> [1, tokens, ..], without padding."""
        if min(self.rows) == x.shape[1]:
            return x.flatten(0, 1)[None]
        return torch.cat([row[:n] for row, n in zip(x, self.rows, strict=True)])[None]

    def padding(self, x: Tensor) -> Tensor:
        """[B, T] -> [n]: the elements that `fold` leaves out."""
        return torch.cat([row[n:] for row, n in zip(x, self.rows, strict=True)])


def documents_of(shape: Sequence[int], told: Mapping[str, Any]) -> Documents:
    """The documents of a batch of `shape` [B, T, ..].

    told: the arguments of the call with a name in NAMES; None counts as missing.
    attention_mask [B, T], 1 for tokens and 0 for padding, which must be at the ends of rows.
    position_ids [B, T] or [1, T]: they count from 0 in each document.
    seq_idx [B, T] or [1, T]: its value changes where a document begins.
    seq_lens: how many tokens each document has, in any shape; zeros are ignored.
    cu_seqlens, cu_seq_lens_q, cu_seq_lens_k: offsets [N+1] of the documents.
    seq_lens and offsets do not count padding. Every row begins a document; without any of these
    arguments, each row is one document.

    Raises ValueError for values that are not as above, and if two of them disagree.
    """
    B, T = shape[:2]
    told = {name: x for name, x in told.items() if x is not None}
    rows = _rows(told["attention_mask"], B, T) if "attention_mask" in told else (T,) * B
    begins = tuple(accumulate(rows, initial=0))
    whole = Documents(begins, rows)
    found = {
        name: _READ[name](x, whole, name) for name, x in told.items() if name != "attention_mask"
    }
    for (one, a), (other, b) in pairwise(found.items()):
        if a != b:
            raise ValueError(f"{other} must begin documents where {one} does, {a}, got {b}")
    for name, offsets in found.items():
        if not set(begins) <= set(offsets):
            raise ValueError(
                f"{name} must begin a document with each row, at {begins}, got {offsets}"
            )
    return Documents(next(iter(found.values()), tuple(sorted(set(begins)))), rows)


def _rows(mask: Any, B: int, T: int) -> tuple[int, ...]:
    """Tokens of each row."""
    if not isinstance(mask, Tensor) or mask.shape != (B, T):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have the shape of the tokens, {(B, T)}, got {got}")
    mask = mask.cpu()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "attention_mask must be 1 for tokens and 0 for padding, got values up to "
            f"{mask.max().item()}; numbers of documents go into seq_idx"
        )
    kept = mask.long()
    if bool((kept[:, 1:] > kept[:, :-1]).any()):
        row = int((kept[:, 1:] > kept[:, :-1]).any(1).nonzero()[0])
        raise ValueError(
            "attention_mask must have padding only at the ends of rows, but in row "
            f"{row} tokens follow padding: let the tokenizer pad on the right "
            "(padding_side='right'), and tell packed documents by position_ids or seq_lens"
        )
    return tuple(kept.sum(1).tolist())


def _per_token(x: Any, whole: Documents, name: str) -> list[int]:
    """The values of a tensor [B, T] or [1, T], without padding."""
    B = len(whole.rows)
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[0] not in (1, B):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [B, T] or [1, T] with B={B}, got {got}")
    if x.shape[1] < max(whole.rows):
        raise ValueError(f"{name} must have a value for each token, got shape {tuple(x.shape)}")
    found: list[int] = whole.fold(x.cpu().expand(B, -1))[0].tolist()
    return found


def _from_positions(x: Any, whole: Documents, name: str) -> tuple[int, ...]:
    at, values = set(whole.offsets), _per_token(x, whole, name)
    for i, value in enumerate(values):
        expected = None if i in at else values[i - 1] + 1
        if value not in (0, expected):
            raise ValueError(
                f"{name} must count from 0 in each document, got {value} for token {i}"
                + ("" if expected is None else f" after {expected - 1}")
            )
    return (*(i for i, value in enumerate(values) if value == 0), len(values))


def _from_numbers(x: Any, whole: Documents, name: str) -> tuple[int, ...]:
    at, values = set(whole.offsets), _per_token(x, whole, name)
    begins = (i for i, v in enumerate(values) if i in at or v != values[i - 1])
    return (*begins, len(values))


def _from_lengths(x: Any, whole: Documents, name: str) -> tuple[int, ...]:
    lengths = torch.as_tensor(x, device="cpu").flatten().tolist()
    if any(type(n) is not int or n < 0 for n in lengths):
        raise ValueError(f"{name} must be integers from 0, got {lengths}")
    return _checked(tuple(accumulate(lengths, initial=0)), whole, name)


def _from_offsets(x: Any, whole: Documents, name: str) -> tuple[int, ...]:
    x = torch.as_tensor(x, device="cpu")
    if x.ndim == 2 and len(x) == 1:  # a data loader has put a dimension before it
        x = x[0]
    if x.ndim != 1 or x.is_floating_point():
        raise ValueError(f"{name} must be integers [N+1], got {x.dtype} {tuple(x.shape)}")
    offsets = tuple(x.tolist())
    if not offsets or offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"{name} must start at 0 and not decrease, got {offsets}")
    return _checked(offsets, whole, name)


def _checked(offsets: tuple[int, ...], whole: Documents, name: str) -> tuple[int, ...]:
    if offsets[-1] != whole.offsets[-1]:
        raise ValueError(
            f"{name} must cover the {whole.offsets[-1]} tokens that are not padding, "
            f"got {offsets[-1]}"
        )
    return tuple(sorted(set(offsets)))


_READ = {
    "position_ids": _from_positions,
    "seq_idx": _from_numbers,
    "seq_lens": _from_lengths,
    **dict.fromkeys(OFFSETS, _from_offsets),
}
