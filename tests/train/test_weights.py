"""Initial weights: the same bits on every split, drawn by shard, in the memory of a shard."""

import gc
import hashlib
import math
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fla_cp.train.weights
from fla_cp.nn.initial import LOG_DECAY_RATE, STEP_BIAS, Normal, Uniform
from fla_cp.train.build import build_sharded
from fla_cp.train.mixers import MIXERS
from fla_cp.train.model import build_model
from fla_cp.train.parse import parse
from fla_cp.train.weights import owned_rows
from tests.support.meshes import ranks_over, shard_ranks
from tests.support.ranks import run_threads

SMALL = [
    *("--model.layers", "2", "--model.hidden-size", "48"),
    *("--model.num-heads", "3", "--model.head-dim", "16"),
]
VOCAB = 130  # no number of ranks below divides these rows


def small(*flags):
    return parse([*SMALL, *flags]).model


def shards_of(config, replicas, shards, dtype=torch.float32, seed=3):
    """{name: (rows, values)} for each rank of a split."""

    def on_rank(group, rank):
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "fsdp"))
        ranks = ranks_over(mesh if replicas > 1 else mesh["fsdp"], rank)
        model = build_sharded(config, VOCAB, seed, ranks, dtype)
        assert (model.head.weight is model.embedding.weight) == model.shape.tie_embeddings
        return {n: (owned_rows(p), p.detach().to_local()) for n, p in model.named_parameters()}

    return run_threads(on_rank, replicas * shards)


@pytest.mark.parametrize("mixer", [*MIXERS, "kda --model.experts 3"])
@pytest.mark.parametrize("split", [(1, 1), (1, 2), (1, 5), (2, 3)])
def test_every_split_starts_from_the_same_bits(mixer, split, monkeypatch):
    monkeypatch.setattr(fla_cp.train.weights, "BLOCK", 500)  # shards begin and end inside of blocks
    config = small("--mixer", *mixer.split(), "--model.tie-embeddings", str(split == (1, 5)))
    whole = dict(build_model(config, VOCAB, 3).named_parameters())
    seen = dict.fromkeys(whole, 0)
    for rank, held in enumerate(shards_of(config, *split)):
        for name, (rows, values) in held.items():
            assert torch.equal(values, whole[name][rows.start : rows.stop]), (name, rank)
            seen[name] += len(rows)
    assert seen == {name: split[0] * len(values) for name, values in whole.items()}


def test_rank_draws_no_more_blocks_than_its_rows_touch(monkeypatch):
    drawn = []
    original = fla_cp.train.weights._Block.draw
    monkeypatch.setattr(fla_cp.train.weights, "BLOCK", 480)
    monkeypatch.setattr(
        fla_cp.train.weights._Block, "draw", lambda block: (drawn.append(block), original(block))
    )
    held = shards_of(small(), 1, 5)
    assert held[1]["embedding.weight"][0] == range(26, 52)
    rows = [(b.rows, b.held) for b in drawn if "/embedding.weight/" in b.key]
    # 13 blocks of 10 rows, of which those of rows 20, 50, 70 and 100 lie on two ranks
    assert len(rows) == 13 + 4
    assert (range(20, 30), range(20, 26)) in rows
    assert (range(20, 30), range(26, 30)) in rows
    assert sum(len(mine) for _, mine in rows) == VOCAB


def test_float64_has_the_values_of_float32():
    exact, single = (shards_of(small(), 1, 3, d)[1] for d in (torch.float64, torch.float32))
    for name, (_, values) in single.items():
        assert exact[name][1].dtype == torch.float64
        assert torch.equal(exact[name][1], values.double()), name


def test_without_a_seed_weights_are_zero_for_a_checkpoint_to_fill():
    for held in shards_of(small(), 1, 2, seed=None):
        assert not any(values.any() for _, values in held.values())


def test_weight_is_a_function_of_seed_name_and_shape_alone():
    two = dict(build_model(small(), VOCAB, 3).named_parameters())
    three = dict(build_model(small("--model.layers", "3"), VOCAB, 3).named_parameters())
    other = dict(build_model(small(), VOCAB, 4).named_parameters())
    scaled = ("o_proj.weight", "down.weight")  # their std depends on the depth
    for name, values in two.items():
        if not name.endswith(scaled):
            assert torch.equal(three[name], values), name
        if "norm" not in name:
            assert not torch.equal(other[name], values), name
    drawn = [values.flatten()[:9] for name, values in two.items() if "norm" not in name]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn)


RECURRENT = ("kda", "gdn", "comba", "gdp", "gla", "simple_gla")


@pytest.mark.parametrize(
    "mixers, expected",
    [(RECURRENT, "2055173f28e0f2c2"), (("attention", "mla"), "a8616184633bb0c8")],
    ids=["recurrent", "softmax"],
)
def test_weights_are_those_of_every_other_machine(mixers, expected):
    """Another hash means that a seed gives other models than before. CHANGELOG must say so."""
    digest = hashlib.sha256()
    for mixer in mixers:
        for name, values in build_model(small("--mixer", mixer), VOCAB, 0).named_parameters():
            digest.update(name.encode())
            digest.update(values.detach().numpy().tobytes())
    assert digest.hexdigest()[:16] == expected


@pytest.mark.parametrize(
    "initial",
    [Normal(0.02), Uniform(-0.5, 0.5), LOG_DECAY_RATE, STEP_BIAS],
    ids=["normal", "uniform", "A_log", "dt_bias"],
)
def test_rows_have_the_distribution_of_reset_parameters(initial):
    """Distribution functions of two samples of n differ by 1.95 sqrt(2 / n) once in 1000."""
    n = 100_000
    torch.manual_seed(0)
    reset = torch.empty(n)
    initial.fill_(reset)
    parameter = torch.nn.Parameter(torch.empty(n))
    for block in fla_cp.train.weights._blocks(initial, parameter, "0"):
        block.draw()
    at = torch.cat([reset, parameter.detach()]).sort().values
    below = [torch.searchsorted(x.sort().values, at, right=True) / n for x in (reset, parameter)]
    assert (below[0] - below[1]).abs().max() < 1.95 * math.sqrt(2 / n)


MEMORY = ["--model", "340M", "--model.layers", "1", "--device", "cpu"]


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def start_in_memory(group, rank, size):
    """(peak growth of the resident set while making a model, bytes of this rank's shard)."""
    ranks = shard_ranks(size, rank, group)
    build_sharded(small(), VOCAB, 0, ranks, torch.float32)  # modules that are loaded once
    gc.collect()
    before, seen, done = resident(), [], threading.Event()

    def watch():
        while not done.wait(0.002):
            seen.append(resident())

    thread = threading.Thread(target=watch)
    thread.start()
    model = build_sharded(parse(MEMORY).model, 32000, 0, ranks, torch.float32)
    done.set()
    thread.join()
    return max(seen) - before, sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_rank_starts_in_the_memory_of_its_share(gloo_pool):
    for growth, share in gloo_pool.run(start_in_memory, 4, world_size=4, timeout=240):
        assert share > 70 * 2**20  # a quarter of 78 M parameters
        assert growth < share + 64 * 2**20
