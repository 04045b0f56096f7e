"""Checks of the kernel that runs layers of a decoding step together, as in checks.py."""

from functools import partial
from unittest import mock

import torch

from fla_cp.kernels.sm90 import rows_run, step_run
from fla_cp.kernels.torch.decoding import StepLayer, StepRun
from fla_cp.kernels.triton.tile_table import sm_count
from tests.gpu import checks
from tests.gpu.cases import BF16
from tests.support.step_layers import drawn_layers, side_by_side, step

SIZES_1B = {"H": 16, "K": 128, "V": 128, "C": 2048, "F": 5504}
LAYERS: dict[str, dict] = {
    "KDA": SIZES_1B | {"bias": True},
    "KDA, sigmoid": SIZES_1B | {"rule": {"gate": "sigmoid", "lower_bound": -5.0}},
    "GDN": SIZES_1B | {"low": False, "rule": {"per_head": True}, "activation": "silu"},
    "KDA, other sizes": {"H": 4, "K": 64, "V": 32, "C": 520, "F": 1400},
    "KDA, words that several threads read": {"H": 4, "K": 64, "V": 64, "C": 512, "F": 1024},
    "GLA": {"H": 4, "K": 64, "V": 128, "C": 512, "F": 1408, "gate": False}
    | {"rule": {"removal": "none", "beta_factor": None}},
}
"""Sizes and kinds of layers that are one kernel, see `drawn_layers`."""

SEVERAL: dict[str, dict] = {
    "KDA, 64 rows": SIZES_1B | {"B": 64},
    "KDA, two rows": SIZES_1B | {"B": 2},
    "GDN, three rows": LAYERS["GDN"] | {"B": 3},
    "KDA, 37 rows": SIZES_1B | {"B": 37, "bias": True, "conv_bias": True},
    "KDA, ranks side by side": SIZES_1B | {"B": 64, "together": True, "bias": True},
    "KDA, heads of 64, sigmoid, three taps": {"B": 9, "H": 4, "K": 64, "V": 64, "C": 520, "F": 1400}
    | {"taps": 3, "rule": {"gate": "sigmoid", "lower_bound": -5.0}},
    "GDN, 64 rows": LAYERS["GDN"] | {"B": 64},
    "GDN, 64 rows, 32 value heads": LAYERS["GDN"] | {"B": 64, "HV": 32},
    "GDN, two value heads a head": LAYERS["GDN"] | {"B": 32, "H": 8, "HV": 16},
    "KDA, keys of 96": {"B": 8, "H": 4, "K": 96, "V": 64, "C": 512, "F": 1024},
    "GLA, 16 rows": LAYERS["GLA"] | {"B": 16},
    "KDA, heads of 256": {"B": 5, "H": 2, "K": 128, "V": 256, "C": 512, "F": 1024},
}
"""The same for several sequences, for which a layer has a few kernels."""

REPLAYS = 19
"""Steps of layers, of which all but the first are replays of a CUDA graph. Each head writes its
state in two of them or more."""

SOME = 7
"""Programs where there is no GPU, and phases are always apart."""


def check_step_layers() -> checks.Rows:
    rows, gen = [], torch.Generator().manual_seed(0)
    for name, of in (LAYERS | SEVERAL).items():
        drawn = drawn_layers(2, **of)
        x = {f"{n} {i}": t for i, s in enumerate(drawn) for n, t in s._asdict().items()}
        x = {n: t for n, t in x.items() if isinstance(t, torch.Tensor)}
        size = REPLAYS, len(drawn[0].state), len(drawn[0].norm)
        x["x"] = torch.randn(size, generator=gen).to(BF16)
        found = checks.judged(partial(layers, like=drawn), x, BF16)
        rows.append({"case": f"decode layers {name}"} | found)
    return rows


def layers(x: checks.Named, impl: str, *, like: list[StepLayer]) -> checks.Named:
    """Steps of layers that follow each other. Kernels run them together and with their phases
    apart, which must give the same bits."""
    results = []
    for apart in (False, True) if impl == "triton" else (True,):
        made = [
            s._replace(**{
                n: x[f"{n} {i}"].to(checks.DEVICE, copy=True)
                for n, t in s._asdict().items() if isinstance(t, torch.Tensor)
            })
            for i, s in enumerate(like)
        ]  # fmt: skip
        for i, s in enumerate(like):
            if any(low.groups == 2 for low in rows_run.low_ranks(s)):
                made[i] = side_by_side(made[i])
        found, run = steps(made, x["x"].to(checks.DEVICE), impl, apart)
        for deferred in () if run is None else run.deferred:
            deferred.write_back()
        found |= {f"state {i}": s.state for i, s in enumerate(made)}
        results.append(found | {f"window {i}": s.window for i, s in enumerate(made)})
    assert all(torch.equal(r[n], t) for r in results for n, t in results[0].items())
    return results[0]


def steps(
    made: list[StepLayer], x: torch.Tensor, impl: str, apart: bool
) -> tuple[checks.Named, StepRun | None]:
    """The residual stream behind all layers, step by step; together in a CUDA graph. Also what ran
    the layers together."""
    found, place, run, graph = [], x[0].clone(), None, None
    if impl == "triton":
        run = step_run.step_layers(made, sm_count(place.device) or SOME)
        assert run is not None
    apart |= not place.is_cuda
    for n in range(len(x)):
        place.copy_(x[n])
        if run is not None and n == len(x) - 3:  # from now on, steps write all states
            for deferred in run.deferred:
                deferred.write_back()
                deferred.reset(True)
        if run is None:
            for s in made:
                step(s, place)
        elif n == 0 or apart:
            with mock.patch.object(step_run, "APART", apart):
                run(place)
        else:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run(place)
            graph.replay()
        found.append(place.clone())
    return {"x": torch.stack(found)}, run
