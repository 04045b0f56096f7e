"""Some rows of a tensor, which one kernel reads or writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.key_rows import Runs, count, indices


@dataclass(frozen=True)
class Rows(Tabled):
    """Some rows of a tensor. No row occurs twice."""

    runs: Runs

    @property
    def count(self) -> int:
        return count(self.runs)

    def of(self, x: Tensor) -> Tensor:
        """These rows of x. They are a view if they are one run."""
        return x[self._place(x.device)]

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Writes `rows` into these rows of x, in x's dtype."""
        x[self._place(x.device)] = rows.to(x.dtype)

    def add(self, x: Tensor, rows: Tensor) -> None:
        """Adds `rows` to these rows of x, in x's dtype."""
        place = self._place(x.device)
        if isinstance(place, slice):
            x[place] += rows
        else:
            x.index_add_(0, place, rows.to(x.dtype))

    def _place(self, device: torch.device) -> slice | Tensor:
        if len(self.runs) <= 1:
            return slice(*self.runs[0]) if self.runs else slice(0)
        return self.cached(device, lambda: indices(self.runs, device))
