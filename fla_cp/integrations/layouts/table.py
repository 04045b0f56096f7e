"""A layout: which rows of which of the decoder's tensors each published tensor consists of.

A published tensor is a sequence of runs of rows, such as q, k, v and z of one head after the other.
The same table serves both directions: `assembled` makes a published tensor, and `read_rows` reads
the rows of one of ours that a rank owns. A row is what a tensor has in its last dimensions; a stack
of experts [E, F, D] has E * F rows of D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fla_cp.integrations.safetensors_folder import TensorFolder


class Run(NamedTuple):
    """Rows begin to begin + rows of the decoder's tensor `own`."""

    own: str
    begin: int
    rows: int


class Place(NamedTuple):
    """Where rows of one of the decoder's tensors are: rows of `name`, from row `at` on."""

    begin: int
    rows: int
    name: str
    at: int


@dataclass(frozen=True)
class Published:
    """A tensor of a published model.

    runs: what its rows are, in their order. minus: what is subtracted from the decoder's values; 1
    for norms that multiply by 1 + weight.
    """

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    minus: float = 0.0

    @property
    def rows(self) -> int:
        return sum(run.rows for run in self.runs)

    @property
    def width(self) -> int:
        return math.prod(self.shape) // self.rows


@dataclass(frozen=True)
class Layout:
    """How a published model stores a decoder.

    model_type: of config.json. config: what config.json says of the model, under the published
    names. own: shapes of the decoder's parameters and persistent buffers, tied ones once. tensors:
    the published ones by name, in the order in which they are written. length_name: what
    config.json calls the length of sequences, which `config` need not have. copies: tensors that a
    folder may have besides, if they equal another one: {name: of which}. writes_copies: whether it
    must have them. renamed: other names that a folder may have -> those of `tensors`. ignored:
    prefixes of names of parts that the decoder does not have and does not miss.
    """

    model_type: str
    config: Mapping[str, Any]
    own: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, Published]
    length_name: str
    copies: Mapping[str, str] = field(default_factory=dict)
    writes_copies: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def assembled(self, name: str, own: Callable[[str], Tensor]) -> Tensor:
        """A published tensor. own: gives the decoder's tensors by name; it is asked for those that
        the published one has rows of."""
        published = self.tensors[name]
        parts = [
            own(run.own).reshape(-1, published.width)[run.begin : run.begin + run.rows]
            for run in published.runs
        ]
        whole = torch.cat(parts).reshape(published.shape)
        return whole - published.minus if published.minus else whole

    def read_rows(self, folder: TensorFolder, own: str, begin: int, end: int) -> Tensor:
        """Elements begin to end of the first dimension of the decoder's tensor `own`, of which the
        folder is read in no more than those: [end - begin, ..], fp32, on the CPU."""
        shape = self.own[own]
        each = math.prod(shape[1:])
        found = torch.empty(end - begin, each, dtype=torch.float32, device="cpu")
        for place in self._places[own]:
            width = self.tensors[place.name].width
            first, last = begin * each // width, end * each // width
            low, high = max(first, place.begin), min(last, place.begin + place.rows)
            if low < high:
                skipped = place.at + low - place.begin
                rows = self._published_rows(folder, place.name, skipped, high - low)
                found.view(-1, width)[low - first : high - first] = rows
        return found.view(end - begin, *shape[1:])

    def _published_rows(self, folder: TensorFolder, name: str, at: int, rows: int) -> Tensor:
        """[rows, width], with the decoder's values, in the folder's dtype or fp32."""
        published = self.tensors[name]
        if published.shape[0] == published.rows:
            found = folder.read(name, at, at + rows)
        else:  # what is not cut by its first dimension is small
            found = folder.read(name).reshape(-1, published.width)[at : at + rows]
        found = found.reshape(rows, published.width)
        return found.to(torch.float32) + published.minus if published.minus else found

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        found: dict[str, list[Place]] = {name: [] for name in self.own}
        for name, published in self.tensors.items():
            at = 0
            for run in published.runs:
                found[run.own].append(Place(run.begin, run.rows, name, at))
                at += run.rows
        return found


class Table:
    """Collects the published tensors of a decoder. `tensors` checks that they hold it exactly."""

    def __init__(self, model_type: str, decoder: nn.Module) -> None:
        self.model_type = model_type
        self.own = own_shapes(decoder)
        self._tensors: dict[str, Published] = {}

    def add(self, name: str, *runs: Run, shape: tuple[int, ...], minus: float = 0.0) -> None:
        """A published tensor that consists of runs."""
        self._tensors[name] = Published(shape, runs, minus)

    def whole(
        self, name: str, own: str, shape: tuple[int, ...] | None = None, minus: float = 0.0
    ) -> None:
        """A published tensor that is one of the decoder's. shape: if it is another one."""
        stored = self.own[own]
        self.add(name, Run(own, 0, stored[0]), shape=shape or stored, minus=minus)

    def tensors(self) -> dict[str, Published]:
        """What was added. Raises ValueError for a tensor of the decoder that none of them holds."""
        covered: dict[str, list[tuple[int, int]]] = {name: [] for name in self.own}
        for published in self._tensors.values():
            for run in published.runs:
                width = published.width
                covered[run.own].append((run.begin * width, (run.begin + run.rows) * width))
        for name, shape in self.own.items():
            if not covered[name]:
                raise ValueError(f"{self.model_type} has no tensor for {name} of the decoder")
            at = 0
            for begin, end in sorted(covered[name]):
                assert begin == at, (name, begin, at)
                at = end
            assert at == math.prod(shape), (name, at, shape)
        return dict(self._tensors)


def own_shapes(decoder: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder's parameters and persistent buffers by name, tied ones once."""
    parameters = dict(decoder.named_parameters())
    tied = dict(decoder.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    state = decoder.state_dict()
    return {name: tuple(x.shape) for name, x in state.items() if name not in tied}
