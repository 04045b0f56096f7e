"""Draft tokens of every member: a state after each token, however many rows a token has."""

import dataclasses

import pytest
import torch

from fla_cp.kernels.torch.recurrent import Pool
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.drafts import FULL, PACKED, ROWS, SERVED, expected, serve
from tests.support.members import Call, draw
from tests.support.sweeps import crossed

IMPLS = ["torch", "triton"]
BOUNDED = (("lower_bound", -5.0), ("use_exp2", False))
GATES = {
    "given": {},
    "slow": {"decay": 1e-3},
    "inside": {"inside": True},
    "bounded": {"inside": True, "options": BOUNDED},
}
SERVINGS = {"rows": (ROWS, {"B": 3, "T": 5}), "packed": (PACKED, {"T": 9, "cu": PACKED.cu})}
LAYOUTS = [("rows", False), ("packed", True)]
"""Of tokens and of states, where every pair of them would take too long."""
SEVERAL = ["gated_delta_product2", "gated_delta_product3", "dplr_delta_rule", "rwkv7"]
"""Members with several rows a token."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def label(x):
    return x if isinstance(x, str) else f"{x[0]}-{'VK' if x[1] else 'KV'}"


def drawn(name, kind, gate="given", dtype=torch.float64):
    """member, serving, inputs and keywords."""
    serving, shape = SERVINGS[kind]
    x, keywords, _ = draw(SERVED[name], Call(**shape, **GATES[gate]), dtype)
    if SERVED[name].per_head:
        keywords.pop("lower_bound", None)  # only decays of channels have one
    return SERVED[name], serving, x, keywords


@pytest.mark.parametrize(
    "name, kind, gate, v_first", crossed(SERVED, SERVINGS, GATES, [False, True])
)
def test_equal_the_recurrence(name, kind, gate, v_first):
    given = drawn(name, kind, gate)
    exact = expected(*given)
    found = serve(*given, impl="torch", v_first=v_first)
    assert found.keys() == exact.keys()
    for part, value in found.items():
        assert_exact(part, value, exact[part])
    assert (found["pool 2"][14 if kind == "packed" else 7] == FULL).all()


@pytest.mark.parametrize("name, gate, layout", crossed(SERVED, GATES, LAYOUTS), ids=label)
def test_kernel_errs_like_the_torch_stage(name, gate, layout):
    kind, v_first = layout
    given = drawn(name, kind, gate, torch.float32)
    exact = expected(*given)
    plain = serve(*given, impl="torch", v_first=v_first)
    for part, value in serve(*given, impl="triton", v_first=v_first).items():
        assert_within_budget(part, value, exact[part], plain[part], factor=4.0)


@pytest.mark.bits
@pytest.mark.parametrize("name", ["kda", *SEVERAL])
def test_the_kernel_cuts_the_accepted_tokens_to_the_columns(name):
    def found(*accepted):
        member, serving, x, keywords = drawn(name, "rows", dtype=torch.float32)
        rounds = serving.rounds[0], (range(3, 5), accepted)
        serving = dataclasses.replace(serving, rounds=rounds)
        return serve(member, serving, x, keywords, "triton")

    cut = found(1, 2, 3)
    for part, value in found(-1, 2, 2**31).items():
        assert torch.equal(value, cut[part])


@pytest.mark.parametrize("name", SEVERAL)
def test_errors_count_tokens(name):
    def call(kind, columns, accepted=(1, 1, 1), impl="torch"):
        member, serving, x, keywords = drawn(name, kind)
        places = tuple(row[:columns] for row in serving.places)
        rounds = ((serving.rounds[0][0], accepted),)
        serving = dataclasses.replace(serving, places=places, rounds=rounds)
        serve(member, serving, x, keywords, impl)

    for impl in IMPLS:
        with pytest.raises(ValueError, match=r"a column for each of 3 tokens, got \(3, 2\)"):
            call("rows", 2, impl=impl)
    with pytest.raises(ValueError, match="a column for each of 5 tokens, got 4"):
        call("packed", 4)
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=rf"from 1 to 3, .* got \[1, {wrong}, 1\]"):
            call("rows", 3, (1, wrong, 1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_columns_of_steps(rows, dtype):
    """What a kernel is given that knows steps only."""
    pool = Pool(torch.tensor([[6, 1], [-1, 2]], dtype=dtype), torch.tensor([2, 1]), True, rows)
    assert pool.places.shape == (2, 2 * rows) and pool.places.dtype == dtype
    assert torch.equal(pool.places[:, rows - 1 :: rows], pool.of_tokens)
    between = torch.arange(2 * rows) % rows < rows - 1
    assert (pool.places[:, between] == -1).all()
    assert pool.accepted is not None and pool.accepted.tolist() == [2 * rows, rows]
    ends = Pool(torch.tensor([[6], [1]]), None, False, rows)
    assert ends.places is ends.of_tokens and ends.accepted is None
