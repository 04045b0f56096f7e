"""The benchmarks run, count what they say, and find a slowdown."""

import json
import sys
from itertools import pairwise

import pytest

import fla_cp
from benchmarks import bandwidth, compare, cp_scaling, members, ops, plot, shapes, timeline


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "cpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ops", "--shapes", "cpu", "--out", str(out)])
        patch.setattr(ops.torch.cuda, "is_available", lambda: False)
        ops.main()
    return out


def test_writes_rows(result):
    (row,) = json.loads(result.read_text())["rows"]
    assert row["op"] == "fla_cp" and row["shape"] == "cpu"
    assert row["both"]["ms"] > 0 and row["forward"]["ms"] > 0
    assert 0 < row["both"]["share_of_floor"] < 1


def test_counts_by_hand():
    s = shapes.Shape("s", T=128, H=1, HV=2, K=16, V=32)
    # q, k: 2 x 128 x 16; per value head v and o 2 x 32, g 16, beta 1
    forward = 2 * (2 * 128 * 16 + 128 * 2 * (64 + 16 + 1))
    o = 2 * 128 * 2 * 32
    assert members.io_bytes(members.MEMBERS["kda"], s) == (forward, 3 * forward - o)
    scores, inner, states = 2 * 64 * 64 * 16, 2 * 64 * 64 * 32, 3 * 64 * 16 * 32
    flops = 2 * 2 * 2 * (scores + inner + states)
    again = 2 * 2 * 2 * (64 * 64 * 32 + 2 * 64 * 16 * 32)
    assert members.products(members.MEMBERS["kda"], s) == (flops, 3 * flops + again)
    assert members.products(members.MEMBERS["gdp2"], s)[0] == 2 * flops
    without = 2 * 2 * 2 * (64 * 64 * (16 + 32) + 2 * 64 * 16 * 32)
    assert members.products(members.MEMBERS["gla"], s)[0] == without


@pytest.mark.parametrize("name", members.MEMBERS)
def test_every_member_runs(name):
    member, shape = members.MEMBERS[name], shapes.Shape("s", T=40, H=2, HV=2, K=16, V=16)
    op = getattr(fla_cp, member.ours)
    row, result = ops.measure("fla_cp", op, member, shape, "cpu")
    assert row["both"]["ms"] > 0
    assert all(t.isfinite().all() and t.abs().sum() > 0 for t in result)


def test_forward_alone(tmp_path):
    """For a peer whose backward does not run: it is never called."""
    member, shape = members.MEMBERS["simple_gla"], shapes.Shape("s", T=40, H=2, HV=2, K=16, V=16)

    def op(*args, **keywords):
        o, state = fla_cp.chunk_simple_gla(*args, **keywords)
        return o.detach(), state

    row, result = ops.measure("peer", op, member, shape, "cpu", ("forward",))
    assert row["forward"]["ms"] > 0 and "both" not in row
    assert len(result) == 1
    other = row | {"op": "fla_cp", "ratio": [1.25]}
    cells = [line.split("|") for line in ops.table([row, other]).splitlines()[2:]]
    assert [len(line) for line in cells] == [10, 10]
    assert [line[4].strip() for line in cells] == ["", ""]
    assert [line[8].strip() for line in cells] == ["", "1.25x"]
    path = tmp_path / "alone.json"
    path.write_text(json.dumps({"date": "today", "rows": [row, other]}))
    assert set(compare.times(path)) == {(r["op"], "s", "forward") for r in (row, other)}
    plot.plot(json.loads(path.read_text()), tmp_path / "alone.png")


def test_documents_tile_the_row():
    offsets = shapes.SHAPES["packed16k"].cu_seqlens
    lengths = [b - a for a, b in pairwise(offsets)]
    assert offsets[0] == 0 and offsets[-1] == 16384
    assert min(lengths) >= 1 and max(lengths) > 8 * sorted(lengths)[len(lengths) // 2]


def changed(path, factor, **more):
    data = json.loads(path.read_text())
    data["rows"][0]["both"]["ms"] *= factor
    data["rows"][0] |= more
    new = path.with_name(f"head{factor}.json")
    new.write_text(json.dumps(data))
    return new


@pytest.mark.parametrize(
    "factor, code, said", [(1.1, 1, "+10.0%"), (1.03, 0, ""), (0.8, 0, "-20.0%")]
)
def test_compare(result, factor, code, said, monkeypatch, capsys):
    head = changed(result, factor)
    monkeypatch.setattr(sys, "argv", ["compare", str(result), str(head)])
    assert compare.main() == code
    out = capsys.readouterr().out
    assert (said in out) if said else (out.count("\n") == 2)


def test_compare_names_missing_rows(result, monkeypatch, capsys):
    head = changed(result, 1.0, shape="other")
    monkeypatch.setattr(sys, "argv", ["compare", str(result), str(head)])
    assert compare.main() == 0
    assert capsys.readouterr().out.count("only in") == 4


def test_compare_plots_what_both_measured(result, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import matplotlib.axes

    drawn = []
    monkeypatch.setattr(
        matplotlib.axes.Axes,
        "barh",
        lambda self, names, change, color: drawn.extend(zip(names, change, color, strict=True)),
    )
    head, out = changed(result, 1.1), tmp_path / "change.png"
    monkeypatch.setattr(sys, "argv", ["compare", str(result), str(head), "--plot", str(out)])
    assert compare.main() == 1 and out.stat().st_size > 1000
    both, forward = sorted(drawn)
    assert both == ("fla_cp cpu both", pytest.approx(10), "C3")
    assert forward == ("fla_cp cpu forward", 0, "C7")


def test_plot(result, tmp_path):
    pytest.importorskip("matplotlib")
    data = json.loads(result.read_text())
    data["rows"][0]["stages"] = {"intra": 1.0, "scan": 2.0}
    plot.plot(data, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_bandwidth_rows(tmp_path, monkeypatch, capsys):
    out = tmp_path / "bandwidth.json"
    monkeypatch.setattr(sys, "argv", ["bandwidth", "--out", str(out)])
    monkeypatch.setattr(bandwidth.torch.cuda, "is_available", lambda: False)
    bandwidth.main()
    both = json.loads(out.read_text())["rows"]
    assert [r["op"] for r in both] == [f"decode B=2 HV=2 [{x}]" for x in ("K, V", "V, K")]
    for r in both:
        assert r["bytes"] == 2 * 4 * 2 * 2 * 16 * 16  # fp32 states, read and written
        assert r["ms"] > 0 and r["over_copy"] > 0
    assert capsys.readouterr().out.count("decode") == 2


@pytest.mark.wide
def test_cp_scaling(tmp_path, monkeypatch, capsys):
    """One rank and two over gloo; efficiency is one rank's time for the local tokens."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "cp.json"
    flags = ["--tokens", "256", "--local", "128", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["cp_scaling", *flags])
    monkeypatch.setattr(cp_scaling.torch.cuda, "is_available", lambda: False)
    cp_scaling.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2  # ranks, kinds, operator and layer
    ms = {(r["op"], r["T"], r["ranks"]): r["ms"] for r in rows}
    for r in rows:
        if r["ranks"] == 2 and r["T"] == 256:
            assert r["efficiency"] == round(ms[r["op"], 128, 1] / r["ms"], 3)
            assert r["exposed_ms"] > 0
    assert out.with_suffix(".png").stat().st_size > 5000
    assert capsys.readouterr().out.count("| operator |") == 4


def test_bytes_of_an_exchange_are_those_of_the_design():
    """8 ranks, 32 heads, K = V = 128: 28, 2, 12, 5.25 and 26 MiB a direction."""
    shape = shapes.Shape("s", 8192)
    mib = {"all_gather": 28, "ring": 2, "scan": 12, "heads": 5.25, "symmetric": 26}
    assert {n: cp_scaling.sent_bytes(shape, 8, n) / 2**21 for n in mib} == mib
    assert cp_scaling.sent_bytes(shape, 1, "all_gather") == 0


def test_timeline(tmp_path):
    """Of the middle one of three steps, which stand in the order of their launches."""
    pytest.importorskip("matplotlib")
    names = {
        "scan_kernel": (7, 5.0, 2.0),
        "ncclDevKernel": (9, 6.0, 4.0),
        "Memcpy DtoD": (9, 10.0, 1.0),  # on a stream of an exchange
        "gemm": (7, 8.0, 1.0),
        "cat": (7, 9.0, 1.0),
    }
    events = [
        {
            "cat": "gpu_memcpy" if name.startswith("Mem") else "kernel",
            "ts": 100.0 * step + start,
            "dur": duration,
            "name": name,
            "args": {"stream": stream, "correlation": 10 * step + n},
        }
        for step in (2, 0, 1)
        for n, (name, (stream, start, duration)) in enumerate(names.items())
    ]
    events.append({"cat": "cpu_op", "ts": 0.0, "dur": 9.0, "name": "aten::mm"})
    rows = timeline.kernels({"traceEvents": events, "steps": 3})
    assert rows == [
        (7, 0.0, 0.002, "scans, folds"),
        (7, 0.003, 0.001, "projections"),
        (7, 0.004, 0.001, "elementwise, norms"),
        (9, 0.001, 0.004, "exchange"),
        (9, 0.005, 0.001, "exchange"),
    ]
    assert timeline.hidden(rows) == pytest.approx((0.005, 0.003))
    timeline.plot({"rank 0": rows, "rank 1": rows[:2]}, tmp_path / "t.png", "title")
    assert (tmp_path / "t.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="not those of 3 equal steps"):
        timeline.kernels({"traceEvents": events[1:], "steps": 3})
