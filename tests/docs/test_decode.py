"""The benchmark of decoding runs, refuses wrong tokens, and has its section in the report."""

import json

import pytest

from benchmarks import decode, measure, report
from benchmarks.report_tables import Result
from fla_cp.train import decoding
from fla_cp.train.model import build_model
from fla_cp.train.parse import parse


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("decode") / "decode.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.torch.cuda, "is_available", lambda: False)
        patch.setattr(decode, "LOOP", 2)
        decode.main(["--batches", "1,3", "--pattern", "kda,gla", "--out", str(out)])
    return Result("decode", json.loads(out.read_text()))


def test_rows(result):
    assert (result.data["size"], result.data["near_ties"]) == ("tiny", {"float32": [0, 0]})
    assert [row["batch"] for row in result.rows] == [1, 3]
    rate = 1e6 * max(result.data["gb_s"].values())
    for row in result.rows:
        assert row["graph_ms"] is None and row["loop_ms"] > 0
        assert row["floor_ms"] == pytest.approx(1e9 * row["gb"] / rate)
    one, three = (1e9 * row["gb"] for row in result.rows)
    # states [2, 64, 64], and windows of four tokens of q, k and v, read and written; in two layers
    assert three - one == 2 * 2 * 2 * 4 * (2 * 64 * 64 + 4 * 3 * 128)


def test_its_section(result):
    assert [s.title for s in report.SECTIONS if s.has(result)] == ["Decoding"]
    row = result.rows[0] | {"graph_ms": 1.25, "over_floor": 1.5, "launches": 200, "late_ms": 1.1}
    row |= {"over_reads": 1.75}
    page = report.performance_page([Result("decode", result.data | {"rows": [row]})])
    section = page.split("## Decoding")[1].split("\n## ")[0]
    assert (
        "| 1 | 0.0027 | " in section
        and " | 1.25 | 1.50x | 1.75x | not measured | not measured | not measured | 1.10 | 200 | "
        in section
    )
    assert "benchmarks.decode --size tiny --pattern kda,gla --batches 1 --out" in section
    assert f"{result.data['gb_s']['read']:.0f} of a sum" in section
    nothing = report.performance_page([]).split("## Decoding")[1].split("\n## ")[0]
    assert "Not measured" in nothing and "python -m benchmarks.decode --out" in nothing
    assert [run.module for run in measure.RUNS if run.name == "decode"] == ["decode"]


def test_wrong_tokens_are_not_timed(monkeypatch):
    monkeypatch.setattr(decode.torch.cuda, "is_available", lambda: False)
    fine = decoding.DecodeStep.__call__

    def wrong(self):
        return -fine(self)

    monkeypatch.setattr(decoding.DecodeStep, "__call__", wrong)
    with pytest.raises(SystemExit, match=r"B = 2, torch.float32: token 1 of the step is not that"):
        decode.main(["--batches", "2"])


def test_near_ties_are_counted_and_others_refused():
    model = build_model(parse(["--model", "tiny"]).model, 1000, 0).eval()
    weight = model.embedding.weight.data
    weight[500:] = weight[:500]  # token 500 + n has the logit of n, and the first one is chosen
    chosen = decode.tokens_of(decode.decoding(model, 2, False)[0], 3)
    assert decode.near_ties(model, chosen) == 0
    weight[500:] *= 1 + 1e-5
    assert decode.near_ties(model, chosen) == 6
    weight[500:] *= 1 + 1e-2
    with pytest.raises(SystemExit, match="is not that of the model's call"):
        decode.near_ties(model, chosen)
