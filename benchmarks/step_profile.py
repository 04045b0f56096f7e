"""What the GPU does in a step: a profile of a few steps, and its summary."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.timeline import EXCHANGE, kind

PROFILED = 2
"""Steps of a profile."""

TOP = 30
"""Kernels of a profile that are kept, by time, and those that the device waits for, alike."""

Row = dict[str, Any]


def profile(step: Callable[[], object], wait: Callable[[], None], on_gpu: bool) -> Row:
    """The `summary` of PROFILED steps of this process.

    wait: returns when the device has nothing left to do. on_gpu: whether GPU kernels are recorded;
    otherwise it is torch's operators on the CPU. Operators of the host are not recorded beside
    kernels, since that would delay the host.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorder

    with recorder(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        wait()
        begin = time.perf_counter()
        for _ in range(PROFILED):
            step()
        wait()
        wall_ms = 1e3 * (time.perf_counter() - begin)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return summary(events, "kernel" if on_gpu else "cpu_op", wall_ms, PROFILED)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(events: Iterable[Row], category: str, wall_ms: float, steps: int) -> Row:
    """The summary of a trace of `steps` steps that took wall_ms together.

    events: those of a profiler's trace, with times in microseconds; only those of the category are
    read, each a kernel here.
    Returns wall_ms: of a step. calls: how many kernels a step has. busy: the share of the wall time
    in which at least one kernel runs. computing: the same without kernels that exchange data
    between GPUs, which also wait for other GPUs. kinds: ms a step by kind of kernel
    (`benchmarks.timeline.kind`); kernels that run at the same time all count. kernels: the TOP
    names by time, with ms and calls a step. idle: ms a step in which no kernel runs, by the name of
    the kernel that ends the wait, the TOP ones.
    """
    spans = [
        ((e["ts"], e["ts"] + e["dur"]), e["name"])
        for e in events
        if e.get("cat") == category and "dur" in e
    ]
    times: defaultdict[str, float] = defaultdict(float)
    kinds: defaultdict[str, float] = defaultdict(float)
    for (start, end), name in spans:
        times[name] += (end - start) / 1e3 / steps
        kinds[kind(name)] += (end - start) / 1e3 / steps
    calls = Counter(name for _, name in spans)
    top = sorted(times, key=lambda name: -times[name])[:TOP]
    idle = idle_before(spans)
    computing = [span for span, name in spans if kind(name) != EXCHANGE]
    return {
        "steps": steps,
        "wall_ms": round(wall_ms / steps, 2),
        "calls": len(spans) / steps,
        "busy": round(covered(span for span, _ in spans) / 1e3 / wall_ms, 4),
        "computing": round(covered(computing) / 1e3 / wall_ms, 4),
        "kinds": {name: round(ms, 2) for name, ms in sorted(kinds.items(), key=lambda x: -x[1])},
        "kernels": [
            {"name": name, "ms": round(times[name], 3), "calls": calls[name] / steps}
            for name in top
        ],
        "idle": {
            name: round(us / 1e3 / steps, 3)
            for name, us in sorted(idle.items(), key=lambda x: -x[1])[:TOP]
        },
    }


def idle_before(spans: Iterable[tuple[tuple[float, float], str]]) -> dict[str, float]:
    """Time in which nothing runs, by the name of what runs next; from spans ((start, end), name).
    The time before the first span does not count."""
    found: defaultdict[str, float] = defaultdict(float)
    reached = math.inf
    for (start, end), name in sorted(spans):
        if start > reached:
            found[name] += start - reached
        reached = end if reached == math.inf else max(reached, end)
    return dict(found)


def shown(found: Row) -> str:
    """A `summary` as lines of text."""
    lines = [
        f"profile of {found['steps']} steps of {found['wall_ms']:.1f} ms each: "
        f"{found['calls']:.0f} kernels run in {100 * found['busy']:.1f}% of it, "
        f"without exchanges {100 * found['computing']:.1f}%",
        ", ".join(f"{name} {ms:.1f} ms" for name, ms in found["kinds"].items()),
    ]
    for kernel in found["kernels"]:
        lines.append(f"{kernel['ms']:>10.3f} ms {kernel['calls']:>8.1f} calls  {kernel['name']}")
    lines += [f"{ms:>10.3f} ms idle before {name}" for name, ms in found["idle"].items()]
    return "\n".join(lines)
