"""Initial values of parameters: one distribution for each, drawn whole or a few rows at a time.

A module states in `initial_values` how each of its own parameters starts. `reset_parameters` draws
them from torch's generator. A trainer that shards its weights calls `rows` instead, for the rows
that a rank holds. This is possible because elements are independent. `rows` draws with NumPy, whose
normal numbers have the same bits on every processor. Those of `torch.Tensor.normal_` depend on the
processor's vector instructions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn


class Initial(Protocol):
    """The distribution of every element of one parameter."""

    def fill_(self, x: Tensor) -> None:
        """Draws x in place, from torch's default generator of its device."""

    def rows(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        """New values of this shape, on the CPU, in fp32."""


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def fill_(self, x: Tensor) -> None:
        nn.init.constant_(x, self.value)

    def rows(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, self.value, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Normal:
    """Mean 0, standard deviation `std`."""

    std: float

    def fill_(self, x: Tensor) -> None:
        nn.init.normal_(x, std=self.std)

    def rows(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        values = generator.standard_normal(shape, dtype=np.float32)
        np.multiply(values, np.float32(self.std), out=values)
        return torch.from_numpy(values)


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high). `then`, if given, is applied to each number."""

    low: float
    high: float
    then: Callable[[Tensor], Tensor] | None = None

    def fill_(self, x: Tensor) -> None:
        nn.init.uniform_(x, self.low, self.high)
        if self.then is not None:
            with torch.no_grad():
                x.copy_(self.then(x))

    def rows(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        # In fp64, because processors' logarithms may differ in the last bit, which the rounding to
        # fp32 then removes.
        draws = generator.random(shape, dtype=np.float32).astype(np.float64)
        values = torch.from_numpy(self.low + (self.high - self.low) * draws)
        return (values if self.then is None else self.then(values)).float()


def _bias_of_log_step(log_step: Tensor) -> Tensor:
    step = log_step.exp()
    return step + torch.log(-torch.expm1(-step))  # softplus^-1(step)


LOG_DECAY_RATE = Uniform(1.0, 16.0, torch.log)
"""A_log as in Mamba-2: the rate uniform in [1, 16)."""

STEP_BIAS = Uniform(math.log(1e-3), math.log(0.1), _bias_of_log_step)
"""dt_bias as in Mamba-2: step sizes log-uniform in [1e-3, 0.1)."""


class InitializedModule(nn.Module):
    """A module that states how each of its own parameters starts."""

    def initial_values(self) -> dict[str, Initial]:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws the module's own parameters, in the order in which they were made.

        It draws only parameters that exist, so a constructor may call it before a subclass adds
        more. On the meta device there is nothing to draw.
        """
        values = self.initial_values()
        for name, parameter in self.named_parameters(recurse=False):
            if not parameter.is_meta:
                values[name].fill_(parameter)
