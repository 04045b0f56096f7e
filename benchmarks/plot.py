"""Bars of one result of `benchmarks.ops`: each shape's time by op, and the stages if it has them.

python -m benchmarks.plot RESULT.json --out PLOT.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def plot(result: dict, out: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("plots need matplotlib: pip install 'fla_cp[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    plot(json.loads(args.result.read_text()), args.out)


if __name__ == "__main__":
    main()
