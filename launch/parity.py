"""--check-parity: the same steps on one rank and on the given split, compared.

Rank 0 first takes the steps alone, with one context over whole sequences and no sharding, and
keeps losses and gradients; then all ranks take them together. Both runs start from the same
weights, read the same batches and make their own updates, so a difference in one step carries
into the next, as it would in training.

What is compared is rounding, which sums in another order on another split. Losses: relative
difference. Gradients: L2 norm of the difference relative to that of the gradient, or to
RELATIVE_FLOOR of the whole model's gradient norm if that is larger: a parameter whose gradient
nearly cancels carries the rounding of the terms that cancelled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launch.config import TrainConfig
from launch.data import PackedDataset
from launch.distributed import Ranks, compute_dtype, shard_model
from launch.model import build_model
from launch.step import (
    agree,
    build_optimizer,
    forward_backward,
    learning_rate,
    micro_batches,
    reduce_metrics,
    update,
)

# (loss, gradient), relative
BUDGETS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 5e-2)}
RELATIVE_FLOOR = 1e-3


@dataclass(frozen=True)
class Row:
    """One parameter's gradients: the worst over the steps. relative: L2. largest: any element."""

    parameter: str
    relative: float
    largest: float
    norm: float


@dataclass(frozen=True)
class Report:
    """losses: (one rank, split) by step. rows: by parameter, in the model's order."""

    losses: list[tuple[float, float]]
    rows: list[Row]
    loss_budget: float
    grad_budget: float

    @property
    def worst_loss(self) -> float:
        return max(abs(a - b) / abs(a) for a, b in self.losses)

    @property
    def passed(self) -> bool:
        # written so that NaN fails
        return self.worst_loss <= self.loss_budget and all(
            row.relative <= self.grad_budget for row in self.rows
        )

    def table(self) -> str:
        width = max(len(row.parameter) for row in self.rows)
        lines = [f"{'step':>4}  {'one rank':>12}  {'split':>12}  relative difference"]
        for step, (a, b) in enumerate(self.losses, 1):
            lines.append(f"{step:>4}  {a:12.8f}  {b:12.8f}  {abs(a - b) / abs(a):.2e}")
        lines.append(f"{'gradient of':<{width}}  relative L2  largest diff.      norm")
        for row in self.rows:
            over = "" if row.relative <= self.grad_budget else "  over budget"
            lines.append(
                f"{row.parameter:<{width}}  {row.relative:11.2e}  {row.largest:13.2e}"
                f"  {row.norm:8.2e}{over}"
            )
        worst = max(self.rows, key=lambda row: row.relative)
        lines.append(
            f"parity {'holds' if self.passed else 'FAILS'}: loss {self.worst_loss:.2e} of "
            f"{self.loss_budget:.0e}, gradient {worst.relative:.2e} of {self.grad_budget:.0e} "
            f"({worst.parameter})"
        )
        return "\n".join(lines)


def _steps(
    config: TrainConfig, dataset: PackedDataset, ranks: Ranks, dtype: torch.dtype
) -> Iterator[tuple[float, nn.Module]]:
    """After the backward of each step: the global loss, and the model with its gradients."""
    model = build_model(config.model, dataset.vocab_size, config.run.seed).to(ranks.device)
    shard_model(model, ranks, dtype)
    optimizer = build_optimizer(model, config.optim)
    batches = micro_batches(config, dataset, ranks, 0)
    for step in range(1, config.parity.steps + 1):
        batch = next(batches)
        targets = agree(batch, ranks).targets
        share = forward_backward(model, batch, targets, config, ranks, check=step == 1)
        loss, norm = reduce_metrics(share, model, ranks)
        yield loss, model
        rate = learning_rate(config.optim, step, config.run.max_steps)
        update(model, optimizer, rate, norm, config.optim.clip_norm)
        optimizer.zero_grad()


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def compare(config: TrainConfig, dataset: PackedDataset, ranks: Ranks) -> Report | None:
    """Takes the steps both ways; the report on rank 0, None on the others. Collective."""
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    alone = ranks.alone()
    expected: list[tuple[float, dict[str, Tensor]]] = []
    if ranks.rank == 0:
        for loss, model in _steps(config, dataset, alone, dtype):
            grads = {n: _full(p.grad).to("cpu", copy=True) for n, p in model.named_parameters()}
            expected.append((loss, grads))
    ranks.barrier()

    losses: list[tuple[float, float]] = []
    worst: dict[str, Row] = {}
    for step, (loss, model) in enumerate(_steps(config, dataset, ranks, dtype)):
        wanted_loss, wanted = expected[step] if ranks.rank == 0 else (0.0, {})
        floor = sum(float(g.double().square().sum()) for g in wanted.values()) ** 0.5
        for name, parameter in model.named_parameters():
            grad = _full(parameter.grad)  # a collective: every rank, whoever compares
            if ranks.rank == 0:
                row = _row(name, grad.cpu(), wanted[name], floor * RELATIVE_FLOOR)
                if name not in worst or not row.relative <= worst[name].relative:
                    worst[name] = row
        losses.append((wanted_loss, loss))
    if ranks.rank != 0:
        return None
    default = BUDGETS[dtype]
    given = (config.parity.loss_budget, config.parity.grad_budget)
    loss_budget, grad_budget = (d if g is None else g for d, g in zip(default, given, strict=True))
    return Report(losses, list(worst.values()), loss_budget, grad_budget)


def _row(name: str, actual: Tensor, wanted: Tensor, floor: float) -> Row:
    difference = actual.double() - wanted.double()
    norm = float(wanted.double().norm())
    relative = float(difference.norm()) / max(norm, floor, 1e-300)
    return Row(name, relative, float(difference.abs().max()), norm)


def write_report(report: Report, run: Path) -> Path:
    """Writes RUN/parity.json."""
    path = run / "parity.json"
    facts = {"passed": report.passed, "worst_loss": report.worst_loss, **asdict(report)}
    path.write_text(json.dumps(facts, indent=1) + "\n")
    return path
