"""What changed between two results of `benchmarks.ops`, as a Markdown table.

    python -m benchmarks.compare BASE.json HEAD.json [--threshold 0.05]

Exits with 1 if anything is slower by more than the threshold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def times(path: Path) -> dict[tuple[str, str, str], float]:
    """ms by (op, shape, what)."""
    rows = json.loads(path.read_text())["rows"]
    found = {(r["op"], r["shape"], w): r[w]["ms"] for r in rows for w in ("forward", "both")}
    for r in rows:
        for stage, ms in r.get("stages", {}).items():
            found[r["op"], r["shape"], stage] = ms
    return found


def compare(
    base: dict[tuple[str, str, str], float],
    head: dict[tuple[str, str, str], float],
    threshold: float,
) -> tuple[list[str], bool]:
    """Lines of the table, and whether anything got slower."""
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05)
    args = parser.parse_args()
    lines, slower = compare(times(args.base), times(args.head), args.threshold)
    print("\n".join(lines))
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
