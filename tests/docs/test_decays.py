"""Operators beside their peers by decay: draws, rows, and the section of the report."""

import ctypes
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fla_cp
from benchmarks import decays, members, ops, plot, report
from benchmarks.cudnn_peer import Cudnn
from benchmarks.members import DECAYS, MEMBERS, log_decay
from benchmarks.report_tables import Result
from benchmarks.shapes import LOWER_BOUND, Shape

SMALL = Shape("small", 512, H=4, HV=4, K=16, V=16)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.torch.cuda, "is_available", lambda: False)
        patch.setitem(decays.SHAPES, "cpu", Shape("cpu", 64, H=2, HV=2, K=16, V=16))
        patch.setitem(sys.modules, "fla", None)  # missing, whatever is installed
        patch.setitem(sys.modules, "flash_qla", None)
        patch.setitem(sys.modules, "cudnn", None)
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("decays") / "decays.json"
    assert decays.main(["--out", str(out)]) == 0
    return Result("decays", json.loads(out.read_text()))


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("decay, mean", [("strong", -2.5), ("weak", -0.01)])
def test_mean_of_decays(op, decay, mean):
    member = MEMBERS[op]
    x, _ = members.draws(member, SMALL, "cpu", decay)
    found = log_decay(member, x).detach()
    assert found.mean().item() == pytest.approx(mean, rel=0.05)
    assert found.max() < 0 and found.min() > LOWER_BOUND
    each = found.flatten(0, 1).mean(0)  # of each head and channel
    assert torch.all((each / mean - 1).abs() < 0.3)


def test_drawn_decays_are_those_of_other_benchmarks():
    for op in ("kda", "gdn"):
        (x, do), (y, do_y) = (
            members.draws(MEMBERS[op], SMALL, "cpu", *d) for d in ((), ("drawn",))
        )
        assert all(torch.equal(x[n], y[n]) for n in x) and torch.equal(do, do_y)
    mean = log_decay(MEMBERS["kda"], members.draws(MEMBERS["kda"], SMALL, "cpu")[0]).mean((0, 1))
    assert mean.max() > -0.5 and mean.min() < -4.5  # channels differ
    with pytest.raises(ValueError, match="chunk_rwkv7 on shape small has no decays of kind 'weak'"):
        members.draws(MEMBERS["rwkv7"], SMALL, "cpu", "weak")
    with pytest.raises(ValueError, match="no decays of kind 'strong'"):
        members.draws(MEMBERS["kda"], Shape("any", 64, safe=False), "cpu", "strong")


def test_log_decay_is_what_the_operator_computes():
    """With a given log decay, the operator has the same results."""
    member = MEMBERS["kda"]
    for decay in DECAYS:
        x, _ = members.draws(member, SMALL, "cpu", decay)
        inside = {n: t.detach().double() for n, t in x.items()}
        options = members.options(member, SMALL)
        o, _ = fla_cp.chunk_kda(**inside, **options, impl="torch")
        given = {n: inside[n] for n in ("q", "k", "v")} | {"beta": inside["beta"].sigmoid()}
        g = log_decay(member, x).detach().double()
        same, _ = fla_cp.chunk_kda(**given, g=g, use_qk_l2norm_in_kernel=True, impl="torch")
        assert ops.compare((o,), (same,)) < 1e-6


def test_rows(result):
    assert [(r["operator"], r["decay"], r["op"]) for r in result.rows] == [
        *(("kda", d, who) for d in DECAYS for who in ("fla_cp", "fla_cp-kept", "fla", "cudnn")),
        *(("gdn", d, who) for d in DECAYS for who in ("fla_cp", "flashqla", "fla")),
    ]
    for row in result.rows:
        ours = row["op"].startswith("fla_cp")
        assert bool(row["reason"]) != ours
        for direction in decays.DIRECTIONS:
            assert len(row.get(direction, [])) == (decays.TURNS if ours else 0)
    kept = next(r for r in result.rows if r["op"] == "fla_cp-kept")
    assert kept["difference"] == {"o": 0.0, "gradients": 0.0}
    assert "stages" not in result.data and result.data["gb_s"]["copy"] > 0
    assert result.data["versions"].keys() == {"fla-core", *decays.PACKAGES["flashqla"],
                                              *decays.PACKAGES["cudnn"]}  # fmt: skip


def test_a_missing_peer_says_why(result):
    reasons = {r["op"]: r["reason"] for r in result.rows if r["operator"] == "kda"}
    assert "--peer fla needs fla" in reasons["fla"] and "cudnn" in reasons["cudnn"]
    section = report.performance_page([result]).split("## Operators and all peers by decay")[1]
    assert f"| FLA | {reasons['fla']} |  |  |  |  |" in section


def peers_that(monkeypatch, call):
    monkeypatch.setattr(decays, "peer", lambda member, name: call)


def rows_of(monkeypatch, capsys, *flags):
    found = []
    monkeypatch.setattr(decays, "table", lambda rows: found.extend(rows) or "")
    assert decays.main(list(flags)) == 0
    return found, capsys.readouterr().out


def test_a_peer_without_a_backward(monkeypatch, capsys):
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no backward here\nsecond line")

    def call(**x):
        o, S = fla_cp.chunk_gated_delta_rule(**x)
        return Refuses.apply(o), S

    peers_that(monkeypatch, call)
    rows, said = rows_of(monkeypatch, capsys, "--op", "gdn", "--peers", "fla")
    theirs = [r for r in rows if r["op"] == "fla"]
    assert len(theirs) == len(DECAYS)
    for row in theirs:
        assert row["reason"] == "RuntimeError: no backward here"
        assert len(row["forward"]) == decays.TURNS and "both" not in row
        assert row["difference"] == {"o": 0.0}
    assert "gdn, first calls of fla: " in said and "gdn, weak, turn 2, fla: forward" in said


def test_a_peer_with_other_results_is_not_timed(monkeypatch, capsys):
    def call(**x):
        o, S = fla_cp.chunk_gated_delta_rule(**x)
        return o * 1.1, S

    peers_that(monkeypatch, call)
    rows, _ = rows_of(monkeypatch, capsys, "--op", "gdn", "--peers", "flashqla")
    for row in (r for r in rows if r["op"] == "flashqla"):
        assert row["difference"]["o"] == pytest.approx(0.1, rel=0.1)
        assert row["reason"].startswith("o differs from ours by 1.0e-01") and "forward" not in row


def test_warm_only_makes_first_calls(monkeypatch, capsys):
    peers_that(monkeypatch, fla_cp.chunk_gated_delta_rule)
    rows, said = rows_of(monkeypatch, capsys, "--op", "gdn", "--peers", "flashqla", "--warm")
    assert not rows and said.startswith("gdn, first calls of flashqla: ") and said.count("\n") == 1


def test_flashqla_is_called_without_the_offsets_of_the_host(monkeypatch):
    """Its operator takes cu_seqlens only."""
    flash_qla = ModuleType("flash_qla")
    flash_qla.chunk_gated_delta_rule = lambda q, *, cu_seqlens: (q, cu_seqlens)
    monkeypatch.setitem(sys.modules, "flash_qla", flash_qla)
    call = members.peer(MEMBERS["gdn"], "flashqla")
    assert call(q=1, cu_seqlens=2, cu_seqlens_cpu=3) == (1, 2)


def test_names_of_peers(capsys):
    with pytest.raises(SystemExit):
        decays.main(["--peers", "fla,other"])
    assert "'other' is not one of fla, cudnn, flashqla" in capsys.readouterr().err


def test_the_section_of_measured_results(tmp_path):
    """Ratios are those of the turns' means, and stages add up."""
    times = {"mean_log_decay": -2.5, "reason": "", "operator": "kda", "decay": "strong"}
    ours = times | {"op": "fla_cp", "forward": [1.0, 3.0], "both": [4.0, 4.0]}
    theirs = times | {"op": "cudnn", "forward": [1.0, 2.0], "both": [10.0, 10.0]}
    theirs["difference"] = {"o": 0.004, "gradients": 0.0061}
    stages = [
        {"stage": "local forward", "kernels": ["a"], "gb": 2.0, "floor_ms": 0.5, "ms": 1.0},
        {"stage": "local backward", "kernels": ["b", "c"], "gb": 4.0, "floor_ms": 1.0, "ms": 1.25},
    ]
    for row in stages:
        row["over_floor"] = row["ms"] / row["floor_ms"]
    data = {"benchmark": "decays", "ops": ["kda"], "peers": ["cudnn"], "rows": [ours, theirs]}
    data |= {"stages": stages, "gb_s": {"copy": 4000.0}, "versions": {"nvidia-cudnn-frontend": "1"}}
    data |= {"date": "today"}
    page = report.performance_page([Result("d", data)])
    section = page.split("## Operators and all peers by decay")[1].split("\n## ")[0]
    assert "| strong | -2.500 | fla_cp | 1.00 / 3.00 | 1.00x | 4.00 / 4.00 | 1.00x |  |" in section
    cells = "1.00 / 2.00 | 0.75x | 10.00 / 10.00 | 2.50x | 4.0e-03 / 6.1e-03"
    assert f"| strong | -2.500 | cuDNN | {cells} |" in section
    assert "| local forward | 1 | 2.00 | 0.500 | 1.00 | 2.00x |" in section
    assert "| all | 3 | 6.00 | 1.50 | 2.25 | 1.50x |" in section
    assert "python -m benchmarks.decays --op kda --peers cudnn --out" in section
    assert "](d.png)" in section and "](d-stages.png)" in section
    assert "Peers: nvidia-cudnn-frontend 1." in section
    pytest.importorskip("matplotlib")
    plot.plot_decays(data, tmp_path / "d.png")
    assert all((tmp_path / f"{n}.png").stat().st_size > 5000 for n in ("d", "d-stages"))
    without = {n: x for n, x in data.items() if n != "stages"} | {"no_stages": "ValueError: why"}
    page = report.performance_page([Result("e", without)])
    assert "The stages were not timed: ValueError: why." in page and "e-stages.png" not in page


def at(address, *shape, dtype=torch.float32):
    """The tensor at an address."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@pytest.fixture
def cudnn(monkeypatch):
    """Launches with the order of arguments that cuDNN's have, which compute with our operator."""
    half = torch.bfloat16
    forward, backward = (ModuleType(n) for n in ("cuda_host", "cuda_bwd_host"))

    def launch(
        device, stream, q, k, v, g, beta, cu, S0, o, S, T, N, H, A_log, dt_bias, bound, flags
    ):
        assert (N, flags, at(cu, 2, dtype=torch.int32).tolist()) == (1, 7, [0, T])
        assert not at(S0, 1, H, 128, 128).any()
        x = [at(a, 1, T, H, 128, dtype=half).float() for a in (q, k, v)]
        x += [at(g, 1, T, H, 128), at(beta, 1, T, H)]
        rates = {"A_log": at(A_log, H), "dt_bias": at(dt_bias, H * 128)}
        options = members.options(MEMBERS["kda"], Shape("s", T)) | {"lower_bound": bound}
        found, last = fla_cp.chunk_kda(
            *x, **rates, **options, output_final_state=True, impl="torch"
        )
        at(o, 1, T, H, 128, dtype=half).copy_(found)
        at(S, 1, H, 128, 128).copy_(last)

    def launch_bwd(
        device, stream, ws, do, q, k, v, g, beta, cu, S0, dS, dq, dk, dv, dg, dbeta, dS0, T, H, N
    ):
        assert N == 1 and not at(S0, 1, H, 128, 128).any() and not at(dS, 1, H, 128, 128).any()
        at(ws, 7 * T, dtype=torch.uint8).zero_()
        x = [at(a, 1, T, H, 128, dtype=half).float() for a in (q, k, v)]
        x = [t.requires_grad_() for t in (*x, at(g, 1, T, H, 128), at(beta, 1, T, H))]
        o, _ = fla_cp.chunk_kda(*x, impl="torch")
        grads = torch.autograd.grad(o, x, at(do, 1, T, H, 128, dtype=half).float())
        for to, grad, dtype in zip((dq, dk, dv), grads, 3 * (half,), strict=False):
            at(to, 1, T, H, 128, dtype=dtype).copy_(grad)
        at(dg, 1, T, H, 128).copy_(grads[3])
        at(dbeta, 1, T, H).copy_(grads[4])
        at(dS0, 1, H, 128, 128).zero_()

    forward.launch, backward.launch = launch, launch_bwd
    backward.workspace_bytes = lambda T, H, N: 7 * T
    package = ModuleType("cudnn.linear_attention.hopper")
    package.cuda_host, package.cuda_bwd_host = forward, backward
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention", ModuleType("linear_attention"))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention.hopper", package)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("decay", DECAYS)
def test_cudnn_operands_and_gradients(decay):
    """What torch does around cuDNN's launches gives the gradients of our inputs."""
    member, shape = MEMBERS["kda"], Shape("s", 100, H=2, HV=2)
    x, do = members.draws(member, shape, "cpu", decay)
    found = Cudnn(member, x, do).results()
    run = ops.runner(fla_cp.chunk_kda, member, shape, "cpu", decay)["both"]
    for name, a, b in zip(("o", *x), found, run(), strict=True):
        assert a.shape == b.shape, name
        assert ops.compare((a,), (b,)) < 0.02, name
    with pytest.raises(ValueError, match="K = V = 128"):
        Cudnn(member, *members.draws(member, SMALL, "cpu"))
