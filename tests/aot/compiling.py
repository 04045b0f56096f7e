"""Compiles for sm_90 without a GPU, and reads the compilers' results."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import triton
from triton.compiler.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from tests.support.driver import Sm90Driver
from tests.support.tuned import variant


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel.

    spills: bytes a thread. shared: bytes of a block. undefined: instructions that read a register
    which nothing wrote. serial: what ptxas reports about asynchronous products that it serialised.
    C7519 is not among it: that puts a fence before a product, which waits for no other one.
    overwritten: operands of a pipelined loop, see `overwritten`. bundled: see `bundled`.
    """

    kernel: str
    registers: int
    spills: int
    shared: int
    undefined: tuple[str, ...]
    serial: tuple[str, ...]
    overwritten: tuple[str, ...]
    bundled: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel by name. key: key in `_LATER.calls` of what Triton compiles for this launch."""

    kernel: str
    key: str


class _Later:
    """Replaces Triton's AsyncCompileMode: keeps compilations for later, by key."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[], CompiledKernel]] = {}

    def submit(self, key: str, compile_fn: Callable[[], CompiledKernel], finalize_fn: Any) -> str:
        self.calls.setdefault(key, compile_fn)
        return key


_LATER = _Later()


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """Records the launches in the block; nothing is compiled."""
    results: list[Launch] = []
    run = JITFunction.run

    def keep(self, *args, grid, warmup, **kwargs):
        key = run(self, *args, grid=grid, warmup=True, **kwargs)
        results.append(Launch(self.__name__, key))

    from fla_cp.kernels import using
    from fla_cp.kernels.triton import launch as launches

    backend = variant(min_chunk_heads=0)
    launches.runner = lambda kernel, grid, *given, **named: kernel[grid](*given, **named)
    active = driver._active  # driver.active would look for a GPU
    driver.set_active(Sm90Driver())
    JITFunction.run = keep
    before = active_mode.set(_LATER)
    try:  # tensors are on the CPU, where "auto" means torch
        with using(backend), using(replace(backend, name="torch")):
            yield results
    finally:
        active_mode.reset(before)
        JITFunction.run = run
        launches.runner = None
        driver._active = active


def start_worker() -> None:
    driver.set_active(Sm90Driver())
    triton.knobs.nvidia.dump_ptxas_log = True


def compile_one(where: str, key: str) -> tuple[CompiledKernel, str]:
    """The kernel, and the messages of ptxas about it."""
    try:
        with redirect_stdout(io.StringIO()) as log:
            kernel = _LATER.calls[key]()
            if "registers" not in log.getvalue():  # from Triton's cache
                data, target = kernel.metadata, kernel.metadata.target
                make_backend(target).make_cubin(kernel.asm["ptx"], {}, data, target.arch)
        return kernel, log.getvalue()
    except Exception:  # not all of Triton's exceptions can be pickled
        raise RuntimeError(f"{where}\n{traceback.format_exc()}") from None


def compile_together(named: list[tuple[str, str]]) -> list[Compiled]:
    """Compiles (configuration, key) pairs in a worker."""
    pairs = [compile_one(*pair) for pair in named]
    sass = disassembled([machine_code(kernel.asm["cubin"]) for kernel, _ in pairs])
    return [resources(*pair, code) for pair, code in zip(pairs, sass, strict=True)]


def resources(kernel: CompiledKernel, log: str, sass: str) -> Compiled:
    """Registers, spills and shared memory of a compiled kernel, and what is miscompiled in it."""
    return Compiled(
        kernel=kernel.metadata.name,
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared=kernel.metadata.shared,
        undefined=tuple(undefined(sass)),
        serial=tuple(re.findall(r"\(C75(?!19)\d\d\).*", log)),
        overwritten=tuple(overwritten(kernel.asm["ttgir"])),
        bundled=tuple(bundled(kernel.src.signature)),
    )


def bundled(signature: dict[str, Any]) -> list[str]:
    """Arguments that are tuples with a tensor descriptor in them. Triton compiles such a kernel,
    but its launcher counts only descriptors that are arguments themselves, and fails."""

    def has_descriptor(kind: Any) -> bool:
        if isinstance(kind, (tuple, list)):
            return any(map(has_descriptor, kind))
        return isinstance(kind, str) and kind.startswith("tensordesc")

    return [
        name
        for name, kind in signature.items()
        if not isinstance(kind, str) and has_descriptor(kind)
    ]


def overwritten(ttgir: str) -> list[str]:
    """Operands in shared memory that a loop overwrites while asynchronous products still read them.

    If products and other instructions use a load, Triton (3.6.0, 3.7.1) gives it one buffer too
    few, and lets the products go on. Data that arrive at once (zeros of rows and tiles beyond the
    end, data from a cache) are then multiplied in place of the right ones.
    """
    of: dict[str, str] = {}
    buffers: dict[str, int] = {}
    before: dict[str, int] = {}
    loops: list[int] = []
    reading: set[str] = set()
    found: set[str] = set()
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        while loops and depth <= loops[-1]:
            loops.pop()
        name = re.match(r"\s*%(\S+?)(?::\d+)? = ", line)
        if m := re.search(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", line):
            of[name[1]], buffers[name[1]] = name[1], int(m[1])
        elif m := re.search(r"= ttg\.memdesc_\w+ %([\w#]+)", line):
            of[name[1]] = of.get(m[1], m[1])
        elif "scf.for" in line:
            loops.append(depth)
            reading = set()
        elif m := re.search(r"async_copy_global_to_local %\S+, %([\w#]+)", line):
            to = of.get(m[1], m[1])
            if not loops:
                before[to] = before.get(to, 0) + 1
            elif to in reading and before.get(to, 0) >= buffers.get(to, 0):
                found.add(to)
        elif "ttng.warp_group_dot " in line and "isAsync = true" in line:
            operands = re.findall(r"%([\w#]+)", line.split("warp_group_dot ")[1].split("{")[0])
            reading |= {of[x] for x in operands[:2] if x in of}
        elif "warp_group_dot_wait" in line and "pendings = 0" in line:
            reading = set()
    return sorted(found)


def machine_code(cubin: bytes) -> bytes:
    """The executable sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = (struct.unpack_from("<4Q", cubin, table + n * size + 8) for n in range(count))
    return b"".join(cubin[at : at + length] for flags, _, at, length in sections if flags & 4)


def disassembled(codes: list[bytes]) -> list[str]:
    """The machine codes as text.

    All are disassembled together, because nvdisasm takes half a second to start.
    """
    with tempfile.NamedTemporaryFile("wb", suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-ndf", "-b", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/(.*)", text, re.MULTILINE)
    if 16 * len(words) != sum(map(len, codes)) or not all(codes):
        raise ValueError(f"nvdisasm: {len(words)} instructions in {[*map(len, codes)]} bytes")
    found, first = [], 0
    for code in codes:
        own = words[first // 16 : (first + len(code)) // 16]
        sass = "\n".join(f"/*{16 * n:04x}*/{x}" for n, x in enumerate(own))
        found.append(re.sub(r"(\bBRA\b[^;]*)\b0x([0-9a-f]+)", jump_from(first), sass))
        first += len(code)
    return found


def jump_from(first: int) -> Callable[[re.Match[str]], str]:
    """Replaces the target of a jump in a kernel that starts at `first` by its address there."""
    return lambda m: f"{m[1]}0x{int(m[2], 16) - first:x}"


class Instruction(NamedTuple):
    """An instruction of machine code. at: its address. to: the uniform register that it writes, or
    None. read: the uniform registers that it names as operands."""

    at: int
    text: str
    op: str
    operands: str
    to: str | None
    read: frozenset[str]


def instructions(sass: str) -> list[Instruction]:
    found = []
    for line in sass.splitlines():
        m = re.search(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", line)
        if m is None:
            continue
        op, operands = m[3], m[4]
        first, _, rest = operands.partition(",")
        to = re.fullmatch(r"UR\d+", first.strip())
        read = frozenset(re.findall(r"\bUR\d+\b", rest if to else operands))
        found.append(Instruction(int(m[1], 16), m[0], op, operands, to and to[0], read))
    return found


def several(register: str, count: int, skip: int = 0) -> set[str]:
    """Registers that follow each other, from the one that is `skip` places behind `register`."""
    file, first = re.fullmatch(r"(U?R)(\d+)", register).groups()
    return {f"{file}{int(first) + n}" for n in range(skip, skip + count)}


def moved(x: Instruction) -> tuple[str, str] | None:
    """The registers to which and from which x moves a value and does nothing else, or None. Either
    may be uniform."""
    if not re.fullmatch(r"U?MOV|R2UR|IMAD(\.MOV)?\.U32", x.op):
        return None
    m = re.fullmatch(r"(U?R\d+), (?:RZ, RZ, )?(U?R\d+)(?:\.reuse)?", x.operands.strip())
    return m and (m[1], m[2])


def all_read(x: Instruction) -> set[str]:
    """The registers that x may read. Operands in several registers name the first one: the place
    and coordinates of a tile, descriptors of products, addresses other than those in shared memory,
    and numbers of 64 bits.

    Only of moves and loads it is known which vector registers they merely write. Any other
    instruction may read all that it names and the three behind each, products 128 altogether."""
    if move := moved(x):
        return {move[1]}
    _, _, rest = x.operands.partition(",")
    named = re.findall(r"\bR\d+\b", rest if loaded(x) else x.operands)
    found = {n for first in named for n in several(first, 128 if "MMA" in x.op else 4)}
    names = re.findall(r"\bUR\d+\b", x.operands)
    if x.op.startswith("UTMA") and names:
        pairs = {n for first in names[1:] for n in several(first, 2)}
        return found | several(names[0], 5) | pairs
    wide = 8 if x.op.startswith("HGMMA") else 1
    long = "[" in x.operands and not re.match(r"LDS|STS|SYNCS", x.op)
    if wide == 1 and (long or re.search(r"\.64|WIDE", x.op)):
        wide = 2
    return found | {n for first in x.read for n in several(first, wide)}


def loaded(x: Instruction) -> str | None:
    """The vector register, or the first of several, that x loads from memory, or None."""
    m = re.fullmatch(r"LD[CGS]\b.* (R\d+)", f"{x.op} {x.operands.partition(',')[0].strip()}")
    return m and m[1]


def written_by(x: Instruction) -> set[str]:
    """The uniform registers that x writes, and the vector registers if it moves or loads."""
    to = x.to or loaded(x)
    if to is None:
        move = moved(x)
        return {move[0]} if move else set()
    return several(to, 4 if ".128" in x.op else 2 if ".64" in x.op or "WIDE" in x.op else 1)


def leaves(x: Instruction) -> bool:
    """Whether the next instruction is reached by jumps only."""
    always = "@" not in x.text and (
        x.op != "BRA" or re.fullmatch(r"0x[0-9a-f]+", x.operands.strip())
    )
    return bool(always and re.fullmatch(r"BRA|BRX|EXIT|RET", x.op.partition(".")[0]))


def target(jump: Instruction) -> int:
    """The address to which an instruction jumps, or -1."""
    found = re.search(r"0x([0-9a-f]+)$", jump.operands.strip())
    return int(found[1], 16) if found else -1


def is_lost(register: str, every: list[Instruction], start: int) -> bool:
    """Whether nothing uses what a register holds, on any way from `start`, the index of an
    instruction, to where it is overwritten or the kernel ends. Moves to other registers do not
    count if that is true of what they move as well.

    A jump by a table leads to the places behind a jump to which no earlier jump leads, or to the
    end. Those places may wait for registers, and then a jump behind them leads back to them.
    """
    places = {x.at: i for i, x in enumerate(every)}
    targets = {target(x) for x in every if x.op.startswith("BRA") and target(x) > x.at}
    listed = [
        i + 1 for i, (x, y) in enumerate(pairwise(every)) if leaves(x) and y.at not in targets
    ]
    ways, seen = [(register, start)], set()
    while ways:
        held, i = ways.pop()
        while i < len(every) and (held, i) not in seen:
            seen.add((held, i))
            x = every[i]
            if held in all_read(x):
                move = moved(x)
                if move is None:
                    return False
                ways.append((move[0], i + 1))
            if held in written_by(x) and "@" not in x.text:
                break
            if re.match(r"CALL|JMP|RET", x.op):
                return False
            if x.op.startswith("BRX"):
                ways += [(held, n) for n in listed]
            elif x.op.startswith("BRA"):
                to = places.get(target(x))
                if to is None:
                    return False
                ways.append((held, to))
            if leaves(x):
                break
            i += 1
    return True


def undefined(sass: str) -> list[str]:
    """Instructions that read an unwritten uniform register, or use the stack pointer R1 as data.

    This is how ptxas 12.8 miscompiles wgmma descriptors. Moves whose result is lost do not count:
    ptxas moves pairs of registers of which only one is meant, and forms the other one after that.
    If it lacks uniform registers, it keeps such pairs in vector registers meanwhile.
    """
    written: set[str] = set()
    found = []
    every = instructions(sass)
    for i, x in enumerate(every):
        _, _, rest = x.operands.partition(",")
        read = set(x.read)
        if x.op.startswith("HGMMA"):  # the second half of the four holds B; A may be in registers
            read = {n for first in read for n in several(first, 2, skip=2)}
        carried = re.search(r"P\d, R1\b", x.operands) or (
            x.op == "IADD3.X" and re.search(r"\bR1\b", rest)
        )
        unset = not read <= written
        move = moved(x) if unset else None
        if carried or (unset and not (move and is_lost(move[0], every, i + 1))):
            found.append(x.text)
        written |= written_by(x)
    return found
