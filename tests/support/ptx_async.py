"""Programs for the emulator of PTX that copy and multiply asynchronously, as sm_90 does.

A copy by `cp.async` writes shared memory at some time from its issue to the end of the wait for its
group. A product by `wgmma` reads shared memory, and writes its accumulator, at some time from its
issue to the end of the wait for its group. What else touches these bytes or registers in that time
is a race.

A product reads through another proxy than everything else here. So it is an error, too, if no
`fence.proxy.async` follows a write to what it reads, or if registers of its accumulator have been
written since the last `wgmma.fence`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from tests.support.ptx_emulator import (
    LANES,
    SHARED,
    TYPES,
    Array,
    Buffer,
    Fault,
    Instruction,
    Program,
    Race,
    elementwise,
    from_bf16,
    members,
    move,
)

WARPS = 4
"""Those of a group that issues `wgmma` together, and here of a program."""

SWIZZLE_128 = 1
"""The number of the layout in descriptors of operands that permutes 16 bytes in rows of 128."""


class Copy(NamedTuple):
    """A copy under way: by the active threads, to these places in shared memory."""

    x: Instruction
    active: Array
    places: Array


class Multiplication(NamedTuple):
    """A product under way. results: its accumulator's registers and what they will hold."""

    places: Array
    results: dict[str, Array]


class Groups:
    """Asynchronous operations: those not committed yet, and committed ones by group."""

    def __init__(self) -> None:
        self.open: list = []
        self.committed: list[list] = []

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def done(self, pending: int) -> list:
        """Those that are done after a wait that leaves `pending` groups."""
        count = max(len(self.committed) - pending, 0)
        found = [x for group in self.committed[:count] for x in group]
        self.committed = self.committed[count:]
        return found

    def all(self) -> list:
        return [x for group in self.committed for x in group] + self.open


class AsyncProgram(Program):
    """A program of the grid. at: its place there.

    copied_to: the bytes that copies under way write. multiplied: the bytes that products under way
    read. dirty: the bytes written since the last fence between proxies. fenced: what registers held
    at the last `wgmma.fence`. in_flight: what products under way will write to registers.
    """

    others: ClassVar[dict[str, Callable[..., None]]] = {}

    def __init__(
        self,
        ptx: str,
        arguments: Sequence[Buffer | int],
        shared: int,
        at: Sequence[int] = (0, 0),
        grid: Sequence[int] = (1, 1),
        lanes: bool = True,
    ):
        super().__init__(ptx, arguments, shared, lanes)
        if self.threads != WARPS * LANES:
            raise Fault(f"a program of {self.threads} threads")
        for axis, place, size in zip("xyz", at, grid, strict=False):
            self.registers[f"%ctaid.{axis}"] = np.full(self.threads, place, np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.threads, size, np.uint32)
        self.copies, self.products = Groups(), Groups()
        self.copied_to, self.multiplied, self.dirty = np.zeros((3, shared), bool)
        self.fenced: dict[str, Array] | None = None
        self.in_flight: dict[str, Array] = {}

    def run(self) -> None:
        super().run()
        if self.copies.all() or self.products.all():
            raise Fault("the program ends before what it has started")

    def read(self, x: Instruction, operand: str, kind: str) -> Array:
        if operand in self.in_flight:
            raise Race(f"a product still writes {operand}: {x}")
        return super().read(x, operand, kind)

    def write(self, register: str, value: Array) -> None:
        if register in self.in_flight:
            raise Race(f"a product still writes {register}")
        super().write(register, value)

    def note(self, x: Instruction, places: Array, values: Array | None) -> None:
        if self.copied_to[places].any():
            raise Race(f"a copy still writes here: {x}")
        if values is not None:
            if self.multiplied[places].any():
                raise Race(f"a product still reads here: {x}")
            self.dirty[places] = True
        super().note(x, places, values)

    def note_product(self, x: Instruction, places: Array) -> None:
        """Notes that all warps read these bytes."""
        if self.copied_to[places].any():
            raise Race(f"a copy still writes here: {x}")
        if self.by_warp.writes[places].any():
            raise Race(f"no barrier since the operand was written: {x}")
        self.by_warp.reads[places] |= (1 << WARPS) - 1

    def uniform(self, x: Instruction, operand: str, kind: str) -> int:
        """An operand that all threads give alike."""
        found = np.unique(self.read(x, operand, kind))
        if len(found) != 1:
            raise Fault(f"threads differ in {operand}: {x}")
        return int(found[0])


def copy(p: AsyncProgram, x: Instruction) -> None:
    """cp.async of 4 or 16 bytes. n, the last operand if there is one, is 0 to write zeros."""
    to, source, width, *count = x.operands
    size = int(width, 0)
    counts = p.read(x, count[0], "u32") if count else np.full(p.threads, size)
    active = p.active
    if not np.isin(counts[active], (0, size)).all():
        raise Fault(f"a part of {size} bytes: {x}")
    values = np.zeros((p.threads, size), np.uint8)
    p.active = reads = active & (counts > 0)
    if reads.any():
        buffer, places = p.access(x._replace(opcode="ld.global"), source, size)
        values[reads] = buffer.bytes[places]
    p.active = active
    buffer, places = p.access(x, to, size, values[active])
    p.copied_to[places] = True
    buffer.bytes[places] = values[active]
    buffer.writes[places] += 1
    p.copies.open.append(Copy(x, active, places))


def wait_for_copies(p: AsyncProgram, x: Instruction) -> None:
    p.all_take(x)
    done = p.copies.done(int(x.operands[0], 0))
    for each in done:
        p.copied_to[each.places] = False
    for each in done:  # threads see their own copies now
        p.active = each.active
        p.note(each.x, each.places, p.shared.bytes[each.places])


def commit_copies(p: AsyncProgram, x: Instruction) -> None:
    p.all_take(x)
    p.copies.commit()


def commit_products(p: AsyncProgram, x: Instruction) -> None:
    p.all_take(x)
    p.products.commit()


def fence_of_proxies(p: AsyncProgram, x: Instruction) -> None:
    p.all_take(x)
    p.dirty[:] = False


def fence_of_products(p: AsyncProgram, x: Instruction) -> None:
    p.all_take(x)
    p.fenced = dict(p.registers)


def move_fenced(p: AsyncProgram, x: Instruction) -> None:
    """A copy of a register needs no fence of its own: the assembler gives both the same place, or
    adds the fence."""
    move(p, x)
    to, source = x.operands
    if p.fenced is not None and p.fenced.get(source, x) is p.registers.get(source):
        p.fenced[to] = p.registers[to]


def operand_places(
    p: AsyncProgram, x: Instruction, operand: str, rows: int, transposed: bool
) -> Array:
    """Where an operand [rows, 16] of halves is in shared memory: [rows, 32]. Rows, or columns of a
    transposed one, have 128 bytes and come in groups of eight. Bits 4 to 6 of an address differ
    where its bits 7 to 9 have ones."""
    bits = p.uniform(x, operand, "b64")
    if bits >> 62 != SWIZZLE_128 or bits >> 49 & 7:
        raise Fault(f"unknown layout of an operand: {x}")
    start, stride = (bits & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    row, column = np.arange(rows)[:, None], np.arange(16)
    line, place = (column, row) if transposed else (row, column)
    if place.max() >= 64:
        raise Fault(f"more than 128 bytes in a line of an operand: {x}")
    at = start + line // 8 * stride + line % 8 * 128 + 2 * place
    at = (at[:, :, None] + np.arange(2)).reshape(rows, 32)
    at = (at ^ (at >> 7 & 7) << 4) - SHARED
    if at.min() < 0 or at.max() >= p.shared.bytes.size:
        raise Fault(f"outside of shared memory: {x}")
    return at


def shared_operand(
    p: AsyncProgram, x: Instruction, operand: str, rows: int, turned: str
) -> tuple[Array, Array]:
    """An operand [rows, 16] in shared memory, and its places."""
    places = operand_places(p, x, operand, rows, turned == "1")
    if not p.shared.writes[places].all():
        raise Fault(f"reads what nothing wrote: {x}")
    if p.dirty[places].any():
        raise Race(f"no fence.proxy.async since the operand was written: {x}")
    p.note_product(x, places)
    p.multiplied[places] = True
    return from_bf16(p.shared.bytes[places].view(np.uint16)), places


def register_operand(p: AsyncProgram, x: Instruction, names: list[str]) -> Array:
    """A left operand [64, 16] in registers, in which warps have 16 rows. Lane 4 g + t has columns
    2 t and 2 t + 1 of row g and then of row g + 8, and then the same of columns 8 to 15."""
    check_fence(p, x, names)
    found = np.stack([p.read(x, n, "b32").view(np.uint16) for n in names])
    found = found.reshape(2, 2, WARPS, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    return from_bf16(found.reshape(64, 16))


def check_fence(p: AsyncProgram, x: Instruction, names: list[str]) -> None:
    """Raises if registers were written after the last wgmma.fence."""
    if p.fenced is None:
        raise Race(f"no wgmma.fence before: {x}")
    for name in names:
        if name not in p.in_flight and p.fenced.get(name) is not p.registers.get(name):
            raise Race(f"no wgmma.fence since {name} was written: {x}")


def multiply(p: AsyncProgram, x: Instruction) -> None:
    """wgmma.m64nNk16: D [64, N] = A [64, 16] @ B [N, 16]^T + D, or without D. Warp w has rows 16 w
    to 16 w + 15 of D. For each eight columns, its lane 4 g + t has columns 2 t and 2 t + 1 of row g
    and then those of row g + 8."""
    p.all_take(x)
    to, a, b, adds, *rest = x.operands
    names, signs, turned = members(to), rest[:2], rest[2:]
    if signs != ["1", "1"]:
        raise Fault(f"negative operands: {x}")
    N = int(re.search(r"m64n(\d+)k16", x.opcode)[1])
    check_fence(p, x, names)
    B, places = shared_operand(p, x, b, N, turned[-1])
    if a.startswith("{"):
        A = register_operand(p, x, members(a))
    else:
        A, others = shared_operand(p, x, a, 64, turned[0])
        places = np.concatenate((places, others))
    D = A.astype(np.float64) @ B.astype(np.float64).T
    D = D.reshape(WARPS, 2, 8, N // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    D = D.reshape(N // 2, p.threads)  # by register, and by warp, row g and pair t
    if p.uniform(x, adds, "pred"):
        given = (p.in_flight[n] if n in p.in_flight else p.read(x, n, "b32") for n in names)
        D = D + np.stack([value.view(np.float32) for value in given])
    results = dict(zip(names, D.astype(np.float32).view(np.uint32), strict=True))
    p.in_flight |= results
    p.products.open.append(Multiplication(places.reshape(-1), results))


def wait_for_products(p: AsyncProgram, x: Instruction) -> None:
    p.all_take(x)
    done = p.products.done(int(x.operands[0], 0))
    p.multiplied[:] = False
    for each in p.products.all():
        p.multiplied[each.places] = True
    for each in done:
        p.note_product(x, each.places)  # writes of other warps must wait for a barrier after this
    still = {name for each in p.products.all() for name in each.results}
    for name in [name for each in done for name in each.results]:
        if name not in still and name in p.in_flight:
            p.registers[name] = p.in_flight.pop(name)


def store_matrices(p: AsyncProgram, x: Instruction) -> None:
    """stmatrix of one or four matrices [8, 8] of halves. Eight lanes for each, from the first on,
    have the addresses of its rows. Lane 4 g + t gives the elements of row g and columns 2 t and
    2 t + 1 of each."""
    p.all_take(x)
    names, everyone = members(x.operands[1]), p.active
    if len(names) not in (1, 4):
        raise Fault(f"neither one nor four matrices: {x}")
    given = np.stack([p.read(x, n, "b32").reshape(-1, 8, 4) for n in names], 1)
    values = np.ascontiguousarray(given).reshape(-1, 4).view(np.uint8)
    p.active = everyone & (np.arange(p.threads) % 32 < 8 * len(names))
    buffer, places = p.access(x, x.operands[0], 16, values)
    p.active = everyone
    np.add.at(buffer.writes, places, 1)
    buffer.bytes[places] = values


def prefetch(p: AsyncProgram, x: Instruction) -> None:
    """Nothing but a check that the address exists."""
    p.access(x, x.operands[0], 1)


def flushed(x: Array) -> Array:
    """Without numbers too small for a normal exponent."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def fused_sum(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def low_sum(p: AsyncProgram, x: Instruction) -> None:
    """mad.lo: the product of two integers, plus another one, without the bits that do not fit."""
    a, b, c = p.operands(x)
    p.write(x.operands[0], a * b + c)


def quotient(a: Array, b: Array) -> Array:
    """Of integers, rounded towards zero."""
    return (np.sign(a) * np.sign(b) * (abs(a.astype(np.int64)) // abs(b.astype(np.int64)))).astype(
        a.dtype
    )


def to_float(p: AsyncProgram, x: Instruction) -> None:
    if x.kind not in ("s32", "u32"):
        raise Fault(f"unknown instruction: {x}")
    (value,) = p.operands(x)
    p.write(x.operands[0], value.astype(TYPES["f32"]))


AsyncProgram.others = {
    "mov": move_fenced,
    "cp.async.ca.shared.global": copy,
    "cp.async.cg.shared.global": copy,
    "cp.async.commit_group": commit_copies,
    "cp.async.wait_group": wait_for_copies,
    "fence.proxy.async.shared::cta": fence_of_proxies,
    "wgmma.fence.sync.aligned": fence_of_products,
    "wgmma.commit_group.sync.aligned": commit_products,
    "wgmma.wait_group.sync.aligned": wait_for_products,
    "stmatrix.sync.aligned.m8n8.x1.shared": store_matrices,
    "stmatrix.sync.aligned.m8n8.x4.shared": store_matrices,
    "prefetch.global.L2": prefetch,
    "mad.lo": low_sum,
    "setp.gtu": elementwise(lambda a, b: ~(a <= b)),  # true for a NaN
    "setp.leu": elementwise(lambda a, b: ~(a > b)),
    "setp.geu": elementwise(lambda a, b: ~(a < b)),
    "div": elementwise(quotient),
    "div.full": elementwise(np.divide),
    "rem": elementwise(lambda a, b: a - b * quotient(a, b)),
    "cvt.rn.f32": to_float,
    "max": elementwise(np.fmax),
    "min": elementwise(np.fmin),
    "abs": elementwise(np.abs),
    "copysign": elementwise(lambda sign, size: np.copysign(size, sign)),
    "fma.rn": elementwise(fused_sum),
    "fma.rn.ftz": elementwise(lambda a, b, c: flushed(fused_sum(*map(flushed, (a, b, c))))),
    "cvt.rmi.ftz.f32": elementwise(lambda x: np.floor(flushed(x))),
    "ex2.approx": elementwise(np.exp2),
    "ex2.approx.ftz": elementwise(lambda x: flushed(np.exp2(flushed(x)))),
    "lg2.approx.ftz": elementwise(lambda x: np.log2(flushed(x))),
    "rsqrt.approx.ftz": elementwise(lambda x: flushed(1 / np.sqrt(flushed(x)))),
}
for N in (32, 64):
    AsyncProgram.others[f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16"] = multiply
