"""A picture of one result of `benchmarks.ops`, `benchmarks.train` or `benchmarks.decays`.

    python -m benchmarks.plot RESULT.json --out PLOT.png

Of an operator: bars of each shape's time by op, and of its stages if the result has them. Of
training steps: tokens/s over GPUs, and the time of a step by kind of kernel if it was profiled. Of
operators by decay: their times, and into PLOT-stages.png the stages beside their floors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import report_decays


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises SystemExit without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("plots need matplotlib: pip install 'fla_cp[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(result: dict, out: Path) -> None:
    """Draws a result of `benchmarks.ops`."""
    plt = pyplot()
    rows = result["rows"]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    ops = list(dict.fromkeys(r["op"] for r in rows))
    staged = [r for r in rows if r.get("stages")]
    timed = [w for w in ("forward", "both") if any(w in r for r in rows)]
    panels = len(timed) + bool(staged)
    figure, ((*axes,),) = plt.subplots(1, panels, figsize=(0.5 + 5.2 * panels, 4), squeeze=False)
    for axis, what in zip(axes, timed, strict=False):
        for n, op in enumerate(ops):
            ms = {r["shape"]: r[what]["ms"] for r in rows if r["op"] == op and what in r}
            here = [i + 0.8 * n / len(ops) for i, s in enumerate(shapes) if s in ms]
            axis.bar(here, list(ms.values()), 0.8 / len(ops), align="edge", label=op)
        axis.set_xticks([i + 0.4 for i in range(len(shapes))], shapes, rotation=30, ha="right")
        axis.set_yscale("log")
        axis.set_ylabel("ms")
        axis.set_title("forward" if what == "forward" else "forward + backward")
        axis.legend()
    for n, r in enumerate(staged):
        at = 0.0
        for m, (stage, ms) in enumerate(r["stages"].items()):
            label = stage.removesuffix("_any").removesuffix("_head") if n == 0 else None
            axes[-1].bar(n, ms, bottom=at, color=f"C{m}", label=label)
            at += ms
    if staged:
        axes[-1].set_xticks(
            range(len(staged)), [r["shape"] for r in staged], rotation=30, ha="right"
        )
        axes[-1].set_ylabel("ms")
        axes[-1].set_title("stages")
        axes[-1].legend(fontsize="small")
    figure.suptitle(
        f"{result.get('operator', 'kda')}, bf16, {result.get('gpu', 'CPU')}, {result['date']}"
    )
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def plot_steps(result: dict, out: Path) -> None:
    """Draws a result of `benchmarks.train`. Dotted lines are the ideal from one GPU on."""
    plt = pyplot()
    rows = [r for r in result["rows"] if "tokens_per_second" in r]
    profiled = [r for r in rows if "profile" in r]
    panels = 1 + bool(profiled)
    figure, ((*axes,),) = plt.subplots(1, panels, figsize=(6.5 * panels, 4.5), squeeze=False)
    lines: dict[str, list[tuple[int, float]]] = {}
    for r in rows:
        lines.setdefault(step_name(r), []).append((r["gpus"], r["tokens_per_second"]))
    for n, (name, points) in enumerate(lines.items()):
        gpus, speeds = zip(*sorted(points), strict=True)
        axes[0].plot(gpus, speeds, "o-", color=f"C{n}", label=name)
        ideal = [speeds[0] * count / gpus[0] for count in gpus]
        axes[0].plot(gpus, ideal, ":", color=f"C{n}")
    counts = sorted({r["gpus"] for r in rows})
    axes[0].set_xticks(counts, [str(count) for count in counts])
    axes[0].set(xlabel="GPUs", ylabel="tokens/s (dotted: ideal)", ylim=(0, None))
    axes[0].legend(fontsize="small")
    kinds = list(dict.fromkeys(kind for r in profiled for kind in r["profile"]["kinds"]))
    at = [0.0] * len(profiled)
    for n, kind in enumerate(kinds):
        ms = [r["profile"]["kinds"].get(kind, 0.0) for r in profiled]
        axes[1].barh(range(len(profiled)), ms, left=at, color=f"C{n}", label=kind)
        at = [a + b for a, b in zip(at, ms, strict=True)]
    if profiled:
        names = [f"{step_name(r)}, {r['gpus']} GPU{'s' * (r['gpus'] > 1)}" for r in profiled]
        axes[1].set_yticks(range(len(profiled)), names, fontsize="small")
        axes[1].invert_yaxis()
        axes[1].set_xlabel("ms a step, by kind of kernel")
        axes[1].legend(fontsize="small")
    figure.suptitle(f"training steps, {result.get('gpu', 'CPU')}, {result['date']}")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def plot_decays(result: dict, out: Path) -> None:
    """Draws a result of `benchmarks.decays`."""
    report_decays.pictures(pyplot(), result, out)


def step_name(row: dict) -> str:
    """Whose model, which one, and on what, in a few words."""
    who = {"fla_cp": "", "fla": "FLA "}[row["who"]]
    packed = ", packed" if row["data"] == "packed" else ""
    flags = f" {row['flags']}" if row["flags"] else ""
    return f"{who}{row['model']}, {row['tokens']} tokens{packed}{flags}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    kinds = {"train": plot_steps, "decays": plot_decays}
    kinds.get(result.get("benchmark"), plot)(result, args.out)


if __name__ == "__main__":
    main()
