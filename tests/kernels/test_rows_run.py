"""Layers of a decoding step of several sequences, in interpreted kernels, against fp64."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp.kernels.sm90 import rows_run
from tests.support.gluon_interpreter import interpreted
from tests.support.step_layers import assert_steps_are_right, doubled, drawn_layers

SIZES = {"B": 5, "H": 2, "K": 32, "V": 64, "C": 96, "F": 72}
CASES: dict[str, dict[str, Any]] = {
    "KDA": {},
    "KDA, two sequences": {"B": 2},
    "KDA, ranks side by side, a bias": {"K": 64, "together": True, "bias": True},
    "KDA, 64 sequences": {"B": 64},
    "KDA, sigmoid, a bias": {"bias": True, "rule": {"gate": "sigmoid", "lower_bound": -5.0}},
    "KDA, heads of two tiles": {"K": 16, "V": 128, "rule": {"beta_factor": 2.0}},
    "GDN": {"low": False, "rule": {"per_head": True}, "activation": "silu"},
    "GLA": {"gate": False, "rule": {"removal": "none", "beta_factor": None}},
    "KDA, a convolution with a bias": {"conv_bias": True},
    "KDA, keys of 48": {"K": 48},
    "GDN, two value heads a head": {"HV": 4, "low": False, "rule": {"per_head": True}},
    "KDA, three taps": {"taps": 3, "conv_bias": True},
    "many columns": {"C": 840, "F": 1000},
}


REFUSED: dict[str, dict[str, Any]] = {
    "one sequence": {"B": 1},
    "more than 64 sequences": {"B": 65},
    "heads of 32 values": {"V": 32},
    "heads of 264 keys": {"K": 264},
    "sizes that are no multiples of 8": {"F": 76},
    "another rule": {"rule": {"removal": "p"}},
    "raw q and k": {"rule": {"qk_l2norm": False}},
    "given decays": {"rule": {"gate": "given"}},
    "more taps than the convolution has": {"taps": 9},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_refused(name):
    """Each differs in one point from layers that are taken."""
    assert rows_run.takes(drawn_layers(1, **SIZES)[0])
    rule = {"rule": REFUSED[name].get("rule", {})}
    assert not rows_run.takes(drawn_layers(1, **SIZES | REFUSED[name] | rule)[0])


def test_weights_that_only_happen_to_lie_side_by_side():
    """They belong to different tensors, so that no view has both."""
    memory = np.zeros(2 * 64 * 16, dtype=np.int16)
    a, b = (
        torch.frombuffer(half, dtype=torch.bfloat16).view(64, 16) for half in np.split(memory, 2)
    )
    assert a.data_ptr() + a.nbytes == b.data_ptr() and not rows_run.follows(a, b)
    both = torch.zeros(2, 64, 16)
    assert rows_run.follows(both[0], both[1]) and not rows_run.follows(both[1], both[0])


def made(case, programs):
    """Two layers that are run together, and the same in bf16 and in fp64."""
    plain = drawn_layers(2, **case)
    layers, exact = drawn_layers(2, **case), [doubled(s) for s in plain]
    run = rows_run.rows_layers(layers, programs)
    assert run is not None
    return run, layers, plain, exact


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kib, steps", [(80, 2), (192, 6)])
def test_layers(name, kib, steps, monkeypatch):
    """Steps of two layers, in which heads write their states once or, with six, more than once."""
    monkeypatch.setattr(rows_run, "SHARED", 1024 * kib)
    case = SIZES | CASES[name]
    with interpreted() as launched:
        assert_steps_are_right(*made(case, 40), steps)
    kernels = {"rows_product_kernel", "rows_state_kernel", "rows_write_back_kernel"}
    if case.get("taps", 4) == 4:
        kernels.add("rows_conv_kernel")
    assert set(launched) == kernels


@pytest.mark.parametrize("name", ["KDA", "GDN"])
@pytest.mark.parametrize("round", [2, 8])
def test_many_heads_of_a_program(name, round, monkeypatch):
    """More of them than warps that prepare one each, and the last group is not full."""
    monkeypatch.setattr(rows_run, "ROUND", round)
    with interpreted():
        assert_steps_are_right(*made(SIZES | CASES[name] | {"B": 7, "H": 4}, 2), 5)


def test_states_are_written_in_turns(monkeypatch):
    """A head's state changes in one of four steps; each step changes a quarter of them."""
    with interpreted():
        run, (layer, _), *_ = made(SIZES | {"B": 16}, 4)
        changed = []
        for _ in range(8):
            before = layer.state.clone()
            run(torch.randn(16, SIZES["C"]).to(torch.bfloat16))
            changed.append((layer.state != before).flatten(2).any(2).flatten())
    assert [int(heads.sum()) for heads in changed] == [8] * 8
    assert all((a ^ b).sum() == 16 for a, b in pairwise(changed))
    assert all(sum(changed[n : n + 4]).eq(1).all() for n in range(5))


def test_states_that_are_read_between_steps():
    """They are up to date once they are written back, and steps go on from there."""
    with interpreted():
        run, layers, plain, exact = made(SIZES, 4)
        for steps in (1, 3, 2):
            assert_steps_are_right(run, layers, plain, exact, steps)
            before = [s.state.clone() for s in layers]
            for deferred in run.deferred:
                deferred.write_back()
            assert all(torch.equal(a, s.state) for a, s in zip(before, layers, strict=True))


def test_steps_that_write_all_states():
    """From a reset on, until the next one, and no matter what the states lacked before it."""
    with interpreted():
        run, layers, plain, exact = made(SIZES, 4)
        for every_step, steps in ((True, 3), (False, 2), (True, 2)):
            assert_steps_are_right(run, layers, plain, exact, steps)
            for deferred in run.deferred:
                deferred.reset(every_step)
            if every_step:
                before = [s.state.clone() for s in layers]
                run(torch.randn(5, SIZES["C"]).to(torch.bfloat16))
                for deferred in run.deferred:
                    deferred.write_back()  # finds nothing
                assert all((a != s.state).all() for a, s in zip(before, layers, strict=True))
                for deferred in run.deferred:
                    deferred.reset(True)
                for s, e, a in zip(plain, exact, layers, strict=True):
                    for name in ("state", "window"):
                        getattr(s, name).copy_(getattr(a, name))
                        getattr(e, name).copy_(getattr(a, name))


def test_steps_outside_of_inference_mode():
    """Layers may be put together in inference mode, and run outside."""
    with interpreted():
        with torch.inference_mode():
            run, *rest = made(SIZES, 4)
        with torch.no_grad():
            run.steps.add_(1)
        assert run.steps.eq(1).all() and rest
