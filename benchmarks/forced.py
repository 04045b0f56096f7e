"""Whole calls with the tiles that they choose and with others, in turn, on a GPU.

    python -m benchmarks.forced --tiles intra_any=STEEP,intra_bwd=QUARTERS_BWD --shapes target-any

Times are the device's, as in `benchmarks.ops`. Each side is measured twice, so that one sees by how
much two measurements of the same differ. The results of both sides are compared, too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from benchmarks import ops, tune
from benchmarks.members import MEMBERS
from benchmarks.report_tables import number, ratio, table
from benchmarks.shapes import SHAPES, Shape
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.tile_table import Tile

TURNS = 2
THRESHOLD = "chunks times heads above which {} kernels are Gluon's"


def tiles_of(text: str) -> dict[str, Tile]:
    """`stage=NAME,..` with names of tile_table.py. Raises SystemExit for unknown ones."""
    found = {}
    for part in text.split(","):
        stage, _, name = part.partition("=")
        tile = getattr(tile_table, name, None)
        if stage not in tune.STAGES or not isinstance(tile, Tile):
            known = [n for n, x in vars(tile_table).items() if isinstance(x, Tile)]
            raise SystemExit(
                f"--tiles must be STAGE=TILE,.. with a stage of {', '.join(tune.STAGES)} and a "
                f"tile of {', '.join(known)}, got {part!r}"
            )
        found[stage] = tile
    return found


def shape_of(text: str) -> Shape:
    """A named shape, or `TxH` or `TxH-any`: tokens, heads, and any gate instead of a safe one.
    Raises SystemExit for others."""
    if text in SHAPES:
        return SHAPES[text]
    found = re.fullmatch(r"(\d+)x(\d+)(-any)?", text)
    if found is None:
        raise SystemExit(f"--shapes must be of {', '.join(SHAPES)}, TxH or TxH-any, got {text!r}")
    T, H = int(found[1]), int(found[2])
    return Shape(text, T, H=H, HV=H, safe=found[3] is None)


def measure(
    name: str, shape: str, tiles: dict[str, Tile], thresholds: dict[str, int | None], device: str
) -> dict:
    """A row: ms of each turn by direction and side, and how much the results differ."""
    import fla_cp

    member = MEMBERS[name]
    run = ops.runner(getattr(fla_cp, member.ours), member, shape_of(shape), device)
    sides: dict[str, Callable[[], AbstractContextManager]] = {
        "chosen": nullcontext,
        "forced": lambda: tune.forced(tiles, **thresholds),
    }
    row: dict = {"op": name, "shape": shape}
    results = {}
    for side, block in sides.items():
        with block():
            run["both"]()  # compiles
            results[side] = tuple(x.detach().clone() for x in run["both"]())
    row["difference"] = float(f"{ops.compare(results['forced'], results['chosen']):.3g}")
    del results
    for direction in ("forward", "both"):
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(TURNS):
            for side, block in sides.items():
                with block():
                    run[direction]()
                    times[side].append(round(ops.milliseconds(run[direction], device), 4))
        row[direction] = times
    print(f"{name} {shape}: {row}", flush=True)
    return row


def shown(rows: list[dict]) -> str:
    """A table of rows. Its ratios are those of the least times."""

    def cells(row: dict) -> list[str]:
        found = [row["op"], row["shape"]]
        for direction in ("forward", "both"):
            chosen, forced = (row[direction][side] for side in ("chosen", "forced"))
            found += [" ".join(map(number, x)) for x in (chosen, forced)]
            found.append(ratio(min(chosen) / min(forced)))
        return [*found, f"{row['difference']:.2g}"]

    head = ["op", "shape"]
    for direction in ("forward", "forward + backward"):
        head += [f"{direction}, ms", "forced, ms", "ratio"]
    return table([*head, "difference"], map(cells, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forced", description=__doc__, allow_abbrev=False
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = "cpu" if device == "cpu" else "target-any"
    parser.add_argument("--tiles", default="", help="STAGE=TILE,.. with names of tile_table.py")
    parser.add_argument("--threshold", type=int, help=THRESHOLD.format("local"))
    parser.add_argument("--threshold-of-all", type=int, help=THRESHOLD.format("all"))
    parser.add_argument("--op", default="kda", help=f"of {', '.join(MEMBERS)}; several by commas")
    parser.add_argument("--shapes", default=default, help=f"of {', '.join(SHAPES)}; TxH; TxH-any")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tiles = tiles_of(args.tiles) if args.tiles else {}
    thresholds = {"min_local_chunk_heads": args.threshold, "min_chunk_heads": args.threshold_of_all}
    if not tiles and set(thresholds.values()) == {None}:
        parser.error("--tiles, --threshold or --threshold-of-all must be given")
    rows: list[dict] = []
    for name in args.op.split(","):
        for shape in args.shapes.split(","):
            rows.append(measure(name, shape, tiles, thresholds, device))
            if args.out:  # after each row, since a run may be stopped
                facts = {"tiles": args.tiles, **thresholds, "rows": rows}
                args.out.write_text(json.dumps({**ops.environment(), **facts}, indent=1) + "\n")
    print(shown(rows))


if __name__ == "__main__":
    main()
