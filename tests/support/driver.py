"""CUDA drivers for Triton on a machine without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


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


class Event:
    """What a stream had to do when the event was recorded."""

    def record(self, stream: Any) -> None:
        self.stream = stream.cuda_stream


class IdleDriver(Sm90Driver):
    """Replaces the CUDA driver, its launcher and torch's streams (`cuda`). Kernels are compiled for
    an H200 and do nothing. launches: the names of those that were launched."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        names: list[str] = []
        driver = self

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None:
                pass

            def __call__(
                self, x: int, y: int, z: int, stream: int, function: int, *rest: Any
            ) -> None:
                _, _, _, _, *args = rest  # packed metadata, metadata and two hooks
                driver.launched(function, names[function], (x, y, z), stream, tuple(args))

        class Utils:
            def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
                names.append(name)
                return 1, len(names) - 1, 32, 0, 1024

            def get_device_properties(self, device: int) -> dict[str, int]:
                return {"max_shared_mem": 232448}

        class Stream:
            """A stream without work. The main one has the address 0."""

            made = 0

            def __init__(self, *_: Any) -> None:
                self.cuda_stream = Stream.made
                Stream.made += 1

            def wait_event(self, event: Event) -> None:
                driver.waited(self.cuda_stream, event.stream)

        self.launcher_cls, self.utils = Launcher, Utils()
        self.streams = [Stream()]
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            stream=self.inside,
            current_stream=lambda _: self.streams[-1],
        )

    def launched(
        self, kernel: int, name: str, grid: tuple[int, int, int], stream: int, args: tuple
    ) -> None:
        """A kernel, given by number and name, is launched."""
        self.launches.append(name)

    def waited(self, stream: int, other: int) -> None:
        """A stream waits for what another one has now."""

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def get_current_stream(self, device: int | None = None) -> int:
        return self.streams[-1].cuda_stream


@contextmanager
def idle() -> Iterator[IdleDriver]:
    """In the block, calls on CPU tensors run the Triton backend as on an H200, except that kernels
    do nothing: the host does its whole work, and results are meaningless.

    Kernels must not be interpreted in this process.
    """
    from fla_cp.kernels import using
    from fla_cp.kernels.triton import streams
    from fla_cp.kernels.triton.backend import TRITON
    from fla_cp.ops.known import known_calls

    facts = {"sms": 132, "architecture": 90, "gluon": True}
    backend = replace(TRITON, name="torch", tuning=replace(TRITON.tuning, **facts))
    before, found = driver._active, IdleDriver()
    driver.set_active(found)
    known_calls.clear()
    with patch.object(streams, "torch", SimpleNamespace(cuda=found.cuda)), using(backend):
        try:
            yield found
        finally:
            driver._active = before
            streams.fork_of.cache_clear()
            known_calls.clear()
