"""Tables of host integers that are copied to a device and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fla_cp.tape import active, paused

_T = TypeVar("_T")

Numbers = Sequence[int] | np.ndarray | Tensor


class Joined(NamedTuple):
    """The columns of a table in one array, so that a single copy takes them to a device. values:
    the array. starts: where each column starts in it, see `places_of`. lengths: the columns'."""

    values: np.ndarray
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


Columns = Sequence[Numbers] | Joined
Build = Callable[[Any], Columns]
"""Returns the columns of a table, for the object that keeps the table. The function is also the
table's key, so it must be defined in a module, or made by a function under `functools.cache`."""


def _on_host(values: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a host tensor. It is pinned if it goes to CUDA, so that the host need not wait
    for the copy."""
    if isinstance(values, np.ndarray) and values.dtype is _OF_NUMPY.get(dtype):
        table = torch.from_numpy(values)
    else:
        table = torch.as_tensor(values, dtype=dtype, device="cpu")
    if table.is_inference() and not torch.is_inference_mode_enabled():
        table = table.clone()
    return table.pin_memory() if device.type == "cuda" else table


RUN_BEFORE = "run the same call once before it is captured in a CUDA graph"


def _check_no_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(RUN_BEFORE)


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`values` on `device`.

    Raises RuntimeError while a CUDA graph is captured, because the graph would copy from the same
    host memory again at each replay.
    """
    device = device if isinstance(device, torch.device) else torch.device(device)
    _check_no_capture(device)
    if torch.is_inference_mode_enabled():
        # Tables outlive a call, autograd saves them, and `fill` writes them. None of this is
        # possible with inference tensors.
        with torch.inference_mode(False):
            return to_device(values, dtype, device)
    return _on_host(values, dtype, device).to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def places_of(lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Where columns of these lengths start in one array, and how long the array is. Each column
    starts at an address that is a multiple of 16 bytes, for which kernels are compiled."""
    step = 16 // dtype.itemsize
    ends = [0, *accumulate(-(-n // step) * step for n in lengths)]
    return tuple(ends[:-1]), ends[-1]


def _join(columns: Sequence[Any], dtype: torch.dtype) -> Joined:
    """The columns in one array. None of them may be a tensor."""
    lengths = tuple(map(len, columns))
    starts, size = places_of(lengths, dtype)
    values = np.zeros(size, dtype=_OF_NUMPY[dtype])
    for start, length, column in zip(starts, lengths, columns, strict=True):
        values[start : start + length] = column
    return Joined(values, starts, lengths)


class DeviceTable:
    """A table on a device. Recorded programs need only the addresses of its columns, so tensors of
    single columns are made only when something asks for them.

    memory: all columns, if they are in one piece of memory, else None. first: where the table
    starts in it. starts, lengths: as in `Joined`. shared: whether other objects have the same
    table.
    """

    __slots__ = ("_addresses", "_columns", "first", "lengths", "memory", "shared", "starts")

    def __init__(
        self,
        memory: Tensor | None,
        starts: tuple[int, ...] = (),
        lengths: tuple[int, ...] = (),
        columns: tuple[Tensor, ...] | None = None,
        *,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        self.memory, self.first, self.starts, self.lengths = memory, first, starts, lengths
        self.shared = shared
        self._columns = columns
        self._addresses: tuple[int, ...] | None = None

    @classmethod
    def send(cls, columns: Columns, dtype: torch.dtype, device: torch.device) -> DeviceTable:
        """A table of these columns on `device`. All are sent in one copy, unless one is a tensor.
        If `range(n)` is the only column, all such tables of n rows share one copy, which programs
        treat as a constant. n must then be the same for all objects with one `PlanKey`."""
        if not isinstance(columns, Joined):
            if len(columns) == 1 and isinstance(columns[0], range):
                _check_no_capture(device)
                return _counted(len(columns[0]), dtype, device)
            several = len(columns) > 1 and dtype in _OF_NUMPY
            if not several or any(isinstance(c, Tensor) for c in columns):
                return cls(None, columns=tuple(to_device(c, dtype, device) for c in columns))
            columns = _join(columns, dtype)
        values, starts, lengths = columns
        return cls(to_device(values, dtype, device), starts, lengths)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        if self._columns is None:
            assert self.memory is not None
            memory, spans = self.memory[self.first :], zip(self.starts, self.lengths, strict=True)
            self._columns = tuple(memory[start : start + n] for start, n in spans)
        return self._columns

    @property
    def addresses(self) -> tuple[int, ...]:
        if self._addresses is None:
            if self.memory is None:
                self._addresses = tuple(c.data_ptr() for c in self.columns)
            else:
                size = self.memory.itemsize
                at = self.memory.data_ptr() + size * self.first
                self._addresses = tuple([at + size * start for start in self.starts])
        return self._addresses

    def fill(self, columns: Columns) -> None:
        """Overwrites the columns with others of the same lengths. The host does not wait."""
        if self.memory is not None:
            joined = columns if isinstance(columns, Joined) else _join(columns, self.memory.dtype)
            assert joined.lengths == self.lengths, (joined.lengths, self.lengths)
            assert len(self.memory) == len(joined.values), "no other table is in the memory"
            return fill(self.memory, joined.values)
        assert not isinstance(columns, Joined)
        for column, values in zip(self.columns, columns, strict=True):
            if self.shared:
                assert len(values) == len(column), (len(values), len(column))
            else:
                fill(column, values)


_OF_NUMPY: dict[torch.dtype, Any] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


def fill(table: Tensor, values: Numbers) -> None:
    """Writes `values` into an existing table of the same size. The host does not wait."""
    source = _on_host(values, table.dtype, table.device)
    assert source.shape == table.shape, (source.shape, table.shape)
    table.copy_(source, non_blocking=True)


@cache
def _counted(n: int, dtype: torch.dtype, device: torch.device) -> DeviceTable:
    """A column 0, .., n-1 on `device`. The host waits for the copy, so that every stream may read
    it."""
    with torch.inference_mode(False):
        column = torch.arange(n, dtype=dtype, device="cpu").to(device)
    return DeviceTable(None, columns=(column,), shared=True)


_captured: set[DeviceTable] = set()
"""Tables that CUDA graphs read. They are kept forever, because a graph keeps no table alive, and a
cache may forget the packing that owns them before the graph is replayed for the last time."""


class Tabled:
    """Base of objects that keep what is derived from them, such as tables. Each is made once."""

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _on_devices(self) -> dict[tuple[Build, torch.device], DeviceTable]:
        return {}

    def cached(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """What `build` returns. It is called once for each key, and its result lives as long as
        this object."""
        if key not in self._cache:
            with paused():
                self._cache[key] = build()
        found: _T = self._cache[key]
        return found

    def table(self, build: Build, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The columns that `build` returns, on `device`. They are made once, see `to_device`."""
        table, tape = self._table(build, dtype, device), active()
        if tape is None:
            return table.columns
        with paused():
            found = table.columns
        if table.shared:
            for column in found:
                tape.constant(column)
        else:
            tape.table(self, build, dtype, found)
        return found

    def addresses(self, build: Build, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
        """The addresses of the columns that `table` returns. They are valid while this object lives
        and no other takes its tables. Numbers keep nothing alive, so the caller has to hold this
        object until its launches are queued."""
        return self._table(build, dtype, device).addresses

    def _table(self, build: Build, dtype: torch.dtype, device: torch.device) -> DeviceTable:
        key, tables = (build, device), self._on_devices
        found = tables.get(key)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if found is None:
                raise RuntimeError(RUN_BEFORE)
            _captured.add(found)
        elif found is None:
            if active() is None:
                found = self._new_table(build, dtype, device)
            else:
                with paused():
                    found = self._new_table(build, dtype, device)
            found = tables.setdefault(key, found)  # another thread may have made it meanwhile
        return found

    def _new_table(self, build: Build, dtype: torch.dtype, device: torch.device) -> DeviceTable:
        return DeviceTable.send(build(self), dtype, device)

    def take_tables(self, other: Self) -> None:
        """Takes over the device tables of `other` (which may be self) and overwrites them with this
        object's values, which must have the same shapes. Tensors keep their addresses, as CUDA
        graphs need. The host does not wait. `other` makes new tables if it is still used."""
        tables = other._on_devices
        other.__dict__["_on_devices"] = {}
        for (build, _), table in tables.items():
            table.fill(build(self))
        self.__dict__["_on_devices"] = tables
