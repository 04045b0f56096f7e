"""Weights of a model of transformers, by shard: from its folder, or drawn as transformers draws.

The modules are on the meta device until the model is sharded. Then each rank allocates its own
rows and reads them; see `fla_cp.integrations.stock_layout`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fla_cp.integrations.safetensors_folder import TensorFolder
from fla_cp.integrations.stock_layout import Layout
from fla_cp.train.waiting_bars import shown
from fla_cp.train.weights import local_tensor, owned_rows

if TYPE_CHECKING:
    from fla_cp.train.stock import StockModel


def published_name(name: str) -> str:
    """The name that transformers gives to a parameter or buffer of a StockModel."""
    return name.removeprefix("stock.").replace(".exact.", ".")


@torch.no_grad()
def compute_buffers(model: StockModel) -> None:
    """Fills buffers that no file holds, such as the frequencies of rotary positions."""
    kept = model.state_dict()
    for prefix, module in model.stock.named_modules(prefix="stock"):
        own = module._buffers
        if any(own[name] is not None and f"{prefix}.{name}" not in kept for name in own):
            fresh = type(module)(model.stock.config)
            for name, buffer in own.items():
                if buffer is not None:
                    buffer.copy_(fresh._buffers[name])


@torch.no_grad()
def load_stock(model: StockModel, folder: TensorFolder, layout: Layout) -> None:
    """Reads this rank's rows of every parameter, and every persistent buffer."""
    targets = {target.name: target for target in layout.targets}
    tensors = list(_persistent(model))
    with shown("loading weights", len(tensors), "tensors") as update:
        for name, tensor in tensors:
            local = local_tensor(tensor.detach())
            first = owned_rows(tensor).start if tensor.ndim else 0
            targets[published_name(name)].fill(local, first, folder.read)
            update()
    folder.close()


def _persistent(model: StockModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once, with their names."""
    kept = model.state_dict()
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


@torch.no_grad()
def initialise_stock(model: StockModel, seed: int) -> None:
    """Draws every weight as transformers does for a new model, one module after the other.

    A module's values depend on the seed and its name alone. Each rank draws the whole module on the
    host, on one thread, and keeps its own rows; so this is for tests and measurements.
    """
    for name, module in model.stock.named_modules():
        holders = [module, module.exact] if "exact" in module._modules else [module]
        if not any(part._parameters for part in holders) or type(module).__name__ == "Exact":
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest, "little"))
            _draw(model.stock, module, holders)


def _draw(stock: Any, module: nn.Module, holders: list[nn.Module]) -> None:
    whole = [_whole(part) for part in holders]
    if len(whole) > 1:
        whole[0]._modules = {**module._modules, "exact": whole[1]}
    stock._init_weights(whole[0])
    for part, drawn in zip(holders, whole, strict=True):
        for name, parameter in part.named_parameters(recurse=False):
            rows = owned_rows(parameter)
            values = drawn.get_parameter(name)
            local_tensor(parameter).copy_(values[rows.start : rows.stop])


def _whole(module: nn.Module) -> nn.Module:
    """The module with uninitialised parameters and buffers of their whole shapes on the host."""
    made = copy.copy(module)
    made._parameters = {
        name: None if x is None else nn.Parameter(torch.zeros(x.shape, dtype=x.dtype, device="cpu"))
        for name, x in module._parameters.items()
    }
    made._buffers = {
        name: None if x is None else torch.zeros(x.shape, dtype=x.dtype, device="cpu")
        for name, x in module._buffers.items()
    }
    return made
