"""Linear layers that read the same input, computed as one product.

A layer projects its input x to q, k, v, decays, beta and an output gate. Each projection alone
would launch one product in the forward, and two products and a sum in the backward. `Projections`
joins them: it concatenates the weights, which are small compared with the activations, and returns
views of one product. The modules and their parameters stay as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fla_cp.arguments import PLAIN_TENSORS
from fla_cp.once_differentiable import once_differentiable
from fla_cp.replay import autocasts, without_autocast

COLUMNS = 16
"""The product has a multiple of this many columns, so that its rows are aligned to 16 bytes and
kernels can use the widest loads."""

NARROW = 1024
"""Gradients of parts with fewer columns than this are concatenated, to share products."""

Grads = tuple[Tensor | None, ...]


class Projections:
    """The projections of x [B, T, hidden] by several modules.

    modules: all modules that may be called. Each is a Linear or, for a low rank, a Sequential of
    two. joined: whether they share products. They do if nobody can notice it: in an eager call, if
    modules, weights and x have torch's plain types and no hook watches a module. Results are then
    [B*T, size], otherwise [B, T, size].
    """

    def __init__(self, x: Tensor, modules: Sequence[nn.Module]) -> None:
        self.x = x
        self._found: dict[nn.Module, Tensor] = {}
        self.joined = not torch.compiler.is_compiling() and joins(x, modules)

    def join(self, *parts: Sequence[nn.Module]) -> list[Tensor]:
        """The products of x with the modules' weights, in one tensor [B*T, size] for each part. For
        a low-rank module it is the product with the first of its two weights."""
        weights = [[_first(module).weight for module in part] for part in parts]
        widths = tuple(sum(w.shape[0] for w in part) for part in weights)
        x = self.x.reshape(-1, self.x.shape[-1]).to(_product_dtype(self.x))
        return list(_Joined.apply(x, widths, *(w for part in weights for w in part)))

    def prepare(self, *modules: nn.Module) -> None:
        """If modules are joined, computes the products of these modules together and keeps them,
        unless they are kept already."""
        if self.joined and not all(module in self._found for module in modules):
            self.keep(modules, self.join(*((module,) for module in modules)))

    def keep(self, modules: Sequence[nn.Module], products: Sequence[Tensor]) -> None:
        """Keeps the products that `join` returned for these modules, until they are called."""
        self._found.update(zip(modules, products, strict=True))

    def __call__(self, module: nn.Module) -> Tensor:
        """module(x)."""
        found = self._found.pop(module, None)
        if found is None:
            found = module(self.x)
        elif isinstance(module, nn.Sequential):
            found = module[1](found)
        return found


def is_low_rank(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def _first(module: nn.Module) -> nn.Linear:
    first: Any = module[0] if isinstance(module, nn.Sequential) else module
    return first


class _Joined(torch.autograd.Function):
    """(x [N, hidden], widths, *weights [size, hidden]) -> for each width a view [N, width] of the
    product of x and all weights. A width is the sum of the sizes of some successive weights.

    Products are computed in x's dtype; weights may have another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], *weights: Tensor) -> Grads:
        ctx.save_for_backward(x, *weights)
        ctx.widths = widths
        ctx.set_materialize_grads(False)
        with without_autocast(x.device.type):
            return split_product(joint_product(x, weights), widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        x, *weights = ctx.saved_tensors
        wants_dx, _, *wants = ctx.needs_input_grad
        dx, dweights = joint_gradients(x, weights, ctx.widths, grads, wants_dx, any(wants))
        return dx, None, *(d if want else None for d, want in zip(dweights, wants, strict=True))


def joint_product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The product [N, columns] of x [N, hidden] with all weights [size, hidden], in x's dtype. The
    last columns, after those of the weights, are only for alignment."""
    fill = weights[0][: -sum(w.shape[0] for w in weights) % COLUMNS]
    return torch.mm(x, _stacked([*weights, fill], x.dtype).t())


def split_product(product: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views of the product's columns, one for each width, without those for alignment."""
    return product.split([*widths, product.shape[1] - sum(widths)], 1)[:-1]


def joint_gradients(
    x: Tensor,
    weights: Sequence[Tensor],
    widths: tuple[int, ...],
    grads: Grads,
    wants_dx: bool,
    wants_dweights: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradient of x and those of the weights. grads: the gradients of the parts of the product,
    [N, width] for each of widths; None for a part that was not used."""
    dx: Tensor | None = None
    dweights: list[Tensor | None] = [None] * len(weights)
    for grad, places in _groups(grads, widths, weights):
        some = [weights[i] for i in places]
        if wants_dx:
            stacked = _stacked(some, x.dtype)
            dx = torch.mm(grad, stacked) if dx is None else dx.addmm_(grad, stacked)
        if wants_dweights:
            dstacked = torch.mm(grad.t(), x).to(some[0].dtype)
            for i, part in zip(places, dstacked.split([w.shape[0] for w in some]), strict=True):
                dweights[i] = part
    return dx, dweights


def _groups(
    grads: Grads, widths: tuple[int, ...], weights: Sequence[Tensor]
) -> list[tuple[Tensor, list[int]]]:
    """The gradients [N, width] of the parts that were used, each with the indices of its weights.
    Narrow parts are concatenated to one."""
    wide: list[tuple[Tensor, list[int]]] = []
    narrow: list[Tensor] = []
    narrow_places: list[int] = []
    first = 0
    for grad, width in zip(grads, widths, strict=True):
        places, size = [], 0
        while size < width:
            places.append(first)
            size += weights[first].shape[0]
            first += 1
        if grad is None:
            continue
        if width < NARROW:
            narrow.append(grad)
            narrow_places += places
        else:
            wide.append((grad, places))
    if narrow:
        wide.append((_beside(narrow), narrow_places))
    return wide


def _stacked(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    return (torch.cat(weights) if len(weights) > 1 else weights[0]).to(dtype)


def _beside(grads: list[Tensor]) -> Tensor:
    """The gradients side by side, with rows as well aligned as those of the product."""
    if len(grads) == 1:
        return grads[0]
    size = sum(grad.shape[1] for grad in grads)
    return torch.cat([*grads, grads[0][:, : -size % COLUMNS]], 1)[:, :size]


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a linear layer's product with x."""
    device = x.device.type
    if x.dtype == torch.float64 or not autocasts(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def joins(x: Tensor, modules: Sequence[nn.Module]) -> bool:
    """Whether modules that read x may share products, see `Projections`."""
    # torch.nn.Module asks for such hooks in the same way (torch 2.10 to 2.13). No public call does.
    if x.__class__ not in PLAIN_TENSORS or nn.modules.module._has_any_global_hook():
        return False
    dtype, device = x.dtype, x.device.type
    cast = dtype.is_floating_point and dtype != torch.float64 and autocasts(device)
    for module in modules:
        if module.__class__ is nn.Sequential:
            if watched(module):
                return False
            module, *rest = module
            if len(rest) != 1:
                return False
        weight = product_weight(module)
        if weight is None:
            return False
        if weight.dtype != dtype and not (cast and weight.dtype != torch.float64):
            return False
    return True


def product_weight(module: nn.Module) -> Tensor | None:
    """The weight of a module whose call is only a product with it. None for all others: adapters
    and other classes, modules with a bias, hooks or a compiled call, and quantised weights."""
    if module.__class__ is not nn.Linear or watched(module):
        return None
    own = module._parameters
    weight = own["weight"]
    return weight if own["bias"] is None and weight.__class__ in PLAIN_TENSORS else None


def watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's forward, for example runs hooks."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or own.get("_compiled_call_impl")
        or "forward" in own
    )
