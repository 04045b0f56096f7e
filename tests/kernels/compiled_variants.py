"""Which variants of a kernel a process compiles, and which arguments make them differ.

    python -m tests.kernels.compiled_variants [--tokens 512,1000] [--heads 4,32]

prints them for calls with many T, packings and numbers of heads, on a machine without a GPU. Here
nothing is compiled: what Triton would compile is recorded. test_launch.py runs the tests of this
file in a process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import fla_cp
from benchmarks.tune import now
from fla_cp.kernels import using
from fla_cp.kernels.triton import launch as launches
from fla_cp.kernels.triton import streams
from tests.support.driver import Sm90Driver

SMS, D = 132, 128
"""Streaming multiprocessors of an H200, and K = V."""

TILE = ("S.BT", "S.BK", "S.BV", "S.NS", "num_warps", "num_stages", "maxnreg")
"""Facts of a variant that the length of a chunk and the tile decide. A tile may depend on how many
chains there are."""

FOLLOW = ("FLIP", "TILES", "SHARES", "FIRST", "S.TRANSPOSED", "TIMES_BETA")
"""Constants that follow from the tiles, the kernel's own or another's, or from the direction."""

OPERATORS = {
    "kda, safe gate": ("kda", {"safe_gate": True, "lower_bound": -5.0}),
    "kda, any gate": ("kda", {}),
    "gated delta rule": ("gated_delta_rule", {}),
}


@dataclass(frozen=True)
class Variant:
    """A kernel by name, and what it was compiled for, by the names of its arguments."""

    kernel: str
    facts: tuple[tuple[str, str], ...]

    def but(self, *names: str) -> Variant:
        """The same without some facts."""
        return Variant(self.kernel, tuple(f for f in self.facts if f[0] not in names))

    @property
    def absent(self) -> frozenset[str]:
        """The arguments that are None, or members of a bundle whose tensor is None."""
        none = {n for n, value in self.facts if value == "None"}
        bundles = {n.rsplit(".", 1)[0] for n in none if "." in n and n.endswith(".ptr")}
        return frozenset(none | {n for n, _ in self.facts if n.rsplit(".", 1)[0] in bundles})


def facts_of(kernel: Any, signature: dict, constants: dict, attributes: dict) -> dict[str, str]:
    """What the signature, constants and attributes of a compilation say of each argument."""
    found: dict[str, str] = {}
    names: dict[tuple[int, ...], str] = {}

    def walk(path: tuple[int, ...], name: str, x: Any) -> None:
        names[path] = name
        if isinstance(x, tuple):
            for i, n in enumerate(getattr(x, "_fields", range(len(x)))):
                walk((*path, i), f"{name}.{n}", x[i])
        else:
            found[name] = str(x)

    for i, (name, x) in enumerate(signature.items()):
        walk((i,), name, x)
    for path, value in constants.items():
        value = getattr(value, "value", value)
        if hasattr(value, "_fields"):
            for n, x in zip(value._fields, value, strict=True):
                found[f"{names[path]}.{n}"] = str(getattr(x, "value", x))
        else:
            found[names[path]] = str(value)
    for path, value in attributes.items():
        found[names[path]] += "".join(f" {n} {x}" for n, x in value)
    return found


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """In the block, launches record what they would compile on an H200, each once."""
    found: list[Variant] = []

    def record(self, key, signature, device, constants, options, attributes, warmup):
        facts = facts_of(self, signature, constants, attributes)
        facts |= {n: str(getattr(options, n)) for n in ("num_warps", "num_stages", "maxnreg")}
        variant = Variant(self.__name__, tuple(sorted(facts.items())))
        if variant not in found:
            found.append(variant)
        return variant

    def run(kernel, grid, *given, **named):
        kernel.run(*given, grid=grid, warmup=True, **named)

    def one_stream(run, device, *held, concurrent):
        run()
        return lambda: None

    backend = replace(now(), tuning=replace(now().tuning, sms=SMS, architecture=90))
    active = driver._active
    driver.set_active(Sm90Driver())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", record)
        patch.setattr(launches, "runner", run)
        patch.setattr(streams, "start", one_stream)
        with using(backend), using(replace(backend, name="torch")):  # tensors are on the CPU
            yield found
    driver._active = active


def call(name: str, T: int, H: int, documents: int = 1) -> None:
    """A forward and a backward; the memory is never touched."""
    operator, options = OPERATORS[name]
    channels = (D,) if operator == "kda" else ()

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype).requires_grad_()

    x = [leaf(1, T, H, D), leaf(1, T, H, D), leaf(1, T, H, D), leaf(1, T, H, *channels)]
    x += [leaf(1, T, H), leaf(H, dtype=torch.float32)]
    x += [leaf(H * (D if channels else 1), dtype=torch.float32)]
    inside = {"qk_l2norm": True, "gate": True, "beta_sigmoid": True}
    options = {**options, **{f"use_{n}_in_kernel": on for n, on in inside.items()}}
    if documents > 1:
        options["cu_seqlens"] = torch.tensor([i * T // documents for i in range(documents + 1)])
    run = getattr(fla_cp, f"chunk_{operator}")
    o, _ = run(*x[:5], A_log=x[5], dt_bias=x[6], **options)
    torch.autograd.grad(o, x, torch.empty_like(o))


TOKENS = (128, 512, 1000, 4096, 4097, 8192, 16384, 30001, 32768, 65536, 131072)
PACKED = (1, 3, 50)


@pytest.mark.parametrize("H", [4, 8, 32])
@pytest.mark.parametrize("name", OPERATORS)
def test_variants_differ_in_tiles_or_in_which_tensors_there_are(name, H):
    """No count, and no stride or length that grows with T, compiles a kernel again. What may: a
    tile that pays for this many chains, and a call that is cut into segments, whose scans read and
    write other tensors."""
    with recorded() as found:
        for T in TOKENS:
            for documents in PACKED:
                call(name, T, H, documents)
    assert {v.kernel for v in found} >= {"scan_kernel", "scan_bwd_kernel", "scan_sm90_kernel"}
    seen: dict[tuple, Variant] = {}
    for v in found:
        facts = dict(v.facts)
        # a descriptor's type says the tile too
        described = [n for n, x in v.facts if x.startswith("tensordesc")]
        kind = v.kernel, tuple(facts.get(n) for n in TILE + FOLLOW), v.absent, tuple(described)
        other = seen.setdefault(kind, v)
        assert other is v, f"{v.kernel} is compiled twice: {set(v.facts) ^ set(other.facts)}"


@pytest.mark.parametrize("name", OPERATORS)
def test_another_length_with_the_same_cut_compiles_nothing(name):
    with recorded() as found:
        for first, others in (
            (16, (1, 5)),  # chunks of 16
            (128, (17, 63, 64, 65)),  # up to 64 chunks times heads, see `Tuning`
            (1024, (129, 512, 1000)),  # up to 512
            (4096, (1025, 3333)),
            (65536, (65535, 50001, 131072)),
        ):
            call(name, first, 32)
            count = len(found)
            for T in others:
                call(name, T, 32)
                assert len(found) == count, (T, [v.kernel for v in found[count:]])


def test_other_kernels_do_not_depend_on_counts():
    """Convolution and fold take counts that are not specialised; decoding takes T = 1 apart,
    because its loop then is a single token. The gate alone is compiled for T = 1, for multiples of
    16 and for other T: without the second fact its backward takes 211 registers instead of 168."""
    from fla_cp.comm.affine import FoldTable
    from fla_cp.kernels.triton.fold import fold
    from fla_cp.partition.packing import Packing

    def fold_chain(n: int) -> None:
        steps = FoldTable(*(tuple(x) for x in ((0, n), (0,), (0,), (0,) * n, (0,) * n, (0,) * n)))
        M, B = (torch.empty(1, 2, 32, 32) for _ in "MB")
        fold(Packing.build((0, 64)), lambda _: steps, M, B, None, B.clone(), transposed=False)

    def gate(T: int) -> None:
        g, A_log = torch.empty(1, T, 2, 32).requires_grad_(), torch.empty(2)
        fla_cp.kda_gate(g, A_log, impl="triton").sum().backward()

    def conv(T: int) -> None:
        x, w = torch.empty(1, T, 256).requires_grad_(), torch.empty(256, 4)
        y = fla_cp.causal_conv1d(x, w, impl="triton")
        (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()

    def decode(T: int) -> None:
        x = [torch.empty(1, T, 2, 32) for _ in range(4)]
        with torch.no_grad():
            fla_cp.fused_recurrent_kda(*x, torch.empty(1, T, 2), impl="triton")

    for run, count in ((fold_chain, 1), (gate, 6), (conv, 2), (decode, 2)):
        with recorded() as found:
            for n in (1, 2, 16, 33, 48):
                run(n)
        assert len(found) == count, (run.__name__, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", default=",".join(map(str, (*TOKENS, 262144))))
    parser.add_argument("--heads", default="4,8,32")
    args = parser.parse_args()
    for name in OPERATORS:
        for H in map(int, args.heads.split(",")):
            causes: dict[Variant, str] = {}
            with recorded() as found:
                for T in map(int, args.tokens.split(",")):
                    for documents in PACKED:
                        call(name, T, H, documents)
                        for v in found[len(causes) :]:
                            causes[v] = f"T={T}, {documents} documents"
            print(f"{name}, {H} heads: {len(found)} variants")
            for kernel in dict.fromkeys(v.kernel for v in found):
                mine = [v for v in found if v.kernel == kernel]
                shared = frozenset.intersection(*(frozenset(v.facts) for v in mine))
                print(f"  {kernel}: {len(mine)}")
                for v in mine if len(mine) > 1 else ():
                    own = {n: x for n, x in v.facts if (n, x) not in shared}
                    absent = sorted(n for n, x in own.items() if x == "None")
                    tile = {n: x for n, x in own.items() if n in TILE + FOLLOW}
                    print(f"    {causes[v]}: tile {tile}, without {', '.join(absent) or 'nothing'}")


if __name__ == "__main__":
    main()
