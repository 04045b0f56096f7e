"""causal_conv1d against torch's convolution of each sequence, alone and under ranks."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fla_cp import build_cp_context, causal_conv1d, zigzag_token_ranges
from fla_cp.comm import Halo
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads

D = 5
F64 = torch.float64


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def plain(x, weight, bias, activation, cu):
    W = weight.shape[1]
    out = []
    for lo, hi in pairwise(cu):
        if hi > lo:
            padded = F.pad(x[:, lo:hi].mT, (W - 1, 0))
            out.append(F.conv1d(padded, weight[:, None], bias, groups=D).mT)
    y = torch.cat(out, 1)
    return F.silu(y) if activation else y


def setup(T, W, with_bias):
    x, weight = draw(1, T, D, seed=1), draw(D, W, seed=2)
    return x, weight, draw(D, seed=3) if with_bias else None, draw(1, T, D, seed=4)


def gradients(y, dy, *leaves):
    return torch.autograd.grad(y, [t for t in leaves if t is not None], dy)


@pytest.mark.parametrize("W", [1, 2, 4, 5])
@pytest.mark.parametrize("with_bias, activation", [(True, "silu"), (False, None), (False, "swish")])
@pytest.mark.parametrize("cu", [(0, 20), (0, 1, 3, 3, 20), (0, 2)], ids=str)
def test_equals_torch(W, with_bias, activation, cu):
    *leaves, dy = setup(cu[-1], W, with_bias)
    leaves = [None if t is None else t.requires_grad_() for t in leaves]
    exact = plain(*leaves, activation, cu)
    actual = causal_conv1d(*leaves, activation, torch.tensor(cu))
    assert_exact("y", actual.detach(), exact.detach())
    pairs = zip(gradients(actual, dy, *leaves), gradients(exact, dy, *leaves), strict=True)
    for a, b in pairs:
        assert_exact("gradient", a, b)


def test_rows_do_not_see_each_other():
    x, weight = draw(3, 7, D, seed=1), draw(D, 4, seed=2)
    y = causal_conv1d(x, weight)
    for b in range(3):
        assert_exact("row", y[b : b + 1], causal_conv1d(x[b : b + 1], weight))


def test_half_precision_sums_in_fp32():
    x, weight = (draw(*s, seed=i).bfloat16() for i, s in enumerate(((1, 50, D), (D, 4))))
    y = causal_conv1d(x, weight)
    exact = causal_conv1d(x.double(), weight.double())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16()) or (y - exact).abs().max() <= 2**-8 * exact.abs().max()


def sharded(group, rank, cu, W, ranges):
    R = group.size()
    x, weight, bias, dy = setup(cu[-1], W, True)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    whole = causal_conv1d(*leaves, "silu", torch.tensor(cu))
    exact = gradients(whole, dy, *leaves)
    table = zigzag_token_ranges(cu[-1], R) if ranges == "zigzag" else ranges
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=W, token_ranges=table)
    local = [context.shard(x).detach().requires_grad_(), *leaves[1:]]
    y = causal_conv1d(*local, "silu", cp_context=context)
    assert_exact("y", y.detach(), context.shard(whole).detach())
    actual = gradients(y, context.shard(dy), *local)
    assert_exact("dx", actual[0], context.shard(exact[0]))
    return actual[1:], exact[1:]


LAYOUTS = {
    "contiguous": None,
    "zigzag": "zigzag",
    "backwards": [[(15, 20)], [(10, 15)], [(3, 10)], [(0, 0), (0, 3)]],
    "rank-without-ranges": [[(2, 20)], [], [(1, 2)], [(0, 1)]],
    "one-token-ranges": [[(3, 4), (0, 1)], [(2, 3), (4, 18)], [(1, 2)], [(18, 20)]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cu", [(0, 20), (0, 2, 3, 3, 17, 20)], ids=str)
@pytest.mark.parametrize("W", [1, 4])
def test_halo_comes_from_as_many_ranks_as_it_takes(cu, W, layout):
    results = run_threads(sharded, 4, cu, W, LAYOUTS[layout])
    exact = results[0][1]
    for i in range(2):
        assert_exact("parameter", sum(actual[i] for actual, _ in results), exact[i])


def test_halo_moves_only_tokens_that_are_read():
    cu, ranges = (0, 6, 12), [[(0, 7)], [(7, 12)]]
    halos = [Halo.build(cu, ranges, rank, 3) for rank in range(2)]
    assert halos[0].send == (6,)  # of the three tokens before 7, only 6 belongs to its sequence
    assert (halos[0].send_counts, halos[1].receive_counts) == ((0, 1), (1, 0))
    assert halos[1].place == (2,)  # next to the range
    assert all(h.needed for h in halos)


def test_no_collective_where_no_sequence_crosses(monkeypatch):
    halo = Halo.build((0, 6, 12), [[(0, 6)], [(6, 12)]], 0, 3)
    monkeypatch.setattr("fla_cp.comm.collectives.all_to_all", lambda *a: pytest.fail("it ran"))
    x = draw(6, D, seed=0)
    assert not halo.gather(x, object()).any()
    halo.scatter_add(x, draw(3, D, seed=1), object())


@pytest.mark.parametrize("T", [1, 3, 9])
def test_shards_shorter_than_the_convolution(gloo_pool, T):
    gloo_pool.run(sharded, (0, T), 4, None)
