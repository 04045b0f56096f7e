"""An emulator of PTX, the assembly language that Triton compiles kernels to, for one program.

It knows the instructions of kernels that multiply by `mma.sync` and exchange data through shared
memory, and refuses all others. All threads of a program take each instruction together. What is
undefined or unordered on a GPU is an error here: reads of registers and of shared memory that
nothing wrote, accesses outside of a buffer or at an address that is not aligned, and races through
shared memory.

A race is two accesses of a byte, at least one of them a write, by two warps without a `bar.sync`
between them, or by two lanes of a warp without a `bar.sync` or `bar.warp.sync`. It is found in
whatever order the threads run, as long as addresses and branches do not depend on what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LANES = 32

SHARED = 1024
"""The address of a program's shared memory: on sm_90, the system keeps what is below it."""

SPACING = 1 << 32
"""Distance between the addresses of buffers in global memory."""

STEPS = 1_000_000
"""Instructions after which a program counts as endless."""

ALL_LANES = (-1, 0xFFFFFFFF)
"""Masks of all lanes of a warp."""

TYPES = {"f32": np.dtype("f4"), "bf16": np.dtype("u2"), "pred": np.dtype("?")}
for bits in (16, 32, 64):
    TYPES |= {f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu"}
    TYPES[f"s{bits}"] = np.dtype(f"i{bits // 8}")


class Fault(Exception):
    """An instruction that the emulator does not know, or whose result would be undefined."""


class Race(Fault):
    """Two accesses of shared memory in no order."""


class Instruction(NamedTuple):
    """A line of PTX. kind: the type at the end of its opcode. line: its number. source: the name of
    the file that it comes from, and the line there."""

    guard: str
    opcode: str
    kind: str
    operands: list[str]
    text: str
    line: int
    source: tuple[str, int]

    def __str__(self) -> str:
        return f"{self.text} (line {self.line}, {self.source[0]}:{self.source[1]})"


class Buffer:
    """Memory that holds x, an array in C order. times_written: by element."""

    def __init__(self, x: Array, address: int = 0):
        self.bytes = x.reshape(-1).view(np.uint8)
        self.writes = np.zeros(self.bytes.size, int)
        self.shape, self.width, self.address = x.shape, x.itemsize, address

    @property
    def times_written(self) -> Array:
        return self.writes.reshape(*self.shape, self.width).max(-1)


class Accesses:
    """Which units, the warps of a program or the lanes of a warp, have read and written each byte
    of shared memory since the last barrier among them."""

    def __init__(self, size: int):
        self.reads, self.writes = np.zeros((2, size), np.uint32)

    def note(self, places: Array, units: Array, write: bool) -> Array:
        """Notes an access of bytes `places` [n, bytes] by `units` [n]. Returns those units, as
        bits, that each byte has a race with."""
        own = np.broadcast_to((1 << units).astype(np.uint32)[:, None], places.shape)
        np.bitwise_or.at(self.writes if write else self.reads, places, own)
        return (self.writes[places] | (self.reads[places] if write else 0)) & ~own

    def clear(self) -> None:
        self.reads[:] = self.writes[:] = 0


def parsed(ptx: str) -> tuple[list[str], list[Instruction], dict[str, int]]:
    """The parameters, the instructions and the labels of the only kernel in `ptx`."""
    lines = ptx.splitlines()
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', ptx))
    start = next(n for n, line in enumerate(lines) if ".entry" in line)
    first, stop = lines.index("{", start) + 1, lines.index("}", start)
    parameters = re.findall(r"\.param\b.*?(\w+),?$", "\n".join(lines[start:first]), re.M)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    source = "", 0
    for n in range(first, stop):
        line = lines[n].split("//")[0].strip()
        if m := re.match(r"\.loc\s+(\d+) (\d+)", line):
            source = files[m[1]], int(m[2])
        elif m := re.fullmatch(r"([$\w]+):", line):
            labels[m[1]] = len(code)
        elif line and not line.startswith("."):
            for text in re.findall(r"[^;]+;?", line):
                m = re.fullmatch(r"\s*(@!?%\w+)?\s*([a-z][\w.:]*)\s*([^;]*);", text)
                if m is None:
                    raise Fault(f"not an instruction: {text} (line {n + 1})")
                opcode, _, kind = m[2].rpartition(".")
                opcode = opcode if kind in TYPES else m[2]
                operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,{}[\]]+", m[3])
                text = text.strip()
                code.append(Instruction(m[1] or "", opcode, kind, operands, text, n + 1, source))
    return parameters, code, labels


def members(operand: str) -> list[str]:
    """The registers of a vector, or the only one."""
    return re.findall(r"[^\s,{}]+", operand)


class Program:
    """A program of the kernel in `ptx`. shared: bytes of shared memory. lanes: whether lanes of a
    warp have races with each other.

    conflicts: the accesses of shared memory for which lanes of a warp wait for each other, because
    they want different words of a bank. others: instructions that programs of a subclass know.
    """

    others: ClassVar[dict[str, Callable[..., None]]] = {}

    def __init__(
        self, ptx: str, arguments: Sequence[Buffer | int], shared: int, lanes: bool = True
    ):
        parameters, self.code, self.labels = parsed(ptx)
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        self.buffers = [x for x in arguments if isinstance(x, Buffer)]
        for n, buffer in enumerate(self.buffers):
            buffer.address = (n + 1) * SPACING
        values = [x.address if isinstance(x, Buffer) else x for x in arguments]
        # Triton adds parameters for memory that these kernels do not use.
        values += [0] * (len(parameters) - len(values))
        self.parameters = dict(zip(parameters, values, strict=True))
        self.shared = Buffer(np.zeros(shared, np.uint8), SHARED)
        self.by_warp = Accesses(shared)
        self.by_lane = [Accesses(shared) for _ in range(self.threads // LANES if lanes else 0)]
        self.conflicts: list[Instruction] = []
        self.thread = np.arange(self.threads)
        self.registers: dict[str, Array] = {"%tid.x": self.thread.astype(np.uint32)}
        self.active = np.ones(self.threads, bool)

    def run(self) -> None:
        """Runs all threads to the end. If only some of them jump ahead, they wait there for the
        others."""
        at, running, known = 0, self.active, INSTRUCTIONS | self.others
        waiting: dict[int, Array] = {}
        with np.errstate(all="ignore"):
            for _ in range(STEPS):
                x = self.code[at]
                running = running | waiting.pop(at, False)
                self.active = running & self.guarded(x)
                at += 1
                if not self.active.any():
                    continue
                if x.opcode == "ret":
                    return self.all_take(x)
                if x.opcode in ("bra", "bra.uni"):
                    to = self.labels[x.operands[0]]
                    if self.active.all():
                        at = to
                    elif to < at:
                        raise Fault(f"threads differ in a jump back: {x}")
                    else:
                        waiting[to] = waiting.get(to, False) | self.active
                        running = running & ~self.active
                elif x.opcode in known:
                    known[x.opcode](self, x)
                else:
                    raise Fault(f"unknown instruction: {x}")
        raise Fault(f"no end after {STEPS} instructions")

    def guarded(self, x: Instruction) -> Array:
        """The threads for which the predicate in front of x holds."""
        if not x.guard:
            return np.ones(self.threads, bool)
        return self.read(x, x.guard.lstrip("@!"), "pred") ^ ("!" in x.guard)

    def all_take(self, x: Instruction) -> None:
        if not self.active.all():
            raise Fault(f"not all threads are there: {x}")

    def read(self, x: Instruction, operand: str, kind: str) -> Array:
        """An operand's value in each thread."""
        dtype = TYPES[kind]
        if operand.startswith("%"):
            if operand not in self.registers:
                raise Fault(f"nothing wrote {operand}: {x}")
            found = self.registers[operand]
            if found.itemsize != dtype.itemsize:
                raise Fault(f"{operand} has {found.itemsize} bytes: {x}")
            return found.view(dtype)
        if operand.startswith("0f"):
            value = int(operand[2:], 16)
        else:
            value = SHARED if operand == "global_smem" else int(operand, 0)
        if kind == "pred":
            return np.full(self.threads, value != 0)
        bits = np.full(self.threads, value % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}")
        return bits.view(dtype)

    def operands(self, x: Instruction) -> Iterator[Array]:
        """All operands after the first, of the type of x."""
        return (self.read(x, operand, x.kind) for operand in x.operands[1:])

    def write(self, register: str, value: Array) -> None:
        value = np.ascontiguousarray(value)
        bits = value if value.dtype.kind == "b" else value.view(f"u{value.itemsize}")
        before = self.registers.get(register, np.zeros_like(bits))
        self.registers[register] = np.where(self.active, bits, before)

    def access(
        self, x: Instruction, operand: str, size: int, values: Array | None = None
    ) -> tuple[Buffer, Array]:
        """The buffer at an address, and the places [threads, size] of bytes in it. values: the
        bytes that are written, if it is no read."""
        base, offset = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()
        shared = ".shared" in x.opcode
        at = self.read(x, base, "u32" if shared else "u64").astype(np.int64)[self.active]
        at += int(offset or 0)
        if (at % size).any():
            raise Fault(f"not aligned: {x}")
        for buffer in [self.shared] if shared else self.buffers:
            places = (at - buffer.address)[:, None] + np.arange(size)
            if (places >= 0).all() and (places < buffer.bytes.size).all():
                if shared:
                    self.note(x, places, values)
                return buffer, places
        raise Fault(f"outside of each buffer: {x}")

    def note(self, x: Instruction, places: Array, values: Array | None) -> None:
        """Notes an access of bytes of shared memory. Threads that write the same bytes to the same
        place together count as the first of them."""
        thread, write = self.thread[self.active], values is not None
        if conflicting(places // 4, thread):
            self.conflicts.append(x)
        if write and len(np.unique(places[:, 0])) < len(places):
            what = np.concatenate((places[:, :1], values), 1)
            first = np.sort(np.unique(what, axis=0, return_index=True)[1])
            thread, places = thread[first], places[first]
        check(x, self.by_warp.note(places, thread // LANES, write), thread, "warps")
        for warp, accesses in enumerate(self.by_lane):
            own = np.flatnonzero(thread // LANES == warp)
            others = accesses.note(places[own], thread[own] % LANES, write)
            check(x, others, thread[own], "lanes")


def check(x: Instruction, others: Array, thread: Array, units: str) -> None:
    """Raises if there are units that `thread` has a race with."""
    if others.any():
        n, byte = np.argwhere(others)[0]
        found = [unit for unit in range(LANES) if others[n, byte] >> unit & 1]
        raise Race(f"thread {thread[n]} with {units} {found}: {x}")


def conflicting(words: Array, thread: Array) -> bool:
    """Whether different words are in a bank. Shared memory serves 128 bytes at a time, to lanes of
    a warp that come after each other. words: by thread and byte."""
    group = thread // min(LANES, 128 // words.shape[1])
    own = (np.unique(words[group == n]) for n in np.unique(group))
    return any(len(np.unique(w % 32)) < len(w) for w in own)


def elementwise(fn: Callable[..., Array]) -> Callable[[Program, Instruction], None]:
    """An instruction whose operands all have its type."""
    return lambda p, x: p.write(x.operands[0], fn(*p.operands(x)))


def doubled(x: Array) -> Array:
    """Integers of twice the bits."""
    return x.astype(np.dtype(f"{x.dtype.kind}{2 * x.itemsize}"))


def high_product(a: Array, b: Array) -> Array:
    return (doubled(a) * doubled(b) >> 8 * a.itemsize).astype(a.dtype)


def wide_sum(p: Program, x: Instruction) -> None:
    """mad.wide: the product of two numbers, plus a number of twice the bits."""
    to, a, b, c = x.operands
    a, b = (doubled(p.read(x, n, x.kind)) for n in (a, b))
    p.write(to, a * b + p.read(x, c, f"u{8 * a.itemsize}").view(a.dtype))


def move(p: Program, x: Instruction) -> None:
    """Also packs two halves in a register and unpacks them."""
    to, source = x.operands
    if to.startswith("{"):
        halves = p.read(x, source, "b32").view(np.uint16).reshape(-1, 2)
        for n, name in enumerate(members(to)):
            p.write(name, halves[:, n])
    elif source.startswith("{"):
        p.write(to, packed(*(p.read(x, name, "b16") for name in members(source))))
    else:
        p.write(to, p.read(x, source, x.kind))


def packed(low: Array, high: Array) -> Array:
    return np.stack((low, high), -1).view(np.uint32)[:, 0]


def shift(p: Program, x: Instruction) -> None:
    """To the left (shl) or to the right (shr), by any number of bits."""
    to, value, count = x.operands
    value, count = p.read(x, value, x.kind), p.read(x, count, "u32")
    bits = 8 * value.itemsize
    within = np.minimum(count, bits - 1).astype(value.dtype)
    found = value << within if x.opcode == "shl" else value >> within
    if value.dtype.kind == "u":
        found[count >= bits] = 0
    p.write(to, found)


def extract(p: Program, x: Instruction) -> None:
    """bfe: some bits of a number of 32 bits, of which the highest is the sign if it has one."""
    value, first, count = (n.astype(np.int64) for n in p.operands(x))
    if x.kind not in ("u32", "s32") or ((first < 0) | (count < 1) | (first + count > 32)).any():
        raise Fault(f"unknown bits: {x}")
    found = value >> first & (1 << count) - 1
    if x.kind == "s32":
        found -= (found >> count - 1) << count
    p.write(x.operands[0], found.astype(TYPES[x.kind]))


def select(p: Program, x: Instruction) -> None:
    to, a, b, condition = x.operands
    a, b = (p.read(x, n, x.kind) for n in (a, b))
    p.write(to, np.where(p.read(x, condition, "pred"), a, b))


def convert_integer(p: Program, x: Instruction) -> None:
    """cvt from one type of integers to another."""
    if x.kind[0] not in "us":
        raise Fault(f"unknown instruction: {x}")
    (value,) = p.operands(x)
    p.write(x.operands[0], value.astype(TYPES[x.opcode.partition(".")[2]]))


def convert_byte(p: Program, x: Instruction) -> None:
    """cvt.s16.s8: the low byte of a register of 16 bits, with its sign."""
    low = p.read(x, x.operands[1], "u16").astype("u1")
    p.write(x.operands[0], low.view("i1").astype("i2"))


def to_bf16(x: Array) -> Array:
    """To the nearest, halves to even."""
    whole = x.view(np.uint32).astype(np.uint64)
    rounded = (whole + 0x7FFF + (whole >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


def load_parameter(p: Program, x: Instruction) -> None:
    """Into a register of 64 bits, also from fewer bits."""
    value = np.array(p.parameters[x.operands[1].strip("[]")], np.uint64)
    value = value.astype(TYPES[x.kind])
    if x.operands[0].startswith("%rd"):
        value = value.astype(TYPES[f"{x.kind[0]}64"])
    p.write(x.operands[0], np.full(p.threads, value))


def load(p: Program, x: Instruction) -> None:
    names = members(x.operands[0])
    buffer, places = p.access(x, x.operands[1], len(names) * TYPES[x.kind].itemsize)
    if buffer is p.shared and not buffer.writes[places].all():
        raise Fault(f"reads what nothing wrote: {x}")
    values = np.zeros((p.threads, len(names)), TYPES[x.kind])
    values[p.active] = buffer.bytes[places].view(values.dtype)
    for n, name in enumerate(names):
        p.write(name, values[:, n])


def store(p: Program, x: Instruction) -> None:
    values = np.stack([p.read(x, name, x.kind) for name in members(x.operands[1])], -1)
    values = values[p.active].view(np.uint8)
    buffer, places = p.access(x, x.operands[0], values.shape[1], values)
    np.add.at(buffer.writes, places, 1)
    buffer.bytes[places] = values


def exchange(p: Program, x: Instruction) -> None:
    """shfl.sync.bfly: each lane gets the number of the lane whose own differs in these bits."""
    p.all_take(x)
    to, value, lane_bits, clamp, mask = x.operands
    if int(clamp, 0) != 31 or int(mask, 0) not in ALL_LANES:
        raise Fault(f"lanes that are left out: {x}")
    p.write(to, p.read(x, value, "b32")[p.thread ^ int(lane_bits, 0)])


def barrier(p: Program, x: Instruction) -> None:
    """bar.sync or bar.warp.sync."""
    p.all_take(x)
    if int(x.operands[0], 0) not in ((0,) if x.opcode == "bar.sync" else ALL_LANES):
        raise Fault(f"threads that are left out: {x}")
    for accesses in p.by_lane:
        accesses.clear()
    if x.opcode == "bar.sync":
        p.by_warp.clear()


def as_tf32(x: Array) -> Array:
    """Without the bits that tensor cores do not read."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def product(p: Program, x: Instruction) -> None:
    """mma.sync.m16n8k8: D [16, 8] = A [16, 8] @ B [8, 8] + C [16, 8] of each warp, summed up in
    double precision. Lane 4 g + t has elements of rows g and g + 8 and, in A, of columns t and
    t + 4, in C and D of columns 2 t and 2 t + 1; in B of rows t and t + 4 and of column g."""
    p.all_take(x)
    to, *given = x.operands
    a, b, c = (
        [p.read(x, name, "f32").reshape(-1, 8, 4) for name in members(operand)] for operand in given
    )
    top, bottom = slice(0, 8), slice(8, 16)
    in_order = [(rows, slice(n, n + 4)) for n in (0, 4) for rows in (top, bottom)]
    in_pairs = [(rows, slice(n, 8, 2)) for rows in (top, bottom) for n in (0, 1)]
    A, C = np.empty((2, p.threads // LANES, 16, 8))
    for (rows, columns), part in zip(in_order, a, strict=True):
        A[:, rows, columns] = as_tf32(part)
    for (rows, columns), part in zip(in_pairs, c, strict=True):
        C[:, rows, columns] = part
    B = np.concatenate([as_tf32(part) for part in b], 2).swapaxes(1, 2).astype(np.float64)
    D = (A @ B + C).astype(np.float32)
    for (rows, columns), name in zip(in_pairs, members(to), strict=True):
        p.write(name, D[:, rows, columns].reshape(-1))


def load_matrices(p: Program, x: Instruction) -> None:
    """ldmatrix.x4: four matrices [8, 8] of halves. Each eight lanes have the addresses of a
    matrix's rows. Lane 4 g + t gets the elements of row g and columns 2 t and 2 t + 1 of each."""
    p.all_take(x)
    names = members(x.operands[0])
    buffer, places = p.access(x, x.operands[1], 16)
    if len(names) != 4 or not buffer.writes[places].all():
        raise Fault(f"not four matrices, or reads what nothing wrote: {x}")
    rows = buffer.bytes[places].view(np.uint32).reshape(-1, 4, 8, 4)  # warp, matrix, row, pair
    for n, name in enumerate(names):
        p.write(name, rows[:, n].reshape(-1))


def half_product(p: Program, x: Instruction) -> None:
    """mma.sync.m16n8k16: as `product`, with 16 columns of A in bf16, of which lane 4 g + t has
    2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and g + 8, and of B the same rows of column g."""
    p.all_take(x)
    to, *given = x.operands
    a, b = (
        [from_bf16(p.read(x, name, "b32").view(np.uint16)) for name in members(operand)]
        for operand in given[:2]
    )
    A, C = np.empty((p.threads // LANES, 16, 16)), np.empty((p.threads // LANES, 16, 8))
    for n, part in enumerate(a):
        rows, columns = 8 * (n % 2), 8 * (n // 2)
        A[:, rows : rows + 8, columns : columns + 8] = part.reshape(-1, 8, 8)
    B = np.concatenate([part.reshape(-1, 8, 8) for part in b], 2).swapaxes(1, 2).astype(np.float64)
    in_pairs = [(slice(rows, rows + 8), slice(n, 8, 2)) for rows in (0, 8) for n in (0, 1)]
    for (rows, columns), name in zip(in_pairs, members(given[2]), strict=True):
        C[:, rows, columns] = p.read(x, name, "f32").reshape(-1, 8, 4)
    D = (A @ B + C).astype(np.float32)
    for (rows, columns), name in zip(in_pairs, members(to), strict=True):
        p.write(name, D[:, rows, columns].reshape(-1))


INSTRUCTIONS: dict[str, Callable[[Program, Instruction], None]] = {
    "mov": move,
    "add": elementwise(np.add),
    "sub": elementwise(np.subtract),
    "mul": elementwise(np.multiply),
    "mul.lo": elementwise(np.multiply),
    "mul.hi": elementwise(high_product),
    "mul.wide": elementwise(lambda a, b: doubled(a) * doubled(b)),
    "mad.wide": wide_sum,
    "neg": elementwise(np.negative),
    "and": elementwise(np.bitwise_and),
    "or": elementwise(np.bitwise_or),
    "xor": elementwise(np.bitwise_xor),
    "not": elementwise(np.invert),
    "shl": shift,
    "shr": shift,
    "bfe": extract,
    "setp.eq": elementwise(np.equal),
    "setp.ne": elementwise(lambda a, b: (a < b) | (a > b)),  # false for a NaN
    "setp.lt": elementwise(np.less),
    "setp.le": elementwise(np.less_equal),
    "setp.gt": elementwise(np.greater),
    "setp.ge": elementwise(np.greater_equal),
    "selp": select,
    "cvt.s16.s8": convert_byte,
    "cvt.rn.bf16": elementwise(to_bf16),
    "cvt.rn.bf16x2": elementwise(lambda high, low: packed(to_bf16(low), to_bf16(high))),
    "cvt.f32": elementwise(from_bf16),
    "ld.param": load_parameter,
    "shfl.sync.bfly": exchange,
    "bar.sync": barrier,
    "bar.warp.sync": barrier,
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32": product,
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16": half_product,
    "ldmatrix.sync.aligned.m8n8.x4.shared": load_matrices,
}
INSTRUCTIONS |= {f"cvt.{kind}{bits}": convert_integer for kind in "us" for bits in (16, 32, 64)}
for vector in ("", ".v2", ".v4"):
    INSTRUCTIONS |= {f"ld.{space}{vector}": load for space in ("global", "shared")}
    INSTRUCTIONS |= {f"st.{space}{vector}": store for space in ("global", "shared")}
