"""Layers of a decoding step in one Gluon kernel, interpreted phase by phase, against fp64.

tests/aot compiles the kernel, and tests/gpu compares it with its phases apart.
"""

import itertools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.sm90 import step_layouts, step_run
from tests.support.gluon_interpreter import interpreted
from tests.support.step_layers import assert_steps_are_right, doubled, drawn_layers

OPTIONS = "split", "columns", "programs"
CASES: dict[str, dict[str, Any]] = {
    "KDA": {},
    "KDA, one program a head": {"split": 1, "programs": 5},
    "KDA, sigmoid, a bias": {"bias": True, "rule": {"gate": "sigmoid", "lower_bound": -5.0}},
    "KDA, K < V": {"K": 16, "V": 64, "rule": {"beta_factor": 2.0}},
    "KDA, K > V": {"K": 64, "V": 16},
    "GDN": {"low": False, "rule": {"per_head": True}, "activation": "silu"},
    "GLA": {"gate": False, "rule": {"removal": "none", "beta_factor": None}},
    "many columns": {"C": 136, "F": 88, "columns": 32, "programs": 3},
    "many rows": {"C": 136, "F": 264, "columns": 64, "programs": 2},
}


def of_a_thread(shape, sizes, threads, warps):
    """Elements of a thread in a blocked layout, replicas counted."""
    parts = zip(shape, sizes, threads, warps, strict=True)
    return math.prod(size * max(1, n // (size * t * w)) for n, size, t, w in parts)


@pytest.mark.parametrize("warps", [4, 8])
def test_words_of_a_thread(warps):
    """The PTX that waits for words reads as many as a thread holds, also where others hold the same
    ones."""
    for n in (32, 256, 512, 1024, 4096):
        assert step_layouts.held(n, warps) == of_a_thread([n], [2], [32], [warps])
    for heads, columns in itertools.product((1, 2, 4, 16, 64), (8, 16, 32, 64)):
        lanes = min(32, columns // 2)
        wanted = of_a_thread([heads, columns], [1, 2], [32 // lanes, lanes], [warps, 1])
        assert step_layouts.held_matrix(heads, columns, 2, warps) == wanted


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_products_of_a_warp(lanes):
    """Fragments of the instruction as PTX has them, each thread with its own columns."""
    gen = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*n, 4 * lanes, generator=gen) for n in ((64 // lanes,), ()))
    a, b, found = torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 8), torch.zeros(64 // lanes)
    for lane in range(32):
        (g, t), (rows, at) = divmod(lane, 4), divmod(lane, lanes)
        a[:, g, :, 2 * t : 2 * t + 2] = w[2 * rows : 2 * rows + 2, 4 * at : 4 * at + 4].view(
            2, 2, 2
        )
        b[:, 2 * t : 2 * t + 2, g] = x[4 * at : 4 * at + 4].view(2, 2)
    d = (a.view(16, 16) @ b.view(16, 8)).view(2, 8, 8)
    for lane, odd in itertools.product(range(32), range(2)):
        if lane // 4 == lane % 4 * 2 + odd:  # step_products.wanted
            start = 2 * (lane // lanes)
            found[start : start + 2] += d[:, lane // 4, lane % 4 * 2 + odd]
    torch.testing.assert_close(found, w @ x)


@pytest.mark.parametrize("name", CASES)
def test_layers(name, monkeypatch):
    """Two steps of two layers, on a few programs."""
    monkeypatch.setattr(step_run, "APART", True)
    case = {option: x for option, x in CASES[name].items() if option not in OPTIONS}
    for option in ("split", "columns"):
        if option in CASES[name]:
            monkeypatch.setattr(step_run, option.upper(), CASES[name][option])
    plain = drawn_layers(2, **case)
    layers, exact = drawn_layers(2, **case), [doubled(s) for s in plain]
    with interpreted() as launched:
        run = step_run.step_layers(layers, CASES[name].get("programs", 7))
        assert run is not None
        assert_steps_are_right(run, layers, plain, exact)
    assert len(launched) == 2 * 2 * step_run.PHASES * run.shape.P
