"""Where the rows of a stock model's tensors are in its published layout.

The published files of some models have another layout than the modules of transformers: experts one
by one, convolutions split, parts under other names. transformers converts whole tensors when it
loads them. Here its converters run once on small tensors of row numbers instead of the weights. The
result says for each row of a module's tensor which row of which published tensor it is, so that a
rank reads only its own rows. Row numbers leave out the last dimension, which is never cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Read = Callable[[str, int, int], Tensor]
"""(name, begin, end) -> those rows of a published tensor, as `TensorFolder.read` returns them."""

READ_BYTES = 64 * 2**20
"""The most bytes of a tensor that are read at a time. At least one row is read."""

_SOURCE = 2**40
"""The factor on the number of the source in a table of rows, see `Target.table`."""


@dataclass(frozen=True)
class Target:
    """A parameter or buffer of the modules, and the published tensors that it consists of.

    shape: of the parameter. sources: names and shapes of the published tensors, in the order of
    `table`. convert: makes the table; None where the only source is the parameter itself.
    """

    name: str
    shape: Shape
    sources: tuple[tuple[str, Shape], ...]
    convert: Callable[[Sequence[Tensor]], Tensor] | None = None

    def table(self) -> Tensor:
        """For each row of the parameter, number of the source * 2^40 + row of that source: int64,
        with the parameter's shape without its last dimension."""
        numbers = [
            i * _SOURCE + torch.arange(_rows(shape), dtype=torch.int64, device="cpu")
            for i, (_, shape) in enumerate(self.sources)
        ]
        if self.convert is None:
            return numbers[0].view(_lead(self.shape))
        found = self.convert(
            [x.view(*_lead(shape), 1) for x, (_, shape) in zip(numbers, self.sources, strict=True)]
        )
        if tuple(found.shape) != (*_lead(self.shape), 1):
            raise ValueError(
                f"{self.name} must have shape {self.shape}, but its published tensors give "
                f"{(*tuple(found.shape)[:-1], self.shape[-1])}"
            )
        return found[..., 0]

    def fill(self, out: Tensor, first: int, read: Read) -> None:
        """Writes rows `first` to first + len(out) of the parameter's first dimension into `out`.

        out: this rank's part, on any device and of any floating dtype. At most READ_BYTES of a
        published tensor are held at a time, and only rows that `out` needs are read.
        """
        if not out.numel():
            return
        if not self.shape:
            out.copy_(read(self.sources[0][0], 0, 1))
            return
        if self.convert is None:
            name, _ = self.sources[0]
            step = _rows_at_once(out.numel() // len(out))
            for lo in range(0, len(out), step):
                hi = min(lo + step, len(out))
                out[lo:hi].copy_(read(name, first + lo, first + hi))
            return
        numbers = self.table()[first : first + len(out)].flatten()
        flat = out.view(-1, self.shape[-1])
        for at, source, begin, end in _runs(numbers, _rows_at_once(self.shape[-1])):
            name, shape = self.sources[source]
            inner = _rows(shape) // shape[0]
            lo, hi = begin // inner, -(-end // inner)
            rows = read(name, lo, hi).reshape(-1, shape[-1])
            flat[at : at + end - begin].copy_(rows[begin - lo * inner : end - lo * inner])

    def published(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The published tensors of a whole parameter, by name: the inverse of reading them."""
        if self.convert is None:
            yield self.sources[0][0], whole
            return
        flat, numbers = whole.reshape(-1, self.shape[-1]), self.table().flatten()
        source, row = numbers // _SOURCE, numbers % _SOURCE
        order = source.argsort(stable=True)
        counts = source.bincount(minlength=len(self.sources)).tolist()
        for (name, shape), rows in zip(self.sources, order.split(counts), strict=True):
            assert len(rows) == _rows(shape), f"{name} must be a part of {self.name} alone"
            out = torch.empty(shape, dtype=whole.dtype, device=whole.device)
            out.view(-1, shape[-1])[row[rows]] = flat[rows]
            yield name, out


def _lead(shape: Shape) -> Shape:
    return shape[:-1]


def _rows(shape: Shape) -> int:
    total = 1
    for size in _lead(shape):
        total *= size
    return total


def _rows_at_once(width: int) -> int:
    return max(1, READ_BYTES // (4 * max(1, width)))


def _runs(numbers: Tensor, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Stretches of rows that follow each other in one source: (place, source, begin, end)."""
    breaks = (numbers.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    for lo, hi in pairwise(edges):
        for at in range(lo, hi, most):
            source, begin = divmod(int(numbers[at]), _SOURCE)
            yield at, source, begin, begin + min(most, hi - at)


@dataclass(frozen=True)
class Layout:
    """targets: of all parameters and persistent buffers, in the model's order. ignored: published
    tensors that transformers leaves out as well, such as heads that predict several tokens. copies:
    the published head, if there is one and it is tied -> the published embedding; see
    `check_copies`."""

    targets: tuple[Target, ...]
    ignored: tuple[str, ...]
    copies: Mapping[str, str] = field(default_factory=dict)


def layout_of(model: Any, shapes: Mapping[str, Shape]) -> Layout:
    """Where the tensors of `model` stand among published tensors of these names and shapes.

    model: a PreTrainedModel of transformers, on the meta device, whose modules are its own.
    Raises ValueError, with a name, for tensors that are missing, unknown or of another shape, and
    for a conversion that changes the last dimension or makes several tensors of one.
    """
    from transformers.core_model_loading import dot_natural_key

    known = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    match = _matcher(model, known)
    found: dict[str, tuple[Any, list[tuple[str, str | None]]]] = {}
    ignored = []
    for name in sorted(shapes, key=dot_natural_key):
        target, converter, pattern = match(name)
        if target in known:
            found.setdefault(target, (converter, []))[1].append((name, pattern))
        elif _is_ignored(model, name):
            ignored.append(name)
        else:
            raise ValueError(f"{name} must be a tensor of {type(model).__name__}, which has none")
    targets = []
    for name, shape in known.items():
        if name in found:
            targets.append(_target(model, name, shape, *found[name], shapes))
        elif name not in tied_names(model):
            raise ValueError(f"{name} of {type(model).__name__} is missing among the weights")
    copies = {}
    if "lm_head.weight" in tied_names(model) & found.keys():
        published = {target.name: target.sources[0][0] for target in targets}
        copies[published["lm_head.weight"]] = published["model.embed_tokens.weight"]
    return Layout(tuple(targets), tuple(ignored), copies)


def published_shapes(model: Any) -> dict[str, Shape]:
    """Names and shapes of the tensors that transformers would write for a model, which may be on
    the meta device. A tied head is left out."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = tied_names(model)
    state = {name: x.to("meta") for name, x in model.state_dict().items() if name not in tied}
    return {name: tuple(x.shape) for name, x in revert_weight_conversion(model, state).items()}


def tied_names(model: Any) -> set[str]:
    """Names of the state dict that share the memory of another parameter."""
    return {"lm_head.weight"} if model.lm_head.weight is model.model.embed_tokens.weight else set()


def _matcher(model: Any, known: dict[str, Shape]) -> Callable[[str], tuple[str, Any, str | None]]:
    """(name of a published tensor) -> name of the modules' tensor, its converter, and the pattern
    of this converter that matches the name. The last two are None if the tensor is not converted
    but at most renamed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix

    def match(name: str) -> tuple[str, Any, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            return name, None, None
        return target, None if pattern is None else by_pattern[pattern], pattern

    return match


def _is_ignored(model: Any, name: str) -> bool:
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _target(
    model: Any,
    name: str,
    shape: Shape,
    converter: Any,
    sources: list[tuple[str, str | None]],
    shapes: Mapping[str, Shape],
) -> Target:
    named = tuple((source, shapes[source]) for source, _ in sources)
    if converter is None:
        if len(named) > 1:
            raise ValueError(f"{name} must be one tensor, got {' and '.join(n for n, _ in named)}")
        if named[0][1] != shape:
            raise ValueError(f"{named[0][0]} must have shape {shape}, got {named[0][1]}")
        return Target(name, shape, named)
    if len(shape) < 2 or any(len(s) < 2 or s[-1] != shape[-1] for _, s in named):
        raise ValueError(f"the last dimension of {name}, {shape[-1]}, must be that of its sources")

    def convert(numbers: Sequence[Tensor]) -> Tensor:
        made = deepcopy(converter)
        for (source, pattern), x in zip(sources, numbers, strict=True):
            made.add_tensor(name, source, pattern, x)
        results = made.convert(name, model=model, config=model.config)
        if list(results) != [name]:
            raise ValueError(f"{name} must be all that is made of its sources, got {list(results)}")
        found = results[name]
        return found[0] if isinstance(found, list) else found

    return Target(name, shape, named, convert)
