"""The benchmarks run, count what they say, and find a slowdown."""

import json
import os
import sys
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch

import fla_cp
from benchmarks import (
    attention,
    bandwidth,
    compare,
    cp_scaling,
    example_figures,
    first_call,
    host,
    hybrid,
    loss,
    members,
    ops,
    plot,
    remat,
    report,
    report_tables,
    shapes,
    timeline,
)
from tests.support.ranks import run_threads


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


def test_first_calls(monkeypatch):
    monkeypatch.setattr(ops.torch.cuda, "is_available", lambda: False)
    row = first_call.measure("kda", [40, 41], 2)
    assert [call["T"] for call in row["calls"]] == [40, 41]
    assert all(call["first"]["s"] > 0 and call["again"] > 0 for call in row["calls"])
    rows = [{"operator": "kda", "mode": mode, **row} for mode in first_call.MODES]
    table = report_tables.first_calls(report_tables.Result("first-call", {"rows": rows}))
    lines = table.splitlines()
    assert len(lines) == 2 + 2 * len(rows) and {line.count("|") for line in lines} == {9}


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
    assert [len(line) for line in cells] == [25, 25]
    assert [line[4].strip() for line in cells] == ["", ""]
    assert [line[23].strip() for line in cells] == ["", "1.25x"]
    path = tmp_path / "alone.json"
    path.write_text(json.dumps({"date": "today", "rows": [row, other]}))
    assert set(compare.times(path)) == {(r["op"], "s", "forward") for r in (row, other)}
    plot.plot(json.loads(path.read_text()), tmp_path / "alone.png")


def test_table_has_the_work_of_the_host(result):
    (row,) = json.loads(result.read_text())["rows"]
    assert row["both"]["not_replayed"] == "no call was recorded"  # the torch stages are not
    for n, what in enumerate(("forward", "both"), 1):
        row[what] |= {"host_ms": 0.06 * n, "bare_ms": 0.02 * n, "host_over_bare": 3.0}
        row[what] |= dict(zip(host.COUNTS, (2 * n, 0, 7 * n, 1), strict=True))
    row["both"] |= {"one_thread_host_ms": 0.09, "bare_autograd_ms": 0.08}
    row["both"]["host_over_bare_autograd"] = 1.5
    row["forward"]["steady_host_ms"] = 0.05
    row["both"] |= {"steady_host_ms": 0.1, "steady_one_thread_host_ms": 0.07}
    for n, what in enumerate(("forward", "both"), 1):
        row[what]["steady_one_core_host_ms"] = 0.03 * n
    row["both"] |= {"steady_bare_autograd_ms": 0.08, "steady_host_over_bare_autograd": 1.25}
    head, _, line = ([c.strip() for c in line.split("|")] for line in ops.table([row]).split("\n"))
    cells = dict(zip(head, line, strict=True))
    assert (cells["host ms"], cells["bare ms"]) == ("0.06 / 0.12", "0.020 / 0.040")
    assert cells["host / bare"] == "3.00 / 3.00"
    assert cells["host ms on one thread"] == "0.09"
    assert (cells["bare ms in autograd"], cells["host / that"]) == ("0.08", "1.50")
    assert (cells["host ms in a row"], cells["in a row on one thread"]) == ("0.05 / 0.10", "0.07")
    assert cells["in a row on one core"] == "0.03 / 0.06"
    assert (cells["bare ms in autograd in a row"], cells["in a row / that"]) == ("0.08", "1.25")
    assert (cells["launches"], cells["torch ops"]) == ("2 / 4", "0 / 0")
    assert (cells["allocations"], cells["descriptors"]) == ("7 / 14", "1 / 1")
    found = report_tables.Result("kda", {"operator": "kda", "rows": [row]})
    *_, line = report_tables.of_host(found).splitlines()
    cells = [c.strip() for c in line.strip("|").split("|")][1:]
    assert cells[:3] == ["0.0600 / 0.120", "0.0200 / 0.0400", "3.00 / 3.00"]
    assert cells[3:6] == ["0.0800", "1.50", "0.0900"]
    assert cells[6:9] == ["0.0500 / 0.100", "0.0700", "0.0300 / 0.0600"]
    assert cells[9:11] == ["0.0800", "1.25"]
    assert cells[11:] == ["2 / 4", "0 / 0", "7 / 14", "1 / 1"]
    del row["both"]["bare_autograd_ms"], row["both"]["steady_bare_autograd_ms"]
    assert "autograd" not in report_tables.of_host(found)
    del row["forward"]["launches"]
    assert report_tables.of_host(found) == ""


def test_all_threads_share_a_core_and_get_theirs_back():
    """Also if a thread ends in between, or starts."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the process may use one core only")
    ends, waits, usual = threading.Event(), threading.Event(), os.sched_getaffinity(0)
    short, long = (threading.Thread(target=event.wait) for event in (ends, waits))
    short.start()
    long.start()
    with host.on_one_core():
        seen = [os.sched_getaffinity(n) for n in (0, short.native_id, long.native_id)]
        ends.set()
        short.join()
        late = threading.Thread(target=waits.wait)
        late.start()
    after = [os.sched_getaffinity(n) for n in (0, long.native_id, late.native_id)]
    waits.set()
    long.join()
    late.join()
    assert len(seen[0]) == 1 and seen == [seen[0]] * 3
    assert after == [usual] * 3


def test_a_thread_that_has_just_ended_is_left_out(monkeypatch):
    """One may end between the listing of threads and the change of its cores."""
    usual, listed = os.sched_getaffinity(0), host._threads
    ended = threading.Thread()
    ended.start()
    ended.join()
    monkeypatch.setattr(host, "_threads", lambda: [ended.native_id, *listed()])
    with host.on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == usual


def test_launches_in_autograd_are_made_in_its_directions():
    made = []
    call = host.in_autograd(
        partial(made.append, "ahead"), partial(made.append, "back"), torch.ones(1)
    )
    call()
    call()
    assert made == ["ahead", "back"] * 2


def test_packings_are_different_and_whole():
    found = host.packings(200, 4096, 0, "cpu")
    offsets = [tuple(p["cu_seqlens_cpu"].tolist()) for p in found]
    assert len(set(offsets)) == 200
    for given, row in zip(found, offsets, strict=True):
        assert given["cu_seqlens"].tolist() == list(row)
        assert row[0] == 0 and row[-1] == 4096 and all(a < b for a, b in pairwise(row))
    documents = {len(row) - 1 for row in offsets}
    assert min(documents) == host.LEAST_DOCUMENTS and max(documents) == host.MOST_DOCUMENTS


def test_new_packings_are_timed(tmp_path, monkeypatch, capsys):
    """No packing is used before it is timed; after each group of new ones, one is repeated."""
    used = []
    monkeypatch.setattr(host, "REPEATS", 2)

    def noted(run, *args, **named):
        used.append(tuple(named["cu_seqlens_cpu"].tolist()))
        return run(*args, **named)

    for name in ("chunk_kda", "chunk_gated_delta_rule"):
        monkeypatch.setattr(fla_cp, name, partial(noted, getattr(fla_cp, name)))
    monkeypatch.setattr(host.torch.cuda, "is_available", lambda: False)
    out = tmp_path / "packings.json"
    host.main(["--packings", "4", "--tokens", "130", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(r["op"], r["T"], r["packings"]) for r in rows] == [("kda", 130, 4), ("gdn", 130, 4)]
    for r in rows:
        assert r["ratio"] == pytest.approx(r["new_ms"] / r["one_ms"], rel=1e-2)
    (a, b, *others), (c, d, *more) = used[4:9], used[9:14]
    assert len({*used[:4], a, b, c, d}) == 8 and (others, more) == ([a] * 3, [c] * 3)
    assert used[14:] == used[:14]
    assert capsys.readouterr().out.count("| 4 packings |") == 2
    result = report_tables.Result("packings", json.loads(out.read_text()))
    table = report_tables.packings(result).splitlines()[2:]
    assert [line.split(" | ")[:4] for line in table] == [
        ["| 4 packings", op, "2", "130"] for op in ("KDA", "GDN")
    ]
    assert "--packings 4 --tokens 130 --heads 2 --op kda,gdn" in report_tables.packings_command(
        result
    )
    assert [s.title for s in report.SECTIONS if s.has(result)] == ["New packings"]


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


NOT_RECORDED = "no call was recorded"
HOST_ON_CPU = {"host_ms": None, "steady_host_ms": None, "not_replayed": NOT_RECORDED}
"""Of the torch stages, which are not replayed."""


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
        assert r["forward"] == r["both"] == HOST_ON_CPU
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


@pytest.mark.wide
def test_attention_beside_its_peer(monkeypatch):
    monkeypatch.setattr(attention, "REPEATS", 1)
    rows = list(attention.alone(attention.parsed(["--device", "cpu", "--tokens", "60"])))
    assert len(rows) == len(attention.TINY) * len(attention.DOCUMENTS)
    assert all(row["ours_both_ms"] > 0 and row["torch_forward_ms"] > 0 for row in rows)
    assert all(max(row["errors"].values()) < 1e-5 for row in rows)


def test_products_of_attention_by_hand():
    # 3 + 1 pairs of a query and a key; two products of 2 heads with 4 and 5 channels
    assert attention.forward_flops(attention.Heads(2, 1, 4, 5), (0, 2, 3)) == 2 * 2 * (3 + 1) * 9


def sharded_attention(group, rank, args):
    return list(attention.sharded(args, "cpu"))


def test_every_exchange_of_attention(monkeypatch):
    monkeypatch.setattr(attention, "REPEATS", 1)
    args = attention.parsed(["--device", "cpu", "--tokens", "60", "--shapes", "gqa-128"])
    rows, _ = run_threads(sharded_attention, 2, args)
    assert len(rows) == len(attention.DOCUMENTS) * len(attention.LAYOUTS) * 3
    for row in rows:
        assert row["both_ms"] > 0
        assert (row["bytes"] > 0) == (
            row["layout"] == "zigzag" or row["documents"] == "one document"
        )


def layer_stacks(group, rank):
    return list(hybrid.measured(group, "cpu", [150, 64], hybrid.PATTERNS.split(";")))


@pytest.fixture
def one_repeat(monkeypatch):
    monkeypatch.setattr(attention, "REPEATS", 1)
    monkeypatch.setattr(attention, "STEPS", 1)
    monkeypatch.setattr(hybrid, "on_cuda", lambda: False)


def test_layer_stacks_over_ranks(one_repeat):
    rows = [*run_threads(layer_stacks, 1)[0], *run_threads(layer_stacks, 2)[0]]
    assert len(rows) == 2 * 2 + 2 * 2 * 2  # stacks, lengths; with two ranks, ranges
    ms = {(r["pattern"], r["T"], r["ranks"], r["layout"]): r["ms"] for r in rows}
    for row in hybrid.with_ratios(rows):
        alone = ms[row["pattern"], row["T"], 1, "contiguous"]
        assert row["ratio"] == round(alone / row["ms"], 3)
        assert row["tokens_s"] == pytest.approx(1e3 * row["T"] / row["ms"], rel=0.01)
        assert 1 <= row["balance"] <= row["ranks"]
        assert row["busy_ms"] <= row["ms"]
        assert row["ranks"] > 1 or (row["busy_ms"], row["balance"]) == (row["ms"], 1.0)
    assert hybrid.with_ratios([{"pattern": "kda", "T": 64, "ranks": 2, "ms": 1.0}])[0].keys() == {
        "pattern", "T", "ranks", "ms"
    }  # fmt: skip


@pytest.mark.parametrize("busy, balance", [((30.0, 10.0), 1.5), ((20.0, 20.0), 1.0)])
def test_balance_is_the_slowest_rank_over_the_mean(monkeypatch, busy, balance):
    def stack(group, rank):
        return hybrid.times(lambda: (41.0 + rank, 41.0 + rank - busy[rank]), 1000, group, "cpu")

    monkeypatch.setattr(hybrid, "rank_times", lambda step, *_: step())
    for row in run_threads(stack, 2):
        assert row == {
            "ms": 42.0, "tokens_s": 23810, "busy_ms": max(busy), "balance": balance, "peak_gib": 0.0
        }  # fmt: skip


def complaint(group, rank):
    try:
        hybrid.check(hybrid.blocks_of("kda,attention", "cpu"), "zigzag", group, "cpu")
    except SystemExit as error:  # which a thread would swallow
        return str(error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_of_a_layer_stack_stops_the_benchmark(one_repeat, monkeypatch, dtype):
    monkeypatch.setattr(hybrid, "dtype_of", lambda: getattr(hybrid.torch, dtype))
    assert run_threads(complaint, 2) == [None, None]
    context_of = hybrid.context_of

    def shorter(T, layout, group, device):
        """Of two documents, where one rank has one."""
        if group is None:
            return context_of(T, layout, group, device)
        offsets = hybrid.torch.tensor([0, T // 2, T])
        return fla_cp.build_cp_context(offsets, group, conv1d_kernel_size=4)

    monkeypatch.setattr(hybrid, "context_of", shorter)
    assert run_threads(complaint, 2)[1].startswith("the result differs from one rank's by")


@pytest.mark.wide
def test_layer_stacks_in_processes(tmp_path, monkeypatch, capsys):
    """One rank and two over gloo, in one run."""
    out = tmp_path / "hybrid.json"
    flags = ["--ranks", "1,2", "--tokens", "128", "--patterns", "kda,mla", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["hybrid", *flags])
    monkeypatch.setattr(hybrid.torch.cuda, "is_available", lambda: False)
    hybrid.main()
    found = json.loads(out.read_text())
    assert [(r["ranks"], r["layout"]) for r in found["rows"]] == [
        (1, "contiguous"), (2, "contiguous"), (2, "zigzag")
    ]  # fmt: skip
    assert all(r["ratio"] > 0 for r in found["rows"])
    assert capsys.readouterr().out.count('"ratio"') == 3
    page = report.performance_page([report.Result("hybrid", found)])
    command = "`python -m benchmarks.hybrid --ranks 1,2 --tokens 128 --patterns 'kda,mla'"
    assert f"{command} --layouts contiguous,zigzag --together 5 --out" in page
    assert page.count("| kda,mla | 128 | 2 |") == 2


def test_an_error_of_attention_stops_the_benchmark(monkeypatch):
    monkeypatch.setattr(attention, "MAX_ERROR", 0.0)
    with pytest.raises(SystemExit, match="wrong results with Heads"):
        attention.errors(attention.TINY["mla"], "cpu", attention.torch.float32)


def test_modes_of_remat(tmp_path, monkeypatch):
    monkeypatch.setattr(ops.torch.cuda, "is_available", lambda: False)
    remat.main(["--layers", "1", "--tokens", "65", "--out", str(tmp_path / "remat.json")])
    found = json.loads((tmp_path / "remat.json").read_text())
    page = report.performance_page([report.Result("remat", found)])
    assert all(f"| {mode} | " in page for mode in remat.MODES)
    rows = found["rows"]
    assert [row["mode"] for row in rows] == list(remat.MODES)
    assert all(row["ms"] > 0 and row["max_difference"] < 1e-4 for row in rows)


EXAMPLE = """
import sys, time
for step, speed in enumerate((10, 50, 40, 60), 1):
    print(f"step {step}: loss 2.5, {speed} tokens/s, {step}.50 GiB", flush=True)
    if step == 2:
        STOPS
"""


@pytest.mark.parametrize(
    "stops, row",
    {
        "pass": {"steps": 4, "peak_gib": 4.5, "tokens_per_second": 50},
        "time.sleep(600)": {"steps": 2, "tokens_per_second": 50, "error": "did not end within 3 s"},
        "sys.exit('torch.OutOfMemoryError: x')": {"steps": 2, "error": "out of memory"},
    }.items(),
)
def test_figures_of_the_example_by_its_lines(stops, row):
    command = [sys.executable, "-c", EXAMPLE.replace("STOPS", stops)]
    limit = 3 if "sleep" in stops else 60
    found = example_figures.row(100, 2, *example_figures.started(command, limit))
    assert found.items() >= row.items() and found["first_step_s"] == 10
    assert ("error" in found) == ("error" in row)
    assert found["wall_s"] < 60
    with pytest.raises(SystemExit, match="failed:\nwhat"):
        example_figures.started([sys.executable, "-c", "import sys; sys.exit('what')"], 60)


@pytest.mark.wide
@pytest.mark.parametrize("script", example_figures.LAUNCHERS)
def test_figures_of_the_example_itself(script, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("accelerate")
    monkeypatch.setattr(ops.torch.cuda, "is_available", lambda: False)
    sizes = "hidden_size=32 intermediate_size=48 num_hidden_layers=4 num_attention_heads=2"
    sizes += " num_key_value_heads=1 head_dim=16 vocab_size=97 linear_num_key_heads=2"
    sizes += " linear_num_value_heads=2 linear_key_head_dim=8 linear_value_head_dim=8"
    out = tmp_path / "example.json"
    flags = ["--tokens", "90", "--steps", "2", "--shape", sizes, "--out", str(out)]
    example_figures.main(["--script", script, "--gpus", "2", *flags])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens_per_second"] > 0 and row["peak_gib"] is None and "error" not in row
    result = report.Result("example", json.loads(out.read_text()))
    assert [s.title for s in report.SECTIONS if s.has(result)] == ["A model of transformers"]
    page = report.performance_page([result])
    assert "| 90 | 2 | " in page and f'--shape "{sizes}"' in page
    with pytest.raises(SystemExit):
        example_figures.main(["--steps", "1"])
    assert "--steps must be at least 2, got 1" in capsys.readouterr().err


def test_ways_to_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(ops.torch.cuda, "is_available", lambda: False)
    loss.main(["--tokens", "300", "--out", str(tmp_path / "loss.json")])
    report = json.loads((tmp_path / "loss.json").read_text())
    rows = {row["way"]: row for row in report["rows"]}
    assert {"whole", "checkpointed", "chunked"} <= set(rows)
    assert all(row["ms"] > 0 and row["errors"]["dx"] < 1e-5 for row in rows.values())
    assert report["tokens"] == 300

    def wrong(x, weight, labels):
        return 1.001 * loss.whole(x, weight, labels)

    monkeypatch.setattr(loss, "ways", lambda: {"whole": loss.whole, "wrong": wrong})
    with pytest.raises(SystemExit, match=r"wrong: errors .* in \['loss', 'dx', 'dweight'\]"):
        loss.main(["--tokens", "300"])
