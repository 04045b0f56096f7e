"""Shares of the gradients of A_log and dt_bias, added up by one interpreted kernel."""

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.triton.rate_grads import rate_grads


def shares(rows, *shape):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", [(1, 1), (5, 130), (600, 3), (0, 0)])
@pytest.mark.parametrize("H, K", [(1, None), (3, 24), (33, 64), (2, 96)])
def test_sums(rows, H, K):
    a, b = shares(rows[0], H), shares(rows[1], H, *(() if K is None else (K,)))
    A_log, dt_bias = torch.zeros(1, 1, H, 1), torch.zeros(H * (K or 1))
    dA_log, ddt_bias = rate_grads(a, A_log, b, dt_bias)
    assert dA_log.shape == A_log.shape and ddt_bias.shape == dt_bias.shape
    for x, found in ((a, dA_log), (b, ddt_bias)):
        exact = x.double().sum(0).flatten()
        budget = 2.0**-20 * (x.abs().sum(0).flatten() + 1e-30)
        assert ((found.flatten() - exact).abs() <= budget).all()


def test_one_alone_or_none():
    a, A_log = shares(70, 4), torch.zeros(4)
    exact = a.double().sum(0)
    only, none = rate_grads(a, A_log, None, None)
    assert none is None
    torch.testing.assert_close(only.double(), exact, rtol=1e-5, atol=1e-5)
    none, only = rate_grads(None, None, a, A_log)
    assert none is None
    torch.testing.assert_close(only.double(), exact, rtol=1e-5, atol=1e-5)
    assert rate_grads(None, None, None, None) == (None, None)
