"""What the kernels of a KDA call read and write, and how long its stages take beside that.

A rehearsal on tensors without memory says which kernels a call launches and which tensors these are
given; it needs no GPU. For each kernel every tensor counts once, with all its bytes, unless
`UNTOUCHED` says that the kernel does nothing with it: what its programs or a second launch read
again counts no second time, so that the time of these bytes at the bandwidth of a copy is about a
floor. A stage can fall a little below it: one that mostly reads has more bandwidth than a copy, and
what the stage before has left in the L2 cache does not come from memory.
The times come from a profile of whole calls, since some kernels run at the same time: that of a
stage is the time in which at least one of its kernels runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.members import MEMBERS, draws, options
from benchmarks.shapes import Shape

STAGES: dict[tuple[str, str], str] = {
    ("forward", "intra_sm90_kernel"): "local forward",
    ("forward", "scan_sm90_kernel"): "summary and scan",
    ("forward", "fold_kernel"): "summary and scan",
    ("backward", "scan_sm90_kernel"): "states again and reverse scan",
    ("backward", "scan_gated_sm90_kernel"): "states again and reverse scan",
    ("backward", "scan_bwd_sm90_kernel"): "states again and reverse scan",
    ("backward", "scan_bwd_gated_sm90_kernel"): "states again and reverse scan",
    ("backward", "fold_kernel"): "states again and reverse scan",
    ("backward", "gated_kernel"): "gated operands",
    ("backward", "scores_bwd_sm90_kernel"): "scores' gradients",
    ("backward", "safe_bwd_sm90_kernel"): "local backward",
    ("backward", "beta_bwd_kernel"): "sums of gradients",
    ("backward", "rate_grads_kernel"): "sums of gradients",
}
"""The stage of a kernel, by direction and name."""

NOTHING: frozenset[str] = frozenset()
FOR_LOCAL = {"out.dq", "out.dk", "out.dg", "out.dA_log", "out.ddt_bias"}
UNTOUCHED: dict[str, frozenset[str]] = {
    "intra_sm90_kernel": NOTHING,
    "scan_sm90_kernel": NOTHING,
    "fold_kernel": NOTHING,
    "scan_gated_sm90_kernel": frozenset({"qg", "Aqk"}),
    "scan_bwd_sm90_kernel": NOTHING,
    "scan_bwd_gated_sm90_kernel": NOTHING,
    "scores_bwd_sm90_kernel": frozenset(
        {"x.q.ptr", "x.k.ptr", "x.h", "x.dh", "x.decay", "x.anchors"} | FOR_LOCAL
    ),
    "safe_bwd_sm90_kernel": frozenset({"x.v.ptr", "x.o", "x.decay"}),
    "beta_bwd_kernel": NOTHING,
    "rate_grads_kernel": NOTHING,
}
"""Tensors that a kernel is given, by name, and neither reads nor writes; tests compare them with
interpreted calls. The bytes of other kernels are not known."""

WARM, CALLS = 3, 9
"""Calls that are profiled, and then those of them that count."""

Tensors = dict[str, Tensor]


class Launch(NamedTuple):
    """A launch of a rehearsal: its direction, its kernel, and the tensors that it is given, by
    their names in its arguments."""

    direction: str
    kernel: str
    tensors: Tensors

    @property
    def stage(self) -> str:
        return STAGES.get((self.direction, self.kernel), "other kernels")

    def touched(self) -> Tensors:
        """Those that it reads or writes, each once, under its first name. Raises KeyError for a
        kernel that UNTOUCHED does not have."""
        found: dict[tuple, str] = {}
        for name, x in self.tensors.items():
            if x.numel() and name not in UNTOUCHED[self.kernel]:
                found.setdefault(place(x), name)
        return {name: self.tensors[name] for name in found.values()}


def moved_by(launches: list[Launch]) -> int:
    """The bytes of the tensors that a kernel touches in some launches, each counted once."""
    touched = {place(x): x for launch in launches for x in launch.touched().values()}
    return sum(x.numel() * x.element_size() for x in touched.values())


def place(x: Tensor) -> tuple[int, int, int]:
    """The same for two views of the same elements, also of tensors without memory."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.numel()


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an argument of a kernel: in bundles, and behind descriptors."""
    if isinstance(value, Tensor):
        yield name, value
    elif hasattr(value, "block_shape"):
        yield name, value.base
    elif isinstance(value, tuple):
        members = getattr(value, "_fields", range(len(value)))
        for member, x in zip(members, value, strict=True):
            yield from tensors_in(f"{name}.{member}", x)


def name_of(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or kernel.fn.__name__)


def arguments(kernel: Any, given: tuple, named: dict[str, Any]) -> Tensors:
    """All tensors that a launch is given, by name."""
    values = {**dict(zip(kernel.arg_names, given, strict=False)), **named}
    return dict(pair for name, x in values.items() for pair in tensors_in(name, x))


def rehearsed(shape: Shape) -> list[Launch]:
    """The launches of a forward and a backward of KDA, in their order, as the Triton backend that
    is in use would make them on a GPU."""
    import fla_cp
    from benchmarks.tune import now
    from fla_cp.kernels import using
    from fla_cp.kernels.triton.launch import redirected

    found: list[Launch] = []
    direction = "forward"

    def note(kernel: Any, grid: tuple, *given: Any, **named: Any) -> None:
        found.append(Launch(direction, name_of(kernel), arguments(kernel, given, named)))

    x, do = draws(MEMBERS["kda"], shape, "meta")
    backend = now()
    sms = backend.tuning.sm_count(torch.device("cuda" if torch.cuda.is_available() else "meta"))
    backend = replace(backend, tuning=replace(backend.tuning, sms=sms), one_stream=True)
    with using(backend), redirected(note):
        o, _ = fla_cp.chunk_kda(**x, **options(MEMBERS["kda"], shape), impl="triton")
        direction = "backward"
        torch.autograd.grad(o, list(x.values()), do)
    return found


class Span(NamedTuple):
    """When a kernel ran on the device, in microseconds."""

    kernel: str
    start: float
    end: float


def profiled(f: Callable[[], object], kernels: set[str]) -> list[Span]:
    """Spans of these kernels in WARM + CALLS calls, in the order in which they began."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(WARM + CALLS):
            f()
        torch.cuda.synchronize()
    spans = []
    for event in seen.events():
        name = next((k for k in kernels if event.name.startswith(k)), None)
        if event.device_type == torch.autograd.DeviceType.CUDA and name is not None:
            spans.append(Span(name, event.time_range.start, event.time_range.end))
    return sorted(spans, key=lambda span: span.start)


def union(spans: list[Span]) -> float:
    """How long at least one of the kernels runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def by_stage(launches: list[Launch], spans: list[Span]) -> dict[str, float]:
    """Milliseconds of each stage in one call, whose spans these are. Raises ValueError if a profile
    has other kernels than the rehearsal."""
    names = [[x.kernel for x in some] for some in (launches, spans)]
    if sorted(names[0]) != sorted(names[1]):
        raise ValueError(f"a call ran {names[1]}, but its rehearsal {names[0]}")
    forward = sum(x.direction == "forward" for x in launches)
    found: dict[str, list[Span]] = {x.stage: [] for x in launches}
    for n, span in enumerate(spans):
        direction = "forward" if n < forward else "backward"
        found[STAGES.get((direction, span.kernel), "other kernels")].append(span)
    return {stage: union(some) / 1e3 for stage, some in found.items()}


def floors(launches: list[Launch], gb_s: float) -> list[dict[str, Any]]:
    """For each stage, in their order, its kernels, the GB that they move at least, and the time of
    these at a bandwidth in GB/s."""
    rows = []
    for stage in dict.fromkeys(x.stage for x in launches):
        own = [x for x in launches if x.stage == stage]
        kernels = [x.kernel for x in own]
        groups = [[x for x in own if x.kernel == name] for name in dict.fromkeys(kernels)]
        gb = sum(map(moved_by, groups)) / 1e9
        rows.append({"stage": stage, "kernels": kernels, "gb": gb, "floor_ms": 1e3 * gb / gb_s})
    return rows


def stages(f: Callable[[], object], shape: Shape, gb_s: float) -> list[dict[str, Any]]:
    """Rows of `floors` with the times of a call f of KDA, forward and backward, on a GPU: medians
    of CALLS calls. Raises ValueError or KeyError if the call's kernels are not those of STAGES."""
    launches = rehearsed(shape)
    rows = floors(launches, gb_s)
    spans, count = profiled(f, {x.kernel for x in launches}), len(launches)
    if len(spans) != count * (WARM + CALLS):
        raise ValueError(f"{WARM + CALLS} calls of {count} kernels ran {len(spans)}")
    calls = [spans[n : n + count] for n in range(count * WARM, len(spans), count)]
    times = [by_stage(launches, call) for call in calls]
    for row in rows:
        ms = statistics.median(time[row["stage"]] for time in times)
        row |= {"ms": ms, "over_floor": ms / row["floor_ms"]}
    return rows
