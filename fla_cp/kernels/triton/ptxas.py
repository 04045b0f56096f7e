"""The choice of the ptxas that assembles the kernels: not 12.8 if Triton has a newer one.

ptxas 12.8 reads registers that nothing wrote when it recomputes the descriptor of a wgmma operand
instead of keeping it. Some kernels then give wrong results or an illegal memory access
(docs/log.md). 12.9 does not. Triton brings a newer one for Blackwell."""

from __future__ import annotations

import os
import warnings

import torch
from triton import knobs
from triton.backends.nvidia import compiler

SOUND = (12, 9)


def _version(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def choose() -> None:
    """Points Triton at a sound ptxas that the driver's CUDA version can load.

    It does nothing if TRITON_PTXAS_PATH is set, and warns if there is no sound ptxas.
    """
    if os.environ.get("TRITON_PTXAS_PATH") or _version(knobs.nvidia.ptxas.version) >= SOUND:
        return
    newer = knobs.nvidia.ptxas_blackwell
    cuda = torch.version.cuda
    if _version(newer.version) >= SOUND and (
        cuda is None or _version(newer.version)[0] <= _version(cuda)[0]
    ):
        knobs.nvidia.ptxas = newer.path
        compiler.get_ptxas_version.cache_clear()  # part of the key of compiled kernels
    else:
        warnings.warn(
            f"ptxas {knobs.nvidia.ptxas.version} miscompiles some wgmma kernels; point "
            f"TRITON_PTXAS_PATH at one of CUDA {'.'.join(map(str, SOUND))} or newer",
            stacklevel=2,
        )
