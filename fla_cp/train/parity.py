"""--check-parity: the same steps on one rank and on the given split, compared.

Rank 0 first takes the steps alone, with one context over whole sequences and no sharding, and
keeps losses, gradients and weights. Then all ranks take the same steps together. Both read the same
batches and start every step from the weights of the one rank: Adam turns the rounding of a gradient
near zero into a step of full size, so two correct runs drift apart, and a difference in the third
step would say little about the split.

A correct split differs from one rank by rounding only, since it sums in another order. The budget
of a gradient is therefore derived from rounding: rank 0 also takes the same steps in fp64 (with the
torch stages), and for each parameter the split may differ from one rank by FACTOR times the
difference of one rank from fp64, in the L2 norm. This difference is a single sample and can be
small by chance, above all for a parameter with few elements. It is therefore taken to be at least
that of the parameter of the same name in any other block, and at least the median over all
parameters. The budget is at least LEAST_BUDGET. The table ends with the smallest fault that every
row would show.

--parity.grad-budget replaces all this by one relative difference; then no fp64 steps are taken. The
relative difference of losses may be at most LOSS_BUDGET of the compute dtype. The difference of the
optimiser's updates, as L2 norm relative to the update, may be at most UPDATE_BUDGET.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fla_cp.train.build import build_sharded
from fla_cp.train.config import TrainConfig
from fla_cp.train.data import Packs
from fla_cp.train.distributed import Ranks, compute_dtype
from fla_cp.train.model import vocabulary
from fla_cp.train.optim import build_optimizer, learning_rate, update
from fla_cp.train.progress import announced
from fla_cp.train.step import Feed, forward_backward, reduce_metrics

LOSS_BUDGET = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3}
# An element whose gradient consists of rounding alone moves by a whole step in either direction.
# The share of such elements in the model is as large as the rounding. A step that is missing or
# taken twice has a relative difference of 1.
UPDATE_BUDGET = {torch.float64: 1e-3, torch.float32: 0.1, torch.bfloat16: 0.5}
FACTOR = 4.0
# In float32, correct splits of six mixers differed by up to 1.8e-5 (for a decay rate, whose
# gradient nearly cancels) and mostly by 3e-7, so a fault of 1e-4 is found. bfloat16 leaves no such
# margin.
LEAST_BUDGET = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 0.0}
# A gradient that is a sum of nearly cancelling terms has the rounding errors of these terms. Its
# error is therefore relative to at least this share of the whole model's gradient norm.
RELATIVE_FLOOR = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class Row:
    """One parameter's gradients at the step that uses the largest share of its budget.

    relative: relative L2 norm of the difference. budget: upper limit of `relative`. largest:
    largest difference of an element. norm: L2 norm of the gradient on one rank.
    """

    parameter: str
    relative: float
    budget: float
    largest: float
    norm: float

    @property
    def within(self) -> bool:
        return self.relative <= self.budget  # False for NaN

    @property
    def use(self) -> float:
        return self.relative / self.budget if self.relative == self.relative else float("inf")


@dataclass(frozen=True)
class Report:
    """Result of the comparison.

    losses: (one rank, split) for each step. rows: one for each parameter, in the model's order.
    updates: for each step, L2 norm of the difference of the optimiser's updates, relative to the
    update.
    """

    losses: list[tuple[float, float]]
    rows: list[Row]
    loss_budget: float
    updates: list[float]
    update_budget: float

    @property
    def worst_loss(self) -> float:
        return max(_difference(a, b) for a, b in self.losses)

    @property
    def passed(self) -> bool:
        # each comparison is False for NaN
        return (
            self.worst_loss <= self.loss_budget
            and all(difference <= self.update_budget for difference in self.updates)
            and all(row.within for row in self.rows)
        )

    def table(self) -> str:
        width = max(len(row.parameter) for row in self.rows)
        titles = f"{'one rank':>12}  {'split':>12}  relative difference  of the update"
        lines = [f"{'step':>4}  {titles}"]
        for step, ((a, b), moved) in enumerate(zip(self.losses, self.updates, strict=True), 1):
            relative = _difference(a, b)
            lines.append(f"{step:>4}  {a:12.8f}  {b:12.8f}  {relative:<19.2e}  {moved:.2e}")
        lines.append(f"{'gradient of':<{width}}  relative L2    budget  largest diff.      norm")
        for row in self.rows:
            over = "" if row.within else "  over budget"
            lines.append(
                f"{row.parameter:<{width}}  {row.relative:11.2e}  {row.budget:8.1e}"
                f"  {row.largest:13.2e}  {row.norm:8.2e}{over}"
            )
        worst = max(self.rows, key=lambda row: row.use)
        widest = max(self.rows, key=lambda row: row.budget)
        lines.append(
            f"a gradient off by more than {widest.budget:.1e} would have shown in every parameter "
            f"(the widest budget is that of {widest.parameter})"
        )
        lines.append(
            f"parity {'holds' if self.passed else 'FAILS'}: loss {self.worst_loss:.2e} of "
            f"{self.loss_budget:.0e}, gradient {worst.relative:.2e} of {worst.budget:.1e} "
            f"({worst.parameter}), update {max(self.updates):.2e} of {self.update_budget:.0e}"
        )
        return "\n".join(lines)


Named = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """Unsharded results of one rank, on the host. before, after: the weights."""

    loss: float
    grads: Named
    before: Named
    after: Named


class Run:
    """Steps of one model, each in two halves, so that the gradients in between can be read."""

    def __init__(
        self, config: TrainConfig, dataset: Packs, ranks: Ranks, dtype: torch.dtype
    ) -> None:
        rows = vocabulary(config.model, dataset.vocab_size)
        self.model = build_sharded(config.model, rows, config.run.seed, ranks, dtype)
        self.config, self.ranks = config, ranks
        self.optimizer = build_optimizer(self.model, config.optim)
        self.feed = Feed(config, dataset, ranks, 0, workers=0)
        self.step, self.norm = 0, 0.0

    def backward(self) -> float:
        """Computes the gradients of the next batch; returns its global loss."""
        self.step += 1
        batch = self.feed.take()
        targets = self.feed.agreement(batch).targets
        first = self.step == 1
        share = forward_backward(self.model, batch, targets, self.config, self.ranks, check=first)
        loss, self.norm = reduce_metrics(share, self.model, self.ranks)
        return loss

    def update(self) -> None:
        """Takes the optimiser's step and drops the gradients."""
        optim = self.config.optim
        rate = learning_rate(optim, self.step, self.config.run.steps)
        update(self.model, self.optimizer, rate, self.norm, optim.clip_norm)
        self.forget()

    def forget(self) -> None:
        self.optimizer.zero_grad()

    def weights(self) -> Named:
        """Unsharded weights on the host of rank 0; empty on the other ranks. Collective.

        The biases of experts' routers, which steps move as well, are among them.
        """
        return self._whole(self._moved())

    def _moved(self) -> Named:
        """Everything that steps change: parameters, and the buffers that checkpoints hold."""
        kept = self.model.state_dict()
        buffers = {n: x for n, x in self.model.named_buffers() if n in kept}
        return {**dict(self.model.named_parameters()), **buffers}

    def grads(self) -> Named:
        """Unsharded gradients, like `weights`."""
        return self._whole({n: _gradient(p) for n, p in self.model.named_parameters()})

    def _whole(self, tensors: Named) -> Named:
        found = {}
        for name, x in tensors.items():
            full = _full(x)  # collective: called on every rank, though only rank 0 compares
            if self.ranks.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def put(self, weights: Named) -> None:
        """Gives the model the weights that rank 0 passes; others may pass anything. Collective."""
        for name, p in self._moved().items():
            whole = torch.empty(p.shape, dtype=p.dtype, device=self.ranks.device)
            if self.ranks.rank == 0:
                whole.copy_(weights[name])
            if isinstance(p, DTensor):
                p.to_local().copy_(distribute_tensor(whole, p.device_mesh, p.placements).to_local())
            else:  # a buffer, the same on all ranks: the others add nothing
                p.copy_(self.ranks.sum(whole if self.ranks.rank == 0 else whole.zero_()))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _alone(run: Run) -> list[Step]:
    """Takes the steps on one rank."""
    steps, before = [], run.weights()
    for _ in range(run.config.parity.steps):
        loss, grads = run.backward(), run.grads()
        run.update()
        after = run.weights()
        steps.append(Step(loss, grads, before, after))
        before = after
    return steps


def _budgets(run: Run, single: list[Step], dtype: torch.dtype) -> list[dict[str, float]]:
    """For each step, the largest allowed relative difference of each parameter's gradient.

    run: a run on one rank in fp64. It takes each step from the weights in `single`, the steps of
    one rank in `dtype`.
    """
    budgets = []
    for step in single:
        run.put(step.before)
        run.backward()
        right, floor = run.grads(), _total(step.grads) * RELATIVE_FLOOR[dtype]
        run.forget()
        noise = {n: _relative(g, right[n], floor) for n, g in step.grads.items()}
        median = statistics.median(noise.values())
        alike: dict[str, float] = {}  # largest value over all blocks
        for n, size in noise.items():
            alike[_kind(n)] = max(size, median, alike.get(_kind(n), 0.0))
        budgets.append({n: max(FACTOR * alike[_kind(n)], LEAST_BUDGET[dtype]) for n in noise})
    return budgets


def _kind(parameter: str) -> str:
    """The parameter's name without the number of its block."""
    return re.sub(r"\b(blocks|layers)\.\d+\.", "", parameter)


def compare(config: TrainConfig, dataset: Packs, ranks: Ranks) -> Report | None:
    """Takes the steps in both ways; returns the report on rank 0, else None. Collective."""
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    parity = config.parity
    alone = ranks.alone()  # collective: it makes a mesh
    single: list[Step] = []
    budgets: list[dict[str, float]] = []
    if ranks.rank == 0:
        with announced("steps on rank 0 alone, for --check-parity"):
            single = _alone(Run(config, dataset, alone, dtype))
            if parity.grad_budget is None:
                stages = replace(config, model=replace(config.model, impl="torch"))
                budgets = _budgets(Run(stages, dataset, alone, torch.float64), single, dtype)
            else:
                budgets = [dict.fromkeys(step.grads, parity.grad_budget) for step in single]
    ranks.barrier()

    run = Run(config, dataset, ranks, dtype)
    losses: list[tuple[float, float]] = []
    updates: list[float] = []
    worst: dict[str, Row] = {}
    for i in range(parity.steps):
        one = single[i] if ranks.rank == 0 else Step(0.0, {}, {}, {})
        if i > 0:  # the first step uses the run's own weights, so that these are compared too
            run.put(one.before)
        losses.append((one.loss, run.backward()))
        floor = _total(one.grads) * RELATIVE_FLOOR[dtype]
        for name, grad in run.grads().items():
            row = _row(name, grad, one.grads[name], floor, budgets[i][name])
            if name not in worst or not row.use <= worst[name].use:
                worst[name] = row
        run.update()
        after = run.weights()
        if ranks.rank == 0:
            moved = _distance(one.after, one.before)
            updates.append(_distance(after, one.after) / max(moved, 1e-300))
    if ranks.rank != 0:
        return None
    loss_budget = LOSS_BUDGET[dtype] if parity.loss_budget is None else parity.loss_budget
    return Report(losses, list(worst.values()), loss_budget, updates, UPDATE_BUDGET[dtype])


def _total(grads: Named) -> float:
    return sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5


def _distance(a: Named, b: Named) -> float:
    return _total({n: a[n].double() - b[n] for n in a})


def _difference(one: float, split: float) -> float:
    """The difference of two losses, relative to that of one rank. Both losses are 0 if no label of
    a batch counts."""
    return abs(one - split) / max(abs(one), 1e-300)


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
