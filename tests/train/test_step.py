"""The parts of a training step on one rank: agreement, held-out loss, model, reports."""

import errno
import math
import sys

import pytest
import torch

import fla_cp.train.loss
from fla_cp import build_cp_context
from fla_cp.train.config import RunConfig, UserError
from fla_cp.train.data import collate
from fla_cp.train.distributed import Ranks, joined, shard_model
from fla_cp.train.loader import Sharing
from fla_cp.train.metrics import Metrics, RunLog, plot_losses, read_metrics
from fla_cp.train.model import build_model, parameter_groups
from fla_cp.train.parse import parse
from fla_cp.train.step import HeldOut, MicroBatch, agree, data_problem, forward_backward
from fla_cp.train.text_files import file_errors

MODEL = [
    *("--model.layers", "2", "--model.hidden-size", "32"),
    *("--model.num-heads", "2", "--model.head-dim", "16"),
]


class FakeRanks(Ranks):
    """Ranks whose host_gather returns values that a test chooses for the other ranks."""

    def host_gather(self, values):
        return self.answer(list(values))


def pack(seed, size=150, targets=100):
    tokens = torch.randint(64, (size,), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[targets:] = -100
    return {"tokens": tokens, "labels": labels, "cu_seqlens": torch.tensor([0, size]).int()}


def test_ranks_agree_on_targets_and_stops_and_refuse_different_batches():
    ranks = object.__new__(FakeRanks)
    for name, value in {"dp": 2, "cp": 2}.items():
        object.__setattr__(ranks, name, value)

    def answer(rows):
        object.__setattr__(ranks, "answer", rows)

    sharing = Sharing(1, cp=2, cp_rank=0, layout="contiguous")
    batch = [MicroBatch(share) for share in sharing([pack(1), pack(2)])]
    answer(lambda mine: torch.tensor([mine, mine, [5, 7, 1, 0], [5, 7, 0, 0]]))
    agreed = agree(batch, ranks)
    assert (agreed.targets, agreed.stop) == (207, True)
    answer(lambda mine: torch.tensor([mine, [mine[0] + 1, *mine[1:]], [5, 7, 0, 0], [6, 7, 0, 0]]))
    with pytest.raises(RuntimeError, match=r"ranks \[1, 3\] differ"):
        agree(batch, ranks)
    # of two ranks that cannot read their data, one says why
    object.__setattr__(ranks, "gather", lambda mine: [mine, mine, "--data: row 3", "--data: row 3"])
    answer(lambda mine: torch.tensor([mine, mine, [0, 0, 0, 1], [0, 0, 0, 1]]))
    with pytest.raises(UserError, match=r"^--data: row 3$"):
        agree(batch, ranks)


class Unreadable(torch.utils.data.Dataset):
    """A file whose disk fails, or bad data."""

    def __init__(self, disk):
        self.disk = disk

    def __len__(self):
        return 1

    def __getitem__(self, i):
        if not self.disk:
            raise ValueError("row 3 has no text")
        with file_errors("a.txt"):
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_a_disk_are_not_called_bad_data(workers):
    """A restart may find the file again; bad data stay as they are."""
    for disk in (True, False):
        with pytest.raises(ValueError, match=r"cannot read|has no text") as caught:
            next(iter(torch.utils.data.DataLoader(Unreadable(disk), num_workers=workers)))
        if disk:
            with pytest.raises(ValueError, match=r"cannot read a\.txt: Input/output error"):
                data_problem(caught.value)
        else:
            assert data_problem(caught.value) == "--data: row 3 has no text"


@pytest.fixture
def one_rank():
    with joined(parse(["--device", "cpu"]).parallel) as ranks:
        yield ranks


def test_held_out_loss_is_exact_for_every_split(one_rank):
    """Three packs over two data-parallel ranks: the fourth forward has no targets."""
    config = parse([*MODEL, "--seq-len", "150", "--global-batch-size", "4", "--eval-batches", "1"])
    packs = [pack(i, targets=40 * i + 10) for i in range(3)]

    model = build_model(config.model, 64, 0)
    whole = HeldOut(config, packs, one_rank).loss(model)
    totals = torch.zeros(2, dtype=torch.float64)
    for dp_rank in range(2):
        ranks = object.__new__(Ranks)
        values = {**one_rank.__dict__, "dp": 2, "dp_rank": dp_rank}
        for name, value in values.items():
            object.__setattr__(ranks, name, value)
        part = HeldOut(config, packs, ranks)
        assert sum(batch.total for batch in part.batches) == 300
        count = sum(batch.targets for batch in part.batches)
        totals += torch.tensor([part.loss(model) * count, count], dtype=torch.float64)
    assert totals[1] == 10 + 50 + 90
    assert whole == pytest.approx(float(totals[0] / totals[1]), rel=1e-6)


def test_cross_entropy_in_parts_equals_the_whole(monkeypatch):
    batch = collate([pack(0)])
    context = build_cp_context(batch["cu_seqlens"], None, conv1d_kernel_size=4)
    results = []
    for limit in (fla_cp.train.loss.CHUNK_BYTES, 2 * 4 * 64 * 40):
        monkeypatch.setattr(fla_cp.train.loss, "CHUNK_BYTES", limit)
        model = build_model(parse(MODEL).model, 64, 0)
        loss = model(batch["tokens"], context, batch["labels"])
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
    assert results[0][0] / 100 == pytest.approx(math.log(64), rel=0.2)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert model(batch["tokens"], context).shape == (1, 150, 64)


def test_the_backward_stays_on_the_calling_thread(one_rank):
    """On a CPU it does in any case; torch's setting is what a GPU would follow."""
    config = parse([*MODEL, "--seq-len", "150", "--global-batch-size", "1"])
    model, seen = build_model(config.model, 64, 0), []
    model.norm.weight.register_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))
    batches = [MicroBatch(share) for share in Sharing(1, 1, 0, "contiguous")([pack(0)])]
    forward_backward(model, batches, 100, config, one_rank)
    assert seen == [False] and torch._C._is_multithreading_enabled()


@pytest.mark.bits
def test_weights_depend_on_the_seed_alone():
    config = parse(MODEL).model
    torch.manual_seed(5)
    first = build_model(config, 64, 3).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn), "building a model moved the global generator"
    second, other = (build_model(config, 64, seed).state_dict() for seed in (3, 4))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert not torch.equal(other["embedding.weight"], first["embedding.weight"])
    residual = first["blocks.0.ffn.down.weight"].std() / first["blocks.0.ffn.up.weight"].std()
    assert residual == pytest.approx(0.5, rel=0.1)


# the core's output is only read, so it may be a view
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_decay_rates_stay_float32_and_undecayed(one_rank):
    model = build_model(parse(MODEL).model, 64, 0)
    decayed, kept = parameter_groups(model, 0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {"blocks.0.mixer.core.A_log", "blocks.1.mixer.core.dt_bias", "norm.weight"} <= {
        names[p] for p in kept["params"]
    }
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)

    shard_model(model, one_rank, torch.bfloat16)
    seen = {}

    def note(module, args):
        seen.update({name: p.dtype for name, p in module.named_parameters(recurse=False)})
        seen["input"] = args[0].dtype

    core = model.blocks[0].mixer.core
    core.register_forward_pre_hook(note)
    batch = collate([pack(0)])
    context = build_cp_context(batch["cu_seqlens"], None, conv1d_kernel_size=4)
    model(batch["tokens"], context, batch["labels"]).backward()
    assert seen == {"A_log": torch.float32, "dt_bias": torch.float32, "input": torch.bfloat16}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_numbers_that_are_not_finite_become_null():
    row = Metrics(1, math.nan, None, math.inf, 0.1, 1.0, 1.0, 1, 0.0, 1).finite()
    assert (row["loss"], row["grad_norm"], row["lr"]) == (None, None, 0.1)


def test_plot_without_matplotlib_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is not installed (extra `plot`)" in plot_losses(tmp_path, [], "title")


def test_a_plot_searches_no_place_for_its_legend(tmp_path, monkeypatch):
    """Matplotlib warns if the search takes a second, as with many steps or on a busy machine."""
    legend = pytest.importorskip("matplotlib.legend").Legend
    monkeypatch.setattr(legend, "_find_best_position", lambda *_: pytest.fail("it searched"))
    rows = [{"step": step, "loss": 1.0, "eval_loss": None} for step in range(3)]
    assert "loss plot" in plot_losses(tmp_path, rows, "title")


class FillingDisk:
    """A file of metrics whose disk takes `room` more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = self.file.write(data[: self.room])
        self.room -= size
        return size

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_metrics_wait_for_room_on_the_disk(ranks, tmp_path, capsys):
    """The training goes on. The file holds whole lines at any time, and in the end all of them."""
    log = RunLog(tmp_path, RunConfig(), ranks, None)
    log.file = FillingDisk(log.file, 600)
    for step in range(1, 5):
        log.write(Metrics(step, 2.0, None, 1.0, 0.1, 1.0, 1.0, 1, 0.0, 0))
    raw = (tmp_path / "metrics.jsonl").read_bytes()
    assert 1 <= raw.count(b"\n") == len(read_metrics(tmp_path)) < 4 and raw.endswith(b"\n")
    assert capsys.readouterr().out.count("warning: metrics.jsonl cannot be written") == 1
    log.file.room = 10_000
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert not capsys.readouterr().out


def test_metrics_that_find_no_room_are_counted(ranks, tmp_path, capsys):
    log = RunLog(tmp_path, RunConfig(), ranks, None)
    log.file = FillingDisk(log.file, 0)
    for step in (1, 2):
        log.write(Metrics(step, 2.0, None, 1.0, 0.1, 1.0, 1.0, 1, 0.0, 0))
    log.close()
    assert "warning: metrics.jsonl lacks the last 2 lines" in capsys.readouterr().out


def test_a_folder_that_takes_no_metrics_is_named(ranks, tmp_path):
    with pytest.raises(UserError, match=r"--out: metrics cannot be written: .*No such file"):
        RunLog(tmp_path / "missing", RunConfig(), ranks, None)


def test_a_plot_that_cannot_be_written_is_no_error(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": 1, "loss": 1.0, "eval_loss": None}]
    assert "no loss plot: " in plot_losses(tmp_path / "missing", rows, "title")
