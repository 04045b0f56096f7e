"""The local backward with one decay a channel as Triton compiles it for sm_90, in an emulator,
against the interpreter of Gluon kernels, which ignores layouts, barriers and fences."""

import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.sm90 import intra_channelwise_bwd
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import empty_chunks, intra
from fla_cp.kernels.triton.operands import Chunks, tables
from fla_cp.kernels.triton.tile_table import QUARTERS_BWD, TALL, TALL_BWD, Tile, Tuning
from fla_cp.partition.packing import Packing
from tests.support import channelwise
from tests.support.channelwise import K
from tests.support.emulated_launches import (
    Compiled,
    compared,
    compiled_by,
    compiled_launches,
    memory,
    without,
)
from tests.support.gluon_interpreter import interpreted
from tests.support.ptx_emulator import Race, parsed

OFFSETS = 0, 70
"""Of the only document: a chunk of 64 tokens, and one of 6."""


class Case(NamedTuple):
    """tile: of the kernel. dv: whether the reverse scan left dv instead of y."""

    tile: Tile = TALL_BWD
    dv: bool = True
    removal: str = "k"


CASES = {
    "dv": Case(),
    "y": Case(dv=False),
    "quarters": Case(QUARTERS_BWD),
    "no removal": Case(removal="none"),
}


def formed(case: Case, *, empty: bool = False) -> tuple[Inputs, Chunks]:
    """Inputs in bf16, and their chunks. empty: nothing is computed."""
    rule, x = channelwise.drawn(channelwise.Case(offsets=OFFSETS, H=1, HV=1, removal=case.removal))
    x = Inputs(*(None if t is None else t.bfloat16() for t in x))
    given = rule, Packing.build(OFFSETS), x, Tuning(gluon=True, forced=(("intra", TALL),))
    if empty:
        return empty_chunks(*given)
    with interpreted():
        return x, intra(*given)


def call(case: Case, x: Inputs, c: Chunks) -> None:
    """Launches the kernel on what the scans and the kernel before it might have left."""
    T, NC, gen = OFFSETS[-1], len(c.decay), torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    like = {n: torch.zeros(T, 1, K, dtype=torch.bfloat16) for n in ("dq", "dk", "dg")}
    out = bundles.Grads(*(None,) * len(bundles.Grads._fields))._replace(
        **like,
        dv=randn(T, 1, K),
        dA_log=torch.zeros(2 * NC, 1),
        ddt_bias=torch.zeros(NC, 1, K),
        shares=torch.zeros(3, T, 1),
        scores=randn(NC, 1, 2, 64, 64).tril(-1),
        row_grads=randn(NC, 1, 3, 64, dtype=torch.float32),
    )
    states = {"h": randn(NC, 1, K, K), "dh": randn(NC, 1, K, K), "v_new": randn(NC, 1, 64, K)}
    read = bundles.Saved(
        *map(bundles.rows, (x.q, x.k, x.k, x.v, randn(T, 1, K))),
        o=None,
        **states,
        y=None if case.dv else randn(NC, 1, 64, K),
        rows=c.rows,
        decay=c.decay,
        anchors=c.anchors,
        steep=None,
    )
    R = bundles.rule_options(c.rule, torch.bfloat16)
    table = tables(Packing.build(OFFSETS), x.q.device)
    intra_channelwise_bwd.safe_bwd(table, x, c, read, out, case.tile, R)


def compile_all(path: str) -> None:
    """Writes the kernel of each case."""
    found = {}
    for name, case in CASES.items():
        given = formed(case, empty=True)
        found[name] = compiled_launches(functools.partial(call, case, *given))
    Path(path).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels, compiled in another process: kernels are interpreted in this one."""
    folder = tmp_path_factory.mktemp("compiled")
    found = compiled_by(__name__, folder)
    return {name: Compiled(*kernel) for name, (kernel,) in found.items()}


@pytest.fixture(autouse=True)
def in_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def emulated(name, kernel):
    case = CASES[name]
    (launch,) = compared(functools.partial(call, case, *formed(case)), [kernel])
    return launch


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_forms_what_the_interpreter_does(name, compiled):
    """It writes the same elements, once each, and no access is in a race. Lanes wait for each
    other's banks only where warps exchange sums."""
    launch = emulated(name, compiled[name])
    written = set()
    for part, stored in launch.stored.items():
        times = torch.from_numpy(launch.times_written[part])
        assert torch.equal(times, stored.long()), part
        if not stored.any():
            continue
        written.add(part.rpartition(".")[2])
        given, own = (memory(of[part])[stored].double() for of in (launch.given, launch.found))
        assert given.norm() > 0, part
        assert (own - given).norm() <= 2e-5 * given.norm(), part
    assert written >= {"dq", "dk", "dg", "dA_log", "ddt_bias"}
    assert ("shares" in written) == (CASES[name].removal == "k")
    programs = 4  # two chunks, two slabs of channels
    assert launch.conflicts <= 4 * programs


@pytest.mark.parametrize(
    "opcode, race",
    [
        ("cp.async.wait_group", "a copy still writes here"),
        ("fence.proxy.async", "no fence.proxy.async since the operand was written"),
        ("wgmma.wait_group", "a product still"),
    ],
)
def test_each_wait_and_fence_is_needed(opcode, race, compiled):
    """Without any one of them there is a race."""
    lines = [x.line for x in parsed(compiled["dv"].ptx)[1] if x.opcode.startswith(opcode)]
    assert len(lines) >= 2
    for line in lines:
        with pytest.raises(Race, match=race):
            emulated("dv", without(compiled["dv"], line))


if __name__ == "__main__":
    compile_all(*sys.argv[1:])
