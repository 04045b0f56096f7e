"""How often a step reduces gradients and gathers parameters over the ranks."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fla_cp.train.build import build_sharded
from fla_cp.train.data import ArraySource, PackedDataset
from fla_cp.train.distributed import frees_after_forward, shard_model
from fla_cp.train.parse import parse
from fla_cp.train.step import Feed, HeldOut, agree, forward_backward
from fla_cp.train.weights import local_tensor
from tests.support.meshes import ranks_of

FLAGS = [
    *("--model.layers", "2", "--model.hidden-size", "32", "--device", "cpu"),
    *("--model.num-heads", "2", "--model.head-dim", "16", "--dtype", "float32"),
    *("--seq-len", "40", "--global-batch-size", "6", "--micro-batch-size"),
]


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _gradients(group, rank, split):
    ranks, found = ranks_of(split, rank), {}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (400,), generator=generator).numpy()
    data = PackedDataset(ArraySource(tokens, torch.tensor([0, 30, 210, 400]).numpy(), 64), 40)
    for name, size in (("step", 1), ("micro_batch", 1), ("whole", 3)):
        reduce = "step" if name == "whole" else name
        config = parse([*FLAGS, str(size), *split.split(), "--parallel.reduce", reduce])
        model = build_sharded(config.model, 64, 0, ranks, torch.float32)
        counts, losses = [], []
        with Feed(config, data, ranks, 0) as feed:
            for step in range(2):
                model.zero_grad()
                batch = feed.take()
                targets = agree(batch, ranks).targets
                with Counted() as counted:
                    share = forward_backward(model, batch, targets, config, ranks, step == 0)
                counts.append(counted.calls["_reduce_scatter_base_"])
                losses.append(float(ranks.sum(share)))
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        found[name] = counts, losses, grads
    return found


def _gathers(group, rank, reshard):
    split = "--cp 2 --dp-shard 2"
    ranks = replace(ranks_of(split, rank), reshard=reshard)
    tokens = torch.randint(64, (400,), generator=torch.Generator().manual_seed(0)).numpy()
    data = PackedDataset(ArraySource(tokens, torch.tensor([0, 30, 210, 400]).numpy(), 64), 40)
    config = parse([*FLAGS, "3", *split.split(), "--eval-batches", "1"])
    model = build_sharded(config.model, 64, 0, ranks, torch.float32)
    held_out, counts, values = HeldOut(config, data, ranks), [], []
    with Feed(config, data, ranks, 0) as feed:
        for _ in range(2):
            model.zero_grad()
            batch = feed.take()
            targets = agree(batch, ranks).targets
            with Counted() as counted:
                share = forward_backward(model, batch, targets, config, ranks)
            counts.append(counted.calls["_allgather_base_"])
            with Counted() as counted:
                values.append(held_out.loss(model))
            counts.append(counted.calls["_allgather_base_"])
            values.append(float(ranks.sum(share)))
            for p in model.parameters():  # fails if the evaluation left a parameter gathered
                p.data.add_(p.grad, alpha=-0.1)
    return counts, values


def test_parameters_are_gathered_once_a_step_or_twice(gloo_pool):
    always, never = (gloo_pool.run(_gathers, reshard)[0] for reshard in ("always", "never"))
    assert always[1] == never[1]
    # In each direction the two blocks exchange states. Forward: two blocks and the rest. Backward:
    # the blocks, unless they stay gathered; the rest always does.
    assert always[0] == [(2 + 3) + (2 + 2), 2 + 3] * 2
    assert never[0] == [(2 + 3) + 2, 2 + 3] * 2


@pytest.mark.parametrize(
    "reshard, shards, size, frees",
    [
        ("auto", 1, 2**40, False),
        ("auto", 2, 2**30, False),
        ("auto", 2, 2**30 + 1, True),
        ("always", 1, 0, True),
        ("never", 2, 2**40, False),
    ],
)
def test_small_parameters_stay_gathered(reshard, shards, size, frees):
    assert frees_after_forward(reshard, shards, size) == frees


@pytest.mark.parametrize("split", ["--cp 2 --dp-shard 2", "--cp 2 --dp-replicate 2"])
def test_gradients_are_reduced_once_a_step(gloo_pool, split):
    for found in gloo_pool.run(_gradients, split):
        (once, *step), (thrice, *each), (one, *whole) = (
            found[name] for name in ("step", "micro_batch", "whole")
        )
        assert once == one == [3, 3]  # two blocks and the rest
        assert thrice == [9, 9]
        torch.testing.assert_close(step, each, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-6)


def test_one_rank_divides_no_gradients(ranks):
    """It has nothing to sum, but FSDP divides by any factor that it is given, also by 1."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x):
            return self.blocks(x)

    plain, x = Model(), torch.randn(4, 8)
    sharded = shard_model(copy.deepcopy(plain), ranks, torch.float32)
    plain(x).sum().backward()
    with Counted() as counted:
        sharded(x).sum().backward()
    assert counted.calls["chunk_cat"] == 2  # FSDP copies the gradients of each block
    assert not {"div", "div_", "mul", "mul_"} & counted.calls.keys()
    for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_tensor(mine.grad), other.grad)
