"""docs/performance.md and README's tables are what benchmarks/report.py makes of the results."""

import json
import re
import shutil
import statistics
import sys

import pytest

from benchmarks import report, report_decays, report_scaling, report_tables, units
from benchmarks.report_tables import MISSING, Result

RESULTS = {r.name: r for r in report.load()}


def cells(text):
    """The rows of the first table of a text, without its head, as lists of cells."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def test_pages_are_those_of_the_results():
    for path, text in report.pages(report.load(), report.ROOT).items():
        assert path.read_text() == text, f"{path.name}: run python -m benchmarks.report"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """README and docs/performance.md in a folder of their own, where `main` finds them."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        shutil.copy(report.ROOT / name, tmp_path / name)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["report", *flags])
    return report.main()


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_check_names_a_stale_page_and_writes_nothing(name, copy, monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 0
    page = copy / name
    good = page.read_text()
    stale = good.replace("NVIDIA H200", "NVIDIA H201")
    assert stale != good
    page.write_text(stale)
    assert run(monkeypatch, "--check") == 1
    assert capsys.readouterr().out == f"{name} is out of date: run python -m benchmarks.report\n"
    assert page.read_text() == stale
    assert run(monkeypatch) == 0
    assert page.read_text() == good


def test_readme_shows_peers_by_decay_as_the_file_has_them():
    result = RESULTS[report.README_PERFORMANCE]
    text = report_decays.readme(result)
    rows = cells(text)
    assert [row[0] for row in rows] == ["strong", "drawn", "weak"]
    for row in rows:
        ours, fla, cudnn = (
            [
                statistics.mean(r[direction])
                for r in result.rows
                for direction in ("forward", "both")
                if (r["decay"], r["op"]) == (row[0], who)
            ]
            for who in ("fla_cp", "fla", "cudnn")
        )
        shown = [float(x) for x in re.findall(r"[\d.]+", " ".join(row[2:]))]
        expected = [*ours]
        for theirs in (fla, cudnn):
            expected += [*theirs, *(b / a for a, b in zip(ours, theirs, strict=True))]
        assert shown == pytest.approx(expected, abs=0.006)
    for fact in ("gpu", "torch", "triton", "date", "commit"):
        assert result.data[fact] in text.splitlines()[-1]


def test_readme_shows_three_lengths_over_gpus():
    result = RESULTS[report.README_SCALING]
    rows = cells(report.readme_scaling(result))
    assert [row[0] for row in rows] == [str(T) for T in report.README_TOKENS]
    ms = {(r["op"], r["T"], r["ranks"]): r.get("ms") for r in result.rows if r["kind"] == "strong"}
    T = report.README_TOKENS[1]
    gain = ms["layer", T, 1] / ms["layer", T, 4]
    assert rows[1][-1] == f"{ms['layer', T, 4]:.2f} ({gain:.2f}x)"
    assert rows[2][1] == "out of memory" and ms["operator", report.README_TOKENS[2], 1] is None


def test_what_was_not_measured_says_so():
    result = RESULTS[report.README_PERFORMANCE]
    data = json.loads(json.dumps(result.data))
    for row in data["rows"]:
        if row["op"] == "cudnn" and row["decay"] == "weak":
            del row["both"]
    data["rows"] = [r for r in data["rows"] if (r["op"], r["decay"]) != ("fla", "drawn")]
    rows = cells(report_decays.readme(Result("r", data)))
    assert rows[1][3:5] == [MISSING, MISSING]
    assert rows[2][5].endswith(f" / {MISSING}") and rows[2][6].endswith(f" / {MISSING}")
    assert "GPU not recorded, torch not recorded" in report.tables.facts({})


def test_scaling_shows_the_host_where_a_row_has_it():
    result, host = RESULTS[report.README_SCALING], ("forward", "both")
    measured = [r for r in result.rows if r["op"] == "operator"]
    rows = [{n: x for n, x in r.items() if n not in host} for r in measured]
    titles = report_scaling.scaling(Result("cp", {"rows": rows}), "operator").splitlines()[0]
    assert "host, ms" not in titles
    for n, direction in enumerate(("forward", "both"), 1):
        counted = {"host_ms": 0.3 * n, "launches": 3 * n, "torch_ops": n}
        rows[1][direction] = counted
        rows[2][direction] = {"host_ms": 0.2 * n, "not_replayed": "why"}
    text = report_scaling.scaling(Result("cp", {"rows": rows}), "operator")
    assert text.splitlines()[0].endswith("| host, ms | launches | torch ops |")
    shown = cells(text)
    assert shown[0][-3:] == [MISSING] * 3
    assert shown[1][-3:] == ["0.300 / 0.600", "3 / 6", "1 / 2"]
    assert shown[2][-3:] == ["0.200 / 0.400", MISSING, MISSING]


def test_every_result_has_a_table():
    page = report.performance_page(report.load())
    assert all(f"[{name}.json]" in page for name in RESULTS)
    with pytest.raises(ValueError, match="no table of other"):
        report.performance_page([*RESULTS.values(), Result("other", {"date": "today"})])
    empty = report.performance_page([])
    optional = [s.title for s in report.SECTIONS if s.optional]
    said = empty.count("Not measured: there is no result file.")
    assert said == len(report.SECTIONS) - len(optional)
    assert optional and not any(f"## {title}\n" in empty for title in optional)
    assert not re.search(r"^### ", empty, re.M)


def test_a_checkpoints_report_is_shown():
    """What benchmarks/checkpoint.py prints, kept as a file."""
    data = {"ranks": 2, "bytes": 3e9, "parameters": 5e8, "seconds": {"blocking": 1.5}}
    page = report.performance_page([Result("checkpoint", data)])
    assert "3.0 GB, 500 M parameters, 2 ranks" in page
    assert "| blocking | 1.50 |" in page


def test_attention_beside_pytorch():
    """A ratio above one means that ours is faster, each way by its own times."""
    row = {"shape": "mla", "T": 8192, "documents": "one document"}
    row |= {"ours_forward_ms": 2.0, "torch_forward_ms": 1.0, "ours_both_ms": 4.0}
    result = Result("attention", {"benchmark": "attention", "rows": [row | {"torch_both_ms": 6.0}]})
    text = report.performance_page([result])
    expected = "| 16 on 16, K = 192, V = 128 | 8192, one document | 2.00 | 1.00 | 0.50x |"
    assert f"{expected} 4.00 | 6.00 | 1.50x |" in text
    assert "python -m benchmarks.attention --tokens 8192 --out" in text


def test_host_time_of_layers():
    times = {"host_ms": 0.5, "aten": 20, "kernels": 10}
    row = {"layer": "gdn", "T": 8192, "nodes": 1, "forward": times}
    row["both"] = {"host_ms": 2.25, "aten": 90, "kernels": 30}
    text = report.performance_page([Result("x", {"benchmark": "layer_host", "rows": [row]})])
    assert "| Gated delta rule | 8192 | 0.500 / 2.25 | 20 / 90 | 10 / 30 | 1 |" in text
    assert "python -m benchmarks.layer_host --out" in text


def test_activation_checkpoints():
    """Ratios are those to the mode none; what no GPU measured says so."""
    row = {"mode": "none", "ms": 2.0, "host_ms": 1.5, "peak_gib": 8.0, "kept_gib": 4.0}
    offloaded = row | {"mode": "full, offload", "ms": 3.0, "kept_gib": None}
    data = {"benchmark": "remat", "size": "340M", "layers": 4, "tokens": 32768}
    data |= {"gate_lower_bound": "-5", "rows": [offloaded, row]}
    text = report.performance_page([Result("remat", data)])
    assert "## Activation checkpoints and offload\n" in text
    assert "| none | 2.00 | 1.00x | 1.50 | 4.00 | 8.00 |" in text
    assert f"| full, offload | 3.00 | 1.50x | 1.50 | {MISSING} | 8.00 |" in text
    flags = "--size 340M --layers 4 --tokens 32768 --gate-lower-bound -5 --out"
    assert f"python -m benchmarks.remat {flags}" in text


def test_figures_of_the_example():
    """A length without tokens/s says why."""
    row = {"tokens": 65536, "gpus": 2, "steps": 3, "wall_s": 61.5, "first_step_s": 30.25}
    row |= {"peak_gib": 70.5, "tokens_per_second": 9000}
    full = {"tokens": 262144, "gpus": 2, "steps": 0, "wall_s": 40.0, "error": "out of memory"}
    data = {"benchmark": "example", "shape": "", "rows": [row, full]}
    text = report.performance_page([Result("example", data)])
    assert "## A model of transformers\n" in text
    assert "| 65536 | 2 | 9000 | 30.25 | 70.50 | 61.50 |" in text
    assert f"| 262144 | 2 | out of memory | {MISSING} | {MISSING} | 40.00 |" in text
    assert "python -m benchmarks.example_figures --gpus 2 --tokens 65536,262144 --steps 3" in text
    other = report.performance_page([Result("x", data | {"script": "accelerate_hybrid.py"})])
    assert "example_figures --script accelerate_hybrid.py --gpus 2 --tokens 65536,262144" in other


def test_units_of_older_files_are_shown_in_todays_words():
    """The names of columns of `benchmarks.ops` are explained once, above its tables."""
    before = "ms of the device, medians; host_ms: until the call returns; peak_gib: with inputs"
    for unit in (before, units.OPS.format(chain=4)):
        assert units.shown(unit) == units.DEVICE
    assert units.shown("ms a step, steps back to back.") == units.STEPS
    assert units.shown("furlongs") == "furlongs"
    data = {"benchmark": "kda", "unit": before}
    assert f"\nUnit: {units.DEVICE}." in report_tables.described(Result("kda", data), "x")
