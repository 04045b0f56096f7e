"""A picture of the kernels of profiler traces, stream by stream: of the middle one of their steps.

    python -m benchmarks.timeline RANK0.json [RANK1.json ..] --out PLOT.png [--title TEXT]

Traces are what `python -m benchmarks.cp_scaling --trace` writes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

KINDS = {
    "nccl": "exchange",
    "symmetric_memory": "exchange",
    "scan": "scans, folds",
    "walk": "scans, folds",
    "intra": "local to a chunk",
    "scores": "local to a chunk",
    "conv": "convolution",
    "nvjet": "projections",
    "gemm": "projections",
}
OTHER = "elementwise, norms"


def kind(name: str) -> str:
    return next((shown for part, shown in KINDS.items() if part in name.lower()), OTHER)


def kernels(trace: dict) -> list[tuple[int, float, float, str]]:
    """(stream, start, duration, name) of each kernel, in ms from the first."""
    found = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    if not found:
        raise SystemExit("the trace has no GPU kernels")
    found.sort(key=lambda e: e["args"]["correlation"])  # as they were launched
    steps = int(trace.get("steps", 1))
    each = len(found) // steps
    found = found[steps // 2 * each : (steps // 2 + 1) * each]
    first = min(e["ts"] for e in found)
    return sorted(
        (e["args"]["stream"], (e["ts"] - first) / 1e3, e["dur"] / 1e3, e["name"]) for e in found
    )


def hidden(rows: list[tuple[int, float, float, str]]) -> tuple[float, float]:
    """ms of the exchange's kernels, and of those the part beside others."""
    exchange = [(a, a + d) for _, a, d, name in rows if kind(name) == KINDS["nccl"]]
    others = sorted((a, a + d) for _, a, d, name in rows if kind(name) != KINDS["nccl"])
    beside, end = 0.0, 0.0
    for a, b in others:  # each moment once, however many kernels run in it
        a, end = max(a, end), max(b, end)
        beside += sum(max(0.0, min(b, y) - max(a, x)) for x, y in exchange)
    return sum(b - a for a, b in exchange), beside


def plot(traces: dict[str, list[tuple[int, float, float, str]]], out: Path, title: str) -> None:
    """Rows of kernels by the name of their trace, one below the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [len({stream for stream, *_ in rows}) for rows in traces.values()]
    figure, axes = plt.subplots(
        len(traces),
        figsize=(13, sum(0.6 + 0.6 * n for n in sizes)),
        height_ratios=sizes,
        sharex=True,
        squeeze=False,
    )
    shown = list(dict.fromkeys([*KINDS.values(), OTHER]))
    for axis, (name, rows) in zip(axes[:, 0], traces.items(), strict=True):
        streams = sorted({stream for stream, *_ in rows})
        for n, what in enumerate(shown):
            of = [(streams.index(s), a, d) for s, a, d, kernel in rows if kind(kernel) == what]
            for lane, start, duration in of:
                axis.broken_barh([(start, duration)], (lane - 0.4, 0.8), color=f"C{n}")
            axis.broken_barh([], (0, 0), color=f"C{n}", label=what)
        axis.set_yticks(range(len(streams)), [f"stream {s}" for s in streams])
        axis.set_ylabel(name)
    axes[0, 0].set_title(title)
    axes[-1, 0].set_xlabel("ms")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(shown), fontsize="small", loc="lower center")
    figure.subplots_adjust(bottom=0.2)
    figure.savefig(out, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    traces = {}
    for n, path in enumerate(args.traces):
        traces[f"rank {n}"] = kernels(json.loads(path.read_text()))
        found = hidden(traces[f"rank {n}"])
        print("{}: exchange {:.3f} ms, {:.3f} beside other kernels".format(path.name, *found))
    plot(traces, args.out, args.title)


if __name__ == "__main__":
    main()
