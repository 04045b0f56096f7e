"""Bad inputs: every row of the error table is raised before anything runs."""

import pytest
import torch
import torch.distributed as dist

import fla_cp
import fla_cp.comm.collectives as collectives
from fla_cp import (
    build_cp_context,
    causal_conv1d,
    chunk_kda,
    cp_chunk_kda,
    kda_gate,
    zigzag_token_ranges,
)
from fla_cp.kernels import TORCH, resolve
from tests.support.cases import PACKED, Case
from tests.support.ranks import run_threads

CASE = Case("valid", T=20, H=2, HV=4, K=8, V=6)
CU = torch.tensor([0, 5, 20])


def shaped(name, *shape, **options):
    return {name: torch.zeros(*shape, **options)}


def cast(name, dtype):
    return {name: CASE.inputs(dtype=torch.float32)[name].to(dtype)}


CONTEXT = build_cp_context(torch.tensor([0, 20]), None)

MISTAKES = {
    "q scalar": ({"q": torch.tensor(0.0)}, r"q must have 4 dimensions, got shape \(\)"),
    "q vector": (shaped("q", 20), r"q must have 4 dimensions, got shape \(20,\)"),
    "q ndim": (shaped("q", 1, 20, 16), r"q must have 4 dimensions, got shape \(1, 20, 16\)"),
    "beta ndim": (shaped("beta", 1, 20, 4, 1), r"beta must have 3 dimensions"),
    "k shape": (shaped("k", 1, 20, 2, 9), r"k must have shape .* = \(1, 20, 2, 8\), got"),
    "v length": (shaped("v", 1, 19, 4, 6), r"v must have shape .* \(1, 20, 4, 6\), got"),
    "g heads": (shaped("g", 1, 20, 2, 8), r"g must have shape .* \(1, 20, 4, 8\)"),
    "heads": (
        shaped("v", 1, 20, 3, 6),
        r"value heads must be a multiple of q heads, got HV=3, H=2",
    ),
    "V": (shaped("v", 1, 20, 4, 257), r"V must be from 1 to 256, got V=257"),
    "dtype k": (
        cast("k", torch.bfloat16),
        r"k must have q's dtype torch.float32, got torch.bfloat16",
    ),
    "dtype g": (cast("g", torch.float16), r"g must have q's dtype .* or fp32, got torch.float16"),
    "dtype q": (cast("q", torch.int32), r"q must be bf16, fp16, fp32 or fp64, got torch.int32"),
    "device": (shaped("g", 1, 20, 4, 8, device="meta"), r"g must be on q's device cpu, got meta"),
    "cu start": ({"cu_seqlens": torch.tensor([1, 20])}, r"cu_seqlens must start at 0, got 1"),
    "cu order": ({"cu_seqlens": torch.tensor([0, 9, 5, 20])}, r"must not decrease, got 9 then 5"),
    "cu end": ({"cu_seqlens": torch.tensor([0, 19])}, r"cu_seqlens must end at T=20, got 19"),
    "cu dtype": (
        {"cu_seqlens": torch.tensor([0.0, 20.0])},
        r"must be int32 or int64, got .*float32",
    ),
    "cu ndim": ({"cu_seqlens": torch.tensor([[0, 20]])}, r"cu_seqlens must be 1-d .*\(1, 2\)"),
    "cu not a tensor": ({"cu_seqlens": [0, 20]}, r"cu_seqlens must be a tensor, got list"),
    "host cu alone": ({"cu_seqlens_cpu": CU}, r"copy of cu_seqlens, which is missing"),
    "host cu beside context": (
        {"cu_seqlens_cpu": CU, "cp_context": CONTEXT},
        r"cu_seqlens_cpu must not be passed beside cp_context",
    ),
    "host cu shape": (
        {"cu_seqlens": CU, "cu_seqlens_cpu": torch.tensor([0, 20])},
        r"cu_seqlens_cpu must have cu_seqlens' shape \(3,\), got \(2,\)",
    ),
    "host cu values": (
        {"cu_seqlens": CU, "cu_seqlens_cpu": torch.tensor([0, 6, 20])},
        r"cu_seqlens_cpu must equal cu_seqlens \[0, 5, 20\], got \[0, 6, 20\]",
    ),
    "host cu dtype": (
        {"cu_seqlens": CU, "cu_seqlens_cpu": CU.float()},
        r"cu_seqlens_cpu must be int32 or int64, got torch.float32",
    ),
    "cu beside context": (
        {"cu_seqlens": CU, "cp_context": CONTEXT},
        r"cu_seqlens must not be passed beside cp_context",
    ),
    "state N": (
        shaped("initial_state", 2, 4, 8, 6),
        r"initial_state must have shape \[N, HV, K, V\] = \(1, 4, 8, 6\), got \(2, 4, 8, 6\)",
    ),
    "state layout": (
        shaped("initial_state", 1, 4, 6, 8),
        r"got \(1, 4, 6, 8\); this is the other layout: pass state_v_first=True",
    ),
    "state other layout": (
        {**shaped("initial_state", 1, 4, 8, 6), "state_v_first": True},
        r"\[N, HV, V, K\] = \(1, 4, 6, 8\).*pass state_v_first=False",
    ),
    "state dtype": (
        shaped("initial_state", 1, 4, 8, 6, dtype=torch.float64),
        r"initial_state must be bf16, fp16 or fp32 .*got torch.float64 with q of torch.float32",
    ),
    "safe without bound": (
        {**shaped("A_log", 4), "use_gate_in_kernel": True, "safe_gate": True},
        r"safe_gate needs lower_bound in \[-5, 0\), got None",
    ),
    "safe bound": ({"safe_gate": True, "lower_bound": -6.0}, r"lower_bound in \[-5, 0\), got -6"),
    "bound sign": ({"lower_bound": 0.5}, r"lower_bound must be below 0, got 0.5"),
    "bound zero": ({"lower_bound": 0.0}, r"lower_bound must be below 0, got 0.0"),
    "no A_log": ({"use_gate_in_kernel": True}, r"use_gate_in_kernel needs A_log, or a lower_bound"),
    "A_log unread": (shaped("A_log", 4), r"A_log is read only with use_gate_in_kernel=True"),
    "A_log size": (
        {**shaped("A_log", 3), "use_gate_in_kernel": True},
        r"A_log must have shape \[HV\] = \(4,\), apart from dims of size 1, got \(3,\)",
    ),
    "A_log square": (
        {**shaped("A_log", 2, 2), "use_gate_in_kernel": True},
        r"A_log must have shape \[HV\] = \(4,\), .* got \(2, 2\)",
    ),
    "dt_bias size": (
        {**shaped("dt_bias", 4), "use_gate_in_kernel": True, "lower_bound": -5.0},
        r"dt_bias must have shape \[HV\*K\] or \[HV, K\] = \(32,\) or \(4, 8\), .* got \(4,\)",
    ),
    "dt_bias transposed": (
        {**shaped("dt_bias", 8, 4), "use_gate_in_kernel": True, "lower_bound": -5.0},
        r"dt_bias must have shape .* got \(8, 4\)",
    ),
    "dt_bias folded": (
        {**shaped("dt_bias", 2, 16), "use_gate_in_kernel": True, "lower_bound": -5.0},
        r"dt_bias must have shape .* got \(2, 16\)",
    ),
    "two names": (
        {"transpose_state_layout": True, "state_v_first": True},
        r"transpose_state_layout and state_v_first are two names of one option: .* True and True",
    ),
    "two names, one off": (
        {"transpose_state_layout": False, "state_v_first": True},
        r"two names of one option: give one, got False and True",
    ),
    "A_log dtype": (
        {**shaped("A_log", 4, dtype=torch.bfloat16), "use_gate_in_kernel": True},
        r"A_log must be fp32",
    ),
    "neg eigval": ({"allow_neg_eigval": True}, r"needs use_beta_sigmoid_in_kernel=True"),
    "impl": ({"impl": "cuda"}, r"impl must be 'auto', 'torch' or 'triton', got 'cuda'"),
}


def call(**changes):
    x = {**CASE.inputs(dtype=torch.float32), **changes}
    if "initial_state" not in changes:
        del x["initial_state"]
    packed = [x.pop(n) for n in PACKED]
    return chunk_kda(*packed, **x)


def test_the_unchanged_call_is_valid():
    call()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named(name, monkeypatch):
    changes, message = MISTAKES[name]
    monkeypatch.setattr("fla_cp.autograd.forward", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_triton_refuses_what_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="impl='triton' runs on CUDA devices, got cpu"):
        call(impl="triton")
    x = [CASE.inputs()[n] for n in PACKED]
    with pytest.raises(ValueError, match=r"bf16, fp16 and fp32, got torch.float64"):
        chunk_kda(*x, impl="triton")
    assert resolve("auto", torch.device("cuda"), torch.float64) is TORCH
    assert resolve("auto", torch.device("cpu"), torch.float32) is TORCH


def test_triton_refuses_tensors_of_another_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    with pytest.raises(ValueError, match="current GPU, cuda:0, got tensors on cuda:1; call torch"):
        resolve("auto", torch.device("cuda:1"), torch.bfloat16)
    resolve("auto", torch.device("cuda:0"), torch.bfloat16)


def test_K_up_to_the_limit():
    x = torch.zeros(1, 3, 1, 257)
    with pytest.raises(ValueError, match="K must be from 1 to 256, got K=257"):
        chunk_kda(x, x, x[..., :8], x, x[..., 0])
    x = x[..., :256]
    assert chunk_kda(x, x, x, x, x[..., 0])[0].shape == x.shape


@pytest.mark.parametrize("operator", [chunk_kda, fla_cp.fused_recurrent_kda])
def test_keys_without_channels(operator):
    x = torch.zeros(1, 3, 1, 8)
    with pytest.raises(ValueError, match="K must be from 1 to 256, got K=0"):
        operator(x[..., :0], x[..., :0], x, x[..., :0], x[..., 0])


def test_no_token_without_cu_seqlens():
    x = Case("none", T=3, states=False).inputs()
    with pytest.raises(ValueError, match="at least one row and one token, got B=1, T=0"):
        chunk_kda(*(t[:, :0] for t in x.values()))
    with pytest.raises(ValueError, match="at least one row and one token, got B=0, T=3"):
        chunk_kda(*(t[:0] for t in x.values()))


def test_rows_with_cu_seqlens():
    x = Case("rows", B=2, T=10, states=False).inputs()
    with pytest.raises(ValueError, match="with cu_seqlens B must be 1, got B=2"):
        chunk_kda(*x.values(), cu_seqlens=torch.tensor([0, 10]))


def test_local_length_and_rows_under_a_context():
    context = build_cp_context(torch.tensor([0, 30]), None)
    with pytest.raises(ValueError, match=r"must be context.local_tokens=30, got T=20"):
        call(cp_context=context)
    x = Case("rows", B=2, T=15, states=False).inputs()
    with pytest.raises(ValueError, match="under cp_context B must be 1"):
        cp_chunk_kda(*x.values(), context)
    with pytest.raises(ValueError, match=r"cp_context must be a FLACPContext .* got NoneType"):
        cp_chunk_kda(*x.values(), None)
    with pytest.raises(ValueError, match=r"cp_context must be a FLACPContext .* got object"):
        chunk_kda(*x.values(), cp_context=object())


def test_unknown_keyword():
    with pytest.raises(TypeError, match="safe_gates"):
        call(safe_gates=True)


@pytest.mark.parametrize(
    "ranges, message",
    [
        ([[(0, 5)], [(6, 10)]], r"a gap at token 5: \[6, 10\) of rank 1 follows 5"),
        ([[(0, 6)], [(5, 10)]], r"an overlap at token 5"),
        ([[(0, 5)], [(5, 9)]], r"they end at 9"),
        ([[(0, 10)]], r"one list per rank, got 1 for 2 ranks"),
        ([[(5, 0)], [(0, 10)]], r"must be \[start, stop\), got \[5, 0\) on rank 0"),
        ([[(0, 5)], [(5, 12)]], r"they end at 12"),
    ],
)
def test_token_ranges(ranges, message, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr(collectives, "all_gather", lambda *a: pytest.fail("a collective ran"))
    with pytest.raises(ValueError, match=message):
        build_cp_context(torch.tensor([0, 10]), object(), token_ranges=ranges, check=True)


def test_context_offsets():
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        build_cp_context(torch.tensor([0, 5, 3]), None)
    with pytest.raises(ValueError, match="cu_seqlens must be int32 or int64"):
        build_cp_context(torch.tensor([0.0, 5.0]), None)
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must equal cu_seqlens \[0, 5\]"):
        build_cp_context(torch.tensor([0, 5]), None, cu_seqlens_cpu=torch.tensor([0, 4]))


def not_in_the_group(group, rank):
    pair = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="group must contain this process"):
            build_cp_context(torch.tensor([0, 5]), pair)


def test_group_of_others():
    run_threads(not_in_the_group, 3)


@pytest.mark.parametrize("width", [0, -3])
def test_context_convolution_width(width):
    with pytest.raises(ValueError, match=f"conv1d_kernel_size must be at least 1, .* got {width}"):
        build_cp_context(torch.tensor([0, 5]), None, conv1d_kernel_size=width)


@pytest.mark.parametrize(
    "changes, message",
    [
        (shaped("x", 4, 3), r"x must be \[B, T, D\], got shape \(4, 3\)"),
        (shaped("weight", 4, 4), r"weight must be \[D, W\] with D=3, got \(4, 4\)"),
        (shaped("bias", 4), r"bias must have shape \[D\] = \(3,\), got \(4,\)"),
        ({"activation": "relu"}, r"activation must be None, 'silu' or 'swish', got 'relu'"),
        (shaped("weight", 3, 4, dtype=torch.float64), r"weight must have x's dtype"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens must end at T=7, got 5"),
        (
            {"cp_context": build_cp_context(torch.tensor([0, 7]), None)},
            r"conv1d_kernel_size=None, but weight has W=4: pass conv1d_kernel_size=4",
        ),
    ],
)
def test_convolution(changes, message):
    x = {"x": torch.zeros(1, 7, 3), "weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{**x, **changes})


def test_gate_alone():
    with pytest.raises(ValueError, match="kda_gate needs A_log, or a lower_bound, got neither"):
        kda_gate(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"g must be \[.., HV, K\]"):
        kda_gate(torch.zeros(3), torch.zeros(1))


def test_zigzag_is_accepted():
    from fla_cp.partition.checks import check_token_ranges

    for R in (1, 2, 5):
        check_token_ranges(zigzag_token_ranges(37, R), 37, R)


def test_offsets_of_a_known_call_are_checked_again():
    """Calls that differ in their offsets alone are known together, but not their mistakes."""
    q = torch.zeros(1, 8, 1, 4)
    x = q, q, q, q, q[..., 0]

    def call(*offsets, copy=None, **kind):
        cu = torch.tensor(offsets, **kind)
        return fla_cp.chunk_kda(*x, cu_seqlens=cu, cu_seqlens_cpu=copy)

    call(0, 3, 8)
    call(0, 8, copy=torch.tensor([0, 8]))
    call(0, 1, 2, 8)
    for wrong in ((0,), (), (0, 3, 7), (0, 5, 3, 8), (1, 8)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            call(*wrong, dtype=torch.int64)
    for copy in (torch.tensor([0, 3, 8]), torch.tensor([0, 4, 6, 8])):
        with pytest.raises(ValueError, match="cu_seqlens_cpu"):
            call(0, 4, 8, copy=copy)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call(0.0, 8.0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        fla_cp.chunk_kda(*x, cu_seqlens=torch.tensor([[0, 8]]))


def test_states_of_a_known_call_are_counted_again():
    q, state = torch.zeros(1, 8, 1, 4), torch.zeros(2, 1, 4, 4)

    def call(*offsets):
        return fla_cp.chunk_kda(
            *(q, q, q, q, q[..., 0]), cu_seqlens=torch.tensor(offsets), initial_state=state
        )

    for _ in range(2):
        call(0, 3, 8)
        call(0, 8, 8)
    with pytest.raises(ValueError, match=r"initial_state must have shape .* got \(2, 1, 4, 4\)"):
        call(0, 3, 5, 8)
