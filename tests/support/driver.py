"""A CUDA driver for Triton on a machine without a GPU."""

import torch
from triton.backends.compiler import GPUTarget


class Sm90Driver:
    """Replaces the CUDA driver. It names a target and does nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> object:
        return torch.cuda

    def get_benchmarker(self) -> object:
        return lambda fn, *args, **kwargs: [1.0, 1.0, 1.0]

    @classmethod
    def is_active(cls) -> bool:
        return True
