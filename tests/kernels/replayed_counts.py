"""A replayed call launches what the first call launched, on its own tensors, and little besides.

A driver whose launches do nothing records them in place of a GPU; the kernels are compiled for an
H200. test_launch.py runs this file in a process of its own.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")
from triton.language import constexpr
from triton.runtime import driver

import fla_cp
from benchmarks import host
from benchmarks.tune import now
from fla_cp import autograd
from fla_cp.comm import peer_memory
from fla_cp.kernels import using
from fla_cp.kernels.triton import launch as launches
from fla_cp.kernels.triton import streams
from fla_cp.kernels.triton.backend import TritonBackend
from fla_cp.ops.known import known_calls
from fla_cp.program import Program
from fla_cp.tape import _ALLOCATIONS
from tests.support.driver import IdleDriver
from tests.support.fake_group import one_of

T, H, D = 64, 4, 128

INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


class Case(NamedTuple):
    """An operator, its options, and the most that a replayed forward and backward have: launches,
    torch ops, and allocations that have elements. gluon: whether the kernels of sm90/ run, which
    take descriptors. descriptors: in each direction. documents: if given, the call is that of the
    middle one of three ranks with T tokens each, which share documents with these offsets and
    exchange states by this scheme; counts are then those of a call with its exchanges."""

    operator: str
    options: dict[str, Any]
    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    gluon: bool = False
    descriptors: tuple[int, int] = (0, 0)
    documents: tuple[int, ...] = ()
    exchange: str = "all_gather"

    @property
    def steps(self) -> int:
        """How often a direction does what a program does not hold: it starts an exchange, and waits
        for it."""
        return 2 if self.documents else 0


SAFE = {"safe_gate": True, "lower_bound": -5.0}
CASES = {
    "kda, safe gate": Case("kda", SAFE, forward=(2, 0, 7), backward=(7, 0, 8)),
    "kda, any gate": Case("kda", {}, forward=(3, 0, 8), backward=(8, 0, 8)),
    "gated delta rule": Case("gated_delta_rule", {}, forward=(2, 0, 5), backward=(6, 0, 8)),
    "gated delta rule, chunks of 32": Case(
        "gated_delta_rule", {"chunk_size": 32}, forward=(2, 0, 5), backward=(6, 0, 8)
    ),
    "kda, safe gate, sm90": Case("kda", SAFE, (2, 0, 7), (6, 0, 8), True, (9, 20)),
    "kda, any gate, sm90": Case("kda", {}, (3, 0, 8), (8, 0, 8), True, (9, 20)),
    "gated delta rule, sm90": Case("gated_delta_rule", {}, (3, 0, 5), (5, 0, 8), True, (9, 33)),
}
ONE, PACKED = (0, 3 * T), (0, 40, 100, 140, 192)
SHARED = {
    "kda, safe gate": ((4, 2, 11), (9, 2, 10), (0, 0)),
    "gated delta rule": ((4, 2, 10), (8, 2, 10), (0, 0)),
    "kda, safe gate, sm90": ((4, 2, 11), (8, 2, 10), (17, 28)),
}
"""Maps are concatenated and gathered: two torch ops in each direction."""
for name, (forward, backward, described) in SHARED.items():
    one = CASES[name]._replace(
        forward=forward, backward=backward, descriptors=described, documents=ONE
    )
    (m, _, a), (n, _, b) = forward, backward
    # No state passes through the middle rank, so that only offsets are sent. In a frame, two
    # launches clear what is behind the tokens.
    packed = one._replace(forward=(m, 1, a - 1), backward=(n + 2, 1, b), documents=PACKED)
    passed = one._replace(forward=(m, 0, a - 2), backward=(n, 0, b - 2), exchange="symmetric")
    CASES |= {
        f"{name}, one document on ranks": one,
        f"{name}, documents on ranks": packed,
        f"{name}, passed on": passed,
    }


class Launched(NamedTuple):
    """A launch: the kernel's number, its name, grid, stream and arguments."""

    kernel: int
    name: str
    grid: tuple[int, int, int]
    stream: int
    args: tuple


class Waited(NamedTuple):
    """A stream waits for what another one has now."""

    stream: int
    other: int


class Recorder(IdleDriver):
    """Records launches and waits in order, with the tensors that they name, so that no memory is
    used again meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launched | Waited] = []

    def launched(self, *launch: Any) -> None:
        self.found.append(Launched(*launch))

    def waited(self, stream: int, other: int) -> None:
        self.found.append(Waited(stream, other))

    def take(self) -> list[Launched | Waited]:
        """What was recorded since the last call of this."""
        found, self.found = self.found, []
        return found


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    active, found = driver._active, Recorder()
    driver.set_active(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "torch", SimpleNamespace(cuda=found.cuda))
        yield found
    driver._active = active
    streams.fork_of.cache_clear()
    launches._known.clear()
    known_calls.clear()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A case, whose calls run the Triton backend on the CPU as on an H200."""
    known_calls.clear()
    found, backend = CASES[request.param], now()
    facts = {"sms": 132, "architecture": 90, "gluon": found.gluon}
    backend = replace(backend, tuning=replace(backend.tuning, **facts))
    with using(backend), using(replace(backend, name="torch")):  # tensors are on the CPU
        yield found


class Boxes:
    """Like `peer_memory.Mailboxes`, of the middle one of three ranks, on a stand-in's stream."""

    def __init__(self, recorder: Recorder, room: peer_memory.Room) -> None:
        memory = [torch.zeros(room.elements) for _ in range(3)]
        number = torch.zeros(room.tiles, dtype=torch.int32)
        self.mail = [
            peer_memory.mailbox(memory, number, 1, room, reverse=reverse)
            for reverse in (False, True)
        ]
        self.recorder, self.stream = recorder, recorder.cuda.Stream()
        self.main, self.cuda_stream = 0, self.stream.cuda_stream

    def open(self, *, reverse: bool) -> tuple[peer_memory.Mailbox, Any]:
        self.recorder.waited(self.cuda_stream, self.main)
        return self.mail[reverse], self

    def launches(self) -> AbstractContextManager[None]:
        return self.recorder.inside(self.stream)

    def wait(self) -> None:
        self.recorder.waited(self.main, self.cuda_stream)


@pytest.fixture(scope="module", autouse=True)
def group(recorder: Recorder) -> Iterator[None]:
    boxes = functools.cache(lambda group, room: Boxes(recorder, room))
    with one_of(3, 1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "mailboxes", boxes)
        patch.setattr(peer_memory, "why_not", lambda group: "")
        yield
        context_of.cache_clear()


@functools.cache
def context_of(documents: tuple[int, ...], exchange: str) -> fla_cp.FLACPContext | None:
    """The context of a case; None without documents."""
    if not documents:
        return None
    options = {"check": False, "exchange": exchange}
    return fla_cp.build_cp_context(torch.tensor(documents), dist.group.WORLD, **options)


_aten = torch.ops.aten
VIEWS = {_aten.as_strided.default, _aten.detach.default, _aten.view.default, _aten.alias.default}
VIEWS |= {_aten.slice.Tensor}
"""Of results, of every allocation under a dispatch mode, and of what an exchange sends."""


ALLOCATIONS = {_aten.empty_strided.default, *_ALLOCATIONS}
"""A program calls the first only; what runs inside of an exchange calls others, too."""


class Ops(TorchDispatchMode):
    """Counts what reaches torch. made: all results, which keeps their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.made: list[Tensor] = []
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made += [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        if func in ALLOCATIONS:
            self.allocated.append(found)
        elif func not in VIEWS and func.namespace != "profiler":
            self.ops.append(str(func))
        return found


class Direction(NamedTuple):
    """launched: in order. tensors: those that a test knows, by name."""

    launched: list[Launched | Waited]
    tensors: dict[str, Tensor]


def call(recorder: Recorder, case: Case) -> tuple[Direction, Direction]:
    """A forward and a backward on new tensors."""
    channels = (D,) if case.operator == "kda" else ()

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype).requires_grad_()

    x = {name: leaf(1, T, H, D) for name in "qkv"}
    x |= {"g": leaf(1, T, H, *channels), "beta": leaf(1, T, H)}
    rates = {"A_log": leaf(H, dtype=torch.float32)}
    rates["dt_bias"] = leaf(H * (D if channels else 1), dtype=torch.float32)
    recorder.take()
    run = getattr(fla_cp, f"chunk_{case.operator}")
    context = context_of(case.documents, case.exchange)
    o, _ = run(*x.values(), **rates, **INSIDE, **case.options, cp_context=context)
    saved = {f"saved {n}": t for n, t in enumerate(o.grad_fn.saved_tensors) if t is not None}
    forward = Direction(recorder.take(), {**x, **rates, "o": o, **saved})
    do = torch.zeros_like(o)
    grads = torch.autograd.grad(o, [*x.values(), *rates.values()], do)
    named = {f"d{name}": d for name, d in zip([*x, *rates], grads, strict=True)}
    return forward, Direction(recorder.take(), {**forward.tensors, "do": do, **named})


class Replay(NamedTuple):
    """A replayed direction: its program, what reached torch, and what it launched."""

    program: Program
    ops: Ops
    direction: Direction


def no_call(*_: Any, **__: Any) -> None:
    raise AssertionError("the call was not replayed")


def replay(recorder: Recorder, case: Case) -> list[Replay]:
    """The third call, in both directions. Raises AssertionError if it is not replayed."""
    (known,) = known_calls.values()
    watched = []
    for direction in (known.kind.forward, known.kind.backward):
        assert len(direction.known) == 1, "the call was not recorded"
        ((key, program),) = direction.known.items()
        assert isinstance(program, Program), program
        ops = Ops()

        def run(*given: Any, program: Program = program, ops: Ops = ops) -> tuple:
            with ops:
                return program.run(*given)

        direction.known.keep(key, program._replace(run=run))
        watched.append((program, ops))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(autograd, name, no_call)
        directions = call(recorder, case)
    return [Replay(*both, found) for both, found in zip(watched, directions, strict=True)]


def leaves(args: Any) -> Iterator[Any]:
    """The arguments in nested tuples, each tuple after its length. A constant that is handed to the
    compiler stands for its value, a descriptor for what it says and the memory that it describes.
    """
    for x in args:
        x = x.value if isinstance(x, constexpr) else x
        if hasattr(x, "block_shape"):
            yield tuple(x.shape), tuple(x.strides), tuple(x.block_shape), x.layout, x.padding
            x = getattr(x.base, "address", x.base)
        if isinstance(x, tuple):
            yield len(x)
            yield from leaves(x)
        else:
            yield x


def place(address: int, tensors: dict[str, Tensor]) -> tuple[str, int] | None:
    """The tensor in which the address is, and how many bytes after its start."""
    for name, x in tensors.items():
        at = address - x.data_ptr()
        if 0 <= at < x.numel() * x.element_size():
            return name, at
    return None


def assert_same_launches(first: Direction, third: Direction, ops: Ops) -> int:
    """Launches of a first call and of a replay are the same, each with its own tensors. ops: of the
    replay. Returns how many arguments are addresses of tensors that the test knows."""
    own = {f"memory {n}": x for n, x in enumerate(ops.made)}
    moved: dict[int, int] = {}
    known = 0
    assert [type(x) for x in first.launched] == [type(x) for x in third.launched]
    for a, b in zip(first.launched, third.launched, strict=True):
        if isinstance(a, Waited):
            assert a == b
            continue
        assert a[:4] == b[:4]
        for x, y in zip(leaves(a.args), leaves(b.args), strict=True):
            if not isinstance(x, Tensor):
                assert x is y or (x == y and type(x) is type(y)), (a.name, x, y)
                continue
            assert type(y) is int
            old = x.data_ptr()
            if x.numel() == 0:  # nothing, or the end of other memory (`state_buffer`)
                assert y == 0 or place(y - 1, own) is not None, (a.name, x.shape)
            elif (expected := place(old, first.tensors)) is not None:
                assert place(y, third.tensors) == expected, (a.name, expected)
                known += 1
            elif (begin := place(y, own)) is not None:
                assert moved.setdefault(old, y) == y, (a.name, x.shape)
                end = place(y + x.numel() * x.element_size() - 1, own)
                assert end is not None and end[0] == begin[0], (a.name, x.shape)
            else:  # a table or another constant, which is where it was: the first call's memory
                assert y == old, (a.name, x.shape)  # is still held, so nothing else can be there
    return known


def test_a_replay_launches_what_the_first_call_launched(recorder, case):
    first = call(recorder, case)
    call(recorder, case)
    for once, again in zip(first, replay(recorder, case), strict=True):
        assert assert_same_launches(once, again.direction, again.ops) >= 10
        launched = [x for x in again.direction.launched if isinstance(x, Launched)]
        assert len(launched) == again.program.launches


def test_a_replay_has_no_more_than_this(recorder, case):
    for _ in range(2):
        call(recorder, case)
    found = replay(recorder, case)
    assert tuple(each.program.descriptors for each in found) == case.descriptors
    for each, most in zip(found, (case.forward, case.backward), strict=True):
        program, ops = each.program, each.ops
        launched = [x for x in each.direction.launched if isinstance(x, Launched)]
        assert program.steps == case.steps
        assert ("plan.links" in program.source) == bool(case.documents)
        if not case.steps:
            assert len(ops.ops) == program.ops and len(ops.allocated) == program.allocations
        real = [x for x in ops.allocated if x.numel()]
        counts = len(launched), len(ops.ops), len(real)
        assert all(n <= limit for n, limit in zip(counts, most, strict=True)), (counts, most)


def test_without_replaying_the_checks_fail(recorder, case, monkeypatch):
    monkeypatch.setattr(TritonBackend, "replay_stream", lambda self, device: None)
    for _ in range(2):
        call(recorder, case)
    with pytest.raises(AssertionError, match="not recorded"):
        replay(recorder, case)


def test_another_tensor_in_a_launch_is_found(recorder, case):
    """The checks above are not blind: each of them fails on a launch that differs a little."""
    first = call(recorder, case)[1]
    call(recorder, case)
    again = replay(recorder, case)[1]
    n = len(first.launched) - 1
    launched = again.direction.launched[n]
    flat = next(i for i, x in enumerate(leaves(launched.args)) if type(x) is int and x > 2**20)

    def changed(args: tuple, at: list[int]) -> tuple:
        out = []
        for x in args:
            if isinstance(x, tuple):
                at[0] += 1
                out.append(changed(x, at))
            else:
                out.append(x + 16 if at[0] == flat else x)
                at[0] += 1
        return tuple(out)

    for other in (
        launched._replace(args=changed(launched.args, [0])),
        launched._replace(grid=(9, 9, 9)),
        launched._replace(kernel=-1),
        launched._replace(stream=1),
    ):
        found = [*again.direction.launched]
        found[n] = other
        wrong = again.direction._replace(launched=found)
        with pytest.raises(AssertionError):
            assert_same_launches(first, wrong, again.ops)


def test_the_benchmark_counts_the_measured_call(recorder, case, monkeypatch):
    """`benchmarks.host` finds the programs of a call among others, and its bare launches are those
    of a replay, without anything else."""
    other = CASES["kda, safe gate" if case.options != SAFE else "kda, any gate"]
    for _ in range(3):
        call(recorder, other)
    found, why = host.replays(lambda: call(recorder, case))
    assert why == "" and len(found) == 2
    monkeypatch.setattr(host.torch.cuda, "synchronize", lambda: None)
    facts = host.facts(lambda: call(recorder, case), "cuda")
    for name in ("bare_ms", "bare_autograd_ms", "steady_bare_autograd_ms"):
        assert facts.pop(name) > 0
    limits = [a + b for a, b in zip(case.forward, case.backward, strict=True)]
    # a program does not hold the gather of an exchange
    gathers = 2 if case.documents and case.exchange == "all_gather" else 0
    assert facts["launches"] == limits[0] and facts["torch_ops"] == limits[1] - gathers
    assert case.steps or facts["allocations"] >= limits[2]
    assert facts["descriptors"] == sum(case.descriptors)
    recorder.take()
    bare = host.Bare(found)
    run = [x for x in recorder.take() if isinstance(x, Launched)]
    with Ops() as ops:
        bare()
    assert recorder.take() == run and len(run) == limits[0]
    for replay_, kept in zip(found, bare._kept, strict=True):  # whose addresses they have
        assert ("block" in kept) == (replay_.program.bytes > 0)
    assert ops.allocated == [] and ops.ops == []
    assert not any(isinstance(x, Tensor) for launch in run for x in leaves(launch.args))


def test_the_benchmark_says_why_nothing_is_replayed(recorder, case, monkeypatch):
    monkeypatch.setattr(TritonBackend, "replay_stream", lambda self, device: None)
    facts = host.facts(lambda: call(recorder, case), "cpu")
    assert facts == {"not_replayed": "no call was recorded"}
