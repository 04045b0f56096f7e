"""Second derivatives are refused, also where the incoming gradient is a constant."""

import pytest
import torch

import fla_cp
from fla_cp import nn, ops
from fla_cp.once_differentiable import once_differentiable

T, H, D = 70, 2, 16


def leaf(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def inputs(gate=()):
    return [*(leaf(1, T, H, D) for _ in range(3)), leaf(1, T, H, *gate)]


def called(name):
    """An output, and a tensor that it depends on."""
    q, k, v, g = inputs(() if name in ("gated_delta_rule", "simple_gla") else (D,))
    beta = () if name in ("gla", "simple_gla") else (leaf(1, T, H),)
    return getattr(fla_cp, f"chunk_{name}")(q, k, v, -g, *beta)[0], q


def recurrent():
    q, k, v, g = inputs((D,))
    return fla_cp.fused_recurrent_kda(q, k, v, -g, leaf(1, T, H))[0], q


def convolved():
    x = leaf(1, T, 8)
    return fla_cp.causal_conv1d(x, leaf(8, 4))[0], x


def attended():
    q, k, v, _ = inputs()
    return ops.causal_attention(q, k, v), q


def layer(kind):
    x = leaf(1, T, 32)
    torch.manual_seed(0)
    return kind(32, num_heads=H, head_dim=D)(x), x


CASES = {
    **{name: lambda name=name: called(name) for name in ("kda", "gated_delta_rule", "gla")},
    "recurrent": recurrent,
    "convolution": convolved,
    "attention": attended,
    "KimiDeltaAttention": lambda: layer(nn.KimiDeltaAttention),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["sum", "squares"])
def test_a_penalty_on_gradients_is_refused(name, loss):
    o, x = CASES[name]()
    (d,) = torch.autograd.grad(loss(o), x, create_graph=True)
    assert d.requires_grad
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        (o.sum() + d.square().sum()).backward()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_with_a_graph(name):
    found = []
    for create_graph in (False, True):
        o, x = CASES[name]()
        found += torch.autograd.grad(o.square().sum(), x, create_graph=create_graph)
    assert torch.equal(*found) and not found[0].requires_grad


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flag):
        return 2 * x, 3 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, dy):
        return None if dx is None else 2 * dx + 3 * dy, None


class Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return dx


@pytest.mark.parametrize("call", [lambda x: Twice.apply(x, True)[0], Alone.apply])
def test_one_gradient_or_several_of_which_some_are_missing(call):
    (d,) = torch.autograd.grad(call(x := leaf(3, 2)).sum(), x, create_graph=True)
    assert d.shape == x.shape
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        d.sum().backward()
