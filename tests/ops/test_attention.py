"""Softmax attention against the plain formula in fp64, on one rank and sharded in every way."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from fla_cp import build_cp_context, causal_attention, zigzag_token_ranges
from fla_cp.comm.keys_values import SCHEMES
from fla_cp.kernels.torch import attention
from tests.support.ranks import run_threads

OFFSETS = (0, 37, 40, 40, 101, 150)
RANGES = {
    "contiguous": None,
    "zigzag": lambda R: zigzag_token_ranges(150, R),
    "uneven": lambda R: [[(0, 3)], [(3, 90)], *[[] for _ in range(R - 3)], [(90, 150)]],
    "crossed": lambda R: [[(120, 150), (0, 20)], [(60, 120)], [(20, 60)], []][:R],
}


def drawn(T=150, H=4, HK=2, K=8, V=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, T, H, K), (1, T, HK, K), (1, T, HK, V), (1, T, H, V)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def plain(q, k, v, offsets, scale=None):
    """The formula, one sequence at a time."""
    groups, outs = q.shape[2] // k.shape[2], []
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    for lo, hi in pairwise(offsets):
        a, b, c = (x[0, lo:hi].transpose(0, 1) for x in (q, k, v))
        scores = a @ b.mT * (a.shape[-1] ** -0.5 if scale is None else scale)
        mask = torch.ones(hi - lo, hi - lo, dtype=torch.bool).triu(1)
        outs.append((scores.masked_fill(mask, -math.inf).softmax(-1) @ c).transpose(0, 1))
    return torch.cat(outs)[None]


def results(attend, tensors, do):
    """o and the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def exact(offsets=OFFSETS, **sizes):
    *tensors, do = drawn(**sizes)
    return results(lambda *x: plain(*x, offsets), tensors, do)


def test_offsets_on_the_host_spare_reading_those_of_the_device():
    *tensors, do = drawn()
    packed = torch.tensor(OFFSETS)
    unreadable = {"cu_seqlens": packed.to("meta"), "cu_seqlens_cpu": packed}
    found = results(partial(causal_attention, **unreadable), tensors, do)
    wanted = results(partial(causal_attention, cu_seqlens=packed), tensors, do)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


def test_offsets_on_the_host_must_be_those_of_the_call():
    *tensors, _ = drawn()
    packed = torch.tensor(OFFSETS)
    with pytest.raises(ValueError, match="cu_seqlens_cpu must equal cu_seqlens"):
        causal_attention(
            *tensors, cu_seqlens=packed, cu_seqlens_cpu=torch.tensor([0, 1, 2, 3, 4, 150])
        )
    with pytest.raises(ValueError, match=r"copy of cu_seqlens, which is missing"):
        causal_attention(*tensors, cu_seqlens_cpu=packed)


@pytest.mark.parametrize("block", [512, 16])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_packed_sequences(heads, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    sizes = {"H": heads[0], "HK": heads[1]}
    *tensors, do = drawn(**sizes)
    packed = torch.tensor(OFFSETS)
    found = results(lambda *x: causal_attention(*x, cu_seqlens=packed), tensors, do)
    torch.testing.assert_close(found, exact(**sizes))


def test_rows_are_sequences_of_their_own():
    *tensors, do = drawn()
    rows = [x.view(3, 50, *x.shape[2:]) for x in (*tensors, do)]
    found = results(lambda *x: causal_attention(*x, scale=0.3), rows[:3], rows[3])
    wanted = results(lambda *x: plain(*x, (0, 50, 100, 150), 0.3), tensors, do)
    torch.testing.assert_close([x.flatten(0, 1)[None] for x in found], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_inputs(dtype):
    """The error is at most twice that of the plain formula in the same dtype."""
    *tensors, do = (x.to(dtype) for x in drawn())
    packed = torch.tensor(OFFSETS)
    found = results(lambda *x: causal_attention(*x, cu_seqlens=packed), tensors, do)
    same = results(lambda *x: plain(*x, OFFSETS), tensors, do)
    wide = [x.double() for x in tensors]
    wanted = results(lambda *x: plain(*x, OFFSETS), wide, do.double())
    for ours, theirs, right in zip(found, same, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours - right).norm() <= 2 * (theirs - right).norm()


def sharded(group, rank, layout, offsets, exchange="auto", dtype=torch.float64, **sizes):
    R = group.size()
    ranges = RANGES[layout]
    context = build_cp_context(
        torch.tensor(offsets), group, token_ranges=None if ranges is None else ranges(R)
    )
    *tensors, do = (context.shard(x) for x in drawn(dtype=dtype, **sizes))
    attend = partial(causal_attention, cp_context=context, exchange=exchange)
    return [context.unshard(x) for x in results(attend, tensors, do)]


@pytest.mark.parametrize("offsets", [OFFSETS, (0, 150), (0, 37, 75, 112, 150)], ids=str)
@pytest.mark.parametrize("layout", RANGES)
@pytest.mark.parametrize("exchange", SCHEMES)
def test_ranks_equal_one(exchange, layout, offsets):
    wanted = exact(offsets)
    for found in run_threads(partial(sharded, exchange=exchange), 4, layout, offsets):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "R, heads", [(2, (4, 4)), (2, (4, 1)), (3, (3, 3)), (4, (8, 2)), (4, (4, 4))], ids=str
)
@pytest.mark.parametrize("exchange", SCHEMES)
def test_heads_of_every_kind(exchange, R, heads):
    sizes = {"H": heads[0], "HK": heads[1]}
    wanted = exact(**sizes)
    for found in run_threads(partial(sharded, exchange=exchange, **sizes), R, "zigzag", OFFSETS):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("exchange", SCHEMES)
def test_rounded_inputs_on_ranks(exchange):
    """In bf16 the error is at most twice that of the plain formula in bf16."""
    *tensors, do = (x.bfloat16() for x in drawn())
    same = results(lambda *x: plain(*x, OFFSETS), tensors, do)
    wide = [x.double() for x in tensors]
    wanted = results(lambda *x: plain(*x, OFFSETS), wide, do.double())
    call = partial(sharded, exchange=exchange, dtype=torch.bfloat16)
    for found in run_threads(call, 4, "zigzag", OFFSETS):
        for ours, theirs, right in zip(found, same, wanted, strict=True):
            assert ours.dtype == torch.bfloat16
            assert (ours - right).norm() <= 2 * (theirs - right).norm()


@pytest.mark.parametrize("exchange", SCHEMES)
def test_processes_equal_one(gloo_pool, exchange):
    wanted = exact()
    for found in gloo_pool.run(sharded, "zigzag", OFFSETS, exchange, world_size=2):
        torch.testing.assert_close(found, wanted)


def test_a_scheme_that_does_not_exist():
    q, k, v, _ = drawn()
    message = "exchange must be 'auto', 'gathered', 'by_heads' or 'ring', got 'heads'"
    with pytest.raises(ValueError, match=message):
        causal_attention(q, k, v, exchange="heads")


def test_heads_that_the_ranks_do_not_divide():
    message = "exchange='by_heads' needs query heads .* got H = 4, HK = 2 on 3 ranks"
    with pytest.raises(ValueError, match=message):
        run_threads(sharded, 3, "contiguous", OFFSETS, "by_heads")


def differing(group, rank):
    sharded(group, rank, "contiguous", OFFSETS, "ring" if rank else "gathered")


def test_ranks_that_ask_for_different_schemes():
    message = r"exchange_of_keys \(gathered on ranks \[0\], ring on ranks \[1\]\)"
    with pytest.raises(ValueError, match=message):
        run_threads(differing, 2)


def test_every_scheme_on_one_rank():
    """Where no keys cross, all schemes are the same."""
    *tensors, do = drawn()
    for exchange in SCHEMES:
        attend = partial(causal_attention, cu_seqlens=torch.tensor(OFFSETS), exchange=exchange)
        torch.testing.assert_close(results(attend, tensors, do), exact())


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"k": (1, 150, 2, 9)}, "k must have q's K = 8 channels, got 9"),
        ({"v": (1, 150, 4, 6)}, "v must have k's HK = 2 heads, got 4"),
        ({"k": (1, 150, 3, 8), "v": (1, 150, 3, 6)}, "a multiple of k's HK = 3, got H = 4"),
        ({"v": (1, 149, 2, 6)}, "v must have q's rows and tokens"),
        ({"q": (150, 4, 8)}, r"q must be \[B, T, heads, channels\], got shape"),
        ({"q": (1, 150, 4, 0), "k": (1, 150, 2, 0)}, "q must have channels, got shape"),
    ],
)
def test_shapes_that_do_not_fit(changed, message):
    shapes = {"q": (1, 150, 4, 8), "k": (1, 150, 2, 8), "v": (1, 150, 2, 6)} | changed
    with pytest.raises(ValueError, match=message):
        causal_attention(*(torch.zeros(s) for s in shapes.values()))
