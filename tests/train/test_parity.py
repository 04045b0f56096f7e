"""--check-parity holds for a correct split on any processor, and finds small faults.

The trainer's functions run on the ranks of the session's pool: a launcher for every case would take
ten times as long. tests/train/test_train.py starts one as a user does.
"""

import json
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

import fla_cp.train.model
import fla_cp.train.parity
from fla_cp.comm.exchange.all_gather import AllGather
from fla_cp.train.parse import parse
from fla_cp.train.sources import Reading, build_dataset
from tests.support.meshes import ranks_of

SPLITS = {
    "cp": "--cp 4",
    "zigzag": "--cp 4 --parallel.layout zigzag",
    "micro-batches and Muon": "--cp 4 --micro-batch-size 1 --optimizer muon",
    "uneven": "--cp 4 --check-parity --parallel.layout uneven",
    "cp and shards": "--cp 2 --dp-shard 2",
    "zigzag and replicas": "--cp 2 --dp-replicate 2 --parallel.layout zigzag --remat selective",
}
FLAGS = [
    *("--model.layers", "2", "--model.hidden-size", "32", "--device", "cpu"),
    *("--model.num-heads", "2", "--model.head-dim", "16"),
    *("--seq-len", "150", "--global-batch-size", "2", "--lr", "0.01", "--warmup-steps", "5"),
    *("--check-parity", "--parity.steps", "2"),
]
FAULT = 1.0001
"""A gradient times this is off by 1e-4."""


def wrong_gradient(patch, rank, name):
    """Changes the gradient of one parameter in the split's run, like a missing factor or term."""
    original = fla_cp.train.parity.forward_backward

    def scaled(model, batch, targets, config, ranks, check=False):
        share = original(model, batch, targets, config, ranks, check)
        if ranks.world_size > 1:
            model.get_parameter(name).grad.mul_(FAULT)
        return share

    patch.setattr(fla_cp.train.parity, "forward_backward", scaled)


def lost_state(patch, rank, where):
    """One rank gets an empty state from one exchange of the split's run.

    where: (rank, number of the exchange).
    """
    original, calls = AllGather.start, []

    def start(self, *args):
        started = original(self, *args)
        calls.append(1)
        if (rank, len(calls)) != where:
            return started
        return SimpleNamespace(wait=lambda overlap: torch.zeros_like(started.wait(overlap)))

    patch.setattr(AllGather, "start", start)


def late_step(patch, rank, _):
    """The split's optimiser takes its first step at twice the rate."""
    original = fla_cp.train.parity.update

    def doubled(model, optimizer, rate, *rest):
        alone = next(model.parameters()).device_mesh.size() == 1
        original(model, optimizer, rate if alone else 2 * rate, *rest)

    patch.setattr(fla_cp.train.parity, "update", doubled)


def reports(group, rank, split, data, mixer, seed, faults):
    """The report of every fault, on rank 0. Faults change the split's run only, so the steps of one
    rank and their budgets are computed once."""
    kind = "--model.pattern" if "," in mixer else "--mixer"
    flags = [kind, mixer, "--seed", str(seed), "--data", data]
    config = parse([*FLAGS, *split.split(), *flags])
    dataset = build_dataset(config.data.source, config.data.seq_len, "train", config.run.seed)
    found = []
    with pytest.MonkeyPatch.context() as shared:
        for part in ("_alone", "_budgets"):
            shared.setattr(fla_cp.train.parity, part, once(getattr(fla_cp.train.parity, part)))
        for fault, what in faults:
            with pytest.MonkeyPatch.context() as patch:
                if fault is not None:
                    fault(patch, rank, what)
                found.append(fla_cp.train.parity.compare(config, dataset, ranks_of(split, rank)))
    return found


def once(fn):
    """Calls `fn` once; what it returned is returned from then on."""
    results = []

    def call(*args):
        if not results:
            results.append(fn(*args))
        return results[0]

    return call


MIXERS = ["kda", "gdn", "comba", "gdp", "gla", "simple_gla"]


@pytest.mark.parametrize("split, mixer", [
    ("zigzag and replicas", "kda"),
    ("cp", "gdn"),
    ("micro-batches and Muon", "kda"),
    ("cp and shards", "comba"),
    ("cp", "gdp"),
    ("zigzag and replicas", "gla"),
    ("cp and shards", "simple_gla"),
    ("cp", "kda,attention"),
    ("zigzag and replicas", "kda,mla"),
    ("uneven", "kda,attention"),
    ("uneven", "gdn,mla"),
    pytest.param("uneven", "gdn,attention", marks=pytest.mark.wide),
    pytest.param("uneven", "kda,mla", marks=pytest.mark.wide),
    pytest.param("uneven", "attention,mla", marks=pytest.mark.wide),
    pytest.param("zigzag", "gdn,attention", marks=pytest.mark.wide),
    pytest.param("zigzag", "kda,mla", marks=pytest.mark.wide),
    pytest.param("cp", "kda,mla", marks=pytest.mark.wide),
    pytest.param("zigzag", "attention,mla", marks=pytest.mark.wide),
])  # fmt: skip
def test_every_mixer_trains_like_one_rank(gloo_pool, short_texts, split, mixer):
    (report,), *_ = gloo_pool.run(reports, SPLITS[split], short_texts, mixer, 1, [(None, None)])
    assert report.passed, report.table()
    for row in report.rows:
        # a decay rate has two elements, whose terms nearly cancel: its rounding may be larger
        limit = 1e-3 if row.parameter.endswith(("A_log", "dt_bias")) else 1e-4
        assert row.budget < limit, f"{row.parameter}\n{report.table()}"


def compiled_reports(group, rank, *given):
    """`reports` of blocks that are compiled without a code generator, and how many graphs the ranks
    made."""
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        compile_with = partial(torch.compile, backend="aot_eager")
        patch.setattr(fla_cp.train.model.torch, "compile", compile_with)
        (report,) = reports(group, rank, *given, 1, [(None, None)])
    return report, counters["stats"]["unique_graphs"]


def quiet(test):
    """Ignores warnings of torch.compile about what it does itself: it looks at the .grad of a
    block's input, and makes an object of an autograd.Function."""
    for start in ("The .grad attribute of a Tensor", "<class 'torch.autograd.function.Function'>"):
        test = pytest.mark.filterwarnings(f"ignore:{start}")(test)
    return test


@quiet
@pytest.mark.parametrize("split, mixer", [
    ("--cp 2 --dp-shard 2", "gdn"),
    ("--cp 2 --dp-shard 2 --remat full", "kda"),
    pytest.param("--cp 2 --dp-shard 2", "gdp", marks=pytest.mark.wide),
    pytest.param("--cp 2 --dp-shard 2", "kda", marks=pytest.mark.wide),
    pytest.param("--cp 2 --dp-shard 2 --remat full", "gdn", marks=pytest.mark.wide),
    pytest.param("--cp 4 --remat full", "kda", marks=pytest.mark.wide),
    pytest.param("--cp 2 --dp-replicate 2 --parallel.layout zigzag", "gdn", marks=pytest.mark.wide),
    pytest.param("--cp 4 --micro-batch-size 1", "gdn", marks=pytest.mark.wide),
])  # fmt: skip
def test_compiled_blocks_train_like_one_rank(gloo_pool, short_texts, split, mixer):
    flags = f"{split} --compile on"
    found = gloo_pool.run(compiled_reports, flags, short_texts, mixer)
    (report, _), *_ = found
    assert report.passed, report.table()
    # rank 0 also compiles for one rank, in two dtypes
    assert found[0][1] > 0 and all(0 < graphs <= 2 for _, graphs in found[1:])


@quiet
@pytest.mark.wide
def test_small_faults_of_compiled_blocks_are_found(gloo_pool, short_texts):
    """The test above is not blind."""
    found = gloo_pool.run(faulty_compiled_report, short_texts)[0]
    assert not found.passed
    assert [row.parameter for row in found.rows if not row.within] == [FAULTS["convolution"][1]]


def faulty_compiled_report(group, rank, data):
    with pytest.MonkeyPatch.context() as patch:
        wrong_gradient(patch, rank, FAULTS["convolution"][1])
        return compiled_reports(group, rank, "--cp 2 --dp-shard 2 --compile on", data, "gdn")[0]


FAULTS = {
    "embedding": (wrong_gradient, "embedding.weight"),
    "norm": (wrong_gradient, "blocks.0.mixer_norm.weight"),
    "convolution": (wrong_gradient, "blocks.1.mixer.qkv_conv.weight"),
    "decay rate": (wrong_gradient, "blocks.0.mixer.core.A_log"),
    "step bias": (wrong_gradient, "blocks.1.mixer.core.dt_bias"),
    "a state, forward": (lost_state, (1, 2)),  # the first layer is the first exchange
    "a state, backward": (lost_state, (0, 4)),
    "the optimiser": (late_step, None),
}


@pytest.mark.parametrize("mixer", ["kda", pytest.param("gdn", marks=pytest.mark.wide)])
def test_small_faults_are_found(gloo_pool, short_texts, mixer):
    found = gloo_pool.run(reports, SPLITS["cp"], short_texts, mixer, 0, list(FAULTS.values()))[0]
    for (name, (fault, what)), report in zip(FAULTS.items(), found, strict=True):
        assert not report.passed, f"{name}\n{report.table()}"
        over = [row.parameter for row in report.rows if not row.within]
        if fault is wrong_gradient:
            assert over == [what], f"{name}\n{report.table()}"
        if fault is late_step:
            assert not over and max(report.updates) > 0.9


def test_a_batch_in_which_no_label_counts():
    """Its loss is 0, so that no difference is relative to it."""
    row = fla_cp.train.parity.Row("weight", 0.0, 1e-4, 0.0, 0.0)
    for split, passed in ((0.0, True), (1e-3, False)):
        report = fla_cp.train.parity.Report([(0.0, split)], [row], 1e-5, [0.0], 0.1)
        assert report.passed is passed
        assert f"parity {'holds' if passed else 'FAILS'}" in report.table()


def masked(group, rank, split, data, tokenizer, cache):
    """The report on conversations, and how many labels of a pack count, on rank 0."""
    flags = ["--data", data, "--tokenizer", tokenizer, "--data.cache", cache]
    config = parse([*FLAGS, *split.split(), *flags])
    reading = Reading(tokenizer, None, cache)
    dataset = build_dataset(data, config.data.seq_len, "train", config.run.seed, reading)
    found = fla_cp.train.parity.compare(config, dataset, ranks_of(split, rank))
    return found, [int((dataset[i]["labels"] != -100).sum()) for i in range(4)]


def test_conversations_train_like_one_rank(gloo_pool, tmp_path):
    """The mean is over the labels that count, and ranks have different numbers of them."""
    tokenizers = pytest.importorskip("tests.support.tokenizers")
    pytest.importorskip("datasets")
    tokenizers.save_tokenizer(tmp_path / "tokenizer")
    rng, rows = random.Random(0), []
    for _ in range(80):
        texts = rng.choice(tokenizers.TEXT) * rng.randint(1, 3), rng.choice(tokenizers.TEXT)
        turns = zip(("user", "assistant"), texts, strict=True)
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = f"hf:{tmp_path}/chat.jsonl", str(tmp_path / "tokenizer"), str(tmp_path / "cache")
    (report, counts), *_ = gloo_pool.run(masked, SPLITS["cp and shards"], *given)
    assert report.passed, report.table()
    assert all(10 < count < 140 for count in counts)


@pytest.mark.parametrize("packs, noted", [("1", False), ("2", True), ("3", False)])
def test_a_comparison_without_exchanges_says_so(packs, noted, monkeypatch, capsys):
    """Two ranks with two packs have a whole one each."""
    from fla_cp.train import main

    for name in ("check_impl", "check_folder", "begin_run"):
        monkeypatch.setattr(main, name, lambda *given, **named: None)
    monkeypatch.setattr(main, "load_data", lambda *given: SimpleNamespace(vocab_size=256))
    monkeypatch.setattr(main, "open_run", lambda *given: SimpleNamespace(path=None))
    monkeypatch.setattr(main, "describe", lambda *given: "2 ranks")
    monkeypatch.setattr(main, "compare", lambda *given: None)
    ranks = SimpleNamespace(rank=0, device=torch.device("cpu"), host_max=lambda values: values)
    config = parse(["--cp", "2", "--check-parity", "--global-batch-size", packs])
    assert main.check_parity(config, ranks, None) == 0
    assert ("no state crosses ranks" in capsys.readouterr().out) == noted
