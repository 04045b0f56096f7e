"""Tables of host integers on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """`values` on `device`. To CUDA from pinned memory, so that the host does not wait."""
    table = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
