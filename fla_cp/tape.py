"""A tape: what one direction of an operator call does on its device, in order.

Most of a call's host time goes into Python code that decides the same things each time: shapes,
tiles, strides, arguments. The second of several equal calls therefore runs under a `Tape`, which
notes kernel launches, torch ops, exchanges, and waits between streams. program.py turns the notes
into one Python function, in which every decision is a constant. Only the addresses differ from
call to call. replay.py says which calls are equal.

Every tensor on the tape belongs to a root: an input, a table of the packing, memory that the call
allocates, a result of a torch op or of an exchange, or a constant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fla_cp.tape_items import (
    Column,
    Fork,
    Item,
    Join,
    Launch,
    Named,
    OfAddress,
    Op,
    Pointed,
    Ref,
    Root,
    Value,
)


class NotReplayable(Exception):
    """A call does something that a tape cannot hold. Such a call runs normally each time."""


class _Active(threading.local):
    tape: Tape | None = None


_active = _Active()


def active() -> Tape | None:
    """The tape on which this thread records, or None."""
    return _active.tape


@contextmanager
def paused() -> Iterator[None]:
    """Records nothing in the block. The block makes something that outlives the call, such as a
    table, so that a program need not make it again."""
    tape, _active.tape = _active.tape, None
    try:
        yield
    finally:
        _active.tape = tape


def step(run: Callable[..., Any], *args: Any) -> Any:
    """Returns `run(*args)`. If a tape records, it notes the call as one step: what happens inside
    is not recorded, and a program calls `run` again. Exchanges are steps, and so is the work that a
    layer hands over to them.

    args: tensors, tuples of them, objects of the plan, results of earlier steps, and constants.
    """
    tape = _active.tape
    return run(*args) if tape is None else tape.add_step(run, args)


class SideStream(Protocol):
    """A stream that runs beside the call's own. main: the address of the call's own stream.
    cuda_stream: the address of the side stream."""

    @property
    def main(self) -> int: ...

    @property
    def cuda_stream(self) -> int: ...


def opened(side: SideStream) -> None:
    """Tells the tape that the last step returned `side` and has made it wait for the call's own
    stream, so that launches on `side` may follow. It must be called right after that step."""
    if _active.tape is not None:
        _active.tape.add_opened(side)


def closed(side: SideStream) -> None:
    """Tells the tape that the last step made the call's own stream wait for a side stream."""
    if _active.tape is not None:
        _active.tape.add_closed(side)


class Tape(TorchDispatchMode):
    """Records what this thread does.

    inputs: the call's tensors. objects: the objects that a program looks up again in each call, by
    the Python expressions that find them. exact: every replay has the same packing, so that tensors
    that existed before the call are constants.
    """

    def __init__(
        self, inputs: Sequence[Tensor | None], objects: Mapping[str, object], *, exact: bool
    ) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.roots: list[Root] = []
        self.exact, self.failed = exact, ""
        self._objects = {id(x): Named(name) for name, x in objects.items()}
        self._held: list[object] = list(objects.values())
        self._refs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._values: dict[int, Value] = {}
        self._streams: dict[int, int] = {}
        self._opened: set[int] = set()
        for place, x in enumerate(inputs):
            if x is not None:
                self._own(x, "input", place)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because otherwise the first recorded operation would make PyTorch import
        torch._dynamo, which takes a second. Nothing is compiled while a tape records."""
        return False

    def __enter__(self) -> Tape:
        super().__enter__()
        _active.tape = self
        return self

    def __exit__(self, *error: Any) -> None:
        _active.tape = None
        super().__exit__(*error)

    def _own(self, x: Tensor, kind: str, what: Any) -> Root:
        """Gives x a new root. kind, what: see `Root`."""
        root = Root(len(self.roots), kind, what, tuple(x.shape), x.stride())
        self.roots.append(root)
        self._refs[x] = Ref(root, root.shape, root.stride, 0, x.dtype)
        return root

    def ref(self, x: Tensor) -> Ref:
        """What the tape knows of x. Raises NotReplayable if it cannot know where x comes from."""
        found: Ref | None = self._refs.get(x)
        if found is None:
            if not self.exact:
                raise NotReplayable(f"a tensor {tuple(x.shape)} that depends on the packing")
            self._own(x, "constant", x)
            found = self._refs[x]
        return found

    def constant(self, x: Tensor) -> Tensor:
        """Declares that all calls read the same x. Returns x."""
        if self._refs.get(x) is None:
            self._own(x, "constant", x)
        return x

    def table(
        self, owner: object, build: Any, dtype: torch.dtype, columns: Sequence[Tensor]
    ) -> None:
        """Declares that these tensors are the columns of one of the owner's tables. A program asks
        the owner for the table in each call. With `exact`, the tables of a packing are constants
        instead. Links are asked even then, so that a context holds every table that a CUDA graph
        captured under it reads."""
        name = self._objects.get(id(owner))
        if name is None or (self.exact and not name.expression.startswith("plan.links")):
            return
        for place, x in enumerate(columns):
            if self._refs.get(x) is None:
                self._own(x, "table", Column(name.expression, build, dtype, place))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if _active.tape is self and not self.failed:
            with self._failing():
                self._note_op(func, args, kwargs, found)
        return found

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keeps the reason if something in the block cannot be noted."""
        try:
            yield
        except NotReplayable as error:
            self.failed = str(error)

    def _note_op(self, func: Any, args: tuple, kwargs: dict, found: Any) -> None:
        """Notes a torch op that returned `found`. An allocation and a view need no item of their
        own: a root or a `Ref` stands for them."""
        results = found if isinstance(found, tuple | list) else (found,)
        if not all(isinstance(x, Tensor) for x in results):
            raise NotReplayable(f"{func} reads values of a tensor")
        given = args, kwargs
        bases = [next((y for y in _tensors(given) if _shares(x, y)), None) for x in results]
        if func in _ALLOCATIONS:
            for x in results:
                self._own(x, "memory", (x.dtype, x.device))
        elif func._schema.is_mutable:
            self._note_write(func, args, kwargs)
        elif any(base is not None for base in bases):
            self._note_views(func, results, bases)
        else:
            noted: Any = self._noted(args), self._noted(kwargs)
            self.items.append(Op(func, noted[0], noted[1], self._result(found)))

    def _note_write(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Notes an op that writes some of its arguments, which must be memory of the call's own.
        Some, such as `out`, are given by name."""
        arguments = func._schema.arguments
        given = {a.name: x for a, x in zip(arguments, args, strict=False)} | kwargs
        written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        for x in _tensors([given.get(name) for name in written]):
            if self.ref(x).root.kind == "constant":
                raise NotReplayable(f"{func} writes a tensor that is not the call's")
        self.items.append(Op(func, self._noted(args), self._noted(kwargs), None))

    def _note_views(self, func: Any, results: Sequence[Any], bases: Sequence[Any]) -> None:
        """Notes where the results of an op lie in the memory of tensors that it was given. bases:
        for each result, the tensor whose memory it shares."""
        for x, base in zip(results, bases, strict=True):
            if base is None:
                raise NotReplayable(f"{func} returns new memory and views")
            seen = self.ref(base)
            if x.dtype != seen.dtype:
                raise NotReplayable(f"{func} reads memory in another dtype")
            offset = seen.offset + x.storage_offset() - base.storage_offset()
            self._refs[x] = Ref(seen.root, tuple(x.shape), x.stride(), offset, x.dtype)

    def _noted(self, value: Any) -> Any:
        """`value` with a record of tape_items.py in place of each tensor, object of the plan and
        result of a step."""
        if isinstance(value, Tensor):
            return self.ref(value)
        if id(value) in self._objects:
            return self._objects[id(value)]
        if id(value) in self._values:
            return self._values[id(value)]
        if isinstance(value, OfAddress):
            return Pointed(self.ref(value.base), value.make)
        if isinstance(value, tuple):
            parts = map(self._noted, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            return list(map(self._noted, value))
        if isinstance(value, dict):
            return {name: self._noted(x) for name, x in value.items()}
        return value

    def add_launch(
        self, kernel: tuple[Any, tuple], grid: tuple[int, ...], args: tuple, stream: int
    ) -> None:
        """Notes a launch. kernel: see `Launch`. stream: the address of the stream."""
        if self.failed:
            return
        number = self._streams.get(stream) if self._streams else 0
        if number is None:
            self.failed = "a launch on a stream that the call did not fork"
            return
        x, y, z = (*grid, 1, 1)[:3]
        with self._failing():
            self.items.append(Launch(number, kernel, (x, y, z), self._noted(args)))

    def add_fork(self, main: int, side: int, make: Callable[[int], Any]) -> None:
        """Notes that a side stream waits for the call's own stream, both given by address."""
        on_main = self._streams.setdefault(main, 0) == 0
        number = self._streams.setdefault(side, len(self._streams))
        if number == 0 or not on_main:
            self.failed = "a fork of a side stream, or into the call's own stream"
        elif number in self._opened:
            self.failed = "a fork into a side stream that a step opened"
        self.items.append(Fork(number, make))

    def add_join(self, side: int) -> None:
        """Notes that the call's own stream waits for a side stream."""
        self.items.append(Join(self._streams[side]))

    def add_opened(self, side: SideStream) -> None:
        """Notes that launches on a side stream may follow. See `opened`."""
        on_main = self._streams.setdefault(side.main, 0) == 0
        number = self._streams.setdefault(side.cuda_stream, len(self._streams))
        stream = self._values.get(id(side))
        forked = any(x.side == number for x in self.items if isinstance(x, Fork))
        if stream is None or number == 0 or not on_main:
            self.failed = self.failed or "a side stream that no step of the call's own opened"
        elif forked and number not in self._opened:  # in another call they may be two streams
            self.failed = self.failed or "a step opened a side stream that the call had forked"
        else:
            self._opened.add(number)
            self.items.append(Fork(number, stream))

    def add_closed(self, side: SideStream) -> None:
        """Notes that the call's own stream has waited for a side stream. See `closed`."""
        if not self.failed:
            self.items.append(Join(self._streams[side.cuda_stream], waits=False))

    def add_step(self, run: Callable[..., Any], args: tuple) -> Any:
        """`run(*args)`, noted as one step."""
        with paused():
            found = run(*args)
        if not self.failed:
            with self._failing():
                given = self._noted(args)
                self.items.append(Op(run, given, {}, self._result(found), is_step=True))
        return found

    def _result(self, found: Any) -> Any:
        """New roots for what an op or a step returned, in the same structure."""
        if found is None:
            return None
        if isinstance(found, Tensor):
            return self._own(found, "result", None)
        if isinstance(found, tuple | list):
            return tuple(map(self._result, found))
        if isinstance(found, bool | int | float | str):  # a tape tells objects apart by their id
            raise NotReplayable(f"a step that returns {found!r}")
        root = Root(len(self.roots), "value", None)
        self.roots.append(root)
        self._held.append(found)  # so that its id stays taken
        self._values[id(found)] = Value(root.number)
        return root

    def outputs(self, tensors: Sequence[Tensor | None]) -> list[Ref | None]:
        """What the tape knows of the call's results. Raises NotReplayable if it is incomplete."""
        if self.failed:
            raise NotReplayable(self.failed)
        found = [None if x is None else self.ref(x) for x in tensors]
        if any(ref is not None and ref.root.kind == "constant" for ref in found):
            raise NotReplayable("a result that the call did not make")
        return found


_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)


def _shares(x: Tensor, y: Tensor) -> bool:
    """Whether both have the same storage. Tensors without elements have none."""
    at = x.untyped_storage().data_ptr()
    return at != 0 and at == y.untyped_storage().data_ptr()
