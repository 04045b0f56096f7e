"""Attention runs the flash attention that `torch.nn.attention` was told to activate.

FlashAttention-3 and 4 need a GPU and a package of their own. What stands for them here enters
PyTorch's dispatcher in the same way and has the same signatures, but computes on the CPU.
"""

from itertools import pairwise

import pytest
import torch
from torch.nn import attention as of_torch

from benchmarks import attention as benchmark
from fla_cp import build_cp_context, causal_attention
from fla_cp.comm.keys_values import SCHEMES
from fla_cp.kernels.torch import attention, flash
from fla_cp.partition.key_rows import Lengths
from tests.support.ranks import run_threads

pytestmark = pytest.mark.skipif(
    not hasattr(of_torch, "activate_flash_attention_impl"), reason="an older torch"
)
NAME = "stand-in"
OFFSETS = (0, 37, 40, 101, 150)


def lengths_of(queries, keys, causal):
    return Lengths(*(tuple(x.diff().tolist()) for x in (queries, keys)), causal=causal)


def forward(q, k, v, queries, keys, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale):
    assert (dropout_p, return_debug_mask, scale is None) == (0.0, False, False)
    assert max_q >= queries.diff().max() and max_k >= keys.diff().max()
    o, lse = attention._torch(q, k, v, lengths_of(queries, keys, is_causal), scale)
    unread = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return o, lse, unread, unread[:0], q.new_empty(0)


class Kernels:
    """What `activate_flash_attention_impl` gets: kernels in the dispatcher until `remove`.

    The keywords of the forward are those of PyTorch 2.10, or of 2.13's FlashAttention-3.
    """

    def __init__(self, torch_version):
        self.calls = []
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        forwards = {"2.10": self.forward_2_10, "2.13": self.forward_2_13}
        self.library.impl("_flash_attention_forward", forwards[torch_version])
        self.library.impl("_flash_attention_backward", self.backward)

    def remove(self):
        self.library._destroy()

    def forward_2_10(
        self, *given, scale=None, window_size_left=None, window_size_right=None,
        seqused_k=None, alibi_slopes=None,
    ):  # fmt: skip
        self.calls.append("forward")
        assert (window_size_left, window_size_right, seqused_k, alibi_slopes) == (None,) * 4
        return forward(*given, scale)

    def forward_2_13(
        self, *given, scale=None, window_size_left=-1, window_size_right=-1,
        seqused_k=None, alibi_slopes=None, block_table=None, out=None, num_splits=None,
    ):  # fmt: skip
        self.calls.append("forward")
        assert (window_size_left, window_size_right) == (-1, -1)
        assert (seqused_k, alibi_slopes, block_table, out, num_splits) == (None,) * 5
        return forward(*given, scale)

    def backward(
        self, do, q, k, v, o, lse, queries, keys, max_q, max_k, dropout_p, is_causal, rng_state,
        unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        self.calls.append("backward")
        assert (dropout_p, window_size_left, window_size_right) == (0.0, None, None)
        lengths = lengths_of(queries, keys, is_causal)
        return attention._torch_bwd(do, q, k, v, attention.Attended(o, lse), lengths, scale)


@pytest.fixture(params=["2.10", "2.13"])
def kernels(request, monkeypatch):
    """The list of calls of the activated kernels."""
    made = []

    def register():
        made.append(Kernels(request.param))
        return made[-1]

    # what a GPU would answer; its flash attention takes no values of another width than the keys
    monkeypatch.setattr(attention, "flash_runs", lambda q, v: True)
    of_torch.register_flash_attention_impl(NAME, register_fn=register)
    of_torch.activate_flash_attention_impl(NAME)
    assert of_torch.current_flash_attention_impl() == NAME
    yield made[0].calls
    if of_torch.current_flash_attention_impl() is not None:
        of_torch.restore_flash_attention_impl()


def drawn():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 150, 4, 8), (1, 150, 2, 8), (1, 150, 2, 6), (1, 150, 4, 6)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def results(attend, tensors, do):
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def wanted():
    *tensors, do = drawn()
    return results(lambda q, k, v: benchmark.documents_one_by_one(q, k, v, OFFSETS), tensors, do)


def assert_equal(found, exact):
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_an_activated_flash_attention_computes_both_directions(kernels):
    *tensors, do = drawn()
    packed = torch.tensor(OFFSETS)
    found = results(lambda *x: causal_attention(*x, cu_seqlens=packed), tensors, do)
    assert kernels == ["forward", "backward"]
    assert_equal(found, wanted())


def test_without_it_the_kernel_of_torch_itself_is_called(kernels):
    *tensors, _ = drawn()
    of_torch.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError, match=r"_flash_attention_forward.*'CPU'"):
        causal_attention(*tensors)  # torch has it for CUDA alone
    assert not kernels


@pytest.fixture
def hopper(monkeypatch):
    """A machine with FlashAttention-3; returns the calls of its kernels."""
    calls = []

    def register():
        found = Kernels("2.13")
        calls.append(found.calls)
        return found

    monkeypatch.setattr(attention, "flash_runs", lambda q, v: True)
    monkeypatch.setitem(of_torch._registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr(flash, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield calls
    if of_torch.current_flash_attention_impl() is not None:
        of_torch.restore_flash_attention_impl()


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("wanted_", ["auto", "on"])
def test_flash_attention_3_is_activated_where_it_can_run(hopper, wanted_):
    assert not flash.activate_flash_attention_3("off", GPU) and not hopper
    assert flash.activate_flash_attention_3(wanted_, GPU)
    assert of_torch.current_flash_attention_impl() == "FA3"
    *tensors, do = drawn()
    packed = torch.tensor(OFFSETS)
    found = results(lambda *x: causal_attention(*x, cu_seqlens=packed), tensors, do)
    assert hopper == [["forward", "backward"]]
    assert_equal(found, wanted())


def without(monkeypatch, what):
    if what == "package":
        monkeypatch.setattr(flash, "find_spec", lambda name: None)
    elif what == "torch":
        monkeypatch.delattr(of_torch, "list_flash_attention_impls")
    elif what == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return torch.device("cpu") if what == "gpu" else GPU


@pytest.mark.parametrize(
    "what, lacks",
    {
        "package": "the package flash-attn-3, whose module flash_attn_interface",
        "torch": "a PyTorch that can activate it, got",
        "capability": r"a GPU of compute capability 9.0, got 8.0",
        "gpu": "a GPU, got cpu",
    }.items(),
)
def test_elsewhere_it_is_left_alone_or_refused(hopper, monkeypatch, what, lacks):
    device = without(monkeypatch, what)
    assert not flash.activate_flash_attention_3("auto", device)
    with pytest.raises(ValueError, match=f"FlashAttention-3 needs {lacks}"):
        flash.activate_flash_attention_3("on", device)
    assert not hopper and of_torch.current_flash_attention_impl() is None


def sharded(group, rank, exchange):
    packed = torch.tensor(OFFSETS)
    context = build_cp_context(packed, group, cu_seqlens_cpu=packed)
    *tensors, do = (context.shard(x) for x in drawn())
    call = results(
        lambda *x: causal_attention(*x, cp_context=context, exchange=exchange), tensors, do
    )
    assert_equal(call, [context.shard(x) for x in wanted()])


@pytest.mark.parametrize("exchange", SCHEMES)
def test_it_computes_what_every_exchange_brings(kernels, exchange):
    run_threads(sharded, 2, exchange)
    assert kernels.count("forward") >= 2 and kernels.count("backward") >= 2


def varlen_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None,
    scale=None,
):  # fmt: skip
    assert is_causal and return_aux is None and scale is None and value.shape == key.shape
    return packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def varlen_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    assert window_size == (-1, 0) and enable_gqa and value.shape == key.shape
    return packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def packed(q, k, v, queries, keys, max_q, max_k):
    assert queries.equal(keys) and max_q == max_k == max(b - a for a, b in pairwise(OFFSETS))
    return benchmark.documents_one_by_one(q[None], k[None], v[None], OFFSETS)[0]


@pytest.mark.parametrize("call", [varlen_2_10, varlen_2_13])
def test_the_benchmark_calls_either_signature_of_torch(monkeypatch, call):
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", call)
    *tensors, do = drawn()
    peer = benchmark.varlen(OFFSETS, benchmark.Heads(4, 2, 8, 6), "cpu")
    assert_equal(results(peer, tensors, do), wanted())
