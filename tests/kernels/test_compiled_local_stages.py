"""The local stages' kernels as Triton compiles them for sm_90, in an emulator, against the
interpreter of Gluon kernels, which ignores layouts and barriers, and against fp64."""

import functools
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.torch.intra import Inputs, Spec, scores
from fla_cp.kernels.torch.intra import intra as exact_intra
from fla_cp.kernels.triton.intra import intra
from fla_cp.kernels.triton.tile_table import STEEP, TALL, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support import channelwise
from tests.support.emulated_launches import (
    Compiled,
    compared,
    compiled_by,
    compiled_launches,
    memory,
    without,
)
from tests.support.ptx_emulator import Race, parsed

BF16 = torch.bfloat16
K = 128
OFFSETS = 0, 64, 104, 150
"""Of the documents: chunks of 64 tokens, and of fewer."""


class Case(NamedTuple):
    """One decay a head, with HV = 2. H: heads of q and k."""

    removal: str = "k"
    H: int = 2
    precise: bool = False
    norm: bool = True


HEADWISE = {
    "gated delta rule": Case(),
    "gated delta rule, a group": Case(H=1),
    "gated delta rule, two terms": Case(precise=True),
    "gated delta rule, a group, two terms": Case(H=1, precise=True),
    "gated delta rule, no norms": Case(norm=False),
    "comba": Case("p"),
    "comba, a group, two terms": Case("p", H=1, precise=True),
    "simple gla": Case("none"),
    "simple gla, a group, two terms": Case("none", H=1, precise=True),
}
CHANNELWISE = channelwise.CASES | channelwise.ANY
FAST = ["gated delta rule", "comba, a group, two terms", "drawn decays"]
"""Those that no mark leaves out."""

WIDE = [name for name in (*HEADWISE, *CHANNELWISE) if name not in FAST]


def drawn(name: str) -> tuple[DeltaRule, Inputs, tuple[int, ...]]:
    """The rule of a case, its inputs in bf16, and its documents."""
    if name in CHANNELWISE:
        case = CHANNELWISE[name]
        rule, x = channelwise.drawn(case)
        offsets = case.offsets
    else:
        of, gen = HEADWISE[name], torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=gen)

        T, HV, removes = OFFSETS[-1], 2, of.removal != "none"
        q, k, p = (randn(T, of.H, K) * (1 if of.norm else 0.1) for _ in "qkp")
        rates = torch.zeros(HV), randn(HV)
        rest = randn(T, HV, K), randn(T, HV) - 3, randn(T, HV) if removes else None, *rates
        x, offsets = Inputs(q, k, *rest, p if of.removal == "p" else None), OFFSETS
        rule = DeltaRule(
            scale=K**-0.5, gate="softplus", qk_l2norm=of.norm, removal=of.removal,
            beta_factor=1.0 if removes else None, per_head=True, precise=of.precise,
        )  # fmt: skip
    return rule, Inputs(*(None if t is None else t.to(BF16) for t in x)), offsets


def call(name):
    """Forms the chunks of a case by the kernels of sm_90."""
    rule, x, offsets = drawn(name)
    tiles = () if rule.per_head else (("intra", TALL), ("intra_any", STEEP))
    tuning = Tuning(gluon=True, forced=tiles)
    return intra(rule, Packing.build(offsets), x, tuning)


def exact(name):
    """T and Aqk of a case in fp64."""
    rule, x, offsets = drawn(name)
    x = Inputs(*(None if t is None else t.double() for t in x))
    if not rule.per_head:
        return channelwise.defined(rule, x, offsets)
    spec = Spec(rule, Packing.build(offsets))
    c = scores(spec, exact_intra(spec, x))
    return {"T": c.T, "Aqk": rule.scale * c.Aqk}


def compile_all(path, *names):
    """Writes the kernels that cases launch, by case."""
    found = {n: compiled_launches(functools.partial(call, n)) for n in names}
    Path(path).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels of a case, compiled in another process: kernels are interpreted in this one."""

    @functools.cache
    def group(names):
        folder = tmp_path_factory.mktemp("compiled")
        found = compiled_by(__name__, folder, *names)
        return {n: [Compiled(*kernel) for kernel in kernels] for n, kernels in found.items()}

    return lambda name: group(tuple(FAST if name in FAST else WIDE))[name]


@pytest.fixture(autouse=True)
def in_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def tiles(x, precise):
    """T or Aqk [NC, HV, 64, 64] in fp64, as the sum of its terms."""
    return x.double().unflatten(-2, (2 if precise else 1, 64)).sum(-3)


CASES = [*FAST, *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_form_what_the_interpreter_does(name, compiled):
    """They write the same elements, once each, no access is in a race, and lanes do not wait for
    each other's banks; of the kernel for steep decays, a few do."""
    rule, precise, definition = drawn(name)[0], drawn(name)[0].precise, exact(name)
    found = compared(functools.partial(call, name), compiled(name))
    kernels = ["intra_head_sm90_kernel"] if rule.per_head else ["intra_sm90_kernel"]
    if name in channelwise.ANY:
        kernels.append("steep_sm90_kernel")
    assert [x.name for x in found] == kernels
    for launch in found:
        assert launch.conflicts == 0 or launch.name == "steep_sm90_kernel"
        for part, stored in launch.stored.items():
            times = torch.from_numpy(launch.times_written[part])
            assert torch.equal(times, stored.long()), part
            given, own = (memory(of[part])[stored] for of in (launch.given, launch.found))
            unit = torch.finfo(own.dtype).eps if own.is_floating_point() else 0
            limit = 4 * unit * given.abs() + 1e-5 * (unit > 0)
            if part.endswith(("T", "Aqk")):  # products in TF32 have rounded operands
                limit += 1e-3 * given.abs().max().clamp(max=1) if len(given) else 0
            assert ((own.double() - given.double()).abs() <= limit).all(), part
            if own.dtype == BF16 and len(own):
                assert (own == given).double().mean() > 0.97, part
            last = part.rpartition(".")[2]
            if last in ("T", "Aqk") and launch is found[-1] and stored.any():
                both = launch.found[part]  # with two kernels, what the first one left is there
                error = tiles(both, precise) - definition[last]
                assert error.norm() <= 4e-3 * definition[last].norm(), part


@pytest.mark.parametrize(
    "opcode, race",
    [
        ("cp.async.wait_group", "a copy still writes here: ldmatrix"),
        ("fence.proxy.async", "no fence.proxy.async since the operand was written: wgmma.mma"),
        ("wgmma.fence", "no wgmma.fence before: wgmma.mma"),
        ("wgmma.wait_group", "a product still writes %r"),
        ("bar.sync", "with lanes|with warps|no barrier"),
    ],
)
def test_what_orders_accesses_is_not_left_out(opcode, race, compiled):
    """Without an instruction that orders accesses there is a race."""
    (kernel,) = compiled("gated delta rule")
    lines = [x.line for x in parsed(kernel.ptx)[1] if x.opcode.startswith(opcode)]
    with pytest.raises(Race, match=race):
        compared(lambda: call("gated delta rule"), [without(kernel, *lines)])


@pytest.mark.parametrize("file, which", [("intra_headwise.py", min), ("inverse.py", max)])
def test_a_barrier_that_is_missing_is_a_race(file, which, compiled):
    """That of `store_square`, and the last one of `invert`."""
    (kernel,) = compiled("gated delta rule")
    found = [x for x in parsed(kernel.ptx)[1] if x.opcode == "bar.sync" and x.source[0] == file]
    missing = which(found, key=lambda x: x.source[1])
    with pytest.raises(Race, match="with warps"):
        compared(lambda: call("gated delta rule"), [without(kernel, missing.line)])


@pytest.mark.parametrize(
    "opcode, before, after",
    [
        ("stmatrix", "{%a, %b,", "{%b, %a,"),
        ("wgmma.mma_async", "}, %a, %b,", "}, %b, %a,"),
        ("ex2", "%a, %b", "%a, 0f3F800000"),
    ],
)
def test_a_wrong_operand_is_seen(opcode, before, after, compiled):
    (kernel,) = compiled("gated delta rule")
    x = next(x for x in parsed(kernel.ptx)[1] if x.opcode.startswith(opcode))
    pattern = re.escape(before).replace(r"\ ", r"\s*")
    for name, number in (("%a", r"\1"), ("%b", r"\2")):
        pattern, after = pattern.replace(name, r"(%\w+)"), after.replace(name, number)
    wrong = re.sub(pattern, after, x.text, count=1)
    assert wrong != x.text
    text = kernel.ptx.splitlines()
    assert x.text in text[x.line - 1]
    text[x.line - 1] = wrong
    (launch,) = compared(lambda: call("gated delta rule"), [kernel._replace(ptx="\n".join(text))])
    errors = [
        (memory(launch.found[n]).double() - memory(launch.given[n]).double())[stored].abs().max()
        for n, stored in launch.stored.items() if stored.any()
    ]  # fmt: skip
    assert max(errors) > 0.01


if __name__ == "__main__":
    compile_all(*sys.argv[1:])
