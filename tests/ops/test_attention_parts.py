"""Softmax attention in parts: what cuDNN computes, what flash attention computes, and their sum.

Both kernels are stand-ins on the CPU (tests/support/attention_kernels.py).
"""

import random
from itertools import accumulate

import pytest
import torch

from fla_cp import causal_attention
from fla_cp.kernels.torch import attention, attention_parts, cudnn_attention
from fla_cp.partition.key_rows import Lengths
from tests.support.attention_kernels import kernels_on_cpu, short_parts

LEAST = 16
"""The fewest queries of cuDNN in these tests."""

CASES = {
    "one sequence": Lengths((64,), (64,)),
    "an odd length": Lengths((61,), (61,)),
    "keys before the queries": Lengths((32,), (96,)),
    "an odd number of keys before": Lengths((32,), (90,)),
    "few keys before": Lengths((32,), (35,)),
    "odd lengths of both": Lengths((45,), (150,)),
    "long and short": Lengths((3, 20, 5, 1, 40, 64, 2), (3, 50, 9, 1, 40, 129, 100)),
    "short alone": Lengths((3, 5), (3, 9)),
    "all keys": Lengths((32, 33), (64, 51), False),
    "all of a few keys": Lengths((33, 40), (7, 16), False),
    "sequences without queries": Lengths((0, 32), (5, 40)),
}


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(attention_parts, "ROWS", 7)
    with short_parts(LEAST), kernels_on_cpu() as found:
        yield found


def drawn(lengths, H=4, HK=2, K=8):
    generator = torch.Generator().manual_seed(0)
    n, m = sum(lengths.queries), sum(lengths.keys)
    sizes = [(n, H, K), (m, HK, K), (m, HK, K), (n, H, K)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]


def results(lengths, exactly=False):
    q, k, v, do = drawn(lengths)
    if exactly:
        found = attention._torch(q, k, v, lengths, 0.3)
        return *found, *attention._torch_bwd(do, q, k, v, found, lengths, 0.3)
    found = attention.attend(q, k, v, lengths, 0.3)
    return *found, *attention.attend_bwd(do, q, k, v, *found, lengths, 0.3)


def assert_equal(lengths):
    for a, b in zip(results(lengths), results(lengths, exactly=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_parts_give_the_whole(kernels, name):
    assert_equal(CASES[name])


@pytest.mark.parametrize("seed", range(20))
def test_random_lengths(kernels, seed):
    rng = random.Random(seed)
    queries = [rng.choice((1, 7, 16, 31, 40, rng.randint(1, 90))) for _ in range(rng.randint(1, 4))]
    causal = rng.random() < 0.7
    before = [rng.choice((0, 0, 3, 16, 50, rng.randint(0, 90))) for _ in queries]
    keys = [n + m if causal else max(m, 1) for n, m in zip(queries, before, strict=True)]
    assert_equal(Lengths(tuple(queries), tuple(keys), causal))


def test_what_each_kernel_is_given(kernels):
    results(CASES["one sequence"])
    assert kernels.cudnn == [(d, 64, 64, True) for d in ("forward", "backward")]
    assert not kernels.flash
    kernels.cudnn.clear()
    results(CASES["keys before the queries"])
    assert not kernels.flash
    assert {x[1:] for x in kernels.cudnn} == {(32, 64, False), (32, 32, True)}
    kernels.cudnn.clear()
    results(CASES["short alone"])
    assert not kernels.cudnn and kernels.flash[0] == ("forward", (3, 5), (3, 9), True)
    kernels.flash.clear()
    results(CASES["odd lengths of both"])
    assert {x[1:] for x in kernels.cudnn} == {(44, 64, False), (44, 32, False), (44, 44, True)}
    assert {x[1:] for x in kernels.flash} == {((1,), (150,), True), ((44,), (9,), False)}
    kernels.cudnn.clear(), kernels.flash.clear()
    results(CASES["long and short"])
    assert {x[1:] for x in kernels.cudnn} == {
        (20, 16, False), (20, 20, True), (40, 40, True), (64, 64, False), (64, 64, True),
    }  # fmt: skip
    assert {x[1:] for x in kernels.flash} == {
        ((3, 0, 5, 1, 0, 0, 2), (3, 50, 9, 1, 40, 129, 100), True),
        ((20,), (14,), False), ((64,), (1,), False),
    }  # fmt: skip


def test_there_are_few_lengths_to_plan_for():
    for digits in (4, 6):
        found = {attention_parts.rounded(n, digits) for n in range(1, 2**17)}
        assert len(found) == 1 + 7 * 2 ** (digits - 1)  # 0, and those of 7 octaves from 1024 on
        for n in range(1024, 2**15, 13):
            assert 0 <= n - attention_parts.rounded(n, digits) < n / 2 ** (digits - 1)
        for n in (1024, 8192, 3 * 2**14, 15 * 2**12):
            assert attention_parts.rounded(n, digits) == n


def test_keys_before_the_queries_are_few_powers_of_two():
    for n in (*range(0, 5000, 7), 2**17 - 1):
        found = attention_parts.powers(n)
        assert len(found) <= 4 and all(x >= 1024 and x & (x - 1) == 0 for x in found)
        assert 0 <= n - sum(found) < max(1024, n / 8)
    assert [attention_parts.powers(x * 8192) for x in (1, 3, 15)] == [
        [8192], [16384, 8192], [65536, 32768, 16384, 8192],
    ]  # fmt: skip


def test_short_sequences_side_by_side_are_one_run():
    division = attention_parts.divided(Lengths((4096, *[16] * 300), (4096, *[16] * 300)))
    assert division.rest.runs == ((4096, 8896),)


@pytest.mark.parametrize("view", ["heads first", "part of wider rows"])
def test_gradients_of_o_may_have_any_strides(kernels, view):
    """PyTorch would read later ones with the strides of the first (the kernels assert it)."""
    lengths = CASES["one sequence"]
    q, k, v, do = drawn(lengths)
    found = attention.attend(q, k, v, lengths, 0.3)
    if view == "heads first":
        strided = do.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        strided = torch.cat([do, do], 2)[..., : do.shape[2]]
    grads = [attention.attend_bwd(x, q, k, v, *found, lengths, 0.3) for x in (do, strided)]
    assert all(map(torch.equal, *grads))


def test_gradients_of_queries_are_summed_up_in_fp32(kernels):
    """Each of five parts is rounded to bf16, and their sum once more, but not what is in between.
    Then the error is at most about sqrt(2) times that of rounding the whole."""
    lengths = Lengths((256,), (256 + 16 * (8 + 4 + 2 + 1),))
    q, k, v, do = (x.bfloat16() for x in drawn(lengths))
    wide = [x.double() for x in (do, q, k, v)]
    found = attention._torch(*wide[1:], lengths, 0.3)
    exact = attention._torch_bwd(*wide, found, lengths, 0.3)[0]
    division = attention_parts.divided(lengths)
    assert [len(block.parts) for block in division.blocks] == [5]

    def run(do, q, k, v, found, lengths, dense):
        wide = (x.double() for x in (do, q, k, v))
        grads = attention._torch_bwd(*wide, found, lengths, 0.3)
        return tuple(x.bfloat16() for x in grads)

    dq = attention_parts.attend_bwd(do, q, k, v, found, division, run)[0]
    error, least = ((x.double() - exact).norm() for x in (dq, exact.bfloat16()))
    assert dq.dtype == torch.bfloat16 and error < 1.5 * least


def test_cudnn_is_not_called_for_little():
    def divides(n, m):
        return attention_parts.divided(Lengths((n,), (m,))) is not None

    assert divides(4096, 4096) and not divides(4095, 4095)
    assert divides(1024, 16384) and not divides(1024, 4096) and not divides(1000, 65536)


def test_lengths_of_fixed_shape_stay_together(kernels, monkeypatch):
    monkeypatch.setattr(Lengths, "changes", True)
    results(CASES["one sequence"])
    assert not kernels.cudnn and len(kernels.flash) == 2


def test_cudnn_is_not_asked_again_for_what_it_refuses(kernels, caplog):
    kernels.error = RuntimeError("cuDNN Frontend error: No execution plans support the graph")
    assert_equal(CASES["odd lengths of both"])
    assert len(caplog.records) == 1 and "No execution plans" in caplog.text
    assert "flash attention computes heads that cuDNN refuses" in caplog.text
    kernels.error = None
    assert_equal(CASES["one sequence"])
    assert not kernels.cudnn


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("cuDNN"), RuntimeError("a fault")])
def test_other_errors_are_raised(kernels, error):
    kernels.error = error
    with pytest.raises(type(error), match=str(error)):
        results(CASES["one sequence"])
    assert not cudnn_attention._refused


class OnGpu:
    """What `runs` reads of a tensor."""

    is_cuda, device, dtype = True, torch.device("cuda", 0), torch.bfloat16

    def __init__(self, *shape):
        self.shape = shape

    def __len__(self):
        return self.shape[0]


def test_where_cudnn_runs(monkeypatch):
    cudnn_attention._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, k = OnGpu(64, 4, 128), OnGpu(64, 2, 128)

    def runs(q=q, v=k):
        return cudnn_attention.runs(q, k, v)

    assert runs()
    assert not runs(q=OnGpu(64, 4, 100)) and not runs(v=OnGpu(64, 2, 4))
    assert not runs(q=OnGpu(2**22, 4, 128)) and runs(q=OnGpu(2**22 - 1, 4, 128))
    assert not runs(OnGpu(2**20, 4, 8), OnGpu(2, 2, 512))
    assert not cudnn_attention.runs(*(torch.empty(64, 2, 128),) * 3)
    torch.use_deterministic_algorithms(True)
    try:
        assert not runs()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert not runs()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with monkeypatch.context() as patch:
        name = "current_flash_attention_impl"
        patch.setattr(torch.nn.attention, name, lambda: "FA3", raising=False)
        assert not runs()
    cudnn_attention._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not runs()
    cudnn_attention._capability.cache_clear()


def test_rows_that_kernels_cannot_load_are_copied(kernels):
    lengths = Lengths((64,), (64,))
    q, k, v, _ = drawn(lengths)
    shifted = torch.cat([q.flatten(), q.new_zeros(3)]).roll(3)[3:].view_as(q)
    wide = torch.cat([k, v[..., :1]], -1)[..., :8]  # rows of 9 elements
    found = attention.attend(
        shifted, wide, v.transpose(0, 1).contiguous().transpose(0, 1), lengths, 1.0
    )
    torch.testing.assert_close(found.o, attention._torch(q, k, v, lengths, 1.0).o)


def test_layers_reach_it(kernels):
    lengths = (64, 3, 40)
    offsets = torch.tensor([0, *accumulate(lengths)])
    q, k, v, _ = (x[None] for x in drawn(Lengths(lengths, lengths)))
    o = causal_attention(q, k, v, cu_seqlens=offsets)
    exact = attention._torch(q[0], k[0], v[0], Lengths(lengths, lengths), 8**-0.5).o
    torch.testing.assert_close(o[0], exact)
    assert {x[1:] for x in kernels.cudnn} == {(64, 64, True), (40, 40, True)}
