"""Every member on N ranks equals itself on one rank, and both equal fp64; see test_kda.py.

The layers, with their convolution and its halo, have the same weights after two steps.
"""

import dataclasses
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context, nn
from fla_cp.ops.wide_heads import Blocks
from tests.support.members import BY_NAME, CALLS, collect, draw, operator
from tests.support.ranks_against_one import (
    RANGES,
    assert_close,
    device_of,
    kinds,
    same_step,
    sum_of_errors,
)

MEMBERS = [key for key in BY_NAME if key not in ("kda", "gated_delta_product1")]
CALL = dataclasses.replace(CALLS["inside"], T=200, K=16, V=16)


def compare(group, rank, key, ranges, call=CALL):
    device, member = device_of(group), BY_NAME[key]
    given, keywords, weights = draw(member, call)
    context = build_cp_context(
        torch.tensor(call.offsets(), device=device),
        group,
        token_ranges=RANGES[ranges](call.T, group.size()),
    )
    rows = context.repeated(member.steps)
    tokens = dict.fromkeys(("q", "g", "gk", "a", "b"), context)
    tokens |= dict.fromkeys(("k", "v", "p", "beta"), rows)
    dg = "dgk" if member.dplr else "dg"
    weights = [w.to(device) for w in weights]

    def run(x, dy, **more):
        return collect(lambda y: operator(member, "chunk", y, **keywords, **more), x, dy)

    for dtype, impl in kinds(device):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x = {n: t.to(device, dtype if n in member.arguments else wide) for n, t in given.items()}
        exact = run({n: t.double() for n, t in x.items()}, weights, impl="torch")
        one = run(x, weights, impl=impl)
        local = {n: tokens[n].shard(t) if n in tokens else t for n, t in x.items()}
        dy = (context.shard(weights[0]), weights[1])
        for name, value in run(local, dy, impl=impl, cp_context=context).items():
            what = f"{name} in {dtype} on rank {rank}"
            if name in ("dA_log", "ddt_bias"):
                value = value.double()
                dist.all_reduce(value, group=group)
                fold = sum_of_errors(one[dg], exact[dg], len(one["dA_log"]))
                assert_close(what, value, exact[name], one[name], fold)
                continue
            pick = tokens.get(name[1:]) or (context if name == "o" else None)
            pick = pick.shard if pick else (lambda t: t)
            fold = 0.0
            if dtype == torch.float32 and value.is_cuda:  # the fold: three TF32 products
                fold = 2**-20 * exact[name].abs().max()
            assert_close(what, value, pick(exact[name]), pick(one[name]), fold)


@pytest.mark.parametrize("ranges", ["contiguous", "uneven"])
@pytest.mark.parametrize("key", MEMBERS)
def test_ranks_equal_one(run, key, ranges):
    run(compare, key, ranges)


SPLIT = {"gated_delta_rule": (128, 256), "simple_gla": (256, 256)}
"""Members, K and V of heads that a context with several ranks splits on a Hopper GPU."""


def compare_split(group, rank, key, ranges):
    K, V = SPLIT[key]
    call = dataclasses.replace(CALLS["inside"], T=2000, cu=(0, 3, 900, 900, 2000), K=K, V=V)
    with patch.object(Blocks, "of", side_effect=Blocks.of) as split:
        compare(group, rank, key, ranges, call)
    if torch.cuda.get_device_capability() == (9, 0):
        assert split.called


@pytest.mark.skipif(not torch.cuda.is_available(), reason="heads are split for a GPU's kernels")
@pytest.mark.parametrize("ranges", ["contiguous", "uneven"])
@pytest.mark.parametrize("key", SPLIT)
def test_heads_split_under_a_context(run, key, ranges):
    run(compare_split, key, ranges)


LAYERS = [
    nn.GatedDeltaNet,
    nn.Comba,
    nn.GatedDeltaProduct,
    nn.GatedLinearAttention,
    nn.SimpleGatedLinearAttention,
]


def train_a_step(group, rank, index):
    same_step(group, "uneven", lambda: LAYERS[index](32, 2, 16, impl="torch"))


@pytest.mark.parametrize("index", range(len(LAYERS)), ids=[kind.__name__ for kind in LAYERS])
def test_a_training_step(run, index):
    run(train_a_step, index)
