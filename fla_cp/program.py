"""Programs: one direction of an operator call as one Python function, written from a tape.

Everything that was decided during the recording is a constant in the function's source: an address
is a sum, and the launch of a kernel is one line. `Program.source` keeps the source for readers and
tests.

Memory that only kernels use is not allocated piece by piece. A program allocates one block, in
which pieces that are never needed at the same time overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_cp.tape import Tape
from fla_cp.tape_items import Column, Fork, Item, Join, Launch, Named, Op, Pointed, Ref, Root, Value

ALIGNMENT = 1024
"""Every piece of a program's block starts at a multiple of this many bytes."""

Flat = tuple[Tensor | None, ...]

Run = Callable[[Any, Sequence[Tensor | None], int], Flat]
"""(plan, inputs, address of the current stream) -> results."""


class Program(NamedTuple):
    """One direction of a call as a function, `run`. source: the function's source. bytes: the size
    of the block. launches, ops, steps, allocations, descriptors: how many of each one run has."""

    run: Run
    source: str
    bytes: int
    launches: int
    ops: int
    steps: int
    allocations: int
    descriptors: int


def program(tape: Tape, outputs: Sequence[Tensor | None]) -> Program:
    """The program that does what the tape says and returns `outputs`."""
    return _Writer(tape, tape.outputs(outputs)).program()


class _Lives(NamedTuple):
    """A piece of memory: the first and the last item of the tape that use it, and its size in
    bytes."""

    first: int
    last: int
    size: int


class _Writer:
    """Writes the source of a program.

    Names in the source: m3 is the tensor of root 3, and m3a its address. t0 is a table, s the
    address of the block, v5 an object that a step returned, w1 the fork into side stream 1, w1a the
    address of that stream, and c0 a constant.
    """

    def __init__(self, tape: Tape, outputs: list[Ref | None]) -> None:
        self.items, self.roots, self.outputs = tape.items, tape.roots, outputs
        self.names: dict[str, Any] = {"as_strided": torch.as_strided, "torch": torch}
        self.names["empty"] = torch.empty_strided
        self.pool: dict[Any, str] = {}
        self.lines: list[str] = []
        self.tables: dict[tuple, str] = {}
        self.described = 0
        self.forks: set[int] = set()
        self.pointed: set[int] = set()
        """The numbers of the roots whose addresses kernels take."""
        self.used: set[int] = set()
        """The numbers of the roots that ops and steps take as tensors."""
        for item in self.items:
            if isinstance(item, Op):
                self.used |= {ref.root.number for ref in _refs((item.args, item.kwargs))}
        self.places, self.bytes = _places(self.items, self._block())

    def _block(self) -> set[int]:
        """The numbers of the roots that have a place in the block, because only kernels use their
        memory."""
        memory = {r.number for r in self.roots if r.kind == "memory"} - self.used
        return memory - {ref.root.number for ref in self.outputs if ref is not None}

    def program(self) -> Program:
        self._begin()
        for item in self.items:
            self._item(item)
        found = ", ".join(map(self._returned, self.outputs))
        lines = ["def run(plan, inputs, w0a):", *self.lines, f"return ({found},)"]
        source = "\n    ".join(lines)
        exec(source, self.names)
        kinds = [type(item) for item in self.items]
        steps = sum(isinstance(item, Op) and item.is_step for item in self.items)
        return Program(
            run=self.names["run"],
            source=source,
            bytes=self.bytes,
            launches=kinds.count(Launch),
            ops=kinds.count(Op) - steps,
            steps=steps,
            allocations=sum(" = empty(" in line for line in self.lines),
            descriptors=self.described,
        )

    def _begin(self) -> None:
        """Writes the lines for inputs, tables and memory."""
        for item in self.items:
            if isinstance(item, Launch):
                self.pointed |= {ref.root.number for ref in _refs(item.args)}
        as_tensors = self.used | {ref.root.number for ref in self.outputs if ref is not None}
        for root in self.roots:
            n = root.number
            if n not in self.pointed | as_tensors:
                continue
            if root.kind == "input":
                self.lines.append(f"m{n} = inputs[{root.what}]")
                self._address(n)
            elif root.kind == "table":
                self._column(n, root.what, as_tensor=n in as_tensors)
            elif root.kind == "constant":
                self.names[f"m{n}"] = root.what
            elif root.kind == "memory" and n not in self.places:
                self._allocate(root)
                self._address(n)
        if self.bytes:
            device = next(self.roots[n].what[1] for n in self.places)
            given = f"({self.bytes},), (1,), dtype=torch.uint8, device={self._value(device)}"
            self.lines += [f"block = empty({given})", "s = block.data_ptr()"]

    def _column(self, n: int, column: Column, *, as_tensor: bool) -> None:
        """Writes the line that finds root n, a column of a table, and before the first column of a
        table the one that finds the table. Kernels need only a column's address, and to make a
        tensor of it takes longer."""
        how, name = ("table", f"m{n}") if as_tensor else ("addresses", f"m{n}a")
        key = (*column[:3], how)
        if key not in self.tables:
            self.tables[key] = f"t{len(self.tables)}"
            given = f"{self._value(column.build)}, {self._value(column.dtype)}"
            call = f"{column.owner}.{how}({given}, inputs[0].device)"
            self.lines.append(f"{self.tables[key]} = {call}")
        self.lines.append(f"{name} = {self.tables[key]}[{column.place}]")
        if as_tensor:
            self._address(n)

    def _allocate(self, root: Root) -> None:
        """Writes the line that allocates a root's own memory."""
        (dtype, device), name = root.what, f"m{root.number}"
        shape, stride = self._shown(root)
        how = f"dtype={self._value(dtype)}, device={self._value(device)}"
        self.lines.append(f"{name} = empty({shape}, {stride}, {how})")

    def _shown(self, root: Root) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and strides with which a root's memory is allocated. If only kernels use the
        memory before it is returned, they are those of the result, which then needs no view."""
        found = [x for x in self.outputs if x is not None and x.root.number == root.number]
        if len(found) == 1 and root.number not in self.used and _dense(found[0]) and _dense(root):
            return found[0].shape, found[0].stride
        return root.shape, root.stride

    def _address(self, n: int) -> None:
        """Writes the line for the address of root n, if kernels take it."""
        if n in self.pointed:
            self.lines.append(f"m{n}a = m{n}.data_ptr()")

    def _item(self, item: Item) -> None:
        """Writes the lines for one item of the tape."""
        if isinstance(item, Fork) and isinstance(item.make, Value):
            self.lines.append(f"w{item.side}a = v{item.make.number}.cuda_stream")
        elif isinstance(item, Fork):
            n, make = item.side, self._value(item.make)
            if n not in self.forks:
                self.forks.add(n)
                self.lines += [f"w{n} = {make}(w0a)", f"w{n}a = w{n}.side.cuda_stream"]
            self.lines.append(f"w{n}.side_waits()")
        elif isinstance(item, Join):
            if item.waits:
                self.lines.append(f"w{item.side}.main_waits()")
        elif isinstance(item, Launch):
            run, fixed = item.kernel
            given = [*map(str, item.grid), f"w{item.stream}a", *map(self._value, fixed)]
            for x in item.args:
                if isinstance(x, Pointed):
                    self.described += 1
                    at, make = self._pointer(x.base), self._value(x.make)
                    made = f"({self._value(x.make.found.get)}({at}) or {make}({at}))"
                    given.append(f"*{made}" if x.make.many else made)
                else:
                    given.append(self._value(x))
            self.lines.append(f"{self._value(run)}({', '.join(given)})")
        else:
            args = [self._value(x, tensors=True) for x in item.args]
            args += [f"{k}={self._value(x, tensors=True)}" for k, x in item.kwargs.items()]
            call = f"{self._value(item.run)}({', '.join(args)})"
            target = self._target(item.results)
            self.lines.append(call if target is None else f"{target} = {call}")
            for root in _roots(item.results):
                if root.kind == "result":
                    self._address(root.number)

    def _target(self, results: Any) -> str | None:
        """The names to which the results of an op are assigned; None if nobody uses them."""
        if results is None:
            return None
        if isinstance(results, Root):
            return f"m{results.number}" if results.kind == "result" else f"v{results.number}"
        return "(" + "".join(f"{self._target(x) or '_'}, " for x in results) + ")"

    def _value(self, x: Any, tensors: bool = False) -> str:
        """An expression for x. tensors: write a `Ref` as a tensor, not as an address."""
        if isinstance(x, Ref):
            return self._tensor(x) if tensors else self._pointer(x)
        if isinstance(x, Named):
            return x.expression
        if isinstance(x, Value):
            return f"v{x.number}"
        if x is None or x.__class__ in (bool, int, str):
            return repr(x)
        if isinstance(x, tuple) and _changes(x):
            parts = "".join(f"{self._value(y, tensors)}, " for y in x)
            if tensors and hasattr(x, "_fields"):
                return f"{self._value(type(x))}({parts})"
            return f"({parts})"
        if isinstance(x, list):
            return "[" + ", ".join(self._value(y, tensors) for y in x) + "]"
        key = x if isinstance(x, torch.device | torch.dtype) else id(x)
        if key not in self.pool:
            self.pool[key] = name = f"c{len(self.pool)}"
            self.names[name] = x
        return self.pool[key]

    def _pointer(self, x: Ref) -> str:
        """An expression for the address of a tensor."""
        root, offset = x.root, x.offset * x.dtype.itemsize
        if 0 in root.shape:
            return "0"
        if root.kind == "constant":
            return str(root.what.data_ptr() + offset)
        if root.number in self.places:
            return f"s + {self.places[root.number] + offset}"
        return f"m{root.number}a + {offset}" if offset else f"m{root.number}a"

    def _returned(self, x: Ref | None) -> str:
        """An expression for a result. A view is detached, because autograd does not let the caller
        change a Function's view in place."""
        found = self._tensor(x)
        return f"{found}.detach()" if found.startswith("as_strided(") else found

    def _tensor(self, x: Ref | None) -> str:
        """An expression for a tensor."""
        if x is None:
            return "None"
        name, root = f"m{x.root.number}", x.root
        known = self._shown(root) if root.kind == "memory" else (root.shape, root.stride)
        if x.offset == 0 and (x.shape, x.stride) == known:
            return name
        start = f"{name}.storage_offset() + {x.offset}"
        return f"as_strided({name}, {tuple(x.shape)}, {tuple(x.stride)}, {start})"


def _dense(x: Ref | Root) -> bool:
    """Whether the elements fill the root's memory, in the order of the dims."""
    size, dense = 1, True
    for n, s in zip(reversed(x.shape), reversed(x.stride), strict=True):
        dense = dense and (n == 1 or s == size)
        size *= n
    return dense and (isinstance(x, Root) or size == math.prod(x.root.shape))


def _changes(x: Any) -> bool:
    """Whether some part of a structure differs from call to call."""
    if isinstance(x, tuple) and not isinstance(x, Ref | Named | Value | Pointed):
        return any(map(_changes, x))
    return isinstance(x, Ref | Named | Value | Pointed)


def _roots(results: Any) -> list[Root]:
    if results is None:
        return []
    return [results] if isinstance(results, Root) else [r for x in results for r in _roots(x)]


def _refs(value: Any) -> Any:
    """Every `Ref` in a structure."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, Pointed):
        yield value.base
    elif isinstance(value, Root):
        return
    elif isinstance(value, dict):
        yield from _refs(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _refs(x)


def _places(items: list[Item], block: set[int]) -> tuple[dict[int, int], int]:
    """The place of each root in the block, in bytes, and the size of the block.

    Two pieces may overlap if the last use of one comes before the first use of the other. A kernel
    on a side stream may run at any time between the `Fork` before it and the `Join` after it, and
    counts as using its memory all that time.
    """
    sizes, first, last = {}, {}, {}  # type: ignore[var-annotated]
    started: dict[int, int] = {}
    open_until: dict[int, list[int]] = {}
    for at, item in enumerate(items):
        if isinstance(item, Fork):
            started[item.side] = at
        elif isinstance(item, Join):
            for n in open_until.pop(item.side, []):
                last[n] = max(last[n], at)
        if not isinstance(item, Launch):
            continue
        for ref in _refs(item.args):
            n = ref.root.number
            if n not in block:
                continue
            shape, stride = ref.root.shape, ref.root.stride
            reach = 1 + sum((d - 1) * s for d, s in zip(shape, stride, strict=True))
            sizes[n] = 0 if 0 in shape else reach * ref.root.what[0].itemsize
            begin = started.get(item.stream, at) if item.stream else at
            first[n] = min(first.get(n, begin), begin)
            last[n] = max(last.get(n, at), at)
            if item.stream:
                open_until.setdefault(item.stream, []).append(n)
    for pieces in open_until.values():  # the call's own stream never waits for these
        for n in pieces:
            last[n] = len(items)
    lives = {n: _Lives(first[n], last[n], -(-sizes[n] // ALIGNMENT) * ALIGNMENT) for n in sizes}
    places: dict[int, int] = {}
    # Largest first, each piece takes the first gap among the pieces that live at the same time.
    for n in sorted(lives, key=lambda n: -lives[n].size):
        taken = sorted(
            (places[m], places[m] + lives[m].size)
            for m in places
            if lives[m].first <= lives[n].last and lives[n].first <= lives[m].last
        )
        at = 0
        for lo, hi in taken:
            if at + lives[n].size <= lo:
                break
            at = max(at, hi)
        places[n] = at
    return places, max((places[n] + lives[n].size for n in places), default=0)
