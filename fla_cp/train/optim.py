"""The optimiser (AdamW, or Muon and AdamW together), its update, and a step's learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fla_cp.train.config import OptimConfig
from fla_cp.train.language_model import LanguageModel, blocks_of
from fla_cp.train.model import parameter_groups
from fla_cp.train.weights import local_tensor


class ShardedMuon(torch.optim.Muon):
    """torch's Muon for matrices that FSDP2 shards by rows. It takes the step that one rank takes.

    A Newton-Schulz iteration needs a whole matrix. Here each rank of the sharding group iterates on
    every R-th matrix: one all-to-all brings it the rows of that matrix, in bfloat16, and another
    returns the result's rows. So R ranks share the work, and each result is that of one rank to the
    bit. torch's own step accepts sharded matrices, too. But there DTensor exchanges up to 16
    messages for each matrix, adds norms and products in bfloat16 in another order, and fails for a
    matrix of which a rank holds no row (torch 2.13).

    Steps are scaled by 0.2 * sqrt(max(rows, columns)), which gives them about the root mean square
    of AdamW's steps, so that AdamW's learning rate fits. The state of a parameter is
    `momentum_buffer`, which is sharded like the parameter.
    """

    def __init__(
        self, params: Sequence[Tensor], *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has overloads
        """Takes one step. Collective over the group that shards the parameters.

        closure: must be None; gradients are there before the step.
        """
        if closure is not None:
            raise ValueError(f"closure must be None, got {closure!r}")
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            # The matrices of a round are iterated on at the same time, so they should cost alike.
            matrices.sort(key=lambda p: p.numel())
            ranks, sharding = _sharding(matrices)
            for first in range(0, len(matrices), ranks):
                self._round(group, matrices[first : first + ranks], sharding)

    def _round(
        self, group: dict[str, Any], matrices: list[Tensor], ranks: dist.ProcessGroup | None
    ) -> None:
        """Updates up to one matrix for each rank."""
        lr, momentum = group["lr"], group["momentum"]
        directions = []
        for p in matrices:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            assert p.grad is not None
            grad, average = local_tensor(p.grad), local_tensor(state["momentum_buffer"])
            average.lerp_(grad, 1 - momentum)
            directions.append(grad.lerp(average, momentum).bfloat16())

        def orthogonal(whole: Tensor) -> Tensor:
            return orthogonalised(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])

        shapes = [p.shape for p in matrices]
        if ranks is None:
            steps = [orthogonal(matrix) for matrix in directions]
        else:
            steps = on_whole_matrices(orthogonal, directions, shapes, ranks)
        for p, step, shape in zip(matrices, steps, shapes, strict=True):
            weight = local_tensor(p)
            weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(step, alpha=-lr * 0.2 * math.sqrt(max(shape)))


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW on the shards of this rank. Its state is sharded like the parameters.

    torch's own step takes each DTensor through DTensor's dispatch, and the GPU waits for the host
    meanwhile: about 12 ms for the 459 parameters of 340M (torch 2.11, H200).

    grad_scale, found_inf: for `update_ahead`; torch's step reads them, as a GradScaler sets them.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fills the lists of parameters, gradients and states, as torch's does, with shards."""
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_tensor, tensors)
        return is_complex


def _sharding(matrices: Sequence[Tensor]) -> tuple[int, dist.ProcessGroup | None]:
    """The number of ranks that share the rows of these matrices, and their group (None: one rank).

    With replicas of the shards, every replica does the same work.
    """
    for p in matrices:
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            for axis, placement in enumerate(p.placements):
                if placement.is_shard() and mesh.size(axis) > 1:
                    assert placement.is_shard(0), f"FSDP2 shards rows, got {p.placements}"
                    return mesh.size(axis), mesh.get_group(axis)
    return 1, None


def orthogonalised(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The matrix nearest to x [M, N] whose singular values are about equal, in x's dtype.

    A Newton-Schulz iteration with a quintic polynomial, as in torch.optim.Muon: singular values end
    between about 0.7 and 1.2. eps: smallest norm that x is divided by.
    Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x  # the products are those of the shorter side
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def on_whole_matrices(
    f: Callable[[Tensor], Tensor],
    parts: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's rows of f(matrix) for each matrix; rank i of the group calls f for matrix i.

    parts: this rank's rows of at most R matrices, [rows_i, N_i], all of one dtype, which f keeps.
    shapes: the whole matrices' shapes; their rows are divided as `torch.chunk` does, like FSDP2's.
    Collective.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    idle = [0] * (ranks - len(parts))
    mine = [part.numel() for part in parts] + idle
    whole = shapes[rank] if rank < len(parts) else torch.Size((0, 0))
    share = math.ceil(whole[0] / ranks)
    rows = [max(0, min(whole[0] - r * share, share)) for r in range(ranks)]
    theirs = [n * whole[1] for n in rows]

    sent = torch.cat([part.flatten() for part in parts])
    matrix = sent.new_empty(whole)
    dist.all_to_all_single(matrix.view(-1), sent, theirs, mine, group=group)
    if rank < len(parts):
        matrix = f(matrix).contiguous()
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, matrix.view(-1), mine, theirs, group=group)
    pieces = returned.split(mine)[: len(parts)]
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


class Optimizers:
    """Optimisers of different parameters that step together.

    Iterating gives the optimisers, which is how torch's functions for distributed state dicts take
    several of them.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, which may be changed in place."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


Stepper = torch.optim.Optimizer | Optimizers
"""What trains the model: one optimiser or several."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> Stepper:
    """The optimiser that the configuration names. model: one whose blocks are sharded."""
    assert config.lr is not None, "with_recipe sets it"
    groups = parameter_groups(model, config.weight_decay)
    matrices = block_matrices(model) if config.name == "muon" else []
    others = set(model.parameters()) - set(matrices)
    for group in groups:
        group["params"] = [p for p in group["params"] if p in others]
    adamw = ShardedAdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    if not matrices:
        return adamw
    muon = ShardedMuon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum
    )
    return Optimizers(muon, adamw)


def block_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices of the linear layers in a model's blocks: what Muon trains.

    Embedding, head, norms, convolutions and constants of heads are not among them.
    """
    modules = (module for block in blocks_of(model) for module in block.modules())
    return [module.weight for module in modules if isinstance(module, nn.Linear)]


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Rate of a step (1 to max_steps): linear warm-up, then the schedule down to lr * min_lr_ratio.

    It is a function of the step alone, so a resumed run continues the schedule.
    """
    lr, warmup = config.lr, config.warmup_steps
    assert lr is not None and warmup is not None, "with_recipe sets them"
    if step <= warmup:
        return lr * step / warmup
    if config.schedule == "cosine":
        done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        decay = round(config.decay_ratio * max_steps)
        begin = max(warmup, max_steps - decay)
        left = 1.0 - max(0, step - begin) / max(1, max_steps - begin)
    return lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * max(0.0, left))


@torch.no_grad()
def update(model: nn.Module, optimizer: Stepper, lr: float, grad_norm: float, clip: float) -> None:
    """Clips the gradients to the global norm `clip` (0: no clipping) and takes one step.

    The biases of experts' routers move as well, by the loads that `reduce_metrics` has summed.
    grad_norm: the global norm of the gradients. Does not wait for the device.
    """
    if 0 < clip < grad_norm:
        grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, clip / grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    if isinstance(model, LanguageModel):
        model.move_biases()


@torch.no_grad()
def update_ahead(optimizer: Stepper, lr: float, norm: Tensor, finite: Tensor, clip: float) -> bool:
    """Queues the optimiser's step before the host knows the norm: the GPU clips, or skips the step.

    norm: the global norm of the gradients, a scalar on the device. finite: whether to take the
    step, a bool scalar there. Returns False, and does nothing, for optimisers and dtypes that
    cannot do so.
    """
    single = all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    if not isinstance(optimizer, ShardedAdamW) or not single:
        return False
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale = (norm / clip).clamp(min=1.0).float() if clip > 0 else None
    optimizer.found_inf = finite.logical_not().float()
    try:
        optimizer.step()
    finally:
        optimizer.grad_scale = optimizer.found_inf = None
    return True
