"""Tables of host integers that are copied to a device and kept."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fla_cp.tape import active, paused

_T = TypeVar("_T")

Numbers = Sequence[int] | np.ndarray | Tensor
Columns = Sequence[Numbers]
Build = Callable[[Any], Columns]
"""Returns a table's columns for the object that keeps the table. It is also the table's key, so it
must be a module's function, or one made by a function under `functools.cache`."""


def _on_host(values: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a host tensor, pinned if it goes to CUDA, so that the host does not wait."""
    if isinstance(values, np.ndarray) and values.dtype == _OF_NUMPY.get(dtype):
        table = torch.from_numpy(values)
    else:
        table = torch.as_tensor(values, dtype=dtype, device="cpu")
    if table.is_inference() and not torch.is_inference_mode_enabled():
        table = table.clone()
    return table.pin_memory() if device.type == "cuda" else table


def _check_no_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run the same call once before it is captured in a CUDA graph")


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`values` on `device`.

    Raises RuntimeError while a CUDA graph is captured, which would copy from host memory again at
    each replay.
    """
    device = torch.device(device)
    _check_no_capture(device)
    if torch.is_inference_mode_enabled():
        # Tables outlive a call, autograd saves them, and `fill` writes them: no inference tensors.
        with torch.inference_mode(False):
            return to_device(values, dtype, device)
    return _on_host(values, dtype, device).to(device, non_blocking=True)


@lru_cache(maxsize=256)
def _counted(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0, .., n-1 on `device`, which all tables share. The host waits for the copy, so that every
    stream may read it."""
    with torch.inference_mode(False):
        return torch.arange(n, dtype=dtype, device="cpu").to(device)


def columns_to_device(
    columns: Columns, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """The columns on `device`. Unless one is a tensor, all go there in one copy, each to an address
    that 16 bytes divide, for which kernels are compiled. A range from 0 that is the only column is
    copied once for all tables."""
    if len(columns) == 1 and isinstance(columns[0], range):
        _check_no_capture(device)
        return (_counted(len(columns[0]), dtype, device),)
    numbers = [c for c in columns if not isinstance(c, Tensor)]
    kind = _OF_NUMPY.get(dtype)
    if len(numbers) < len(columns) or len(numbers) == 1 or kind is None:
        return tuple(to_device(c, dtype, device) for c in columns)
    step, ends = 16 // dtype.itemsize, [0]
    for column in numbers:
        ends.append(ends[-1] + -(-len(column) // step) * step)
    flat = np.zeros(ends[-1], dtype=kind)
    places = [slice(a, a + len(c)) for a, c in zip(ends, numbers, strict=False)]
    for place, column in zip(places, numbers, strict=True):
        flat[place] = column
    memory = to_device(flat, dtype, device)
    return tuple(memory[place] for place in places)


_OF_NUMPY: dict[torch.dtype, Any] = {torch.int32: np.int32, torch.int64: np.int64}


def fill(table: Tensor, values: Numbers) -> None:
    """Writes `values` into an existing table of the same size. The host does not wait."""
    source = _on_host(values, table.dtype, table.device)
    assert source.shape == table.shape, (source.shape, table.shape)
    table.copy_(source, non_blocking=True)


class Tabled:
    """Keeps objects that are derived from it. Each is made once."""

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _on_devices(self) -> dict[tuple[Build, torch.device], tuple[Tensor, ...]]:
        return {}

    def cached(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """What `build` returns. It is made once for each key and lives as long as this object."""
        if key not in self._cache:
            with paused():
                self._cache[key] = build()
        found: _T = self._cache[key]
        return found

    def table(self, build: Build, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The columns that `build` returns, on `device`. They are made once, see `to_device`."""
        key = (build, device)
        if key not in self._on_devices:
            with paused():
                self._on_devices[key] = columns_to_device(build(self), dtype, device)
        found, tape = self._on_devices[key], active()
        if tape is not None:
            tape.table(self, build, dtype, found)
        return found

    def take_tables(self, other: Self) -> None:
        """Takes over the device tables of `other` (which may be self) and fills them in place with
        this object's values, which must have the same shapes. The host does not wait. `other` makes
        new tables if it is still used."""
        tables = other._on_devices
        other.__dict__["_on_devices"] = {}
        for (build, _), columns in tables.items():
            for column, values in zip(columns, build(self), strict=True):
                fill(column, values)
        self.__dict__["_on_devices"] = tables
