"""Memory and initial weights. A model is made on the meta device and sharded. Then each rank
allocates its rows and, for a decoder, draws their values.

A parameter's values are a function of (seed, its full name, its shape). They are drawn in blocks of
rows, each with a generator of its own. A rank therefore draws only the blocks that contain its
rows, and every split and device starts from the same bits. Values are always drawn on the host.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fla_cp.nn.initial import Initial
from fla_cp.train.distributed import Ranks, shard_model
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.waiting_bars import shown

if TYPE_CHECKING:
    from fla_cp.train.model import Decoder

# Number of elements that one generator draws. It is small, since a rank that holds a part of a
# block draws all of it. Another size gives other weights.
BLOCK = 2**16


class _NothingDrawn(TorchFunctionMode):
    """In the block, the functions of torch.nn.init return their tensor as it is."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__ and "tensor" in given:
            return given["tensor"]
        return func(*args, **given)


@contextmanager
def on_meta() -> Iterator[None]:
    """In the block, modules are made on the meta device, and their weights have no values.

    torch.nn.init does nothing there. Without values it has nothing to do, but it would import
    torch's compiler, which takes a second of each rank's start."""
    with torch.device("meta"), _NothingDrawn():
        yield


def allocate(model: LanguageModel, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shards a model on the meta device, in place, and allocates this rank's shard.

    dtype: compute dtype, see `shard_model`; with float64 the parameters are float64 too.
    """
    if dtype == torch.float64:
        model.double()
    if model.balance is not None and ranks.world_size > 1:
        model.balance.group = dist.group.WORLD
    shard_model(model, ranks, dtype)
    give_memory(model, ranks.device)


@torch.no_grad()
def give_memory(model: LanguageModel, device: torch.device) -> None:
    """Allocates the parameters and buffers of a model on the meta device, filled with zeros.

    Zero is where the buffers of a decoder start: the biases and loads of experts.
    """
    model.to_empty(device=device)
    model.tie_weights()
    for parameter in model.parameters():
        local_tensor(parameter).zero_()
    for buffer in model.buffers():
        buffer.zero_()


def local_tensor(x: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def owned_rows(x: Tensor) -> range:
    """The rows of a parameter that this rank holds; FSDP2 cuts rows as `torch.chunk` does."""
    if not isinstance(x, DTensor):
        return range(x.shape[0])
    rows, coordinate = range(x.shape[0]), x.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh"
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            assert placement.is_shard(0) and rows == range(x.shape[0]), x.placements
            size = math.ceil(len(rows) / x.device_mesh.size(axis))
            rows = rows[coordinate[axis] * size :][:size]
    assert len(rows) == local_tensor(x).shape[0], (rows, local_tensor(x).shape)
    return rows


@dataclass(frozen=True)
class _Block:
    """Rows of a parameter that one generator draws.

    rows: row numbers in the whole parameter. held: those of them that this rank holds. target: the
    memory of the held rows, [len(held), ...].
    """

    initial: Initial
    key: str
    rows: range
    held: range
    target: Tensor

    def draw(self) -> None:
        digest = hashlib.blake2b(self.key.encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
        values = self.initial.rows(generator, (len(self.rows), *self.target.shape[1:]))
        first = self.held.start - self.rows.start
        with torch.no_grad():
            self.target.copy_(values[first : first + len(self.held)])


def _blocks(initial: Initial, parameter: Tensor, key: str) -> Iterator[_Block]:
    """The blocks that contain rows of this rank."""
    owned, local = owned_rows(parameter), local_tensor(parameter.detach())
    size = max(1, BLOCK // max(1, math.prod(parameter.shape[1:])))
    for first in range(owned.start - owned.start % size, owned.stop, size):
        rows = range(first, min(first + size, parameter.shape[0]))
        held = range(max(rows.start, owned.start), min(rows.stop, owned.stop))
        target = local[held.start - owned.start :][: len(held)]
        yield _Block(initial, f"{key}/{first // size}", rows, held, target)


def initialise(model: Decoder, seed: int) -> None:
    """Draws this rank's part of every weight, with the decoder's `initial_values`.

    The states of torch's generators do not change.
    """
    values = model.initial_values()
    blocks = [
        block
        for name, parameter in model.named_parameters()
        for block in _blocks(values[name], parameter, f"{seed}/{name}/{tuple(parameter.shape)}")
    ]
    # NumPy draws without the interpreter's lock
    drawing = shown("drawing weights", len(blocks), "blocks")
    with drawing as update, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(_Block.draw, blocks):
            update()
