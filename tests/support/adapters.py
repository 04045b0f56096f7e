"""Modules whose call is more than a product with their weight: adapters, hooks and a bias."""

import torch
from torch import nn


class LowRankAdapter(nn.Module):
    """A LoRA adapter as PEFT has it, in the place of a linear layer whose weight it shows."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.to(base.weight.dtype)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.up(self.down(x))


def adapted(parent, name):
    """Puts an adapter in the place of a linear layer."""
    setattr(parent, name, LowRankAdapter(getattr(parent, name)))


def hooked(parent, name):
    """Registers a hook that changes the result."""
    getattr(parent, name).register_forward_hook(lambda module, given, y: -1.5 * y)


def hooked_before(parent, name):
    """Registers a hook that changes the input."""
    getattr(parent, name).register_forward_pre_hook(lambda module, given: (given[0] + 0.3,))


def biased(parent, name):
    """Gives a linear layer a bias."""
    linear = getattr(parent, name)
    linear.bias = nn.Parameter(torch.full_like(linear.weight[:, 0], 0.2))


CHANGES = {f.__name__: f for f in (adapted, hooked, hooked_before, biased)}
