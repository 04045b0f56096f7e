"""The checks for a GPU, tried on the CPU: they pass, and they fail on a wrong result."""

import functools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import fla_cp.ops.wide_heads
from fla_cp import kda_gate
from fla_cp.comm.exchange import all_gather
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.torch.recurrent import Pool
from fla_cp.nn import grouped
from tests.gpu import kernel_hashes, said, warn_if_stale, write_report

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp.kernels.sm90 import rows_run, step_run
from fla_cp.kernels.triton import chunk_tables, intra_channelwise, scan
from fla_cp.kernels.triton import clock as clock_kernels
from fla_cp.kernels.triton.backend import TritonBackend
from tests.gpu import (
    checks,
    clock,
    conv_states,
    decoding,
    drafts,
    exchange,
    experts,
    frames,
    layers,
    short_chunks,
    step_layers,
    tables,
    wide_heads,
)
from tests.gpu.__main__ import SMALL_CALL
from tests.support import gluon_interpreter
from tests.support.clocks import hosttimer
from tests.support.closeness import share_of_budget

F32, F64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(*shape, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=F64).to(F32)


@pytest.fixture
def small(monkeypatch):
    """tests/gpu/checks.py at small sizes, on the CPU."""
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    monkeypatch.setattr(checks, "CONVOLUTIONS", ((20, 6, 4, (0, 3, 20)),))
    monkeypatch.setattr(checks, "GATES", ((9, 2, 16),))
    monkeypatch.setattr(checks, "RANGES", (30, 5))
    monkeypatch.setattr(checks, "CHANNELS", 70)
    monkeypatch.setattr(checks, "FAMILY", ((16, 16, 5),))
    monkeypatch.setattr(checks, "BF16", torch.float32)  # products of bf16 are not interpreted


@pytest.fixture
def known(small, monkeypatch):
    """Rows that differ only in the dtype, which is the same here, are computed once."""
    monkeypatch.setattr(checks, "check_member", functools.cache(checks.check_member))


@pytest.mark.bits
@pytest.mark.wide
def test_the_gpu_checks_themselves(small, monkeypatch):
    """Each check runs, passes, and fails on a wrong result."""
    rows = checks.check_conv_and_gate()
    assert len(rows) == 3 * (2 + 2 + 2)
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    fine = checks.kda_gate

    def wrong(g, *rates, impl, **options):
        return fine(g, *rates, impl=impl, **options) * (1.0001 if impl == "triton" else 1.0)

    monkeypatch.setattr(checks, "kda_gate", wrong)
    monkeypatch.setattr(checks, "CONVOLUTIONS", ())
    rows = [r for r in checks.check_conv_and_gate() if "gate" in r["case"]]
    assert rows and not any(row["ok"] for row in rows if row["dtype"] == "float32")


@pytest.mark.bits
@pytest.mark.wide
@pytest.mark.parametrize(
    "name, more",
    [("comba", 0), ("simple_gla", 0), ("gated_delta_product2", 0), ("dplr_delta_rule", 6)],
)
def test_the_gpu_checks_of_the_family(name, more, known, monkeypatch):
    monkeypatch.setattr(checks, "HALF", (F32,))  # sums of decays are products of bf16
    rows = checks.check_family(name)
    assert len(rows) == 7 + more
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]


@pytest.mark.bits
@pytest.mark.parametrize("wrong", [None, "dinitial_state", "final"])
def test_the_gpu_check_of_states_of_convolutions(wrong, small, monkeypatch):
    """It passes, and it fails if one result is a little off."""
    monkeypatch.setattr(conv_states, "CALLS", ((2, 2, 6, 4, None), (1, 20, 6, 3, (0, 3, 3, 20))))
    fine = checks.judged

    def spoilt(call, x, *more):
        def other(x, impl):
            found = call(x, impl)
            if impl == "triton" and wrong:
                found[wrong] = found[wrong] * 1.01
            return found

        return fine(other, x, *more)

    monkeypatch.setattr(checks, "judged", spoilt)
    rows = conv_states.check_conv_states()
    assert len(rows) == 3 * 2
    assert all(row["ok"] == (wrong is None) for row in rows if row["dtype"] == "float32"), rows
    assert wrong or all(row["ok"] for row in rows), rows


@pytest.mark.bits
@pytest.mark.wide
@pytest.mark.parametrize("name", ["gla"])
def test_the_gpu_checks_of_wide_heads(name, known, monkeypatch):
    monkeypatch.setattr(wide_heads, "SIZE", (24, 20, 5))
    monkeypatch.setattr(fla_cp.ops.wide_heads, "MAX_DIM", 16)  # the interpreter is slow
    monkeypatch.setattr(wide_heads, "BF16", F32)
    rows = wide_heads.check_wide(name)
    assert len(rows) == 4 and all(row["ok"] for row in rows), rows


@pytest.mark.bits
@pytest.mark.wide
@pytest.mark.parametrize("splits", [True, False])
def test_the_gpu_check_of_split_heads(splits, small, monkeypatch):
    """It passes, and it fails if heads are not split."""
    calls = (("gated_delta_rule", 4, 8, (0, 3, 3, 20)), ("simple_gla", 8, 8, None))
    monkeypatch.setattr(wide_heads, "SPLIT", calls)
    monkeypatch.setattr(wide_heads, "SPLIT_TOKENS", 20)
    monkeypatch.setattr(wide_heads, "BF16", F32)
    monkeypatch.setattr(fla_cp.ops.wide_heads, "FAST_WIDTH", 4)
    monkeypatch.setattr(fla_cp.ops.wide_heads, "WORTH", 0 if splits else 2**30)
    fast = {"triton": 4, "torch": None}
    monkeypatch.setattr(fla_cp.ops.wide_heads, "_fast_width", lambda impl, *_: fast[impl])
    rows = wide_heads.check_split()
    assert all((row["splits"] > 0) == row["ok"] == splits for row in rows), rows


@pytest.mark.bits
@pytest.mark.wide
@pytest.mark.parametrize("wrong", [False, True])
def test_the_gpu_check_of_drafts(small, monkeypatch, wrong):
    """It passes, and it fails if the state of a token is that after its first row."""
    monkeypatch.setattr(drafts, "SIZES", ((16, 16),))
    monkeypatch.setattr(drafts, "DTYPES", (F32,))  # products of bf16 are not interpreted
    if wrong:  # one member of each kind shows it
        monkeypatch.setattr(drafts, "MEMBERS", ("gated_delta_product2", "dplr_delta_rule"))
        places = Pool.places.fget
        shifted = property(lambda pool: places(pool).roll(-1, 1) if pool.rows > 1 else places(pool))
        monkeypatch.setattr(Pool, "places", shifted)
    rows = drafts.check_drafts()
    assert len(rows) == len(drafts.MEMBERS) * 2, rows
    assert all(row["ok"] != wrong for row in rows), rows


@pytest.mark.bits
@pytest.mark.wide
def test_the_gpu_check_of_tables(small, monkeypatch):
    """It passes, and it fails if the tables of new packings are a little off."""
    monkeypatch.setattr(tables, "PACKINGS", ((5, 300),))
    monkeypatch.setattr(tables, "CALL", (40, 1, 16))
    monkeypatch.setattr(tables, "CALLS", 2)
    monkeypatch.setattr(tables, "BF16", F32)
    rows = tables.check_tables()
    assert len(rows) == 6 and all(row["ok"] for row in rows), rows
    launch = chunk_tables.launch

    def wrong(kernel, grid, offsets, *rest):
        launch(kernel, grid, (offsets - 1).clamp(0), *rest)

    monkeypatch.setattr(chunk_tables, "launch", wrong)
    assert not any(row["ok"] for row in tables.check_tables()[2:4])
    clear = scan.clear
    for moved in (-1, 1):
        monkeypatch.setattr(scan, "clear", lambda x, y, n, by=moved: clear(x, y, n + by))
        assert not any(row["ok"] for row in tables.cleared())


@pytest.mark.bits
@pytest.mark.wide
@pytest.mark.parametrize("chunk", [16, 32])
def test_the_gpu_check_of_short_chunks(chunk, small, monkeypatch):
    """It passes, and it fails if the scores lack their widest level."""
    monkeypatch.setattr(short_chunks, "KEYS", ("kda", "simple_gla"))
    monkeypatch.setattr(TritonBackend, "chunk_for", Backend.chunk_for)  # also in fp32
    monkeypatch.setattr(short_chunks, "VALUE_HEADS", 1)  # the interpreter is slow
    monkeypatch.setattr(short_chunks, "CALLS", ((128, 16, 3, F32, 1),))
    monkeypatch.setattr(short_chunks, "FRAMED", (2,))
    monkeypatch.setattr(short_chunks, "ASKED_KEYS", ("kda",))
    monkeypatch.setattr(short_chunks, "ASKED", ((16, 16, (0, 5, 40), F32, 1),))
    rows = short_rows(chunk)
    assert len(rows) == 1 + 3 + 2 + 3 and all(row["ok"] for row in rows), rows
    least = intra_channelwise.widest_level
    monkeypatch.setattr(intra_channelwise, "widest_level", lambda BT: least(BT) + 1)
    monkeypatch.setattr(short_chunks, "OPTIONS", {"any": {}})  # one is enough to see it
    for part in (short_chunks.rows_of, short_chunks.asked):
        assert not all(row["ok"] for row in short_chunks.check_short(part, chunk, "kda"))


def short_rows(chunk: int) -> checks.Rows:
    """Rows of all parts with chunks of so many tokens."""
    parts = short_chunks.short_parts()
    return [row for name, part in parts.items() if name.split()[1] == str(chunk) for row in part()]


def test_the_gpu_check_of_the_clock(small, monkeypatch):
    """It passes, and it fails if the clock counts us, or if a wait is added twice."""
    monkeypatch.setattr(clock, "WAITS_MS", (300.0,))
    monkeypatch.setattr(clock, "MOST_OFF_US", 150_000.0)  # interpreted on a busy host
    monkeypatch.setattr(clock_kernels, "globaltimer", hosttimer)
    assert [row["ok"] for row in clock.check_clock()] == [True, True]
    monkeypatch.setattr(clock_kernels, "globaltimer", lambda: hosttimer() // 1000)
    assert [row["ok"] for row in clock.check_clock()] == [False, True]
    monkeypatch.setattr(clock_kernels, "globaltimer", hosttimer)
    add = clock_kernels.add_wait
    monkeypatch.setattr(clock_kernels, "add_wait", lambda s, *t: (add(s, *t), add(s, *t)))
    assert not any(row["ok"] for row in clock.check_clock())


@pytest.mark.bits
@pytest.mark.wide
def test_the_gpu_check_of_the_exchange(small, monkeypatch):
    """It passes, and it fails if a rank applies another rank's map."""
    monkeypatch.setattr(exchange, "EXCHANGES", ((2, 24, 16),))
    rows = exchange.check_exchange()
    assert len(rows) == 2 and all(row["ok"] for row in rows), rows
    fine = exchange.exchanged

    def wrong(x, impl, **how):
        return fine({n: t.roll(1, 0) if impl == "triton" else t for n, t in x.items()}, impl, **how)

    monkeypatch.setattr(exchange, "exchanged", wrong)
    assert not any(row["ok"] for row in exchange.check_exchange())


@pytest.mark.bits
@pytest.mark.wide
def test_the_gpu_checks_of_layers(small, monkeypatch):
    """They pass, and they fail on a wrong stage and on a wrong gradient."""
    monkeypatch.setattr(layers, "NORMS", ((70, 2, 24),))
    monkeypatch.setattr(layers, "LAYERS", ((2, 30),))
    monkeypatch.setattr(layers, "BF16", F32)
    monkeypatch.setattr(layers, "HEADS", {"num_heads": 1, "num_v_heads": 2, "head_dim": 16})
    monkeypatch.setattr(layers, "CALLS", 1)
    rows = layers.check_norm() + layers.check_layers()
    assert len(rows) == 3 * 2 + 3 and all(row["ok"] for row in rows), rows
    backend = type(resolve("triton", torch.device("cpu"), F32))
    fine = backend.gated_norm_bwd

    def wrong(*given):
        dx, dgate, dweight = fine(*given)
        return dx, dgate * 1.01, dweight

    monkeypatch.setattr(backend, "gated_norm_bwd", staticmethod(wrong))
    assert not any(row["ok"] for row in layers.check_norm() + layers.check_layers())


@pytest.mark.bits
def test_the_gpu_check_of_frames(small, monkeypatch):
    """On the CPU nothing is replayed, and packings have no frames. It fails on wrong states."""
    for name, value in {"TOKENS": 40, "DIM": 8, "PACKINGS": 3, "IMPL": "torch"}.items():
        monkeypatch.setattr(frames, name, value)
    rows = frames.check_frames()
    assert len(rows) == 4 and all(row["ok"] and row["replayed"] == 0 for row in rows), rows
    plain, fold = frames.counted, all_gather.fold_wires

    @contextmanager
    def wrong():
        with plain() as ran, mock.patch.object(all_gather, "fold_wires", wrong_fold):
            yield ran

    def wrong_fold(*given):
        return fold(*given).mul_(1.5)

    monkeypatch.setattr(frames, "counted", wrong)
    assert not any(row["ok"] for row in frames.check_frames())


@pytest.mark.bits
@pytest.mark.parametrize(
    "wrong", ["nothing", "step_product", "conv_update", "step_mixer", "argmax"]
)
def test_the_gpu_checks_of_decoding(small, monkeypatch, wrong):
    """They pass, and they fail on a wrong product, convolution, mixer or likeliest token."""
    parts = {"normed": ("norm",), "SwiGLU": ("norm", "swiglu"), "added": ("onto",)}
    monkeypatch.setattr(decoding, "PRODUCTS", {n: (1, 34, 40, of) for n, of in parts.items()})
    monkeypatch.setattr(decoding, "UPDATES", ((3, 70, 3),))
    monkeypatch.setattr(decoding, "BATCHES", (2, 5))
    monkeypatch.setattr(decoding, "LOGITS", ((4, 50), (2, 9000)))
    mixers = {"KDA": (1, 1, 16, 40, {}), "GDN": (1, 2, 16, 24, {"per_head": True})}
    monkeypatch.setattr(decoding, "MIXERS", mixers)
    backend = type(resolve("triton", torch.device("cpu"), F32))
    if wrong != "nothing":
        fine = getattr(backend, wrong)

        def changed(*given):
            found = fine(*given)
            return found.mul_(1.5) if found.is_floating_point() else found.add_(1)

        plain = changed if wrong == "step_mixer" else staticmethod(changed)
        monkeypatch.setattr(backend, wrong, plain)
    rows = decoding.check_decoding()
    assert len(rows) == 3 * (3 * 2 + 1 + 2 * 2 + 2)
    for row in rows:
        if "argmax" in row["case"]:
            assert row["ok"] == (wrong != "argmax"), row
            continue
        mixer = "mixer" in row["case"]
        stages = mixer and ("B=5" in row["case"] or "GDN" in row["case"])
        update = "convolution" in row["case"]
        of = {"conv_update": update or stages, "step_mixer": mixer}
        of |= {"nothing": False, "argmax": False}
        assert row["ok"] != of.get(wrong, not (mixer or update)), row


def on_more(step):
    """A step of layers on more than it is given."""
    return lambda run, x: step(run, x.mul_(1.05))


@pytest.mark.bits
@pytest.mark.parametrize("wrong", [False, True])
def test_the_gpu_checks_of_layers_together(monkeypatch, wrong):
    """They pass, and they fail on a kernel that takes another step than it should."""
    monkeypatch.setattr(step_layers, "REPLAYS", 2)  # which only a GPU does
    monkeypatch.setattr(step_layers, "LAYERS", {"KDA": {}, "GDN": step_layers.LAYERS["GDN"]})
    monkeypatch.setitem(step_layers.LAYERS["GDN"], "H", 2)
    for name, size in {"K": 32, "V": 16, "C": 48, "F": 40}.items():
        monkeypatch.setitem(step_layers.LAYERS["GDN"], name, size)
    several = {"B": 5, "K": 64, "V": 64, "C": 48, "F": 40, "together": True, "bias": True}
    monkeypatch.setattr(step_layers, "SEVERAL", {"KDA, 5 rows": several})
    for run in (step_run.Run, rows_run.RowsRun) if wrong else ():
        monkeypatch.setattr(run, "__call__", on_more(run.__call__))
    with gluon_interpreter.interpreted():
        rows = step_layers.check_step_layers()
    assert len(rows) == 3
    for row in rows:
        assert row["ok"] != wrong, row


@pytest.mark.bits
@pytest.mark.parametrize("wrong", ["nothing", "product", "gradient of weights", "loop"])
def test_the_gpu_checks_of_experts(small, monkeypatch, wrong):
    """They pass in bfloat16, which the CPU's grouped product takes; and they fail if a product
    takes rows for the next expert's, and if only the loop runs."""
    monkeypatch.setattr(experts, "TOKENS", (5, 70))
    tiny = {"Kimi": (32, 16, 6, 2), "Qwen": (16, 24, 9, 3), "one expert": (16, 8, 1, 1)}
    made = {name: (tiny[name], options) for name, (_, options) in experts.MIXTURES.items()}
    monkeypatch.setattr(experts, "MIXTURES", made)
    fine = grouped._grouped_mm

    def shifted(a, b, *, offs):
        if b.ndim == (2 if wrong == "gradient of weights" else 3):
            # by a block: the last rows of a group are padding here
            offs = torch.cat([(offs[:-1] - grouped.BLOCK).clamp(min=0), offs[-1:]])
        return fine(a, b, offs=offs)

    if wrong == "loop":
        monkeypatch.setattr(grouped, "_fits", lambda *given: False)
    elif wrong != "nothing":
        monkeypatch.setattr(grouped, "_grouped_mm", shifted)
    rows = experts.check_experts()
    assert len(rows) == 2 * len(experts.MIXTURES)
    if wrong == "nothing":
        assert all(row["ok"] for row in rows), rows
    elif wrong == "loop":
        assert all("0 grouped products, not 6" in row["error"] for row in rows)
    else:
        many = [row for row in rows if "one expert" not in row["case"]]
        assert many and all(row["use"] > 1 for row in many)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_gates_budget_is_that_of_its_terms(bound):
    """The budget holds if the sums cancel, and a gradient that is wrong by 1e-4 exceeds it."""
    for seed in range(10):
        g, dout = draw(9, 2, 16, seed=seed) * 4, draw(9, 2, 16, seed=seed + 100)
        x = {"g": g, "A_log": draw(2, seed=seed + 200), "dt_bias": draw(32, seed=seed + 300)}

        def call(x, impl, dout=dout):
            x = {n: t.detach().requires_grad_() for n, t in x.items()}
            y = kda_gate(**x, lower_bound=bound, impl=impl)
            return checks.with_gradients(y, x, dout)

        wide = {n: t.double() for n, t in x.items()}
        actual, exact, plain = call(x, "triton"), call(wide, "torch"), call(x, "torch")
        off = checks.of_gate(wide, actual, exact, dout=dout, bound=bound)
        for n in ("dg", "dA_log", "ddt_bias"):
            for factor, within in ((1.0, True), (1.0001, n == "dA_log" and None)):
                use = share_of_budget(actual[n] * factor, exact[n], plain[n], off[n], F32)
                assert within is None or (use <= 1) == within, (n, seed, factor, use)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_budget_is_that_of_the_inputs_dtype(dtype):
    """An error of eight roundings exceeds the budget, and one of a single rounding does not."""
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    for roundings, within in ((1, True), (8, False)):
        actual = exact * (1 + roundings * torch.finfo(dtype).eps)
        assert (share_of_budget(actual, exact, exact, None, dtype) <= 1) == within


def test_hash_of_a_kernel_file_is_of_its_code():
    code = 'def f(x):\n    """Doc."""\n    if x:\n        y = 1\n    return f"{x}"\n'
    other = "# why\ndef f( x ):\n\n  if x:\n    y = 1  # one\n  return f'{x}'\n".replace("'", '"')
    assert said(code) == said(other)
    assert said(code) != said(code.replace("y = 1", "y = 2"))
    assert said(code) != said(code.replace("    return", "        return"))
    braces = 'x = f"{{{a}}} {b!r:>{c}}"; y = f"""{a\n} b"""\n'  # tokens of Python 3.12 lose braces
    assert said(braces) == 'x=f"{{{a}}}{b!r:>{c}}";y=f"""{a}b""";'


def test_the_call_under_the_sanitizer_finds_what_it_imports():
    """The call itself runs only on a GPU, in a process of its own."""
    head, _, _ = SMALL_CALL.partition("\nfor ")
    exec(compile(head, "SMALL_CALL", "exec"), {})


def test_a_part_that_never_ran_is_named(tmp_path, capsys):
    """A check that is newer than the report is missing in it, although its kernels have not
    changed."""
    path = tmp_path / "report.json"
    row = {"case": "a case", "ok": True, "use": 0.5, "worst": "o"}
    write_report(path, {}, kernel_hashes(), {"old": [row]}, [])
    capsys.readouterr()
    warn_if_stale(path, ["old"])
    assert capsys.readouterr().out == ""
    warn_if_stale(path, ["old", "new"])
    assert "1 parts are missing in report.json: new" in capsys.readouterr().out
