"""A picture of the kernels of profiler traces, stream by stream: of the middle one of their steps.

    python -m benchmarks.timeline RANK0.json [RANK1.json ..] --out PLOT.png [--title TEXT]

Traces are what `python -m benchmarks.cp_scaling --trace` writes, and on GPUs --profile of the
trainer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXCHANGE, OTHER = "exchange", "elementwise, norms"
KINDS = {
    "nccl": EXCHANGE,
    "symmetric_memory": EXCHANGE,
    "exchange": EXCHANGE,
    "scan": "scans, folds",
    "fold": "scans, folds",
    "intra": "local to a chunk",
    "scores": "local to a chunk",
    "safe_bwd": "local to a chunk",
    "gated_kernel": "local to a chunk",
    "conv": "convolution",
    "adam": "optimiser",
    "nvjet": "projections",
    "gemm": "projections",
    "kernel_h_": "scans, folds",  # FLA's
    "chunk_": "local to a chunk",  # FLA's
}
"""Kinds of kernels by a part of their name; the first part that occurs decides."""


def kind(name: str) -> str:
    return next((shown for part, shown in KINDS.items() if part in name.lower()), OTHER)


Row = tuple[int, float, float, str]
"""Stream, start and duration in ms, what it is: one of KINDS or OTHER."""


def kernels(trace: dict) -> list[Row]:
    """The kernels of the middle step, from its first one on.

    Other operations on an exchange's stream (copies to and from peers' memory) count as exchange.
    """
    found = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    steps = int(trace.get("steps", 1))
    if not found or len(found) % steps:
        raise SystemExit(
            f"the trace's {len(found)} GPU kernels are not those of {steps} equal steps"
        )
    found.sort(key=lambda e: e["args"]["correlation"])  # in the order of launches
    each = len(found) // steps
    found = found[steps // 2 * each : (steps // 2 + 1) * each]
    kinds: dict[int, set[str]] = {}
    for e in found:
        kinds.setdefault(e["args"]["stream"], set()).add(kind(e["name"]))
    of_exchange = {n for n, of in kinds.items() if EXCHANGE in of and of <= {EXCHANGE, OTHER}}

    def what(e: dict) -> str:
        return EXCHANGE if e["args"]["stream"] in of_exchange else kind(e["name"])

    first = min(e["ts"] for e in found)
    return sorted(
        (e["args"]["stream"], (e["ts"] - first) / 1e3, e["dur"] / 1e3, what(e)) for e in found
    )


def union(rows: list[Row], exchange: bool) -> list[tuple[float, float]]:
    """Disjoint intervals in which an exchange runs, or, if not `exchange`, anything else."""
    found: list[tuple[float, float]] = []
    for a, b in sorted((a, a + d) for _, a, d, what in rows if (what == EXCHANGE) == exchange):
        if found and a <= found[-1][1]:
            a, b = found[-1][0], max(b, found.pop()[1])
        found.append((a, b))
    return found


def hidden(rows: list[Row]) -> tuple[float, float]:
    """ms in which an exchange runs, including waits for other ranks, and how many of them overlap
    others.
    """
    exchange, others = union(rows, True), union(rows, False)
    beside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchange for c, d in others)
    return sum(b - a for a, b in exchange), beside


def plot(traces: dict[str, list[Row]], out: Path, title: str) -> None:
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
            of = [(streams.index(s), a, d) for s, a, d, found in rows if found == what]
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timeline", description=__doc__, allow_abbrev=False
    )
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
