"""fla-cp-memory: predictions beside what was measured, and the count of a block beside autograd."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.training_sides import VOCABULARY
from fla_cp import build_cp_context
from fla_cp.kernels.triton.launch import redirected
from fla_cp.train import cli, loss, memory
from fla_cp.train.block_memory import Live, eager, first_tensor, rounded
from fla_cp.train.config import UserError
from fla_cp.train.memory import GIB, RESERVED, Part, Prediction, Predictor, longest_that_fits
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.parse import parse

# Dynamo makes an instance of each autograd.Function that it traces (torch 2.13)
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WITHIN, GRAPHS_WITHIN = 0.05, 0.06
"""How far a prediction may be from what was measured, relatively, for all steps and for those in a
CUDA graph whose blocks are not compiled; docs/training.md says it."""

OLDER = "train-1.3B-split.json", "train-1.3B.json"
"""Results from before blocks were compiled."""

UNCOMPILED = "train-4-gpus-selective.json"
"""Steps of blocks that are not compiled, in a CUDA graph or not. The peak of a graph is the memory
that torch reserved for it, with the gaps between tensors."""

RECIPES = "train-recipes-2-gpus.json"
"""Steps of docs/long-context.md."""

HYBRIDS = "train-hybrids.json"
"""Steps on one GPU, in which cuDNN computes the softmax attention."""

BYTES = 256
"""Vocabulary of the trainer's runs over stdlib."""


def rows(name):
    return json.loads((RESULTS / name).read_text())["rows"]


def flags_of(row):
    """The flags of a row of benchmarks.train, with --cuda-graphs on if "auto" captured a graph."""
    own = row["flags"]
    if "--parallel.layout" not in own:  # the default of those days
        own += " --parallel.layout contiguous"
    if row.get("cuda_graph") and "--cuda-graphs" not in own:
        own += " --cuda-graphs on"
    return f"--model {row['model']} --seq-len {row['tokens']} --cp {row['gpus']} {own}"


def measured():
    """(flags, vocabulary, peak in GiB) of every step of the trainer in docs/performance.md."""
    files = "train.json", "train-2-gpus.json", "train-fla.json", UNCOMPILED, RECIPES, HYBRIDS
    for name in files:
        for row in rows(f"current/{name}"):
            if row["who"] == "fla_cp":  # not a peer's model
                yield flags_of(row), VOCABULARY[row["model"]], row["peak_gib"]
    for name in OLDER:
        for row in rows(f"current/{name}"):
            tokens = row.get("seq_len") or row["tokens"]
            flags = f"--model 1.3B --seq-len {tokens} --cp {row['cp']} --compile off"
            yield flags, BYTES, row["peak_gib"]


@functools.cache
def predicted(flags, vocab_size=BYTES):
    config = parse([*flags.split(), "--global-batch-size", "1"])
    return Predictor(config, vocab_size).predict(config.data.seq_len)


def test_every_result_of_training_steps_is_compared():
    """Another result of the trainer in benchmarks/results/current belongs into `measured`."""
    found = {path.name for path in (RESULTS / "current").glob("train*.json")}
    others = {"train.json", "train-2-gpus.json", "train-fla.json", UNCOMPILED, RECIPES, HYBRIDS}
    assert found == others | {*OLDER}
    page = " ".join((RESULTS.parents[1] / "docs/training.md").read_text().split())
    assert "was predicted within 5%" in page
    assert "its blocks are not compiled, within 6%" in page
    assert len(list(measured())) == 23


@pytest.mark.parametrize("flags, vocab_size, peak_gib", list(measured()))
def test_predictions_are_near_what_was_measured(flags, vocab_size, peak_gib):
    found = predicted(flags, vocab_size)
    uncompiled = "--remat selective --cuda-graphs on" in flags
    within = GRAPHS_WITHIN if uncompiled else WITHIN
    assert abs(found.gib / peak_gib - 1) < within, f"{found.table()}\nmeasured {peak_gib} GiB"


@pytest.mark.parametrize("flags, share", [("--compile on", 0.03), ("--compile off", 0.10)])
def test_gaps_of_graphs(flags, share):
    """They depend on whether blocks are compiled; other parts are those without a graph."""
    flags = f"--seq-len 512 --device cuda {flags}"
    plain, graph = predicted(flags), predicted(f"{flags} --cuda-graphs on")
    assert [p for p in graph.parts if "gaps" not in p.name] == [
        p for p in plain.parts if "gaps" not in p.name
    ]
    assert graph.bytes == pytest.approx((1 + share) * plain.bytes, rel=1e-6)
    assert "gaps in the CUDA graph" in graph.table()
    assert "gaps" not in plain.table()


LONG = (RESULTS.parents[1] / "docs/long-context.md").read_text()
PREDICTED = re.findall(r"^\| `(--.*?)` \| ([\d.]+) \| ([\d.]+|-) \|$", LONG, re.M)
"""Flags, GiB of a GPU, and GiB of the host's memory, in docs/long-context.md."""


def test_recipes_have_predictions():
    assert len(PREDICTED) == 7
    for flags, _, _ in PREDICTED:
        assert re.search(rf"fla-cp-train {re.escape(flags)}(?: --out .*)?$", LONG, re.M), flags


@pytest.mark.wide
@pytest.mark.parametrize("flags, gib, host", PREDICTED)
def test_predictions_of_recipes_are_those_of_the_page(flags, gib, host):
    config = parse(flags.split())
    found = Predictor(config).predict(config.data.seq_len)
    assert found.gib == pytest.approx(float(gib), rel=5e-3)  # versions of torch save other tensors
    assert found.host / GIB == pytest.approx(0.0 if host == "-" else float(host), rel=5e-3)


@pytest.mark.parametrize("row", rows("archive/2026-11-21-9d060fa/train-1.3B-fits.json"))
def test_lengths_that_fit(row):
    """On H200s, which have 139 GiB."""
    found = predicted(f"--model 1.3B --compile off --cp {row['cp']} --seq-len {row['tokens']}")
    assert (found.gib <= (1 - RESERVED) * memory.MEMORY_GIB) == row["fits"]


MIXERS = ["kda", "gdn", "gla", "attention", "mla"]


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_count_of_a_block_is_what_autograd_saves(mixer, experts):
    """The same block on the CPU, with memory, saves tensors of as many bytes."""
    flags = f"--mixer {mixer} --impl torch --model.layers 1 --model.experts {experts}"
    model = build_model(parse(flags.split()).model, 64, 0)
    block, T = model.blocks[0], 200
    context = build_cp_context(torch.tensor([0, T]), None, conv1d_kernel_size=4)
    x = torch.randn(1, T, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(x, context):
        return first_tensor(block(x, context))

    run(x.detach(), context)  # makes the tables of the packing
    given = {t.untyped_storage()._cdata for t in (x, *block.parameters(), *block.buffers())}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in given:
            found[storage._cdata] = storage.nbytes(), t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(x, context)
    found[y.untyped_storage()._cdata] = y.untyped_storage().nbytes(), y
    saved = sum(rounded(size) for size, _ in found.values())

    with torch.device("meta"):
        other = Decoder(parse(flags.split()).model, 64)
    block = other.blocks[0]
    counted = eager(block, run, x.detach().to("meta"), context)
    # On the CPU, RMSNorm keeps another copy of its input, and tables of packings are saved.
    assert 0.8 < counted.kept / saved < 1.1
    assert counted.kept <= counted.forward


def test_remat_and_offload_take_less():
    flags = "--model 340M --seq-len 131072"
    modes = ["", " --remat selective", " --remat full", " --remat full --offload"]
    found = [predicted(flags + mode) for mode in modes]
    kept = [sum(p.bytes for p in f.parts if "activations" in p.name) for f in found]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert [f.host > 0 for f in found] == [False, False, False, True]
    # docs/training.md: with full a block keeps 2D bytes a token
    assert kept[2] == 24 * 131072 * 2 * 1024


QWEN = 131072, 248_320, 2560
"""Tokens, vocabulary and hidden size of Qwen3.5-4B, whose logits in float32 would take 121 GiB."""


def one_kernel(function, device):
    """Of the pointwise part of a chunk, only what it returns, as when it is compiled on a GPU."""

    def results(logits, labels):
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        return losses if function is loss._losses else (losses, torch.empty_like(logits))

    return results


@pytest.mark.parametrize("sizes", [QWEN, (131072, 32000, 1024)], ids=["Qwen3.5", "340M"])
def test_count_of_the_loss_is_the_prediction(monkeypatch, sizes):
    tokens, vocabulary, hidden = sizes
    monkeypatch.setattr(loss, "_pointwise", one_kernel)
    x, weight = (
        torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for rows in (tokens, vocabulary)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Live((x, weight, labels)) as live:
        loss.chunked_cross_entropy(x.clone(), weight, labels).backward()  # the clone counts
    assert live.peak == pytest.approx(memory.loss_bytes(tokens, hidden, vocabulary, 2), rel=1e-3)
    if sizes == QWEN:
        assert live.peak < 5 * GIB < 2 * tokens * vocabulary / 10


def test_loss_in_separate_kernels_holds_few_chunks():
    """With FLA_CP_COMPILE_LOSS=0: logits and gradient in bfloat16, what is between in float32."""
    tokens, vocabulary, hidden = QWEN
    x, weight = (
        torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for rows in (tokens, vocabulary)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Live((x, weight, labels)) as live:
        loss.chunked_cross_entropy(x, weight, labels)
    gradients = 2 * tokens * hidden + 4 * vocabulary * hidden
    assert live.peak - gradients < 6 * loss.CHUNK_BYTES


def test_small_sums_are_shown_in_mib():
    for unit, size in (("MiB", 2**20), ("GiB", 2**30)):
        table = Prediction(1, "now", (Part("all", 3 * size), Part("none", 0))).table()
        rows = [f"  all            3.00 {unit}", f"  peak, now      3.00 {unit}"]
        assert table.split("\n") == rows


def test_ranks_share_tokens_and_parameters():
    alone, shared = predicted("--seq-len 8192"), predicted("--seq-len 32768 --cp 4")

    def part(found, name):
        return next(p.bytes for p in found.parts if p.name == name)

    assert part(shared, "optimiser") == pytest.approx(part(alone, "optimiser") / 4, rel=1e-3)
    assert part(shared, "tokens and labels") == part(alone, "tokens and labels")
    assert not torch.distributed.is_initialized()


def test_gradients_of_several_micro_batches():
    flags = "--model 340M --seq-len 128 --dp-shard 4 --micro-batch-size 1 --global-batch-size 8"
    found = []
    for reduce in ("step", "micro_batch"):
        config = parse([*flags.split(), "--parallel.reduce", reduce])
        found.append(Predictor(config, BYTES).predict(128))
    (whole, shard) = (next(p.bytes for p in f.parts if p.name == "gradients") for f in found)
    assert whole == pytest.approx(4 * shard, rel=1e-3)


@pytest.mark.parametrize("room", [0, 999, 1000, 54321, 10_000_000])
def test_longest_that_fits(room):
    calls = []

    def peak(n):
        calls.append(n)
        return Prediction(n, "", (Part("all", 872 + 2 * n + n * n // 10**5),))

    n = longest_that_fits(peak, room, 64)
    assert n % 64 == 0
    assert n == 0 or peak(n).bytes <= room
    assert peak(n + max(64, n // 400)).bytes > room
    assert len(calls) < 25


def test_command(capsys):
    flags = ["--seq-len", "4096", "--cp", "2", "--global-batch-size", "1", "--memory-gib", "1"]
    plain = "--compile off"  # compiling a block for each length that is tried takes seconds
    assert memory.main([*flags, *plain.split()]) == 0
    out = capsys.readouterr().out
    for text in ("4096 tokens over cp 2", "each of 2 ranks", "2 x kda and SwiGLU", "peak, in"):
        assert text in out
    longest = int(out.rsplit(": ", 1)[1])
    room = (1 - RESERVED) * GIB
    assert predicted(f"--seq-len {longest} --cp 2 {plain}").bytes <= room
    longer = longest + longest // 100 // 128 * 128
    assert predicted(f"--seq-len {longer} --cp 2 {plain}").bytes > room
    assert memory.main([*flags, "--no-longest"]) == 0
    assert "longest" not in capsys.readouterr().out
    assert memory.main(["--memory-gib", "0.001", *plain.split()]) == 0
    assert "no length fits into 0.001 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--memory-gib 0", "--memory-gib must be finite and above 0, got 0.0"),
        ("--device cpu", "--device must be cuda or auto, since GPUs are predicted, got cpu"),
        ("--data synthetic", "--model.vocab-size must be given .* got --data synthetic"),
    ],
)
def test_refusals(flags, message, capsys):
    assert memory.main(flags.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_models_of_transformers_are_refused(tmp_path):
    config = parse([])
    folder = f"hf:{tmp_path}"
    model = type(config.model)(size=folder)
    with pytest.raises(UserError, match="must be a named size, since models of transformers"):
        Predictor(type(config)(model=model))


def test_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "tyro" else object())
    assert cli.run_memory() == 2
    assert "fla-cp-memory needs tyro: pip install 'fla_cp[train]'" in capsys.readouterr().err


def test_launches_run_again_afterwards():
    predicted("--seq-len 128")
    from fla_cp.kernels.triton import launch

    assert launch.runner is None
    with redirected(print):
        assert launch.runner is print
