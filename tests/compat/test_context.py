"""Contexts that are built as FLA builds them, and calls under them."""

import math

import pytest
import torch

from fla_cp import compat, zigzag_token_ranges
from fla_cp.partition.fla_names import Neighbours
from fla_cp.reference import recurrence
from tests.support.closeness import assert_exact
from tests.support.fla_record import by_position
from tests.support.members import BY_NAME, Call, draw, oracle
from tests.support.ranks import run_threads

CU = (0, 37, 38, 90, 150, 160)
PACKINGS = [CU, (0, 160), (0, 40, 120, 160), (0, 80, 80, 81, 160), (0, 39, 41, 121, 160)]
"""Also documents that begin or end where a rank does."""


def built(layout, cu=CU):
    def f(group, rank):
        context = compat.build_cp_context(torch.tensor(cu), group, 4, None, True, layout)
        names = "num_seqs is_cp_enabled pre_num_conv_tokens pre_num_ranks post_num_ranks"
        names += " is_first_rank is_last_rank conv1d_kernel_size token_ranges"
        found = {name: getattr(context, name) for name in names.split()}
        assert context.copy_for_backward() is context
        return found | {"cu": context.cu_seqlens.tolist(), "on_host": context.cu_seqlens_cpu}

    return run_threads(f, 4)


@pytest.mark.parametrize("cu", PACKINGS, ids=str)
def test_facts_of_a_contiguous_division(cu):
    """The numbers as FLA defines them, for ranks with equally many tokens."""
    part = cu[-1] // 4
    for rank, found in enumerate(built("contiguous", cu)):
        lo, hi = rank * part, (rank + 1) * part
        assert found["token_ranges"][rank] == ((lo, hi),)
        cut = sorted({min(max(c, lo), hi) - lo for c in cu})
        assert found["cu"] == found["on_host"].tolist() == cut
        assert found["num_seqs"] == len(cut) - 1
        assert found["conv1d_kernel_size"] == 4
        assert found["is_cp_enabled"] is True
        start = max(c for c in cu if c <= lo)
        stop = min(c for c in cu if c >= hi)
        assert found["pre_num_conv_tokens"] == lo - start
        assert found["pre_num_ranks"] == rank - start // part
        assert found["post_num_ranks"] == (stop - 1) // part - rank
        assert found["is_first_rank"] == (found["pre_num_ranks"] == 0)
        assert found["is_last_rank"] == (found["post_num_ranks"] == 0)


def test_facts_of_a_zigzag_division():
    for found in built("zigzag"):
        assert [list(own) for own in found["token_ranges"]] == zigzag_token_ranges(160, 4)
        assert found["is_first_rank"] is None
        assert found["pre_num_conv_tokens"] is None


def test_a_rank_without_tokens_has_no_neighbours():
    def f(group, rank):
        context = compat.build_cp_context(torch.tensor([0, 2]), group)
        return context.pre_num_ranks, context.is_last_rank

    assert run_threads(f, 4) == [(None, None), (0, False), (None, None), (1, True)]
    assert Neighbours.of((0, 2), (((0, 1),), (), ((1, 2),)), 0) == (0, 0, 1)


def test_one_rank():
    context = compat.build_cp_context(torch.tensor(CU), None)
    assert context.is_cp_enabled is False
    assert context.is_first_rank is context.is_last_rank is True
    assert isinstance(context, compat.FLACPContext)


REFUSED = [
    ({"use_tf32x3_affine_chain": False}, "use_tf32x3_affine_chain must be True, got False"),
    ({"layout": "striped"}, "layout must be 'contiguous' or 'zigzag', got 'striped'"),
    ({"layout": "zigzag", "token_ranges": [[(0, 160)]]}, "layout must be 'contiguous' beside"),
    ({"layout": "zigzag", "cu_seqlens_cpu": CU}, "cu_seqlens_cpu must be a tensor, got tuple"),
    ({"layout": "zigzag", "cu_seqlens_cpu": torch.ones(2, 2)}, "cu_seqlens_cpu must be int32 or"),
]


@pytest.mark.parametrize("keywords, message", REFUSED)
def test_what_a_context_refuses(keywords, message):
    with pytest.raises(ValueError, match=message):
        compat.build_cp_context(torch.tensor(CU), None, **keywords)


def test_a_context_takes_our_options_but_no_others():
    context = compat.build_cp_context(torch.tensor(CU), None, token_ranges=[[(80, 160), (0, 80)]])
    assert context.token_ranges == (((80, 160), (0, 80)),)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        compat.build_cp_context(torch.tensor(CU), None, rank=0)


OPERATORS = {
    "chunk_kda": "kda",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_gated_delta_product": "gated_delta_product2",
    "chunk_comba": "comba",
    "chunk_dplr_delta_rule": "dplr_delta_rule",
    "chunk_gla": "gla",
    "chunk_simple_gla": "simple_gla",
}
SHAPE = Call(T=150, cu=(0, 37, 38, 90, 150), decay=0.01)


def sharded(group, rank, name, layout):
    """This rank's outputs and gradients, in a call with offsets beside the context, as trainers
    pass them. T is no multiple of the ranks."""
    member = BY_NAME[OPERATORS[name]]
    x, _, (weight, final_weight) = draw(member, SHAPE)
    cu = torch.tensor(SHAPE.cu)
    context = compat.build_cp_context(cu, group, layout=layout)

    def mine(x):
        if x.shape[0] != 1:  # the states of all sequences, equal on all ranks
            return x
        rows = x.unflatten(1, (SHAPE.T, -1)) if x.shape[1] != SHAPE.T else x
        part = context.shard(rows)
        return part if rows is x else part.flatten(1, 2)

    leaves = {n: mine(t).clone().requires_grad_() for n, t in x.items()}
    extra = {"num_householder": member.steps} if "product" in name else {}
    offsets = {"cu_seqlens": context.cu_seqlens, "cu_seqlens_cpu": cu}
    o, final = by_position(
        name, **leaves, **extra, **offsets, cp_context=context, output_final_state=True
    )
    torch.autograd.backward([o, final], [context.shard(weight), final_weight])
    exact = oracle(member, SHAPE)
    assert_exact("o", o.detach(), context.shard(exact["o"]))
    assert_exact("final_state", final.detach(), exact["final_state"])
    for n, leaf in leaves.items():
        assert_exact(f"d{n}", leaf.grad, mine(exact[f"d{n}"]))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_under_a_context(gloo_pool, name, layout):
    gloo_pool.run(sharded, name, layout)


def halved(group, rank, layout):
    """The states before every 32 of this rank's tokens in a document."""
    x, _, _ = draw(BY_NAME["kda"], Call(T=300, cu=(0, 40, 300), decay=0.01))
    context = compat.build_cp_context(torch.tensor([0, 40, 300]), group, layout=layout)
    state = x.pop("initial_state")
    mine = {n: context.shard(t) for n, t in x.items()}
    more = {"return_intermediate_states": True, "chunk_size": 32, "initial_state": state}
    h = by_position("chunk_kda", **mine, **more, cp_context=context)[2]
    exact = []
    for start, stop in context.token_ranges[context.rank]:
        for n, (begin, end) in enumerate(((0, 40), (40, 300))):
            for token in range(max(start, begin), min(stop, end), 32):
                before = {k: t[:, begin:token] for k, t in x.items()}
                first = state[n : n + 1]
                exact.append(
                    recurrence(**before, initial_state=first)[1] if token > begin else first
                )
    assert_exact("h", h[0], torch.cat(exact))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_intermediate_states_of_chunks_of_32(gloo_pool, layout):
    gloo_pool.run(halved, layout)


def delta_rule(group, rank):
    x, _, _ = draw(BY_NAME["gated_delta_rule"], SHAPE)
    x["g"] = torch.zeros_like(x["g"])
    exact = by_position("chunk_gated_delta_rule", **x, cu_seqlens=torch.tensor(SHAPE.cu))[0]
    context = compat.build_cp_context(torch.tensor(SHAPE.cu), group)
    part = {n: context.shard(t) for n, t in x.items() if n not in ("g", "initial_state")}
    state = x["initial_state"]
    o, _ = by_position("chunk_delta_rule", **part, initial_state=state, cp_context=context)
    assert_exact("o", o, context.shard(exact))


def test_the_delta_rule_under_a_context(gloo_pool):
    gloo_pool.run(delta_rule)


def test_a_context_of_another_library_is_refused():
    x, _, _ = draw(BY_NAME["kda"], Call(T=3))
    with pytest.raises(ValueError, match="cp_context must be a FLACPContext"):
        by_position("chunk_kda", **x, cp_context=math)
