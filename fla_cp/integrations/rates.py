"""Decay rates in float32 beside weights in 16 bits, under FSDP2.

FSDP2 casts whole modules, but `A_log` and `dt_bias` of recurrences lose their meaning in bfloat16.
They therefore become a module of their own in each mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fla_cp.arguments import described

RATES = ("A_log", "dt_bias")
"""Names of the parameters of recurrences that are not cast."""


class Exact(nn.Module):
    """Holds the parameters of a recurrence that are gathered apart from its block."""


class _SameNames(nn.Module):
    """A module whose part `exact` has the same name as it, so that parameters keep theirs."""

    exact: Exact

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The part `exact` comes before the module, which has the same name. In a dict by name, the
        module itself therefore remains."""
        yield from self.exact.named_modules(memo, prefix, remove_duplicate)
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if module is not self.exact:
                yield name, module


_Model = TypeVar("_Model", bound=nn.Module)


def shard_rates(model: _Model, mesh: DeviceMesh | None = None) -> _Model:
    """The same model, whose parameters `A_log` and `dt_bias` are sharded apart from all others and
    stay float32 in each forward.

        shard_rates(model, mesh)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, ..))

    model: the module that is called, or one inside, with all recurrences. Call this before
    `fully_shard` shards its modules, and shard the module around all of them, too.
    mesh: as for `fully_shard`. One small collective gathers the rates of all layers.

    Parameters have the names that they had, in `named_parameters` and `state_dict`, and for
    torch.distributed.checkpoint. A second call changes nothing.
    Raises ValueError for a model without such parameters, which needs no call, and for one in which
    some of them are sharded already.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {described(model)}")
    apart, owners = _exact_parts(model), _owners(model)
    if apart and not owners:
        return model
    _check_owners(type(model).__name__, owners, len(apart))
    parts: list[nn.Module] = list(set_apart(model))
    changed: list[Any] = [m for m in model.modules() if m._modules.get("exact") in parts]
    for owner in changed:
        kind = type(owner)
        owner.__class__ = type(kind.__name__, (_SameNames, kind), {"__module__": kind.__module__})
        owner.register_state_dict_post_hook(_rename_saved)
        owner.register_load_state_dict_pre_hook(_rename_loaded)
        # so that torch.distributed.checkpoint.state_dict finds parameters by these names
        owner._fqn_modifiers = partial(dict.fromkeys, [*owner.exact._parameters], "exact")
    policy = MixedPrecisionPolicy(torch.float32, cast_forward_inputs=False)
    shard_without_hooks(parts, mesh, policy)
    global _gather_outside_graphs
    _gather_outside_graphs = torch.compiler.disable(_gather_for_backward)
    model.register_forward_pre_hook(_gather)
    model.register_forward_hook(_release)
    return model


class _Owner(NamedTuple):
    """A module with parameters RATES of its own. path: where it is in the model. names: of these
    parameters."""

    path: str
    module: nn.Module
    names: list[str]


def _owners(model: nn.Module) -> list[_Owner]:
    found = []
    for path, module in model.named_modules():
        own = module._parameters
        names = [name for name in RATES if isinstance(own.get(name), nn.Parameter)]
        if names and not isinstance(module, Exact):
            found.append(_Owner(path, module, names))
    return found


def rate_names(model: nn.Module) -> list[str]:
    """The names of a model's parameters RATES, except those that `shard_rates` has set apart."""
    return [f"{path}.{name}".lstrip(".") for path, _, names in _owners(model) for name in names]


def _exact_parts(model: nn.Module) -> list[Exact]:
    return [module for module in model.modules() if isinstance(module, Exact)]


def _check_owners(kind: str, owners: list[_Owner], apart: int) -> None:
    """Raises ValueError unless the rates of all owners can be sharded apart from the rest. kind:
    the model's class. apart: how many of its modules have rates apart already."""
    if not owners:
        raise ValueError(
            f"model must have parameters A_log or dt_bias, got {kind} without: it needs no call of "
            "shard_rates"
        )
    if apart:
        raise ValueError(
            "model must be the first module with these recurrences that shard_rates gets, got "
            f"{kind}, in which {apart} of {apart + len(owners)} have been in a call: call it once, "
            "with the module that holds all"
        )
    for path, module, names in owners:
        if isinstance(module._parameters[names[0]], DTensor):
            name = f"{path}.{names[0]}".lstrip(".")
            raise ValueError(
                f"model must not be sharded yet, got {kind} with {name} as a DTensor: call "
                "shard_rates before fully_shard"
            )


def shard_without_hooks(
    parts: list[nn.Module], mesh: DeviceMesh | None, policy: MixedPrecisionPolicy
) -> None:
    """Makes one FSDP group of the parameters of all parts, without the hooks that gather them. The
    caller gathers them, because a parameter may be read without a call of its part, and because
    torch.compile cannot trace hooks in the middle of a block. FSDP's callback at the end of a
    backward reduces the gradients of such groups."""
    fully_shard(parts, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in parts:
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()


def set_apart(model: nn.Module) -> list[Exact]:
    """Moves the parameters RATES of each module into a part `exact`, in place; returns the parts.
    The module still finds them as its attributes."""
    found = []
    for _, module, names in _owners(model):
        exact = Exact()
        for name in names:
            exact.register_parameter(name, module._parameters.pop(name))
        module.exact = exact
        kind = type(module)
        read = {name: property(partial(_exact, name=name)) for name in names}
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **read})
        found.append(exact)
    return found


def _exact(module: nn.Module, name: str) -> Tensor:
    return getattr(module.exact, name)


def _group(model: nn.Module) -> Any:
    """The first part. Its FSDP methods act on the group of all parts."""
    return next(module for module in model.modules() if isinstance(module, Exact))


def _gather(model: nn.Module, args: Any) -> None:
    _group(model).unshard()


def _release(model: nn.Module, args: Any, out: Any) -> None:
    if torch.is_grad_enabled():  # the end of the backward does it
        _gather_outside_graphs(model, out)
    else:
        _group(model).reshard()


def _gather_for_backward(model: nn.Module, out: Any) -> None:
    """Gathers the rates again when the backward of this call begins. Before that, a call without
    gradients or the backward of another call may have resharded them, and a recomputation reads
    them."""
    group = _group(model)
    for x in tree_leaves(out):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _: group.unshard())


_gather_outside_graphs: Callable[[nn.Module, Any], None] = _gather_for_backward
"""`_gather_for_backward`, which `shard_rates` replaces by a form that torch.compile does not trace.
It is not made here, because it makes PyTorch import torch._dynamo, which takes a second even in
programs that compile nothing."""


def _rename_saved(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for name in RATES:
        if (found := state.pop(f"{prefix}exact.{name}", None)) is not None:
            state[prefix + name] = found


def _rename_loaded(module: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    for name in RATES:
        if (found := state.pop(prefix + name, None)) is not None:
            state[f"{prefix}exact.{name}"] = found
