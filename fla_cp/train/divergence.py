"""Divergence: steps whose loss or gradient norm is not finite, and when they end the training.

Such a step is skipped: its batch is consumed, and the weights stay as they are. After
`run.max_skips` skipped steps in a row the run ends with `Diverged`. No checkpoint is written while
steps are skipped, so earlier ones are not deleted. Weights that are not finite are never saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fla_cp.train.distributed import Ranks
from fla_cp.train.weights import local_tensor


class Diverged(RuntimeError):
    """The training cannot go on. Raised on all ranks, with the same message of one line."""


@dataclass(frozen=True)
class NotFinite:
    """Names of parameters in the model's order, the same on all ranks.

    weights: parameters that are not finite. gradients: parameters whose gradient has a norm that is
    not finite, because an element is not or because its square is too large for float32. largest:
    absolute value of the largest finite weight, and its parameter's name.
    """

    weights: list[str]
    gradients: list[str]
    largest: tuple[float, str]

    def __str__(self) -> str:
        gradients = f"the gradient of {_few(self.gradients)}" if self.gradients else ""
        if self.weights:
            return f"not finite: the weights of {_few(self.weights)}; {gradients}".rstrip("; ")
        size, name = self.largest
        finite = f"all weights are finite, the largest is {size:.1e} in {name}"
        return f"not finite: {gradients or 'no single gradient'}; {finite}"


def _few(names: list[str]) -> str:
    """The first name, and the number of the others."""
    others = len(names) - 1
    return names[0] + (f" and {others} other{'s' * (others > 1)}" if others else "")


def find_not_finite(model: nn.Module, ranks: Ranks) -> NotFinite:
    """Looks at every weight and gradient. Collective, with one read from the device."""
    names, facts = [], []
    zero = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for name, parameter in model.named_parameters():
        names.append(name)
        weight, grad = local_tensor(parameter.detach()), parameter.grad
        norm = zero if grad is None else local_tensor(grad).norm()
        # a rank may hold no row of a parameter
        size = weight.abs().max() if weight.numel() else zero
        finite = size.isfinite()  # the maximum of values with a NaN is NaN
        facts.append(torch.stack([~finite, ~norm.isfinite(), torch.where(finite, size, zero)]))
    answers = ranks.host_max(torch.stack(facts).flatten().tolist())
    weights, gradients, sizes = (answers[i::3] for i in range(3))
    return NotFinite(
        [name for name, bad in zip(names, weights, strict=True) if bad],
        [name for name, bad in zip(names, gradients, strict=True) if bad],
        max(zip(sizes, names, strict=True)),
    )


class Skips:
    """Counts the steps that were skipped in a row.

    limit: number of skipped steps that ends the training. first: number of the first skipped step.
    cause: what was not finite in it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.first = 0
        self.count = 0
        self.cause = ""

    def end(self) -> None:
        """To be called after a step that was not skipped."""
        self.count = 0

    def add(self, step: int, loss: float, norm: float, model: nn.Module, ranks: Ranks) -> str:
        """Counts a skipped step and returns a line about it. Its gradients must still be there.

        loss, norm: values of this step, equal on all ranks. Collective.
        """
        text = f"loss {loss} and gradient norm {norm}"
        if self.count == 0:
            self.first = step
            self.cause = f"{text}; {find_not_finite(model, ranks)}"
            text = self.cause
        self.count += 1
        return f"step {step}: skipped, {text}"

    def __str__(self) -> str:
        last = self.first + self.count - 1
        which = f"step {last} was" if self.count == 1 else f"steps {self.first} to {last} were"
        return f"{which} skipped"

    def report(self) -> str:
        """The skipped steps, the limit and the cause in one line."""
        return f"{self} in a row (--max-skips {self.limit}); step {self.first} had {self.cause}"

    def check(self) -> None:
        """Raises Diverged once there are as many as the limit."""
        if self.count >= self.limit:
            raise Diverged(f"training diverged: {self.report()}")


def check_weights(model: nn.Module, ranks: Ranks, step: int) -> None:
    """Raises Diverged if a weight is not finite. Collective, with one read from the device."""
    found = find_not_finite(model, ranks)
    if found.weights:
        raise Diverged(f"training diverged: after step {step} {found}")
