"""The kernels of the gated norm, interpreted on CPU, and its torch stages, against fp64."""

import pytest
import torch

from fla_cp.kernels import TORCH, resolve
from fla_cp.nn import GatedRMSNorm
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.sweeps import crossed

pytest.importorskip("triton")  # interpreted: conftest.py

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(*shape, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=F64)


def reference(x, gate, weight, eps, activation, dy):
    """y, dx, dgate and dweight by autograd, in fp64."""
    leaves = [t.double().requires_grad_() for t in (x, gate, weight)]
    x, gate, weight = leaves
    value = torch.sigmoid(gate) * (gate if activation == "silu" else 1)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * value
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


def stages(backend, x, gate, weight, eps, activation, dy):
    given = x, gate, weight, eps, activation
    return backend.gated_norm(*given), *backend.gated_norm_bwd(*given, dy)


NAMES = "y", "dx", "dgate", "dweight"


@pytest.mark.parametrize("V, T, activation, dtype", crossed(
    [16, 24, 128, 256], [1, 63, 300], ["sigmoid", "silu"], [F32, BF16]
), ids=str)  # fmt: skip
def test_stages(V, T, activation, dtype):
    """Rows of o, gate and dy in wider tensors; heads and tokens of different sizes; 300 tokens are
    several programs of the backward."""
    H, eps = 3, 1e-2
    o, dy = (draw(T, H, V + 8, seed=i).to(dtype)[..., :V] for i in (1, 2))
    o *= torch.logspace(-3, 3, T, dtype=F64)[:, None, None].to(dtype)
    gate = (4 * draw(T, H * V + 16, seed=3)).to(dtype)[:, : H * V].view(T, H, V)
    weight = draw(V, seed=4).to(dtype)
    given = o, gate, weight, eps, activation, dy
    exact = reference(*given)
    plain = stages(TORCH, *given)
    found = stages(resolve("triton", o.device, dtype), *given)
    for name, a, e, p in zip(NAMES, found, exact, plain, strict=True):
        assert a.dtype == dtype
        assert_within_budget(name, a, e, p, factor=4.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_beyond_the_end_add_nothing_without_eps():
    """Their squares sum to zero, so that 1 / rms is infinite with eps = 0."""
    o, gate, dy = (draw(5, 1, 24, seed=i).float() for i in range(3))
    given = o, gate, draw(24, seed=3).float(), 0.0, "silu", dy
    found = stages(resolve("triton", o.device, F32), *given)
    for name, a, e, p in zip(NAMES, found, reference(*given), stages(TORCH, *given), strict=True):
        assert_within_budget(name, a, e, p, factor=4.0)


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_torch_stages_are_exact(activation):
    o, gate, dy = draw(3, 2, 50, 4, 8, seed=1)
    given = o, gate, draw(8, seed=2), 1e-5, activation, dy
    for name, a, e in zip(NAMES, stages(TORCH, *given), reference(*given), strict=True):
        assert_exact(name, a, e)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 5, 24), (0, 24)], ids=str)
def test_module_of_any_rank(shape):
    """The module on Triton kernels, whose gate has the elements of x in another shape."""
    found = []
    for impl, dtype in (("triton", F32), ("torch", F64)):
        norm = GatedRMSNorm(24, activation="silu", impl=impl).to(dtype)
        norm.weight.data.copy_(draw(24, seed=3))
        x, gate = (draw(*shape, seed=i).to(dtype).requires_grad_() for i in (1, 2))
        y = norm(x, gate.flatten())
        assert y.shape == x.shape
        grads = torch.autograd.grad(y.square().sum(), [x, gate, norm.weight])
        found.append((y.detach(), *grads))
    for a, e in zip(*found, strict=True):
        if a.numel():
            assert (a - e).abs().max() <= 2e-5 * e.abs().max()


def test_module_refuses_another_activation():
    with pytest.raises(ValueError, match=r"activation must be .*sigmoid.*silu.*got 'gelu'"):
        GatedRMSNorm(8, activation="gelu")


def test_torch_func_transforms_the_module():
    norm = GatedRMSNorm(8, impl="triton")
    x, gate = draw(2, 3, 8, seed=1).float()
    grad = torch.func.grad(lambda x: norm(x, gate).square().sum())(x)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(norm(x, gate).square().sum(), x)
    assert (grad - expected).abs().max() <= 1e-5 * expected.abs().max()
