"""Tables of host integers on their way to a device, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

Columns = Sequence[Sequence[int] | Tensor]
Build = Callable[[Any], Columns]
"""Gives a table's columns, of the object that keeps it. It is also the table's name: a function of
a module, or one that a function under `functools.cache` made."""


def _on_host(values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values`, pinned if they go to CUDA, so that the host does not wait."""
    table = torch.as_tensor(values, dtype=dtype, device="cpu")
    if table.is_inference() and not torch.is_inference_mode_enabled():
        table = table.clone()
    return table.pin_memory() if device.type == "cuda" else table


def to_device(
    values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """`values` on `device`."""
    device = torch.device(device)
    # also under inference_mode: tables outlive a call, autograd saves them and `fill` writes them
    with torch.inference_mode(False):
        return _on_host(values, dtype, device).to(device, non_blocking=True)


def fill(table: Tensor, values: Sequence[int] | Tensor) -> None:
    """Writes `values`, as many as it has, into a table that exists; the host does not wait."""
    source = _on_host(values, table.dtype, table.device)
    assert source.shape == table.shape, (source.shape, table.shape)
    table.copy_(source, non_blocking=True)


class Tabled:
    """Keeps what is derived from it, each made once."""

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _on_devices(self) -> dict[tuple[Build, torch.device], tuple[Tensor, ...]]:
        return {}

    def cached(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """What `build` returns, made once for each key: it lives as long as this."""
        if key not in self._cache:
            self._cache[key] = build()
        found: _T = self._cache[key]
        return found

    def table(self, build: Build, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The columns that `build` gives, on `device`.

        Raises RuntimeError if they would have to be made while a CUDA graph is captured, which
        would copy from host memory again at each replay.
        """
        key = (build, device)
        if key not in self._on_devices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("run the same call once before it is captured in a CUDA graph")
            columns = build(self)
            self._on_devices[key] = tuple(to_device(c, dtype, device) for c in columns)
        return self._on_devices[key]

    def take_tables(self, other: Tabled) -> None:
        """Takes over the device tables of `other` (or its own) and fills them with this one's
        values, in place and of the same shapes; the host does not wait. `other` makes its own
        again where it is still used."""
        tables = other._on_devices
        other.__dict__["_on_devices"] = {}
        for (build, _), columns in tables.items():
            for column, values in zip(columns, build(self), strict=True):
                fill(column, values)
        self.__dict__["_on_devices"] = tables
