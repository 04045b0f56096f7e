"""Layers of a decoding step of several sequences, in interpreted kernels, against fp64."""

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
    "few sequences": {"B": 4},
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kib, steps", [(80, 2), (192, 6)])
def test_layers(name, kib, steps, monkeypatch):
    """Steps of two layers, in which heads write their states once or, with six, more than once."""
    monkeypatch.setattr(rows_run, "SHARED", 1024 * kib)
    monkeypatch.setattr(rows_run, "ROUND", 4)
    case = SIZES | CASES[name]
    plain = drawn_layers(2, **case)
    layers, exact = drawn_layers(2, **case), [doubled(s) for s in plain]
    with interpreted() as launched:
        run = rows_run.rows_layers(layers, 40)
        assert run is not None
        assert_steps_are_right(run, layers, plain, exact, steps)
    kernels = {"rows_product_kernel", "rows_state_kernel", "rows_write_back_kernel"}
    if case.get("taps", 4) == 4:
        kernels.add("rows_conv_kernel")
    assert set(launched) == kernels
