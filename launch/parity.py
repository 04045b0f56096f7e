"""--check-parity: the same steps on one rank and on the given split, compared.

Rank 0 first takes the steps alone, with one context over whole sequences and no sharding, and
keeps losses and gradients; then all ranks take them together. Both runs start from the same
weights, read the same batches and make their own updates, so a difference in one step carries
into the next, as it would in training.

What is compared is rounding, which sums in another order on another split, so the budget of a
gradient comes from rounding too: before both, rank 0 takes the steps in fp64 (torch stages), and
the split may differ from one rank by FACTOR times what one rank differs from fp64, in the L2 norm,
for each parameter; a parameter whose own rounding happens to be small gets the median one.
--parity.grad-budget replaces this by one relative difference for all, and then the fp64 steps are
not taken. Losses: relative difference, at most LOSS_BUDGET of the compute dtype.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launch.config import TrainConfig
from launch.data import PackedDataset
from launch.distributed import Ranks, compute_dtype
from launch.model import build_sharded
from launch.progress import announced
from launch.step import (
    agree,
    build_optimizer,
    forward_backward,
    learning_rate,
    micro_batches,
    reduce_metrics,
    update,
)

LOSS_BUDGET = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3}
FACTOR = 4.0
# A gradient that nearly cancels carries the rounding of what cancelled: it is measured against at
# least this share of the whole model's gradient norm.
RELATIVE_FLOOR = 1e-3


@dataclass(frozen=True)
class Row:
    """One parameter's gradients at the step that uses most of its budget.

    relative: L2 norm of the difference, relative. budget: the most that it may be. largest:
    difference of any element. norm: of the gradient on one rank.
    """

    parameter: str
    relative: float
    budget: float
    largest: float
    norm: float

    @property
    def within(self) -> bool:
        return self.relative <= self.budget  # written so that NaN fails

    @property
    def use(self) -> float:
        return self.relative / self.budget if self.relative == self.relative else float("inf")


@dataclass(frozen=True)
class Report:
    """losses: (one rank, split) by step. rows: by parameter, in the model's order."""

    losses: list[tuple[float, float]]
    rows: list[Row]
    loss_budget: float

    @property
    def worst_loss(self) -> float:
        return max(abs(a - b) / abs(a) for a, b in self.losses)

    @property
    def passed(self) -> bool:
        # written so that NaN fails
        return self.worst_loss <= self.loss_budget and all(row.within for row in self.rows)

    def table(self) -> str:
        width = max(len(row.parameter) for row in self.rows)
        lines = [f"{'step':>4}  {'one rank':>12}  {'split':>12}  relative difference"]
        for step, (a, b) in enumerate(self.losses, 1):
            lines.append(f"{step:>4}  {a:12.8f}  {b:12.8f}  {abs(a - b) / abs(a):.2e}")
        lines.append(f"{'gradient of':<{width}}  relative L2    budget  largest diff.      norm")
        for row in self.rows:
            over = "" if row.within else "  over budget"
            lines.append(
                f"{row.parameter:<{width}}  {row.relative:11.2e}  {row.budget:8.1e}"
                f"  {row.largest:13.2e}  {row.norm:8.2e}{over}"
            )
        worst = max(self.rows, key=lambda row: row.use)
        lines.append(
            f"parity {'holds' if self.passed else 'FAILS'}: loss {self.worst_loss:.2e} of "
            f"{self.loss_budget:.0e}, gradient {worst.relative:.2e} of {worst.budget:.1e} "
            f"({worst.parameter})"
        )
        return "\n".join(lines)


def _steps(
    config: TrainConfig, dataset: PackedDataset, ranks: Ranks, dtype: torch.dtype
) -> Iterator[tuple[float, nn.Module]]:
    """After the backward of each step: the global loss, and the model with its gradients."""
    model = build_sharded(config.model, dataset.vocab_size, config.run.seed, ranks, dtype)
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


Steps = list[tuple[float, dict[str, Tensor]]]


def _alone(config: TrainConfig, dataset: PackedDataset, alone: Ranks, dtype: torch.dtype) -> Steps:
    """Loss and every gradient, on the host, of each step on one rank."""
    return [
        (loss, {n: _full(p.grad).to("cpu", copy=True) for n, p in model.named_parameters()})
        for loss, model in _steps(config, dataset, alone, dtype)
    ]


def _budgets(config: TrainConfig, exact: Steps, single: Steps) -> list[dict[str, float]]:
    """Largest relative difference of each parameter's gradient, by step."""
    fixed = config.parity.grad_budget
    budgets = []
    for step, (_, grads) in enumerate(single):
        if fixed is not None:
            budgets.append(dict.fromkeys(grads, fixed))
            continue
        floor = _total(grads) * RELATIVE_FLOOR
        noise = {n: _relative(g, exact[step][1][n], floor) for n, g in grads.items()}
        median = statistics.median(noise.values())
        budgets.append({n: FACTOR * max(size, median) for n, size in noise.items()})
    return budgets


def compare(config: TrainConfig, dataset: PackedDataset, ranks: Ranks) -> Report | None:
    """Takes the steps both ways; the report on rank 0, None on the others. Collective."""
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    alone = ranks.alone()  # on every rank: it makes a mesh
    single: Steps = []
    budgets: list[dict[str, float]] = []
    if ranks.rank == 0:
        exact: Steps = []
        with announced("steps on rank 0 alone, for --check-parity"):
            if config.parity.grad_budget is None:
                torch_stages = replace(config, model=replace(config.model, impl="torch"))
                exact = _alone(torch_stages, dataset, alone, torch.float64)
            single = _alone(config, dataset, alone, dtype)
            budgets = _budgets(config, exact, single)
    ranks.barrier()

    losses: list[tuple[float, float]] = []
    worst: dict[str, Row] = {}
    for step, (loss, model) in enumerate(_steps(config, dataset, ranks, dtype)):
        wanted_loss, wanted = single[step] if ranks.rank == 0 else (0.0, {})
        floor = _total(wanted) * RELATIVE_FLOOR
        for name, parameter in model.named_parameters():
            grad = _full(parameter.grad)  # a collective: every rank, whoever compares
            if ranks.rank == 0:
                row = _row(name, grad.cpu(), wanted[name], floor, budgets[step][name])
                if name not in worst or not row.use <= worst[name].use:
                    worst[name] = row
        losses.append((wanted_loss, loss))
    if ranks.rank != 0:
        return None
    loss_budget = config.parity.loss_budget
    if loss_budget is None:
        loss_budget = LOSS_BUDGET[dtype]
    return Report(losses, list(worst.values()), loss_budget)


def _total(grads: dict[str, Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5


def _relative(actual: Tensor, wanted: Tensor, floor: float) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm()) / max(float(wanted.norm()), floor, 1e-300)


def _row(name: str, actual: Tensor, wanted: Tensor, floor: float, budget: float) -> Row:
    largest = float((actual.double() - wanted.double()).abs().max())
    norm = float(wanted.double().norm())
    return Row(name, _relative(actual, wanted, floor), budget, largest, norm)


def write_report(report: Report, run: Path) -> Path:
    """Writes RUN/parity.json."""
    path = run / "parity.json"
    facts = {"passed": report.passed, "worst_loss": report.worst_loss, **asdict(report)}
    path.write_text(json.dumps(facts, indent=1) + "\n")
    return path
