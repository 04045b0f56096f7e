"""Steps through CUDA graphs equal steps without them. On the CPU a stand-in repeats the call that
was captured, and holds it to what a graph needs: gradients stay where they are."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fla_cp.train import build, graphs
from fla_cp.train.config import UserError
from fla_cp.train.distributed import joined
from fla_cp.train.graphs import (
    MAX_GRAPHS,
    MAX_SEEN,
    PROVEN_COMPILED,
    PROVEN_RANKS,
    SEEN_BEFORE,
    Graph,
    Graphs,
    graphs_of,
    zero_gradients,
)
from fla_cp.train.model import build_model
from fla_cp.train.parse import parse
from fla_cp.train.sources import build_dataset
from fla_cp.train.step import HeldOut
from fla_cp.train.weights import local_tensor
from tests.support.loops import steps_taken, training_loop

MODEL = [
    *("--model.layers", "2", "--model.hidden-size", "32"),
    *("--model.num-heads", "2", "--model.head-dim", "16"),
    *("--seq-len", "192", "--global-batch-size", "2", "--device", "cpu", "--lr", "0.01"),
    *("--max-steps", "8", "--eval-every", "4", "--eval-batches", "1"),
]


def addresses(model):
    return [local_tensor(p.grad).data_ptr() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def captures(monkeypatch):
    """Stands in for capturing; returns how many micro-batches each graph has repeated."""
    found = []

    def capture(self, tokens, labels, context):
        tokens, labels = tokens.clone(), labels.clone()
        factor, loss = torch.ones(()), torch.zeros(())
        number = len(found)
        found.append(0)
        if self.single:
            assert not addresses(self.model), "a graph must not add to gradients that it writes"
            self._eager(tokens, labels, context, factor)
            for p in self.model.parameters():
                local_tensor(p.grad).fill_(torch.nan)  # a capture computes nothing
        place = addresses(self.model)
        assert place, "gradients must be there before a graph adds to them"

        def run():
            found[number] += 1
            assert all(isinstance(p, DTensor) for p in self.model.parameters())
            assert addresses(self.model) == place
            if self.single:
                zero_gradients(self.model)  # then what is added is what a graph writes
            loss.copy_(self._eager(tokens, labels, context, factor))
            assert addresses(self.model) == place

        graph = SimpleNamespace(replay=run, reset=lambda: None)
        return Graph(graph, tokens, labels, factor, context, loss, self._written())

    monkeypatch.setattr(Graphs, "_capture", capture)
    return found


def compared(tmp_path, *flags, model=()):
    model = [*MODEL, *model]
    plain, weights, _ = steps_taken(model, tmp_path / "plain")
    rows, found, graphs = steps_taken(model, tmp_path / "graphs", "--cuda-graphs", *flags)
    assert sum(r[2] > 0 for r in rows) == 2
    for mine, theirs in zip(rows, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)
    return graphs


def test_one_graph_serves_every_packing_of_a_fixed_context(captures, tmp_path):
    graphs = compared(tmp_path, "--data.max-documents", "12")
    # the first step compares the ranks, and then SEEN_BEFORE steps run as they are
    assert captures == [8 - 1 - SEEN_BEFORE]
    assert graphs.fixed.max_sequences == 12


def test_one_graph_serves_every_packing_of_softmax_attention(captures, tmp_path):
    model = ["--model.pattern", "mla,attention", "--model.mla-rope"]
    compared(tmp_path, "--data.max-documents", "12", model=model)
    assert captures == [8 - 1 - SEEN_BEFORE]


def test_a_captured_packing_is_that_of_its_first_step(captures, tmp_path):
    """That context has made its tables; a new one would have to copy them while it is captured."""
    (tmp_path / "long.txt").write_text("one long document " * 2000)
    data = ["--data", f"text:{tmp_path / 'long.txt'}"]
    *_, graphs = steps_taken(MODEL, tmp_path / "graphs", "--cuda-graphs", *data)
    ((packing, graph),) = graphs.graphs.items()
    assert graph.context is graphs.seen[packing].context


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_a_failed_capture_names_the_flag(kind, monkeypatch, tmp_path):
    def capture(self, *given):
        raise kind("CUDA error: not permitted when stream is capturing\nDetails follow.")

    monkeypatch.setattr(Graphs, "_capture", capture)
    (tmp_path / "long.txt").write_text("one long document " * 2000)
    data = ["--data", f"text:{tmp_path / 'long.txt'}"]
    with pytest.raises(RuntimeError) as found:
        steps_taken(MODEL, tmp_path / "graphs", "--cuda-graphs", *data)
    if kind is RuntimeError:
        end = "when stream is capturing; start again with --cuda-graphs off"
        assert str(found.value).endswith(end)
    else:  # it has advice of its own
        assert type(found.value) is kind and "--cuda-graphs" not in str(found.value)


def test_packings_that_do_not_come_back_are_forgotten():
    graphs = Graphs(torch.nn.Linear(1, 1))
    for n in range(3 * MAX_SEEN):
        graphs._seen((n,), None)
        graphs._seen((-1,), None)
    assert len(graphs.seen) == MAX_SEEN and graphs.seen[-1,].times == 3 * MAX_SEEN


def test_attention_for_all_packings_needs_bfloat16(tmp_path):
    from fla_cp.train.device_rules import check_impl

    flags = ["--mixer", "mla", "--cuda-graphs", "--data.max-documents", "3", "--dtype", "float32"]
    config = parse([*MODEL, *flags])
    ranks = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(UserError, match=r"with mla needs --dtype bfloat16, .* got float32"):
        check_impl(config, ranks)


def test_packs_of_one_document_share_a_graph(captures, tmp_path):
    """Their packing is the same in each step."""
    (tmp_path / "long.txt").write_text("one long document " * 2000)
    steps_taken(
        MODEL, tmp_path / "graphs", "--cuda-graphs", "--data", f"text:{tmp_path / 'long.txt'}"
    )
    assert captures == [8 - 1 - SEEN_BEFORE]


def test_few_graphs_are_kept(counted, tmp_path, monkeypatch):
    config = parse([*MODEL, "--cuda-graphs", "--out", str(tmp_path)])
    with joined(config.parallel) as ranks, training_loop(config, ranks) as (loop, feed):
        loop._step(feed, [])
        tokens, labels, context = feed.take()[0].placed(config, ranks)
        for n in range(2 * MAX_GRAPHS):
            offsets = (0, n + 1, 384)
            other = SimpleNamespace(global_cu_seqlens=offsets, token_ranges=context.token_ranges)
            monkeypatch.setattr(loop.graphs, "_eager", lambda *given: torch.zeros(()))
            for _ in range(SEEN_BEFORE + 2):
                loop.graphs.loss(tokens, labels, other, 1.0)
    assert counted.made == MAX_GRAPHS


def test_more_documents_than_allowed_run_without_a_graph(captures, tmp_path):
    graphs = compared(tmp_path, "--data.max-documents", "1")
    assert graphs.fixed is None  # packings that came often have graphs of their own


def test_parameters_are_shards_after_an_evaluation(tmp_path):
    """A group that stayed gathered would hide its shards from the norm of the gradients, and keep
    old weights for the next evaluation."""
    config = parse([*MODEL, "--out", str(tmp_path)])
    with joined(config.parallel) as ranks, training_loop(config, ranks) as (loop, _):
        HeldOut(config, build_dataset("stdlib", 192, "valid", 0), ranks).loss(loop.model)
        assert all(isinstance(p, DTensor) for p in loop.model.parameters())


ONE_DOCUMENT = (0, 384)


def automatic(monkeypatch, agreed=bool):
    """`Graphs` with "auto", whose `take` gives the loss of a micro-batch of some packing."""
    from fla_cp.train import graphs

    monkeypatch.setattr(Graphs, "_eager", lambda *given: torch.zeros(()))
    monkeypatch.setattr(graphs, "fits", lambda device: True)
    found = Graphs(torch.nn.Linear(1, 1), auto=True, agreed=agreed)

    def take(*offsets):
        context = SimpleNamespace(global_cu_seqlens=offsets, token_ranges=(((0, 384),),))
        found.loss(torch.zeros(1), torch.zeros(1), context, 1.0)

    found.take = take
    return found


@pytest.fixture
def counted(monkeypatch):
    """Stands in for capturing; holds the graphs that were captured and those that were let go."""
    found = SimpleNamespace(made=0, gone=0)

    def capture(self, tokens, labels, context):
        found.made += 1
        graph = SimpleNamespace(replay=lambda: None, reset=lambda: setattr(found, "gone", 1))
        return Graph(graph, tokens, labels, torch.ones(()), context, torch.zeros(()))

    monkeypatch.setattr(Graphs, "_capture", capture)
    return found


def test_auto_captures_a_packing_that_comes_in_a_row(counted, monkeypatch):
    graphs = automatic(monkeypatch)
    for _ in range(SEEN_BEFORE + 3):
        graphs.take(*ONE_DOCUMENT)
    assert (counted.made, counted.gone) == (1, 0)
    graphs.take(0, 100, 384)
    assert counted.gone and not graphs.graphs
    for _ in range(SEEN_BEFORE + 3):
        graphs.take(*ONE_DOCUMENT)
    assert counted.made == 1, "a graph that was let go must not be captured again and again"


def test_auto_captures_nothing_where_packings_change(counted, monkeypatch):
    graphs = automatic(monkeypatch)
    for n in range(20):
        graphs.take(0, n % 2 + 1, 384)
    assert not counted.made


def test_auto_asks_all_ranks_for_memory_once(counted, monkeypatch):
    asked = []
    graphs = automatic(monkeypatch, agreed=lambda here: asked.append(here))
    for _ in range(SEEN_BEFORE + 4):
        graphs.take(*ONE_DOCUMENT)
    assert asked == [True] and not counted.made


def test_several_micro_batches_share_a_graph(captures, tmp_path):
    """A graph then adds to the gradients of those before."""
    (tmp_path / "long.txt").write_text("one long document " * 2000)
    more = ["--micro-batch-size", "1", "--parallel.reduce", "micro_batch", "--data"]
    compared(tmp_path, model=[*more, f"text:{tmp_path / 'long.txt'}"])
    # both micro-batches of the first step compare the ranks
    assert captures == [2 * (8 - 1) - SEEN_BEFORE]


def test_auto_is_for_gpus_and_for_what_never_waits():
    gpu, cpu = (
        SimpleNamespace(device=torch.device(d), at_end=[], world_size=2) for d in ("cuda", "cpu")
    )
    model = torch.nn.Linear(1, 1)
    found = graphs_of(model, parse(MODEL), gpu)
    assert found.auto and found.single and gpu.at_end == [found.close]
    assert graphs_of(model, parse(MODEL), cpu) is None
    refused = "--micro-batch-size 1", "--offload", "--no-cuda-graphs", "--cuda-graphs off"
    for flags in refused:
        assert graphs_of(model, parse([*MODEL, *flags.split()]), gpu) is None, flags
    each = "--micro-batch-size 1 --parallel.reduce micro_batch"
    found = graphs_of(model, parse([*MODEL, *each.split()]), gpu)
    assert found.auto and not found.single
    assert not graphs_of(model, parse([*MODEL, "--cuda-graphs"]), gpu).auto


@pytest.mark.parametrize("compiled, proven", [(False, PROVEN_RANKS), (True, PROVEN_COMPILED)])
def test_auto_is_for_as_many_ranks_as_were_proven(compiled, proven, monkeypatch):
    """On four GPUs, steps of compiled blocks through graphs did not end."""
    monkeypatch.setattr(graphs, "has_compiled_blocks", lambda _: compiled)
    model = torch.nn.Linear(1, 1)
    for ranks in (1, PROVEN_COMPILED, PROVEN_COMPILED + 1, PROVEN_RANKS, PROVEN_RANKS + 1):
        gpus = SimpleNamespace(device=torch.device("cuda"), at_end=[], world_size=ranks)
        assert (graphs_of(model, parse(MODEL), gpus) is None) == (ranks > proven)
        assert graphs_of(model, parse([*MODEL, "--cuda-graphs", "on"]), gpus) is not None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flags", ["--model.pattern kda,mla", "--model.experts 4", ""])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_for_hybrids_and_experts(flags, dtype, compiled, monkeypatch):
    """They have run through graphs on one GPU, in bf16."""
    monkeypatch.setattr(graphs, "has_compiled_blocks", lambda _: compiled)
    config = parse([*MODEL, "--dtype", dtype, *flags.split()])
    model = build_model(config.model, 300, 0)
    for ranks in (1, 2):
        gpus = SimpleNamespace(device=torch.device("cuda"), at_end=[], world_size=ranks)
        found = graphs_of(model, config, gpus)
        assert (found is not None) == (not flags or (dtype == "bfloat16" and ranks == 1))


@pytest.mark.parametrize(
    "device, flags, compiled",
    [
        ("cuda", "", True),
        ("cuda", "--remat full", True),
        ("cuda", "--compile off", False),
        ("cuda", "--remat selective", False),
        ("cpu", "", False),
        ("cpu", "--compile", True),
    ],
)
def test_blocks_are_compiled_by_default_on_gpus(device, flags, compiled, monkeypatch):
    found = []
    monkeypatch.setattr(build, "allocate", lambda *given: None)
    monkeypatch.setattr(build, "compile_blocks", found.append)
    config = parse([*MODEL, *flags.split()]).model
    ranks = SimpleNamespace(device=torch.device(device))
    build.build_sharded(config, 300, None, ranks, torch.float32)
    assert len(found) == compiled
    # a graph for all packings takes no compiled blocks, unless they are asked for
    build.build_sharded(config, 300, None, ranks, torch.float32, compiled=False)
    assert len(found) == compiled + ("--compile" in flags.split()[-1:])


def test_graphs_end_before_the_ranks_group():
    """NCCL waits for graphs with its messages when a group ends: the process would never end."""
    groups = []
    with joined(parse(MODEL).parallel) as ranks:
        ranks.at_end.append(lambda: groups.append(dist.is_initialized()))
    assert groups == [True] and not dist.is_initialized()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data.max-documents", "3"], "left out without --cuda-graphs, got 3"),
        (["--cuda-graphs", "--data.max-documents", "0"], "at least 1, got 0"),
        (["--cuda-graphs", "--data.max-documents", "3", "--compile"], "left out with --compile"),
        (["--remat", "selective", "--compile"], "auto or off with --remat selective, got on"),
        (
            ["--cuda-graphs", "--micro-batch-size", "1"],
            "--parallel.reduce must be micro_batch with --cuda-graphs, got step",
        ),
    ],
)
def test_what_graphs_refuse(flags, message):
    with pytest.raises(UserError, match=message):
        parse([*MODEL, *flags])


def test_graphs_need_a_gpu(tmp_path):
    from fla_cp.train.device_rules import check_impl

    config = parse([*MODEL, "--cuda-graphs"])
    with (
        joined(replace(config.parallel)) as ranks,
        pytest.raises(UserError, match="--cuda-graphs needs --device cuda, got cpu"),
    ):
        check_impl(config, ranks)
