"""What changed between two results of `benchmarks.ops`, as a Markdown table.

    python -m benchmarks.compare BASE.json HEAD.json [--threshold 0.05] [--plot PLOT.png]

PLOT has a bar for everything that both measured, changed or not. Exits with 1 if anything is slower
by more than the threshold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def times(path: Path) -> dict[tuple[str, str, str], float]:
    """ms by (op, shape, what)."""
    rows = json.loads(path.read_text())["rows"]
    both = ("forward", "both")
    found = {(r["op"], r["shape"], w): r[w]["ms"] for r in rows for w in both if w in r}
    for r in rows:
        for stage, ms in r.get("stages", {}).items():
            found[r["op"], r["shape"], stage] = ms
    return found


def compare(
    base: dict[tuple[str, str, str], float],
    head: dict[tuple[str, str, str], float],
    threshold: float,
) -> tuple[list[str], bool]:
    """Lines of the table, and whether anything became slower."""
    lines = ["| op | shape | what | base ms | head ms | change |", "|---|---|---|---|---|---|"]
    slower = False
    for key in sorted(base.keys() | head.keys()):
        if key not in base or key not in head:
            where = "head" if key in head else "base"
            lines.append(f"| {' | '.join(key)} | | | only in {where} |")
            continue
        change = head[key] / base[key] - 1
        if abs(change) > threshold:
            slower |= change > 0
            lines.append(
                f"| {' | '.join(key)} | {base[key]:.3f} | {head[key]:.3f} | {change:+.1%} |"
            )
    return lines, slower


def plot(
    base: dict[tuple[str, str, str], float],
    head: dict[tuple[str, str, str], float],
    threshold: float,
    out: Path,
) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("plots need matplotlib: pip install 'fla_cp[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = sorted(base.keys() & head.keys(), reverse=True)
    change = [100 * (head[key] / base[key] - 1) for key in keys]
    color = {True: "C3", False: "C2"}
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.25 * len(keys)))
    axis.barh(
        [" ".join(key) for key in keys],
        change,
        color=[color[c > 0] if abs(c) > 100 * threshold else "C7" for c in change],
    )
    for edge in (-100 * threshold, 100 * threshold):
        axis.axvline(edge, color="C7", linestyle=":")
    axis.set_xlabel("change of time, % (red: slower, green: faster)")
    figure.savefig(out, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    base, head = times(args.base), times(args.head)
    lines, slower = compare(base, head, args.threshold)
    print("\n".join(lines))
    if args.plot:
        plot(base, head, args.threshold, args.plot)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
