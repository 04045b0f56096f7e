"""FLA's recurrence for serving, `fused_recurrent_kda_fwd`, called in FLA's order."""

import pytest
import torch

from fla_cp.reference import recurrence
from tests.support.closeness import assert_exact
from tests.support.fla_record import by_position
from tests.support.members import BY_NAME, F64, Call, draw

POOL = torch.tensor([6, -1, 3])
"""The states of three sequences in a pool; the second has none."""


def in_a_pool():
    """Inputs of three sequences of 2, 1 and 3 tokens, and a pool of 8 states."""
    shape = Call(T=6, HV=2, cu=(0, 2, 3, 6), inside=True)
    x, keywords, _ = draw(BY_NAME["kda"], shape)
    state = x.pop("initial_state")
    state[1] = 0.0
    pool = torch.full((8, *state.shape[1:]), 1e30, dtype=F64)
    pool[[6, 3]] = state[[0, 2]]
    return {**x, **keywords, "cu_seqlens": torch.tensor(shape.cu)}, state, pool


@pytest.mark.parametrize("v_first", [False, True], ids=["KV", "VK"])
def test_serving_reads_and_writes_a_pool_in_place(v_first):
    x, state, pool = in_a_pool()
    exact_o, exact = recurrence(**{**x, "cu_seqlens": [0, 2, 3, 6]}, initial_state=state)
    pool = pool.mT.contiguous() if v_first else pool
    untouched = pool.clone()
    out = torch.empty_like(x["v"])
    more = {"ssm_state_indices": POOL, "state_v_first": v_first, "out": out}
    o, final = by_position("fused_recurrent_kda_fwd", **x, initial_state=pool, **more)
    assert o is out and final is pool
    assert_exact("o", o, exact_o)
    exact = exact.mT if v_first else exact
    assert_exact("states", pool[[6, 3]], exact[[0, 2]])
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(pool[others], untouched[others])


def test_serving_goes_on_from_accepted_drafts():
    """Each token leaves a state, and the next call starts from one of them."""
    x, state, _ = in_a_pool()
    rows = {"cu_seqlens": torch.tensor([0, 2, 4, 6])}
    places = torch.tensor([[0, 1], [2, 3], [4, 5]])
    pool = torch.zeros(6, *state.shape[1:], dtype=F64)
    pool[[0, 2, 4]] = state
    name, more = "fused_recurrent_kda_fwd", {**rows, "ssm_state_indices": places}
    by_position(name, **{**x, **more}, initial_state=pool)
    start, accepted = pool[[1, 2, 5]].clone(), torch.tensor([2, 1, 2])
    given = {**x, **more, "num_accepted_tokens": accepted}
    o, _ = by_position(name, **given, initial_state=pool)
    exact = recurrence(**{**x, "cu_seqlens": [0, 2, 4, 6]}, initial_state=start)
    assert_exact("o", o, exact[0])
    assert_exact("states", pool[[1, 3, 5]], exact[1])


def test_serving_without_a_pool():
    """States in order: in place by default, else new ones if they are asked for."""
    x, state, _ = in_a_pool()
    exact = recurrence(**{**x, "cu_seqlens": [0, 2, 3, 6]}, initial_state=state)[1]
    name, given = "fused_recurrent_kda_fwd", state.clone()
    assert by_position(name, **x, initial_state=given, inplace_final_state=False)[1] is None
    more = {"inplace_final_state": False, "output_final_state": True}
    assert_exact("new", by_position(name, **x, initial_state=given, **more)[1], exact)
    assert torch.equal(given, state)
    leaves = {n: t.clone().requires_grad_() if n == "q" else t for n, t in x.items()}
    o, final = by_position(name, **leaves, initial_state=given)
    assert final is given and not o.requires_grad
    assert_exact("in place", given, exact)


def test_what_serving_refuses():
    x, _, pool = in_a_pool()
    name = "fused_recurrent_kda_fwd"
    with pytest.raises(ValueError, match="inplace_final_state needs initial_state, got None"):
        by_position(name, **x)
    more = {"ssm_state_indices": POOL, "inplace_final_state": False}
    with pytest.raises(ValueError, match="ssm_state_indices needs inplace_final_state=True"):
        by_position(name, **x, initial_state=pool, **more)
    with pytest.raises(ValueError, match=r"out must have v's shape \(1, 6, 2, 6\)"):
        by_position(name, **x, initial_state=pool, ssm_state_indices=POOL, out=torch.empty(1, 6))
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
        by_position(name, **x, initial_state=pool, ssm_state_indices=POOL, chunk_size=64)
