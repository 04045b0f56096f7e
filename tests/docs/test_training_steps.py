"""`benchmarks.train` runs on the CPU, counts what it says, and its results become pages."""

import itertools
import json
import re
import subprocess
import sys

import pytest
import torch

from benchmarks import plot, report, report_steps, step_profile, timeline, train, training_sides
from benchmarks.report_tables import MISSING, Result
from benchmarks.training_sides import Case
from fla_cp.train.flops import step_flops

TINY = Case("fla_cp", "tiny", 128, "one", 1, "--model.layers 1")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """The tiny model on the CPU, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def rows_of(path):
    return json.loads(path.read_text())["rows"]


@pytest.mark.wide
def test_the_whole_program(tmp_path, capfd):
    """Two ranks, with a profile; a second call measures nothing again."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "train.json"
    flags = ["--gpus", "2", "--seq-len", "128", "--steps", "2", "--profile", "--out", str(out)]
    flags += ["--flags", "--remat"]
    assert train.main(flags) == 0
    (row,) = rows_of(out)
    assert (row["who"], row["gpus"], row["flags"]) == ("fla_cp", 2, "--remat")
    assert row["tokens_per_second"] == pytest.approx(128 / row["step_ms"] * 1e3, rel=0.01)
    assert row["slowest_step_ms"] >= row["step_ms"] > 0
    assert row["host_ms"] > 0 and row["batch_ms"] > 0
    assert row["mfu"] is None and row["peak_gib"] is None, "there is no GPU"
    assert 0 < row["profile"]["busy"] <= 1
    assert "DeltaRuleFunction" in [kernel["name"] for kernel in row["profile"]["kernels"]]
    shown = capfd.readouterr().out
    assert "first step" in shown and "kernels run in" in shown
    plot.plot_steps(json.loads(out.read_text()), tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 5000

    assert train.main(flags) == 0
    assert rows_of(out) == [row]
    assert "first step" not in capfd.readouterr().out
    changed = json.loads(out.read_text()) | {"torch": "1.0"}
    out.write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match=r"--out must be a new file .*torch: 1\.0, now"):
        train.main(flags)


@pytest.fixture(scope="module")
def one_rank():
    from fla_cp.train.distributed import joined

    with joined(TINY.config().parallel) as ranks:
        yield ranks


def test_a_case_of_one_rank(one_rank):
    """The steps are the trainer's: the loss of repeated steps falls, and weights change once."""
    side = training_sides.Trainer(TINY, TINY.config(), one_rank)
    before = [p.detach().clone() for p in side.model.parameters()]
    row = train.measure(side, TINY, one_rank, 2, False)
    assert side.steps == 1 + train.WARM + 2 + train.ISSUED
    assert any((a != b).any() for a, b in zip(before, side.model.parameters(), strict=True))
    assert row["parameters"] == sum(p.numel() for p in side.model.parameters())
    assert row["flops"] == training_sides.step_operations(TINY) > 0
    assert TINY.found([{"who": "other"}, row]) is row


class Wrong(training_sides.Trainer):
    def metrics(self):
        return 2 * super().metrics()


def test_a_loss_that_cannot_be_is_refused(one_rank):
    side = Wrong(TINY, TINY.config(), one_rank)
    with pytest.raises(RuntimeError, match=r"near ln\(vocabulary\) = 5.55, got"):
        train.measure(side, TINY, one_rank, 1, False)


RANDOM = "--model.init random --remat full"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of transformers with experts, whose weights are random but no longer small."""
    pytest.importorskip("transformers", minversion="5.23")
    from tests.support.stock_folders import save_stock

    return save_stock(tmp_path_factory.mktemp("models") / "qwen", "qwen3_5_moe")


@pytest.mark.parametrize("flags", [RANDOM, ""])
def test_a_model_of_transformers(one_rank, folder, flags):
    case = Case("fla_cp", f"hf:{folder}", 128, "packed", 1, flags)
    side = training_sides.Trainer(case, case.config(), one_rank)
    row = train.measure(side, case, one_rank, 2, False)
    assert (case.vocabulary, row["model"]) == (256, f"hf:{folder}")
    assert row["parameters"] == sum(p.numel() for p in side.model.parameters()) > 1e4
    assert row["tokens_per_second"] > 0 and row["flops"] > 6 * 128 * 256 * 32  # the head's alone
    if flags == "":
        with pytest.raises(RuntimeError, match=r"must be at least ln\(vocabulary\) = 5.55, got 0"):
            train.measure(Still(case, case.config(), one_rank), case, one_rank, 1, False)


class Still(training_sides.Trainer):
    def metrics(self):
        return 0.1 * super().metrics()


@pytest.mark.wide
def test_the_whole_program_with_a_model_of_transformers(folder, tmp_path):
    flags = ["--models", f"hf:{folder}", "--gpus", "2", "--seq-len", "128", "--steps", "1"]
    out = tmp_path / "train.json"
    assert train.main([*flags, "--out", str(out), "--flags", RANDOM]) == 0
    (row,) = rows_of(out)
    assert row["tokens_per_second"] > 0 and row["flops"] > 0


def test_operations_of_attention_over_packed_documents(folder):
    """The mean over packs; recurrences and products count by the token."""
    for model, flags in (f"hf:{folder}", ""), ("tiny", "--model.pattern kda,attention"):
        one, packed = (Case("fla_cp", model, 500, data, 1, flags) for data in ("one", "packed"))
        parts = step_flops(training_sides.meta_model(one), 500)
        less = training_sides.step_operations(one) - training_sides.step_operations(packed)
        pairs = [
            sum(n * (n + 1) for n in pack["cu_seqlens"].diff().tolist())
            for pack in training_sides.dataset(packed)
        ]
        share = sum(pairs) / len(pairs) / (500 * 501)
        assert 0 < share < 0.9
        assert less == pytest.approx((1 - share) * parts["attention"].needed)
    tiny = [Case("fla_cp", "tiny", 500, data, 1, "") for data in ("one", "packed")]
    assert len({training_sides.step_operations(case) for case in tiny}) == 1


def test_a_model_without_a_formula_has_no_operations(monkeypatch, folder):
    from fla_cp.train import stock_flops

    def unknown(mixer):
        raise ValueError(f"there is no formula for the mixer {type(mixer).__name__}")

    monkeypatch.setattr(stock_flops, "_mixer", unknown)
    assert training_sides.step_operations(Case("fla_cp", f"hf:{folder}", 9, "one", 1, "")) is None


def test_documents():
    one = training_sides.dataset(TINY, packs=3)
    assert [pack["cu_seqlens"].tolist() for pack in one] == [[0, 128]] * 3
    assert int(one[0]["tokens"].min()) >= 0 and int(one[0]["tokens"].max()) < 256
    case = Case("fla_cp", "340M", 65536, "packed", 1, "")
    lengths = training_sides.dataset(case, packs=2)[0]["cu_seqlens"].diff()
    assert len(lengths) > 20 and int(lengths.sum()) == 65536
    assert int(lengths.min()) < 100 and 2000 < int(lengths.max()) <= 8192


def failing(monkeypatch, program):
    """Lets the ranks of a case run this program."""
    monkeypatch.setattr(train, "rank_command", lambda _: [sys.executable, "-c", program])


ARGUMENTS = ["--gpus", "2", "--steps", "1", "--limit", "60"]
SLEEP = "import time; time.sleep(100)"
"""The other rank, which must be ended."""


@pytest.mark.parametrize("code", [train.OUT_OF_MEMORY, 1])
def test_ranks_that_fail(code, monkeypatch, tmp_path):
    """Too little memory is a row; anything else ends the run."""
    first = f"import os; os.environ['RANK'] == '0' and os._exit({code}); {SLEEP}"
    failing(monkeypatch, first)
    out = tmp_path / "train.json"
    if code == 1:
        with pytest.raises(SystemExit, match="a rank ended with exit code 1"):
            train.main([*ARGUMENTS, "--out", str(out)])
        assert not out.exists()
        return
    assert train.main([*ARGUMENTS, "--out", str(out)]) == 0
    (row,) = rows_of(out)
    assert row["error"] == "out of memory" and "step_ms" not in row


def test_ranks_get_the_environment_before_our_backend(monkeypatch):
    """Triton's settings go into the environment; those of our backend must not reach FLA's."""
    real = train.environment

    def change():
        monkeypatch.setenv("TRITON_PTXAS_PATH", "ours")
        return real()

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(train, "environment", change)
    failing(monkeypatch, "import os; os._exit(5 if 'TRITON_PTXAS_PATH' in os.environ else 6)")
    with pytest.raises(SystemExit, match="a rank ended with exit code 6"):
        train.main(["--gpus", "1"])


def test_a_case_that_takes_too_long(monkeypatch):
    failing(monkeypatch, SLEEP)
    with pytest.raises(SystemExit, match="no result after --limit 1 s"):
        train.main(["--gpus", "1", "--limit", "1"])


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--models", "7B"],
            "--models must be of tiny, 340M, 1.3B, kimi-linear-small, qwen3-next-small, "
            "kimi-linear, qwen3-next, hf:DIR, got 7B",
        ),
        (
            ["--models", "hf:/no/such"],
            "--model hf:/no/such: must be a folder, got '/no/such', which does not exist",
        ),
        (
            ["--models", "tiny,hf:a", "--peer", "fla"],
            "--peer must be left out with --models hf:a, got fla",
        ),
        (["--data", "one,two"], "--data must be of one, packed, got two"),
        (["--peer-only"], "--peer-only needs --peer"),
        (["--peer", "fla"], "--peer fla needs a GPU"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--flags", "--seq-len 0"], "--flags: --seq-len must be at least 2, got 0"),
    ],
)
def test_refusals(flags, said):
    with pytest.raises(SystemExit) as refused:
        train.main(flags)
    assert str(refused.value) == said


def test_cases():
    flags = ["--models", "340M,1.3B", "--data", "one,packed", "--gpus", "1,2", "--peer", "fla"]
    args = train.parser(2).parse_args(
        train.joined_flags([*flags, "--flags", "--remat", "--flags", "--compile"])
    )
    found = train.cases(args)
    assert len(found) == 2 * 2 * (2 * 2 + 1)
    assert {c.flags for c in found if c.who == "fla_cp"} == {"--remat", "--compile"}
    assert {(c.gpus, c.flags) for c in found if c.who == "fla"} == {(1, "--remat")}
    args.peer_only = True
    assert {c.who for c in train.cases(args)} == {"fla"}


def test_the_peers_process_does_not_load_our_kernels():
    """Our backend chooses an assembler for the whole process, also for FLA's kernels."""
    program = "import sys, benchmarks.train; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=report.ROOT)
    assert "fla_cp.train.step" in done.stdout
    assert "fla_cp.kernels.triton" not in done.stdout


def event(name, start, duration, category="kernel"):
    return {"cat": category, "name": name, "ts": start, "dur": duration}


def test_summary_of_a_profile():
    """Two steps of 10 ms; a collective runs for a while beside a product, and for a while alone."""
    events = [
        event("nvjet_gemm", 1000.0, 4000.0),
        event("scan_kernel", 11000.0, 5000.0),
        event("nvjet_gemm", 16000.0, 1000.0),
        event("ncclDevKernel", 4000.0, 2000.0),
        event("cudaLaunchKernel", 0.0, 20000.0, "cuda_runtime"),
        {"cat": "kernel", "name": "no duration", "ts": 0.0},
    ]
    found = step_profile.summary(events, "kernel", 20.0, 2)
    assert found["wall_ms"] == 10.0
    assert found["busy"] == (5 + 6) / 20
    assert found["computing"] == (4 + 6) / 20
    assert found["kinds"] == {"projections": 2.5, "scans, folds": 2.5, "exchange": 1.0}
    assert found["kernels"][0] == {"name": "nvjet_gemm", "ms": 2.5, "calls": 1.0}
    assert found["idle"] == {"scan_kernel": 2.5}
    assert "2.500 ms idle before scan_kernel" in step_profile.shown(found)
    assert (
        "10.0 ms each: 2 kernels run in 55.0% of it, without exchanges 50.0%"
        in step_profile.shown(found)
    )


def test_kinds_of_kernels_of_both_sides():
    """Names of our kernels, FLA's and torch's."""
    kinds = {
        "scan_bwd_kernel": "scans, folds",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "scans, folds",
        "chunk_kda_fwd_kernel_intra_sub_chunk": "local to a chunk",
        "chunk_gla_fwd_kernel_o": "local to a chunk",
        "causal_conv1d_bwd_kernel": "convolution",
        "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimiser",
        "void vectorized_elementwise_kernel<4>": "elementwise, norms",
    }
    assert {name: timeline.kind(name) for name in kinds} == kinds


def test_union_of_intervals():
    assert step_profile.covered([]) == 0
    assert step_profile.covered([(5, 6), (0, 2), (1, 4), (2, 3)]) == 5


# pages


def step_row(who, model, gpus, speed, flags="", **more):
    row = {"who": who, "model": model, "tokens": 65536, "data": "one", "gpus": gpus}
    row |= {"flags": flags, "tokens_per_second": speed, "mfu": 0.456, "step_ms": 1234.5}
    return row | {"host_ms": 210.0, "peak_gib": 80.5} | more


def example(*rows):
    """A result with made-up numbers; no page shows it."""
    return Result("train", {"benchmark": "train", "date": "today", "rows": list(rows)})


def cells(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_table_of_steps():
    result = example(
        step_row("fla_cp", "340M", 1, 30000.0),
        step_row("fla_cp", "340M", 2, 57000.0),
        step_row("fla", "340M", 1, 20000.0, peak_gib=99.0),
        {k: v for k, v in step_row("fla_cp", "1.3B", 1, 0.0).items() if k not in MEASURED}
        | {"error": "out of memory"},
    )
    one, two, large = cells(report_steps.training_steps(result))
    assert one["tokens"] == "65536, one document"
    assert (one["tokens/s"], one["MFU"], one["host, ms"]) == ("30000", "45.6%", "210.0")
    assert (one["FLA, tokens/s"], one["FLA, peak GiB"], one["ratio"]) == ("20000", "99.00", "1.50x")
    assert (two["over one GPU"], two["FLA, tokens/s"], two["ratio"]) == ("1.90x", "-", "-")
    assert (large["tokens/s"], large["MFU"], large["ratio"]) == ("out of memory", MISSING, MISSING)
    assert "flags" not in one
    page = report.performance_page([result])
    alone = "--seq-len 65536 --data one --gpus 1 --peer fla --out"
    assert "--models 340M --seq-len 65536 --data one --gpus 1,2 --peer fla --out" in page
    assert f", then `python -m benchmarks.train --models 1.3B {alone}" in page
    assert "train-steps.png" in page


def test_one_command_measures_all_combinations():
    cases = itertools.product(("340M", "1.3B"), (1, 2), ("", "--remat"))
    rows = (step_row("fla_cp", model, gpus, 9.0, flags) for model, gpus, flags in cases)
    command = report_steps.steps_command(example(*rows))
    assert ", then " not in command
    of_all = "--models 340M,1.3B --seq-len 65536 --data one --gpus 1,2"
    assert f'{of_all} --flags "" --flags "--remat" --out' in command


MEASURED = ("tokens_per_second", "mfu", "step_ms", "host_ms", "peak_gib")


def test_flags_and_their_peer():
    """FLA's row has the same flags or none; a row with other flags is not comparable."""
    result = example(
        step_row("fla_cp", "340M", 1, 30000.0, "--compile"),
        step_row("fla_cp", "340M", 1, 24000.0, "--remat"),
        step_row("fla", "340M", 1, 20000.0),
        step_row("fla", "340M", 1, 16000.0, "--remat"),
        step_row("fla_cp", "1.3B", 1, 9000.0),
        step_row("fla", "1.3B", 1, 5000.0, "--remat"),
    )
    rows = cells(report_steps.training_steps(result))
    assert report_steps.steps_command(result).count(", then ") == 2
    assert [r["flags"] for r in rows] == ["`--compile`", "`--remat`", "-"]
    assert [r["ratio"] for r in rows] == ["1.50x", "1.50x", MISSING]


def test_table_of_profiles():
    kernels = [{"name": "void gemm<a|b>", "ms": 5.0, "calls": 2.0}]
    profile = {"wall_ms": 100.0, "busy": 0.97, "computing": 0.9, "kernels": kernels}
    profile["kinds"] = {"projections": 50.0}
    text = report_steps.training_steps(
        example(step_row("fla_cp", "340M", 2, 57000.0, profile=profile))
    )
    assert "| 340M, 65536, one document, 2 GPUs | 100.0 | 97.0% | 90.0% | 50.00 |" in text
    assert "| `void gemm<a/b>` | 5.00 | 2.00 |" in text


def test_readmes_list():
    assert report.readme_training({}).endswith(f"{MISSING}.")
    beside = example(
        step_row("fla_cp", "340M", 1, 30000.0),
        step_row("fla_cp", "340M", 1, 33000.0, "--compile", mfu=0.5),
        step_row("fla_cp", "340M", 2, 57000.0, "--compile"),
        step_row("fla", "340M", 1, 20000.0),
        step_row("fla_cp", "1.3B", 1, 8000.0),
    )._replace(name="train-fla")
    alone = example(step_row("fla_cp", "1.3B", 4, 9000.0), step_row("fla_cp", "340M", 1, 1.0))
    text = report.readme_training({r.name: r for r in (beside, alone)})
    first, second = text.splitlines()
    document = "- Training 340M on one document of 65536 tokens,"
    assert first.startswith(
        f"{document} 1 GPU, `--compile`: 33000 tokens/s, MFU 50.0%, "
        "1.65x the 20000 tokens/s of FLA's own model class. ["
    )
    assert second.startswith(
        f"{document} 2 GPUs, `--compile`: 57000 tokens/s, MFU 45.6%, "
        "1.73x the 33000 tokens/s of one GPU. ["
    )
    assert "1.3B" not in text  # not measured on one GPU in its file
    assert re.search(r"\(benchmarks/results/current/train-fla\.json\): GPU not recorded", text)
    assert "train.json" not in text
    more = example(step_row("fla_cp", "1.3B", 1, 9000.0, mfu=0.5))
    text = report.readme_training({r.name: r for r in (beside, more)})
    assert "65536 tokens, 1 GPU: 9000 tokens/s, MFU 50.0%. [train.json]" in text
    assert text.index("train-fla.json") < text.index("train.json")
    two = example(step_row("fla_cp", "340M", 1, 30000.0), step_row("fla_cp", "340M", 2, 57000.0))
    two = two._replace(name="train-2-gpus")
    two.data["note"] = "two machines"
    text = report.readme_training({r.name: r for r in (beside, two)})
    assert "45.6%, 1.90x the 30000 tokens/s of one GPU. [train-2-gpus.json]" in text
    assert text.endswith(" Note: two machines.")
    rows = [step_row("fla_cp", "340M", n, 30000.0 * n, "--compile") for n in (1, 2, 4)]
    four = example(*rows, step_row("fla_cp", "340M", 4, 99000.0))
    four = four._replace(name="train-4-gpus-selective")
    text = report.readme_training({r.name: r for r in (two, four)})
    assert len(text.splitlines()) == 2
    assert "4 GPUs, `--compile`: 120000 tokens/s, MFU 45.6%, 4.00x the 30000 tokens/s" in text
    alone = example(step_row("fla_cp", "340M", 1, 30000.0))._replace(name="train-2-gpus")
    assert report.readme_training({alone.name: alone}).endswith(f"{MISSING}.")
