"""The compilation for sm_90 without a GPU, and how its results are read."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.aot.__main__ import RECORD, SPILLS, check
from tests.aot.compiling import (
    Compiled,
    bundled,
    disassembled,
    machine_code,
    overwritten,
    undefined,
)
from tests.aot.configurations import configurations


@pytest.mark.timeout(7200)  # all: ten minutes on two idle cores
@pytest.mark.wide
@pytest.mark.parametrize(
    "only", [["--only", "16x16 bf16 safe"], ["--changed"]], ids=["one", "changed"]
)
def test_kernels_compile_for_sm_90(only, tmp_path):
    """In processes of their own, since kernels are interpreted in this one."""
    clean = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.aot", *only],
        env={**clean, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_every_configuration_is_recorded():
    kept, key = json.loads(RECORD.read_text()), f"triton {triton.__version__}"
    if key not in kept:
        pytest.skip(f"record.json has nothing of {key}")
    assert sorted(kept[key]) == sorted(name for name, _ in configurations())


def test_a_configuration_that_launches_nothing_is_a_fault():
    assert check("a name", [], {}) == ["a name: launches no kernel of that name"]


@pytest.mark.parametrize(
    "bytes_, allowed, faults",
    [
        (0, {}, []),
        (4, {}, ["x: a_kernel: spills 4 bytes"]),
        (4, {"a_kernel": 4}, []),
        (8, {"a_kernel": 4}, ["x: a_kernel: spills 8 bytes"]),
        (0, {"a_kernel": 4}, ["x: a_kernel: spills 0 bytes"]),
        (0, {"b_kernel": 4}, ["x: b_kernel: in SPILLS, but not launched"]),
    ],
)
def test_only_stated_spills_are_allowed(bytes_, allowed, faults):
    """Exactly so many bytes: an exception that is no longer needed is a fault, too."""
    kernel = Compiled("a_kernel", 255, bytes_, 0, (), (), (), ())
    assert check("x", [kernel], allowed) == faults


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_recorded_spills_are_those_stated(version):
    rows = json.loads(RECORD.read_text())[f"triton {version}"]
    spilled = {
        name: {k: spills for k, of in kernels.items() for _, spills, _ in of if spills}
        for name, kernels in rows.items()
    }
    assert {n: s for n, s in spilled.items() if s} == SPILLS.get(version, {})


def test_descriptors_in_tuples_are_found():
    kinds = {"x": "tensordesc<fp16[64, 64],..>", "y": "*fp32", "w": ("*fp16", ("tensordesc<..>",))}
    assert bundled(kinds) == ["w"]


SASS = """
 /*0610*/ UIADD3 UR26, UP2, {base}, 0x40, URZ ;
 /*0620*/ ULDC.64 UR12, c[0x0][0x208] ;
 /*0630*/ UIADD3.64 UR14, UR12, 0x4, URZ ;
 /*0640*/ HGMMA.64x32x16.F32.BF16 R40, gdesc[UR12].tnspB, R40 ;
 /*0650*/ IADD3 R34, P1, {stack}, 0x40, RZ ;
 /*0660*/ STL [R1+0x24], R231 ;
"""


@pytest.mark.parametrize("base, stack, found", [
    ("URZ", "R2", 0), ("UR12", "R2", 1), ("URZ", "R1", 1), ("UR12", "R1", 2),
])  # fmt: skip
def test_undefined_registers_are_found(base, stack, found):
    """As ptxas 12.8 wrote them: a descriptor formed from UR12 before it is set, or from R1."""
    assert len(undefined(SASS.format(base=base, stack=stack))) == found


@pytest.mark.parametrize(
    "then, found",
    [
        ("UIADD3.X UR7, URZ, UR4, URZ, UP6, !UPT", 0),
        ("UIADD3.X UR7, URZ, UR7, URZ, UP6, !UPT", 1),
        ("UTMALDG.2D [UR4], [UR6]", 1),
        ("@!UP0 USHF.L.U32 UR7, UR4, 0xb, URZ ;\n/*0050*/ FADD R2, R2, UR7", 1),
        ("BRA 0x10", 0),
        ("BRA P1, 0x10 ;\n/*0050*/ FADD R2, R2, UR7", 1),
        ("RET.REL.NODEC R20 0x0", 1),
        ("UMOV UR9, UR7 ;\n/*0050*/ UMOV UR7, UR9 ;\n/*0060*/ FADD R2, R2, UR7", 1),
        ("@P0 BRA 0x60 ;\n/*0050*/ EXIT ;\n/*0060*/ FADD R2, R2, UR6", 0),
        ("@P0 BRA 0x60 ;\n/*0050*/ EXIT ;\n/*0060*/ FADD R2, R2, UR7", 1),
        ("@P0 BRA 0x60 ;\n/*0050*/ FADD R2, R2, UR7 ;\n/*0060*/ UMOV UR7, URZ", 1),
        ("FADD R2, R2, UR6 ;\n/*0050*/ UMOV UR7, URZ", 0),
        ("ULDC.64 UR6, c[0x0][0x198] ;\n/*0050*/ FADD R2, R2, UR7", 0),
        ("LDS R2, [UR6] ;\n/*0050*/ UMOV UR7, URZ", 0),
        ("LDG.E R2, desc[UR6][R2.64] ;\n/*0050*/ UMOV UR7, URZ", 1),
        ("SYNCS.EXCH.64 URZ, [UR4], UR6 ;\n/*0050*/ UMOV UR7, URZ", 1),
        ("UMOV UR9, UR7 ;\n/*0050*/ UMOV UR7, URZ ;\n/*0060*/ UMOV UR9, URZ", 0),
        ("UMOV UR9, UR7 ;\n/*0050*/ UMOV UR7, URZ ;\n/*0060*/ FADD R2, R2, UR9", 1),
    ],
)
def test_a_move_of_nothing_whose_result_is_lost(then, found):
    lines = "UMOV UR4, URZ", "UMOV UR5, URZ", "UMOV UR6, URZ", "UMOV UR7, UR13", then, "EXIT"
    sass = "\n".join(f"/*{16 * n:04x}*/ {line} ;" for n, line in enumerate(lines))
    assert len(undefined(sass)) == found


PAIR = (
    "BRX R2 -0x10",
    "LDS.128 R8, [R0]",
    "@!P0 BRA 0x10",
    "IADD3 R3, R10, R9, RZ",
    "UMOV UR24, URZ",
    "MOV R10, UR25",
    "R2UR UR44, R7",
    "R2UR UR25, R10",
    "UMOV UR45, UR25",
    "UMOV UR25, URZ",
    "UIADD3.X UR45, URZ, UR24, URZ, UP2, !UPT",
    "UTMALDG.2D [UR24], [UR44]",
    "@P1 BRA 0x40",
    "BRA 0x0",
)
"""Half of a pair that is kept in R10 before anything was written to it, as ptxas 12.9 does. R10
holds something else at the places to which the table leads."""


@pytest.mark.parametrize(
    "line, instead, found",
    [
        ("MOV R10, UR25", "MOV R10, UR25", 0),
        ("MOV R10, UR25", "IMAD.U32 R10, RZ, RZ, UR25", 0),
        ("MOV R10, UR25", "IADD3 R10, R10, UR25, RZ", 1),
        ("R2UR UR25, R10", "R2UR UR25, R9", 0),
        ("R2UR UR25, R10", "IADD3 R4, R10, R4, RZ", 1),
        ("R2UR UR25, R10", "STS [R10], R4", 1),
        ("R2UR UR25, R10", "STS.128 [R0], R8", 1),
        ("R2UR UR25, R10", "HGMMA.64x64x16.F32.BF16 R4, R40, gdesc[UR24], R4", 1),
        ("UMOV UR25, URZ", "NOP", 1),
        ("UIADD3.X UR45, URZ, UR24, URZ, UP2, !UPT", "NOP", 1),
        ("UIADD3.X UR45, URZ, UR24, URZ, UP2, !UPT", "@P0 UMOV UR45, URZ", 1),
        ("LDS.128 R8, [R0]", "LDS.64 R8, [R0]", 1),
        ("LDS.128 R8, [R0]", "LDS.128 R8, [R8]", 1),
        ("LDS.128 R8, [R0]", "@P0 LDS.128 R8, [R0]", 1),
    ],
)
def test_half_a_pair_that_goes_through_a_vector_register(line, instead, found):
    lines = [instead if x == line else x for x in PAIR]
    sass = "\n".join(f"/*{16 * n:04x}*/ {x} ;" for n, x in enumerate(lines))
    assert len([x for x in undefined(sass) if "UR25" in x]) == found


def elf(*sections: tuple[int, bytes]) -> bytes:
    """Sections of (flags, content), as in a cubin."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3A, 64, len(sections))
    table, at = b"", 64 + 64 * len(sections)
    for flags, content in sections:
        table += struct.pack("<8x4Q24x", flags, 0, at, len(content))
        at += len(content)
    return bytes(header) + table + b"".join(content for _, content in sections)


def test_machine_code_is_taken_apart_by_kernel():
    """Each kernel has its own addresses, and data sections are not code."""
    nop = struct.pack("<2Q", 0x7918, 0x000FC00000000000)
    leave = struct.pack("<2Q", 0x794D, 0x000FEA0003800000)
    codes = [machine_code(elf((2, b"data"), (6, leave))), machine_code(elf((6, nop), (6, leave)))]
    words = [re.findall(r"/\*(\w+)\*/ +(\w+)", sass) for sass in disassembled(codes)]
    assert words == [[("0000", "EXIT")], [("0000", "NOP"), ("0010", "EXIT")]]
    with pytest.raises(ValueError, match=r"1 instructions in \[16, 0\] bytes"):
        disassembled([leave, b""])


LOOP = """
    %b_k = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16, #shared, #smem, mutable>
    %k_0 = ttg.memdesc_index %b_k[%c0] : !ttg.memdesc<64x64xbf16>
    %t_0 = ttg.async_copy_global_to_local %p, %k_0 mask %m : tensor<64x64x!tt.ptr<bf16>>
    %x:2 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>) : i32 {{
      %k_1 = ttg.memdesc_index %b_k[%s] : !ttg.memdesc<64x64xbf16>
      %k_2 = ttg.memdesc_trans %k_1 {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16>
      %d = ttng.warp_group_dot %q, %k_2, %acc {{inputPrecision = 0 : i32, isAsync = true}} : tensor
      %w:2 = ttng.warp_group_dot_wait %d, %k_2 {{pendings = {pending} : i32}} : tensor<64x64xf32>
      %k_3 = ttg.memdesc_index %b_k[%s] : !ttg.memdesc<64x64xbf16>
      %t_1 = ttg.async_copy_global_to_local %p, %k_3 mask %m : tensor<64x64x!tt.ptr<bf16>>
      scf.yield %w#0, %t_1 : tensor<64x64xf32>, !ttg.async.token
    }}
"""


@pytest.mark.parametrize("buffers,pending,found", [(1, 1, ["b_k"]), (2, 1, []), (1, 0, [])])
def test_pipelines_that_overwrite_operands_are_found(buffers, pending, found):
    assert overwritten(LOOP.format(buffers=buffers, pending=pending)) == found
