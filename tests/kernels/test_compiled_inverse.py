"""Products by warps of the local stages as Triton compiles them for sm_90, in an emulator: the
inverse of a chunk's triangular matrix, and products of rows of q and k.

The interpreter of Gluon kernels ignores layouts and barriers. Here each thread has addresses and
fragments of its own, and accesses of shared memory need barriers between them.
"""

import inspect
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2
from triton.runtime import driver

from fla_cp.kernels.sm90 import inverse
from fla_cp.kernels.sm90.inverse import store_inverse
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.sm90.warp_blocks import blocks, diagonals, operands
from tests.support import ptx_emulator
from tests.support.driver import Sm90Driver
from tests.support.emulated_launches import compiled_by
from tests.support.ptx_emulator import Buffer, Fault, Program, Race, as_tf32, parsed
from tests.support.triangles import drawn, inverses_by_warps, of_parallel_keys

BF16 = torch.bfloat16

HEADS = 2
"""Matrices that a program inverts, one after the other."""

SLICES = [1, 2, 4]
"""How many of the four places are slices of allocations of two places each: as in
intra_channelwise.py, intra_channelwise_steep.py and intra_headwise.py."""


@gluon.jit
def inverse_kernel(x, to, n, HEADS: gl.constexpr, SLICES: gl.constexpr, TERMS: gl.constexpr):
    """The inverses for x [HEADS, 64, 64]. n: 63, which the compiler cannot tell."""
    half: gl.constexpr = to.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    s_q = gl.allocate_shared_memory(half, [64, 128], wide)
    s_k = gl.allocate_shared_memory(half, [2, 64, 64], wide)
    s_out = s_q._reinterpret(half, [2, 64, 64], wide)
    if SLICES == 4:
        places = s_out.index(0), s_out.index(1), s_k.index(0), s_k.index(1)
    else:
        s_near = gl.allocate_shared_memory(half, [2, 64, 64], wide)
        if SLICES == 2:
            places = s_out.index(0), s_out.index(1), s_k, s_near
        else:
            s_far = gl.allocate_shared_memory(half, [2, 64, 64], wide)
            places = s_out.index(0), s_k, s_near, s_far
    i = gl.arange(0, 64, gl.SliceLayout(1, acc))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, acc))[None, :]
    for h in range(HEADS):
        none = (n + h) // (64 + HEADS)
        b_x = gl.load(x + h * 64 * 64 + (i + none) * 64 + j)
        store_inverse(b_x, to + h * (TERMS * 64 * 64), places, none, TERMS)
        barrier()  # the inverse is read


@gluon.jit
def rows_kernel(q, k, to, n, SLABS: gl.constexpr):
    """The products of rows i of q and k [SLABS, 64, N], which together are [64, 128]: [64]. They
    are copied as on GPUs to where the tensor cores find them."""
    half: gl.constexpr = q.dtype.element_ty
    N: gl.constexpr = 128 // SLABS
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    s_q = gl.allocate_shared_memory(half, [SLABS, 64, N], wide)
    s_k = gl.allocate_shared_memory(half, [SLABS, 64, N], wide)
    at = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None] * N
    at += gl.arange(0, N, gl.SliceLayout(0, flat))[None, :]
    for part in gl.static_range(SLABS):
        s_q.index(part).store(gl.load(q + part * 64 * N + at))
        s_k.index(part).store(gl.load(k + part * 64 * N + at))
    barrier()
    x = gl.full([4, 16, 16], 0.0, gl.float32, blocks())
    for part in gl.static_range(SLABS):
        b_q, _ = operands(s_q.index(part))
        _, b_k = operands(s_k.index(part))
        x = mma_v2(b_q, b_k, x)
    of_rows: gl.constexpr = gl.SliceLayout(2, blocks())
    w = gl.arange(0, 4, gl.SliceLayout(1, of_rows))[:, None]
    i = w * 16 + gl.arange(0, 16, gl.SliceLayout(0, of_rows))[None, :]
    gl.store(to + i, diagonals(x, n // 64))


def compile_all(path):
    """Writes the PTX and the bytes of shared memory, by slices and terms, and by slabs."""
    driver.set_active(Sm90Driver())
    found = {}
    for slices in SLICES:
        for terms in (1, 2):
            given = torch.float32, BF16, 63, HEADS, slices, terms
            kernel = inverse_kernel.warmup(*given, grid=(1,), num_warps=4)
            found[f"{slices} {terms}"] = kernel.asm["ptx"], kernel.metadata.shared
    for slabs in (1, 2):
        kernel = rows_kernel.warmup(BF16, BF16, torch.float32, 63, slabs, grid=(1,), num_warps=4)
        found[f"{slabs}"] = kernel.asm["ptx"], kernel.metadata.shared
    Path(path).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What `compile_all` writes, in a process of its own: kernels are interpreted in this one."""
    folder = tmp_path_factory.mktemp("compiled")
    found = compiled_by(__name__, folder)
    return {tuple(map(int, key.split())): value for key, value in found.items()}


def matrices(draw):
    """x below the diagonal, and NaN elsewhere: kernels leave anything there."""
    x = -draw(2 * HEADS, torch.Generator().manual_seed(0))
    return torch.where(torch.ones(64, 64).tril(-1) > 0, x, float("nan"))


def run(ptx, shared, x, terms):
    """The program for x [HEADS, 64, 64], and the terms of the inverses."""
    to = torch.full((HEADS, terms, 64, 64), float("nan"), dtype=BF16)
    stored = Buffer(to.view(torch.uint16).numpy())
    program = Program(ptx, [Buffer(x.numpy()), stored, 63], shared)
    program.run()
    assert (stored.times_written == 1).all()
    return program, to


def step_by_step(a, b, acc, input_precision):
    """acc + a @ b in TF32, of which `mma.sync` adds up eight products at a time."""
    a, b = (torch.from_numpy(as_tf32(t.contiguous().numpy())).double() for t in (a, b))
    for k in (slice(0, 8), slice(8, 16)):
        acc = (acc.double() + a[..., k] @ b[..., k, :]).float()
    return acc


@pytest.mark.bits
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize(
    "draw, most", [(drawn, (1.5e-3, 3e-4)), (of_parallel_keys, (2e-3, 1.5e-3))]
)
def test_compiled_inverses_are_those_of_the_interpreter(draw, most, slices, terms, compiled):
    """There are no races either, and lanes that access shared memory do not wait for each other."""
    x, found = matrices(draw), []
    for heads in x.split(HEADS):
        program, to = run(*compiled[slices, terms], heads, terms)
        assert not program.conflicts
        found.append(to)
    found = torch.cat(found)
    assert torch.equal(found, inverses_by_warps(x, terms, BF16, step_by_step))
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) - x.double().tril(-1))
    error = (found.double().sum(1) - exact).norm() / exact.norm()
    assert error < most[terms - 1]


def barriers(ptx):
    """The barriers of the source, in their order, and those that the compiler adds."""
    files = (Path(inspect.getsourcefile(module)) for module in (inverse, sys.modules[__name__]))
    lines = {file.name: file.read_text().splitlines() for file in files}
    found = [], []
    for x in parsed(ptx)[1]:
        if x.opcode == "bar.sync":
            name, line = x.source
            found["barrier()" not in lines[name][line - 1]].append(x)
    return found


def has_race(ptx, shared, terms, *removed):
    lines = ptx.splitlines()
    for x in removed:
        lines[x.line - 1] = ""
    try:
        run("\n".join(lines), shared, matrices(drawn)[:HEADS], terms)
    except Race:
        return True
    return False


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("slices", SLICES)
def test_a_barrier_that_is_missing_is_a_race(slices, terms, compiled):
    """The source needs none of the barriers that the compiler adds between slices, and has its
    first one for the sake of registers alone."""
    given = *compiled[slices, terms], terms
    own, added = barriers(given[0])
    assert not has_race(*given, *added)
    assert [has_race(*given, *added, x) for x in own] == [False, True, True, True, True]


@pytest.mark.parametrize(
    "opcode, pattern, other",
    [
        ("mma", r"\}, \{ (%r\d+), (%r\d+) \}", r"}, { \2, \1 }"),
        ("mma", r"\}, \{ (%r\d+), (%r\d+), ", r"}, { \2, \1, "),
        ("ld.shared", r"\[(%r\d+)(\+\d+)?\]", r"[\1+1024]"),
        ("shfl", r", 1, 31,", ", 2, 31,"),
    ],
    ids=["right operand", "left operand", "block", "lane"],
)
def test_a_wrong_operand_is_seen(opcode, pattern, other, compiled):
    ptx, shared = compiled[1, 1]
    last = [x for x in parsed(ptx)[1] if x.opcode.startswith(opcode)][-1]
    wrong, count = re.subn(pattern, other, last.text, count=1)
    assert count == 1 and wrong != last.text and ptx.count(last.text) == 1
    x = matrices(of_parallel_keys)[:HEADS]
    found = [run(text, shared, x, 1)[1] for text in (ptx, ptx.replace(last.text, wrong))]
    assert not torch.equal(*found)


@pytest.mark.parametrize("slabs", [1, 2])
def test_compiled_products_of_rows(slabs, compiled):
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(slabs, 64, 128 // slabs, generator=gen).to(BF16) for _ in "qk")
    to = Buffer(np.zeros(64, np.float32))
    ptx, shared = compiled[slabs,]
    given = [Buffer(x.view(torch.uint16).numpy()) for x in (q, k)]
    program = Program(ptx, [*given, to, 63], shared)
    program.run()
    exact = (q.double() * k.double()).sum((0, 2))
    found = torch.from_numpy(to.bytes.view(np.float32)).double()
    assert torch.allclose(found, exact, rtol=1e-6, atol=1e-5)
    assert not program.conflicts and (to.times_written >= 1).all()


SMALL = """
.visible .entry small_kernel(
	.param .u64 .ptr .global .align 4 small_kernel_param_0
)
.reqntid 64
{
	ld.param.b64 %rd1, [small_kernel_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	shl.b32 %r2, %r1, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	and.b32 %r5, %r1, 1;
	setp.eq.b32 %p1, %r5, 0;
	CODE
	ret;
}
"""
"""A kernel of 64 threads: their numbers are in %r1, addresses of their own in %rd3 and %r4, and %p1
says which are even."""


def small(*code, lanes=True):
    """The program with this code, and what its threads store."""
    to = np.zeros(64, np.uint32)
    program = Program(SMALL.replace("CODE", "\n".join(code)), [Buffer(to)], 512, lanes)
    program.run()
    return program, to.tolist()


WRITE, READ, WAIT = "st.shared.b32 [%r4], %r1;", "ld.shared.b32 %r8, [%r7];", "bar.sync 0;"


def exchanged(bits, between=None):
    """Each thread writes its number, and stores that of the thread whose own differs in `bits`."""
    other = f"xor.b32 %r6, %r2, {4 * bits};", "add.s32 %r7, %r3, %r6;"
    return WRITE, between or "", *other, READ, "st.global.b32 [%rd3], %r8;"


@pytest.mark.parametrize("bits, between, lanes", [
    (0, None, True), (1, WAIT, True), (32, WAIT, True), (1, "bar.warp.sync -1;", True),
    (1, None, False),
])  # fmt: skip
def test_accesses_with_a_barrier_between_them_are_no_race(bits, between, lanes):
    _, found = small(*exchanged(bits, between), lanes=lanes)
    assert found == [n ^ bits for n in range(64)]


@pytest.mark.parametrize("code, lanes, race", [
    (exchanged(1), True, r"lanes \[1\]: ld.shared"),
    (exchanged(32), False, r"warps \[1\]: ld.shared"),
    (exchanged(32, "bar.warp.sync -1;"), True, r"warps \[1\]: ld.shared"),
    ((*exchanged(32, WAIT), WRITE), True, r"warps \[1\]: st.shared"),
    (("st.shared.b32 [global_smem], %r1;",), False, r"warps \[1\]: st.shared"),
])  # fmt: skip
def test_accesses_without_a_barrier_are_a_race(code, lanes, race):
    with pytest.raises(Race, match=f"thread 0 with {race}"):
        small(*code, lanes=lanes)


@pytest.mark.parametrize("code, fault", [
    (["ex2.approx.f32 %r6, %r1;"], "unknown instruction: ex2.approx.f32"),
    (["mov.b32 %r6, %r9;"], "nothing wrote %r9"),
    (["mov.b32 %r6, %rd1;"], "%rd1 has 8 bytes"),
    (["ld.shared.b32 %r6, [%r4];"], "reads what nothing wrote"),
    (["st.shared.b32 [%r4+260], %r1;"], "outside of each buffer"),
    (["st.global.b32 [%rd3+4], %r1;"], "outside of each buffer"),
    (["st.shared.b32 [%r4+2], %r1;"], "not aligned"),
    (["@%p1 bra $L;", WAIT, "$L:"], "not all threads are there: bar.sync"),
    (["$L:", "@%p1 bra $L;"], "threads differ in a jump back"),
    (["$L:", "bra $L;"], "no end"),
])  # fmt: skip
def test_what_is_undefined_is_a_fault(code, fault, monkeypatch):
    monkeypatch.setattr(ptx_emulator, "STEPS", 100)
    with pytest.raises(Fault, match=fault):
        small(*code)


def test_threads_that_part_meet_again():
    """Even ones have 1 and odd ones 2, and all add 4."""
    either = "@%p1 bra $EVEN;", "mov.b32 %r6, 2;", "bra $END;", "$EVEN:", "mov.b32 %r6, 1;", "$END:"
    _, found = small(*either, "add.s32 %r7, %r6, 4;", "st.global.b32 [%rd3], %r7;")
    assert found == [5, 6] * 32


@pytest.mark.parametrize("apart, conflicts", [(4, 0), (8, 1)])
def test_bank_conflicts_are_found(apart, conflicts):
    """Lanes write words that are so many bytes apart."""
    address = f"mul.lo.s32 %r6, %r1, {apart};", "add.s32 %r7, %r3, %r6;"
    program, _ = small(*address, "st.shared.b32 [%r7], %r1;")
    assert len(program.conflicts) == conflicts


if __name__ == "__main__":
    compile_all(sys.argv[1])
