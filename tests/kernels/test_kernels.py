"""The Triton kernels in Triton's interpreter, on CPU: every option against fp64.

Inputs are fp32, since the interpreter's bf16 arithmetic is not the hardware's. tests/gpu checks on
a GPU what only a GPU can show.
"""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")  # interpreted: conftest.py

from benchmarks import tune
from fla_cp import build_cp_context, chunk_kda, zigzag_token_ranges
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import intra
from fla_cp.kernels.triton.intra_channelwise import gated_operands
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.cases import INSIDE, PACKED, Case, options
from tests.support.closeness import assert_within_budget
from tests.support.running import oracle, run, run_sharded
from tests.support.sweeps import crossed, some

# products of pairs that are masked away later may overflow; numpy warns of it
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("overflow encountered", "invalid value encountered")
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Lets kernels run on CPU tensors, in this module only, and fp32 take the path of bf16."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    take_both_paths(monkeypatch, torch.float32, torch.bfloat16)
    yield
    forget_paths()


def take_both_paths(monkeypatch, *dtypes):
    """Lets these dtypes take the path of a safe gate."""
    monkeypatch.setattr(bundles, "SAFE_DTYPES", dtypes)
    forget_paths()


def forget_paths():
    for remembered in (bundles.rule_options, bundles.local_paths):
        remembered.cache_clear()


SAFE = {"safe_gate": True, "lower_bound": -5.0}
SMALL = {"T": 70, "H": 1, "HV": 2, "K": 16, "V": 16}

CASES = [
    Case("given", **SMALL),
    Case("inside", **SMALL, options=options(**INSIDE)),
    Case("bounded", **SMALL, options=options(**INSIDE, lower_bound=-5.0)),
    Case("safe", **SMALL, options=options(**INSIDE, **SAFE)),
    Case("safe-exp", **SMALL, options=options(**INSIDE, **SAFE, use_exp2=False)),
    Case("given-safe", **SMALL, decay=5.0, options=options(**SAFE)),
    Case("kept", **SMALL, options=options(**INSIDE, disable_recompute=True)),
    Case("neg-eigval", **SMALL, options=options(**INSIDE, allow_neg_eigval=True, scale=0.5)),
    Case("strong-decay", **SMALL, decay=40.0),
    Case("no-decay", **SMALL, decay=0.0),
    Case("one-token", **{**SMALL, "T": 1}),
    Case("packed", **{**SMALL, "T": 130}, cu_seqlens=(0, 0, 1, 64, 130)),
    Case("rows", **SMALL, B=2, states=False),
    Case("odd-dims", T=65, H=2, HV=2, K=24, V=40, options=options(**INSIDE)),
    Case("two-key-tiles", T=65, H=1, HV=1, K=96, V=16, options=options(**INSIDE)),
    Case("wide", T=33, H=1, HV=1, K=192, V=16, options=options(**INSIDE, **SAFE)),
]


def compare(case, actual, exact, baseline):
    # bf16's path takes decays from differences of gc, at most 64 * 5 / ln 2, in fp32
    shift = 462 * 2**-24 if case.keywords.get("safe_gate") else 0.0
    for name, value in actual.items():
        if name in ("dA_log", "ddt_bias"):  # sums over tokens: their terms round, not the result
            error = (value.double() - exact[name]).abs().max()
            assert error <= 32 * torch.finfo(value.dtype).eps * exact["dg"].abs().sum(), name
        else:
            # 4 would do on most processors; where products are added in wider registers, the torch
            # stages err less, and one case needs 4.1
            assert_within_budget(name, value, exact[name], baseline[name], factor=5.0, shift=shift)


FAST = "bounded", "safe-exp", "kept", "strong-decay", "one-token", "packed", "rows", "odd-dims"


@pytest.mark.parametrize("case", some(CASES, FAST), ids=lambda c: c.name)
def test_kernels_err_like_the_torch_stages(case):
    rounded = {n: t.double() for n, t in case.inputs(dtype=torch.float32).items()}
    exact, baseline = oracle(case, rounded), run(case, torch.float32)
    compare(case, run(case, torch.float32, impl="triton"), exact, baseline)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("inside", "strong-decay")])
def test_one_path_serves_every_chunk_of_fp32(case, monkeypatch):
    take_both_paths(monkeypatch)
    test_kernels_err_like_the_torch_stages(case)


def test_each_chunk_takes_the_path_that_its_decays_allow():
    """2^-100 over 16 rows is the bound: one path for what decays less, the other for the rest."""
    case = Case("steep", T=150, H=1, HV=2, K=24, V=16)
    bound = 100 * math.log(2)
    x = case.inputs(dtype=torch.float32)
    g = x["g"].fill_(-0.1)
    g[0, :64, 0] = -0.99 * bound / 16
    g[0, 64:128, 1] = -1.01 * bound / 16
    g[0, 64 + 20, 0, 7] = -bound  # one channel of one token
    g[0, 140, 1, 23] = -bound
    exact = oracle(case, {n: t.double() for n, t in x.items()})
    baseline = run(case, torch.float32, inputs=x)
    compare(case, run(case, torch.float32, impl="triton", inputs=x), exact, baseline)
    given = Inputs(*(x[n][0] for n in PACKED), A_log=None, dt_bias=None)
    chunks = intra(DeltaRule(scale=0.3), Packing.build((0, 150)), given)
    assert chunks.steep.tolist() == [[0, 0], [1, 1], [0, 1]]


@pytest.mark.parametrize("gate", [{}, SAFE], ids=["any", "safe"])
def test_recomputed_gated_operands_are_the_forwards(gate):
    case = Case("again", T=70, H=1, HV=2, K=24, V=16, cu_seqlens=(0, 66, 70))
    x = case.inputs(dtype=torch.float32)
    rates = {"A_log": torch.randn(2), "dt_bias": torch.randn(2 * 24)}
    x = Inputs(*(x[n][0] for n in PACKED), **rates)
    bounded = {"gate": "sigmoid", **gate} if gate else {"gate": "softplus"}
    rule = DeltaRule(scale=0.3, qk_l2norm=True, beta_factor=1.0, **bounded)
    packing = Packing.build(case.cu_seqlens)
    c = intra(rule, packing, x)
    for again, kept in zip(
        gated_operands(rule, packing, x, c.rows, c.anchors), (c.qg, c.k_decayed, c.kg), strict=True
    ):
        assert (again - kept).abs().max() <= 3e-5 * kept.abs().max()


@pytest.mark.parametrize("g, safe", crossed([0.0, -5.0, "mixed"], [True, False]))
def test_extreme_gates_stay_finite(g, safe):
    case = Case("extreme", **SMALL, states=False)
    x = case.inputs(dtype=torch.float32)
    steps = torch.arange(case.T) % 2 * -5.0 if g == "mixed" else torch.full((case.T,), g)
    x["g"] = steps[None, :, None, None].expand_as(x["g"]).contiguous()
    leaves = [x[n].requires_grad_() for n in PACKED]
    bound = SAFE if safe else {}
    both = []
    for impl in ("torch", "triton"):
        o, final = chunk_kda(*leaves, output_final_state=True, impl=impl, **bound)
        both.append((o, final, *torch.autograd.grad(o.sum() + final.sum(), leaves)))
    for a, b in zip(*both, strict=True):
        assert b.isfinite().all()
        assert (a - b).abs().max() <= 1e-4 * a.abs().max().clamp(min=1e-3)


def test_state_layouts_and_intermediate_states():
    case = Case("states", **{**SMALL, "T": 130})
    x = case.inputs(dtype=torch.float32)
    packed, S = [x[n] for n in PACKED], x["initial_state"]
    more = {"output_final_state": True, "return_intermediate_states": True}
    plain = chunk_kda(*packed, initial_state=S, impl="triton", **more)
    wide = [t.double() for t in packed]
    exact = chunk_kda(*wide, initial_state=S.double(), impl="torch", **more)
    torch_ = chunk_kda(*packed, initial_state=S, impl="torch", **more)
    flipped = chunk_kda(*packed, initial_state=S.mT, impl="triton", state_v_first=True, **more)
    flipped = flipped[0], flipped[1].mT, flipped[2].mT
    for found, factor, baseline in ((plain, 4.0, torch_), (flipped, 2.0, plain)):
        for name, *values in zip(("o", "final_state", "h"), found, exact, baseline, strict=True):
            assert_within_budget(name, *values, factor)


@pytest.mark.parametrize("v_first", [False, True])
def test_kernels_write_states_in_the_callers_layout(v_first, monkeypatch):
    """Strides give the layout: results are dense without a copy, and arguments are not copied."""
    from fla_cp.kernels.triton import launch as launches
    from fla_cp.kernels.triton.backend import TRITON as backend
    from fla_cp.kernels.triton.intra import intra

    read = []

    def seen(kernel, grid, *args, **kwargs):
        if kernel.fn.__name__ in ("scan_kernel", "scan_bwd_kernel"):
            given = tree_leaves((args, kwargs))
            read.extend(t.data_ptr() for t in given if isinstance(t, torch.Tensor))
        kernel[grid](*args, **kwargs)

    monkeypatch.setattr(launches, "runner", seen)
    from fla_cp.comm.carry import States
    from fla_cp.kernels.torch.intra import Inputs, Spec
    from fla_cp.partition.packing import Packing
    from fla_cp.rule import DeltaRule

    T, H, K, V = 100, 2, 16, 32
    q, k, g = torch.randn(3, T, H, K)
    x = Inputs(q, k, torch.randn(T, H, V), -g.abs(), torch.rand(T, H), None, None)
    rule, packing = (
        DeltaRule(scale=1.0, qk_l2norm=True, state_v_first=v_first),
        Packing.build((0, T)),
    )
    spec, c = Spec(rule, packing), intra(rule, packing, x)
    S0 = torch.randn(1, H, V, K).mT
    assert not S0.is_contiguous()
    wanted = {"want_states": True, "want_end": True}
    o, h, _, S_end = backend.scan_output(spec, c, States((0,), S0), **wanted)
    dense = backend.scan_output(spec, c, States((0,), S0.contiguous()), **wanted)
    for a, b in ((o, dense[0]), (h, dense[1]), (S_end, dense[3])):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    grads = backend.output_bwd(spec, c, torch.randn_like(x.v))
    dS = States((0,), torch.randn(1, H, V, K).mT)
    _, dS0 = backend.scan_bwd(spec, x, grads, dS, want_start=True, concurrent=False)
    assert {S0.data_ptr(), dS.value.data_ptr()} <= set(read)
    for state in (h, S_end, dS0):
        assert state.shape[-2:] == (K, V)
        assert (state.mT if v_first else state).is_contiguous()


def test_scans_of_a_backward_run_concurrently_if_both_fit(monkeypatch):
    from fla_cp.kernels.torch.intra import Inputs, Spec
    from fla_cp.kernels.triton.backend import TritonBackend
    from fla_cp.kernels.triton.intra import intra
    from fla_cp.kernels.triton.tile_table import Tuning
    from fla_cp.partition.packing import Packing
    from fla_cp.rule import DeltaRule

    backend = TritonBackend(tuning=Tuning(sms=16))

    def fit(HV, T=64, cut=None, **rule):
        qk = torch.randn(2, T, 1, 128, dtype=torch.bfloat16)
        v, g = torch.randn(T, HV, 128, dtype=torch.bfloat16), -torch.rand(T, HV)
        rule = DeltaRule(**{"scale": 1.0, "per_head": True, "removal": "none", **rule})
        if not rule.per_head:
            g = -torch.rand(T, HV, 128)
        p = qk[0] if rule.removal == "p" else None
        beta = None if rule.removal == "none" else torch.rand(T, HV)
        x = Inputs(*qk, v, g, beta, None, None, p)
        packing = Packing.build((0, T), segment_chunks=cut)
        return backend.runs_concurrently(Spec(rule, packing), intra(rule, packing, x))

    assert fit(HV=4)  # 4 chains of 2 value tiles, twice
    assert not fit(HV=5)
    assert not fit(HV=4, T=128, cut=1)
    assert not fit(HV=4, keep_intermediates=True)  # nothing is recomputed
    assert fit(HV=4, per_head=False) and fit(HV=4, removal="k")
    assert not fit(HV=4, removal="p")  # three operands a chunk: too much memory
    assert not fit(HV=0)


def test_slow_memory_runs_long_scans_one_by_one(monkeypatch):
    """With one decay a head and as many key heads as value heads, as measured on an H100."""
    from fla_cp.kernels.torch.intra import Inputs, Spec
    from fla_cp.kernels.triton import backend as triton_backend
    from fla_cp.kernels.triton.intra import intra
    from fla_cp.kernels.triton.tile_table import Tuning, memory_speed
    from fla_cp.partition.packing import Packing
    from fla_cp.rule import DeltaRule

    assert memory_speed(torch.device("cpu")) == float("inf")
    monkeypatch.setattr(triton_backend, "LONG_CHUNKS", 2)

    def fit(memory, T=128, heads=2, per_head=True, sms=15, gluon=True):
        rule = DeltaRule(scale=1.0, per_head=per_head, removal="k")
        packing = Packing.build((0, T))
        qk = [torch.randn(T, heads, 128, dtype=torch.bfloat16) for _ in "qk"]
        v = torch.randn(T, 2, 128, dtype=torch.bfloat16)
        g = -torch.rand(T, 2) if per_head else -torch.rand(T, 2, 128)
        x = Inputs(*qk, v, g, torch.rand(T, 2), None, None)
        tuning = Tuning(sms=sms, memory=memory, gluon=gluon)
        chunks = intra(rule, packing, x)._replace(tuning=tuning)
        backend = triton_backend.TritonBackend(tuning=tuning)
        return backend.runs_concurrently(Spec(rule, packing), chunks)

    assert fit(4.9e12) and not fit(3.35e12)
    assert fit(3.35e12, T=64)  # one chunk is not long
    assert fit(3.35e12, heads=1)  # a group reads q and k once
    assert fit(3.35e12, per_head=False)
    assert fit(3.35e12, sms=16)  # few programs do not fill memory
    assert fit(3.35e12, gluon=False)


def test_rehearsals_know_the_memory_of_the_gpu(monkeypatch):
    """Tensors of a rehearsal have no GPU, but choose what calls on it will."""
    from fla_cp.kernels.triton import tile_table
    from fla_cp.kernels.triton.backend import TritonBackend

    monkeypatch.setattr(tile_table, "memory_speed", lambda device: 3.35e12)
    rehearsed = TritonBackend().rehearsing(torch.device("cpu"))
    monkeypatch.undo()
    assert rehearsed.tuning.memory_speed(torch.device("meta")) == 3.35e12


@pytest.mark.wide
@pytest.mark.parametrize("chunks", [1, 8])
def test_reverse_scan_of_wide_tiles_is_the_transposed_one(chunks):
    """With 64 columns the state is the left operand: the same numbers except for rounding."""
    from benchmarks.tune import cut_into, forced
    from fla_cp.kernels.triton.tile_table import Tile

    case = Case("flip", **{**SMALL, "T": 150, "K": 24, "V": 72})
    results = []
    for BV in (32, 64):
        wide = {name: Tile(32, BV, 4, 1) for name in ("scan_bwd", "scan_bwd_ends")}
        with forced(wide), cut_into(chunks):
            results.append(run(case, torch.float32, impl="triton"))
    narrow, wide = results
    for name, x in narrow.items():
        assert (wide[name] - x).abs().max() <= 1e-5 * x.abs().max(), name


@pytest.mark.bits
@pytest.mark.parametrize("member", ["kda", "gated_delta_rule"])
def test_prefetched_lines_change_no_bit(member):
    """Kernels of several stages prefetch lines that later phases load, with a use that is never
    executed. The products, and so all bits, are the same as without.
    """
    import fla_cp
    from benchmarks.tune import forced
    from fla_cp.kernels.triton.tile_table import Tile

    gen = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 100, 2, n, generator=gen).requires_grad_() for n in (40, 40, 24)]
    channels = (40,) if member == "kda" else ()
    g = torch.randn(1, 100, 2, *channels, generator=gen).requires_grad_()
    beta = torch.rand(1, 100, 2, generator=gen).requires_grad_()
    inside = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    inside |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 * len(channels) * 40 or 2)}
    if member == "kda":
        inside |= {"safe_gate": True, "lower_bound": -5.0}
    stage = "intra_bwd" if member == "kda" else "dqk_head"
    results = []
    for stages in (1, 2):
        with forced({stage: Tile(32, 32, 4, stages)}):
            o, _ = getattr(fla_cp, f"chunk_{member}")(*x, g, beta, **inside, impl="triton")
            results.append(torch.autograd.grad(o.float().square().sum(), [*x, g, beta]))
    for a, b in zip(*results, strict=True):
        assert a.abs().sum() > 0
        assert torch.equal(a, b)


@pytest.mark.bits
@pytest.mark.parametrize("chunks", [1, 8], ids=["segments", "whole"])
def test_order_of_concurrent_scans(chunks, monkeypatch):
    """The inputs of the side stream exist before it starts, and its results are waited for."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    from benchmarks.tune import cut_into, forced, now
    from fla_cp import chunk_gated_delta_rule
    from fla_cp.kernels.triton import launch as launches
    from fla_cp.kernels.triton import streams as of_streams
    from fla_cp.kernels.triton.tile_table import Tile

    marked = {
        name: Tile(16, 32, 4, 2) for name in ("scan_bwd_concurrent", "scan_bwd_ends_concurrent")
    }
    events, streams = [], ["main"]

    side = SimpleNamespace(
        side="side",
        side_waits=lambda: events.append("side waits for main"),
        main_waits=lambda: events.append("main waits for side"),
    )

    def logged(kernel, grid, *args, **kwargs):
        if (name := kernel.fn.__name__) in ("scan_kernel", "scan_bwd_kernel", "dqk_head_kernel"):
            beside = " beside" * ("S" in kwargs and kwargs["S"].NS == 2)  # by their tiles' stages
            events.append(f"{name} on {streams[-1]}{beside}")
        kernel[grid](*args, **kwargs)

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    q, k, v = torch.randn(3, 1, 70, 1, 16).requires_grad_()
    rest = -torch.rand(1, 70, 1), torch.rand(1, 70, 1)

    def gradient():
        with cut_into(chunks), forced(marked):
            o, _ = chunk_gated_delta_rule(q, k, v, *rest, impl="triton")
            return torch.autograd.grad(o.sum(), q)[0]

    plain = gradient()
    monkeypatch.setattr(type(now()), "runs_concurrently", lambda self, packing, c: True)
    main = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(of_streams, "fork_of", lambda device, priority, stream: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(launches, "runner", logged)
    assert torch.equal(plain, gradient())
    summary = chunks == 1
    assert events == [
        *["scan_kernel on main"] * summary,
        "scan_kernel on main",
        "side waits for main",
        "scan_kernel on side",
        *["scan_bwd_kernel on main beside"] * summary,
        "scan_bwd_kernel on main" + " beside" * (not summary),
        "main waits for side",
        "dqk_head_kernel on main",
    ]


def sharded(group, rank, case, ranges):
    context = build_cp_context(torch.tensor(case.offsets()), group, token_ranges=ranges)
    whole, mine = run(case), run_sharded(case, context, torch.float32, impl="triton")
    one = run(case, torch.float32)
    for name in ("o", "final_state", "dinitial_state", *(f"d{n}" for n in PACKED)):
        pick = (lambda t: t) if "state" in name else context.shard
        assert_within_budget(name, mine[name], pick(whole[name]), pick(one[name]), factor=10.0)


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param(None, marks=pytest.mark.wide, id="plain"),
        pytest.param(zigzag_token_ranges(200, 3), id="zigzag"),
    ],
)
def test_ranks(gloo_pool, ranges):
    case = Case("ranks", **{**SMALL, "T": 200}, cu_seqlens=(0, 180, 200))
    # fp64 inputs are not rounded to fp32 here, hence the wider factor
    gloo_pool.run(sharded, case, ranges, world_size=3)


def as_compiled(group, rank, keep):
    """Calls the ops that torch.compile uses with several ranks, one after another."""
    case = Case("ops", **{**SMALL, "T": 140}, options=options(**INSIDE, disable_recompute=keep))
    context = build_cp_context(torch.tensor(case.offsets()), group)
    plain = run_sharded(case, context, torch.float32, impl="triton")
    # Dynamo lists known functions once, at its first use: the patched one would stay in it
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compiler.is_compiling", lambda: True)
        ops = run_sharded(case, context, torch.float32, impl="triton")
    for name, value in plain.items():
        assert (ops[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.wide
@pytest.mark.parametrize("keep", [False, True])
def test_ranks_in_the_ops_of_torch_compile(gloo_pool, keep):
    gloo_pool.run(as_compiled, keep, world_size=2)


def test_scans_of_many_chains_take_wider_tiles():
    """The widest tile that applies is taken. Each is a candidate, so that tests/gpu checks it."""
    from fla_cp.kernels.triton import tile_table

    for (arch, stage, k, v, dtype), fuller in tile_table.TILES_BY_CHAINS.items():
        if arch != tile_table.architecture():
            continue
        assert list(fuller) == sorted(fuller, reverse=True)
        for least, tile in fuller:
            assert tile in tune.candidates(stage, k, v), (stage, tile)
            assert tile_table.TUNING.tile(stage, k, v, dtype, least) == tile
        least, narrowest = min(fuller)
        assert tile_table.TUNING.tile(stage, k, v, dtype, least - 1).BV < narrowest.BV


@pytest.mark.bits
@pytest.mark.parametrize("per_head", [True, False])
def test_chunks_that_no_summary_reads_are_computed_after_it(monkeypatch, per_head):
    """For a sequence cut in two on one GPU; all bits stay the same."""
    from fla_cp.kernels.torch.intra import Inputs, Spec
    from fla_cp.kernels.triton import launch as launches
    from fla_cp.kernels.triton.backend import TritonBackend
    from fla_cp.kernels.triton.tile_table import Tuning
    from fla_cp.partition.packing import Packing
    from fla_cp.rule import DeltaRule

    T, H, K, V = 64 * 20 + 5, 2, 16, 16
    q, k = torch.randn(2, T, H, K)
    g = -torch.rand((T, H) if per_head else (T, H, K))
    x = Inputs(q, k, torch.randn(T, H, V), g, torch.rand(T, H), None, None)
    rule = DeltaRule(scale=1.0, per_head=per_head)
    whole = Packing.build((0, T))
    name, summary = "intra_head_kernel" if per_head else "intra_kernel", ("scan_kernel", (1, H))
    launched = []

    def noted(kernel, grid, *args, **options):
        if kernel.fn.__name__ in (name, "scan_kernel"):
            launched.append((kernel.fn.__name__, grid))
        kernel[grid](*args, **options)

    monkeypatch.setattr(launches, "runner", noted)
    backend = TritonBackend(tuning=Tuning(later_least=0, later_share=20))
    c, maps = backend.prepare_chunks(Spec(rule, whole.cut(11)), x, None)
    paths = 1 if per_head else 2
    first, rest = [(name, (16, H))] * paths, [(name, (5, H))] * paths
    assert launched == [*first, summary, *rest]  # 11 of 21 rounded up
    backend = TritonBackend(tuning=Tuning(later_least=0, later_share=4))
    launched.clear()
    d, others = backend.prepare_chunks(Spec(rule, whole.cut(11)), x, None)
    assert launched == [(name, (21, H))] * paths + [summary]
    for a, b in zip((*c[:5], maps.offset), (*d[:5], others.offset), strict=True):
        assert torch.equal(a, b)


def test_two_streams_wait_for_each_other(monkeypatch):
    """The summary starts after the first chunks, and the other chunks one wait later. Nothing reads
    maps before the streams are joined. Streams are replaced by objects that record the host's
    calls.
    """
    from contextlib import contextmanager
    from types import SimpleNamespace

    from fla_cp.kernels.triton import backend, streams
    from fla_cp.partition.packing import Packing
    from fla_cp.rule import DeltaRule

    said, current = [], ["main"]

    fork = SimpleNamespace(
        side="urgent",
        side_waits=lambda: said.append("urgent waits for main"),
        main_waits=lambda: said.append("main waits for urgent"),
    )

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def does(what):
        said.append(f"{what} on {current[-1]}")

    def in_two(*args):
        does("first chunks")
        return "chunks", lambda: does("rest")

    def summary(*args):
        return "maps", lambda: does("summary")

    monkeypatch.setattr(backend.intra, "intra_in_two", in_two)
    monkeypatch.setattr(backend, "summarize", summary)
    forks = {streams.URGENT: fork}
    monkeypatch.setattr(streams, "fork_of", lambda device, priority, stream: forks[priority])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "stream", on)
    tensor = SimpleNamespace(device=torch.device("cuda"), shape=(32768, 32, 128))
    x, packing = SimpleNamespace(q=tensor, v=tensor), Packing.build((0, 32768)).cut(256)
    spec = Spec(DeltaRule(scale=1.0, per_head=True), packing)
    found = backend.TRITON.prepare_chunks(spec, x, None)
    assert found == ("chunks", "maps")
    assert said == [
        "first chunks on main",
        "urgent waits for main",
        "main waits for urgent",
        "summary on urgent",
        "rest on main",
        "main waits for urgent",
    ]
