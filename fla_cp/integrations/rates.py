"""Decay rates in float32 beside weights in 16 bits, under FSDP2.

FSDP2 casts whole modules, but `A_log` and `dt_bias` of recurrences lose their meaning in bfloat16.
They therefore become a module of their own in each mixer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

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
        """The part comes first: a dict of names then has the module itself."""
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
    torch.distributed.checkpoint.
    """
    parts: list[nn.Module] = list(set_apart(model))
    owners: list[Any] = [m for m in model.modules() if m._modules.get("exact") in parts]
    for owner in owners:
        kind = type(owner)
        owner.__class__ = type(kind.__name__, (_SameNames, kind), {"__module__": kind.__module__})
        owner.register_state_dict_post_hook(_rename_saved)
        owner.register_load_state_dict_pre_hook(_rename_loaded)
        # so that torch.distributed.checkpoint.state_dict finds parameters by these names
        owner._fqn_modifiers = partial(dict.fromkeys, [*owner.exact._parameters], "exact")
    if parts:
        policy = MixedPrecisionPolicy(torch.float32, cast_forward_inputs=False)
        shard_without_hooks(parts, mesh, policy)
        model.register_forward_pre_hook(_gather)
        model.register_forward_hook(_release)
    return model


def shard_without_hooks(
    parts: list[nn.Module], mesh: DeviceMesh | None, policy: MixedPrecisionPolicy
) -> None:
    """Makes one group of the parameters of all parts, which the caller gathers: a parameter may be
    read without a call of its part, and torch.compile cannot trace hooks in the middle of a block.
    FSDP's callback at the end of a backward reduces the gradients of such groups."""
    fully_shard(parts, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in parts:
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()


def set_apart(model: nn.Module) -> list[Exact]:
    """Moves the parameters RATES of each module into a part `exact`, in place; returns the parts.
    The module still finds them as its attributes."""
    found = []
    for module in list(model.modules()):
        names = [name for name in RATES if isinstance(module._parameters.get(name), nn.Parameter)]
        if not names:
            continue
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
    """The first part, which stands for all."""
    return next(module for module in model.modules() if isinstance(module, Exact))


def _gather(model: nn.Module, args: Any) -> None:
    _group(model).unshard()


def _release(model: nn.Module, args: Any, out: Any) -> None:
    if torch.is_grad_enabled():  # the end of the backward does it
        _gather_for_backward(model, out)
    else:
        _group(model).reshard()


@torch.compiler.disable
def _gather_for_backward(model: nn.Module, out: Any) -> None:
    """A call without a graph, or the backward of another call, may come before this call's backward
    and reshard the rates, which a recomputation reads."""
    group = _group(model)
    for x in tree_leaves(out):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _: group.unshard())


def _rename_saved(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for name in RATES:
        if (found := state.pop(f"{prefix}exact.{name}", None)) is not None:
            state[prefix + name] = found


def _rename_loaded(module: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    for name in RATES:
        if (found := state.pop(prefix + name, None)) is not None:
            state[f"{prefix}exact.{name}"] = found
