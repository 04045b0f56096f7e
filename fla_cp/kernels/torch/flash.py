"""FlashAttention-3 in place of PyTorch's own flash attention, where it can run."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch.nn import attention

NAME, PACKAGE, CAPABILITY = "FA3", "flash_attn_interface", (9, 0)
"""PyTorch's name of it, the module of its package (flash-attn-3), and the GPUs that it runs on."""


def why_not(device: torch.device) -> str | None:
    """What FlashAttention-3 lacks on this device; None if it can run."""
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if NAME not in known:
        return f"a PyTorch that can activate it, got {torch.__version__}"
    if find_spec(PACKAGE) is None:
        return f"the package flash-attn-3, whose module {PACKAGE} is not installed"
    if device.type != "cuda":
        return f"a GPU, got {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        return f"a GPU of compute capability 9.0, got {found[0]}.{found[1]}"
    return None


def activate_flash_attention_3(wanted: str, device: torch.device) -> bool:
    """Whether softmax attention of this process now runs FlashAttention-3, of all models.

    wanted: "off" changes nothing, "auto" activates it where it can run, and "on" anywhere else
    raises ValueError with what it lacks.
    """
    if wanted == "off":
        return False
    lacks = why_not(device)
    if lacks is not None:
        if wanted == "on":
            raise ValueError(f"FlashAttention-3 needs {lacks}")
        return False
    attention.activate_flash_attention_impl(NAME)
    return True
