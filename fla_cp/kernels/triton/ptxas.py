"""Which ptxas assembles the kernels: not 12.8, where a newer one comes with Triton.

ptxas 12.8 reads registers that nothing wrote when it forms the descriptor of a wgmma operand again
instead of keeping it: wrong results or an illegal memory access, in some kernels and not in others
(docs/log.md). 12.9 does not. Triton keeps a newer one for Blackwell beside it.
"""

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

    Does nothing where TRITON_PTXAS_PATH is set. Warns if there is none.
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
