"""Operators beside their peers with strong, drawn and weak decays, all in one run.

    python -m benchmarks.decays [--op kda,gdn] [--peers fla,cudnn,flashqla] [--out FILE] [--warm]

T = 32768, 32 heads, K = V = 128, one document. KDA has norm, gate and sigmoid inside and a safe
gate; its peers are FLA and cuDNN (`benchmarks.cudnn_peer` says what is timed of that). The gated
delta rule takes log decays and beta, with the norm inside; its peers are FlashQLA and FLA. FLA runs
its own Triton kernels: it could also take others, which a run with TileLang would find installed.
`benchmarks.members.DECAYS` says what the decays are.

For each kind of decay, the results of all are compared with ours; then all are timed in turn, twice
(TURNS). A peer that is missing or fails has rows with the reason. For KDA the stages of a call are
timed, too, beside the time that their traffic takes at a copy's bandwidth (`benchmarks.traffic`).
--warm only makes the peers' first calls, which leave compiled kernels in the caches on disk.

Peers' kernels are compiled before ours are imported, like in `benchmarks.ops`. On a machine without
a GPU a tiny shape runs on the torch stages.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import units
from benchmarks.members import DECAYS, MEMBERS, draws, log_decay, peer
from benchmarks.ops import (
    Call,
    bandwidth,
    compare,
    compiled_together,
    environment,
    milliseconds,
    runner,
)
from benchmarks.shapes import SHAPES, Shape

TURNS = 2
"""How often everything is timed, in turn."""

UNIT = units.DECAYS
PEERS = {"kda": ("fla", "cudnn"), "gdn": ("flashqla", "fla")}
OURS = {"kda": ("fla_cp", "fla_cp-kept"), "gdn": ("fla_cp",)}
"""fla_cp-kept: with `disable_recompute`."""

PACKAGES = {
    "fla": ("fla-core",),
    "cudnn": ("nvidia-cudnn-frontend",),
    "flashqla": ("flash-qla", "tilelang"),
}
"""The distributions whose versions a result names."""

LARGEST = 2e-2
"""Relative difference of o above which a peer computes something else, and is not timed."""

DIRECTIONS = ("forward", "both")


class Side(NamedTuple):
    """Calls of one implementation; `results` are o and the gradients of the inputs, in order."""

    forward: Callable[[], tuple[Tensor, ...]]
    both: Callable[[], tuple[Tensor, ...]]
    results: Callable[[], tuple[Tensor, ...]]


class First(NamedTuple):
    """What became of the first calls of an implementation: their seconds, the directions in which
    it runs, and why it lacks others."""

    seconds: float
    directions: tuple[str, ...]
    reason: str = ""


def side(who: str, op: str, shape: Shape, device: str, decay: str) -> Side:
    """Raises ImportError, SystemExit or whatever a peer raises if it cannot run."""
    member = MEMBERS[op]
    if who == "cudnn":
        from benchmarks.cudnn_peer import Cudnn

        cudnn = Cudnn(member, *draws(member, shape, device, decay))
        return Side(cudnn.forward, cudnn.both, cudnn.results)
    call: Call
    more = {"disable_recompute": True} if who == "fla_cp-kept" else {}
    if who.startswith("fla_cp"):
        import fla_cp

        call = getattr(fla_cp, member.ours)
    else:
        call = peer(member, who)
    run = runner(call, member, shape, device, decay, **more)
    return Side(run["forward"], run["both"], run["both"])


def first_calls(who: str, op: str, shape: Shape, device: str) -> First:
    """Compiles, and tunes, what an implementation needs. Decays decide on no kernel."""
    started, works, reason = time.perf_counter(), list[str](), ""
    try:
        calls = side(who, op, shape, device, "drawn")
        for direction in DIRECTIONS:
            getattr(calls, direction)()
            synchronize(device)
            works.append(direction)
    except (Exception, SystemExit) as error:
        reason = why(error)
    return First(round(time.perf_counter() - started, 1), tuple(works), reason)


def why(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines()
    text = lines[0][:400] if lines else "no message"
    return text if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def differences(theirs: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> dict[str, float]:
    """Relative differences in norms: of o, and the largest one of the gradients if there are any.
    theirs may be o alone."""
    o, *grads = (compare((a,), (b,)) for a, b in zip(theirs, ours, strict=False))
    return {"o": o} | ({"gradients": max(grads)} if grads else {})


def measured(
    op: str, decay: str, shape: Shape, device: str, first: dict[str, First]
) -> list[dict[str, Any]]:
    """The rows of an operator and a kind of decays. first: of ours, then of the peers."""
    member = MEMBERS[op]
    x, _ = draws(member, shape, device, decay)
    mean = log_decay(member, x).mean().item()
    del x
    rows: dict[str, dict[str, Any]] = {}
    sides, expected = dict[str, Side](), tuple[Tensor, ...]()
    for who, found in first.items():
        row: dict[str, Any] = {"operator": op, "decay": decay, "op": who, "mean_log_decay": mean}
        row |= {"first_call_s": found.seconds, "reason": found.reason}
        rows[who] = row
        if not found.directions:
            continue
        if who == "fla_cp":
            sides[who] = side(who, op, shape, device, decay)
            expected = tuple(t.detach().clone() for t in sides[who].results())
            continue
        try:
            calls = side(who, op, shape, device, decay)
            results = calls.results if "both" in found.directions else calls.forward
            row["difference"] = differences(results(), expected)
        except Exception as error:
            row["reason"] = why(error)
            continue
        if row["difference"]["o"] <= LARGEST:
            sides[who] = calls
        else:
            row["reason"] = f"o differs from ours by {row['difference']['o']:.1e}"
    del expected
    for turn in range(TURNS):
        for who, calls in sides.items():
            for direction in first[who].directions:
                ms = milliseconds(getattr(calls, direction), device)
                rows[who].setdefault(direction, []).append(round(ms, 4))
            said = ", ".join(f"{d} {rows[who][d][turn]:.3f}" for d in first[who].directions)
            print(f"{op}, {decay}, turn {turn + 1}, {who}: {said} ms", flush=True)
    for row in rows.values():
        if row["reason"]:
            print(f"{op}, {decay}, {row['op']}: {row['reason']}", flush=True)
    return list(rows.values())


def versions(peers: list[str]) -> dict[str, str]:
    found = {}
    for name in (name for who in peers for name in PACKAGES.get(who, ())):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def timed_stages(shape: Shape, gb_s: float) -> dict[str, Any]:
    """The stages of KDA with drawn decays, or why there are none."""
    from benchmarks.traffic import stages

    call = side("fla_cp", "kda", shape, "cuda", "drawn").both
    try:
        return {"stages": stages(call, shape, gb_s)}
    except (KeyError, ValueError) as error:
        return {"no_stages": f"{type(error).__name__}: {error}"}


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = [f"{d} {' / '.join(f'{ms:.3f}' for ms in row[d])}" for d in DIRECTIONS if d in row]
        cells += [f"{part} apart {x:.1e}" for part, x in row.get("difference", {}).items()]
        cells += [row["reason"]] * bool(row["reason"])
        lines.append(f"{row['operator']:4} {row['decay']:7} {row['op']:12} {'; '.join(cells)}")
    return "\n".join(lines)


def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """For argparse: names separated by commas, of those that are known."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return found

    return parse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decays", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--op", type=names(tuple(PEERS)), default=list(PEERS))
    parser.add_argument("--peers", type=names(tuple(PACKAGES)), default=list(PACKAGES))
    parser.add_argument("--warm", action="store_true", help="only the peers' first calls")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES["target" if device == "cuda" else "cpu"]
    for name in ("FLA_TILELANG", "FLA_FLASH_QLA"):
        os.environ.setdefault(name, "0")

    first: dict[str, dict[str, First]] = {op: {} for op in args.op}

    def begin(op: str, who: str) -> None:
        first[op][who] = found = first_calls(who, op, shape, device)
        said = f": {found.reason}" if found.reason else ""
        print(f"{op}, first calls of {who}: {found.seconds} s{said}", flush=True)
        gc.collect()

    with compiled_together(device):
        for op in args.op:
            for who in (who for who in PEERS[op] if who in args.peers):
                begin(op, who)
    if args.warm:
        return 0
    report: dict[str, Any] = {**environment(), "unit": UNIT, "benchmark": "decays"}
    report |= {"ops": args.op, "peers": args.peers, "shape": shape.name, "rows": []}
    report |= {"versions": versions(args.peers), "gb_s": bandwidth(device)}
    print(f"a copy moves {report['gb_s']['copy']:.0f} GB/s", flush=True)

    def keep() -> None:
        if args.out:  # after each kind of decays, since a run may be stopped
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    for op in args.op:
        theirs, first[op] = first[op], {}
        for who in OURS[op]:
            begin(op, who)
        first[op] |= theirs
        for decay in DECAYS:
            report["rows"] += measured(op, decay, shape, device, first[op])
            keep()
        if op == "kda" and device == "cuda":
            report |= timed_stages(shape, report["gb_s"]["copy"])
            keep()
    print(table(report["rows"]))
    for row in report.get("stages", []):
        print(
            f"{row['stage']:30} {row['ms']:.3f} ms, floor {row['floor_ms']:.3f} "
            f"({row['gb']:.2f} GB), {row['over_floor']:.2f}x"
        )
    if "no_stages" in report:
        print(f"no stages: {report['no_stages']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
