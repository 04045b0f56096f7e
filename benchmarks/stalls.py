"""Why warps of a call's kernels wait, by Nsight Compute, on a GPU whose counters it may read.

    python -m benchmarks.stalls --op kda --shape 16384x32 [--kernels 'intra|safe'] [--out FOLDER]

runs `ncu` on one forward and backward of a call and prints, for each kernel, its time, how busy
memory and the schedulers are, the reasons for which warps stall, and the instructions at which they
do most, with their numbers in the kernel. FOLDER keeps ncu's tables. An instruction that waits for
a load (`long_sb`) stands where its result is used first: look before it for loads that could start
earlier.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.forced import shape_of
from benchmarks.members import MEMBERS

SHARE = 0.01
"""Stall reasons and causes below this share of a kernel's samples are left out."""

FACTS = ("Duration", "DRAM Throughput", "Issue Slots Busy", "Registers Per Thread")
SAMPLES, REASON = "Warp Stall Sampling (All Samples)", re.compile(r"stall_(\w+)")


class Instruction(NamedTuple):
    """An instruction of a kernel: how often the profiler found a warp there, and why it waited."""

    number: int
    text: str
    samples: int
    reasons: dict[str, int]


def kernels_in(table: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The kernels of ncu's page "source" as CSV, in the order of their launches."""
    name, columns, found = "", [], []
    for row in csv.reader(io.StringIO(table)):
        if row and row[0] == "Kernel Name":
            if found:
                yield name, found
            name, found = row[1], []
        elif row and row[0] == "Address":
            columns = row
        elif row and columns:
            given = dict(zip(columns, row, strict=False))
            reasons = {
                match[1]: int(x)
                for column, x in given.items()
                if (match := REASON.fullmatch(column)) and int(x)
            }
            text = " ".join(given["Source"].split())
            found.append(Instruction(len(found), text, int(given[SAMPLES]), reasons))
    if found:
        yield name, found


def shares(found: list[Instruction]) -> dict[str, float]:
    """The share of each reason in all samples, largest first."""
    total = sum(x.samples for x in found) or 1
    sums: dict[str, int] = {}
    for x in found:
        for reason, count in x.reasons.items():
            sums[reason] = sums.get(reason, 0) + count
    every = sorted(sums.items(), key=lambda pair: -pair[1])
    return {reason: count / total for reason, count in every if count / total >= SHARE}


def facts_in(details: str) -> Iterator[dict[str, str]]:
    """For each launch some lines of ncu's page "details": names and values with their units."""
    found: dict[str, str] | None = None
    for line in details.splitlines():
        if re.match(r"  \w+ \(\d+, \d+, \d+\)x\(", line):
            if found is not None:
                yield found
            found = {}
        match = re.fullmatch(rf" +({'|'.join(FACTS)}) +(\S+) +([\d.,]+) *", line)
        if match and found is not None:
            found.setdefault(match[1], f"{match[3]} {match[2]}")
    if found is not None:
        yield found


def told(name: str, found: list[Instruction], facts: dict[str, str], top: int) -> str:
    """What is printed about a kernel."""
    total = sum(x.samples for x in found) or 1
    reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in shares(found).items())
    lines = [
        f"{name}: {', '.join(f'{n} {x}' for n, x in facts.items())}",
        f"  {len(found)} instructions; {reasons}",
    ]
    for x in sorted(found, key=lambda x: -x.samples)[:top]:
        if x.samples / total < SHARE:
            break
        why = max(x.reasons, key=lambda reason: x.reasons[reason], default="")
        lines.append(f"  {x.number:5} {x.samples / total:6.1%} {why:12} {x.text[:70]}")
    return "\n".join(lines)


def child(op: str, shape: str) -> None:
    """Calls that compile, and one that is profiled."""
    import torch

    import fla_cp
    from benchmarks import ops

    member = MEMBERS[op]
    run = ops.runner(getattr(fla_cp, member.ours), member, shape_of(shape), "cuda")["both"]
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiled(op: str, shape: str, kernels: str, folder: Path) -> tuple[str, str]:
    """ncu's pages "source" as CSV and "details". Raises SystemExit if ncu is missing or fails."""
    if shutil.which("ncu") is None:
        raise SystemExit("ncu (Nsight Compute) is not in PATH")
    report = folder / "report"
    call = [sys.executable, "-m", "benchmarks.stalls", "--child", "--op", op, "--shape", shape]
    record = ["ncu", "--clock-control", "none", "--set", "full", "--profile-from-start", "off"]
    record += ["--kernel-name", f"regex:{kernels}", "--force-overwrite", "--export", str(report)]
    pages = ([], ["--page", "source", "--csv"], ["--page", "details"])
    outputs = []
    for page in pages:
        command = [*record, *call] if not page else ["ncu", "--import", f"{report}.ncu-rep", *page]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        outputs.append(done.stdout)
    for name, text in (("source.csv", outputs[1]), ("details.txt", outputs[2])):
        (folder / name).write_text(text, encoding="utf-8")
    return outputs[1], outputs[2]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stalls", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--op", default="kda", choices=MEMBERS)
    parser.add_argument("--shape", default="16384x32", help="as benchmarks.forced takes it")
    parser.add_argument("--kernels", default=".*", help="a regular expression of names")
    parser.add_argument("--top", type=int, default=12, help="instructions of each kernel")
    parser.add_argument("--out", type=Path, help="a folder for ncu's tables")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args.op, args.shape)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        source, details = profiled(args.op, args.shape, args.kernels, folder)
    for (name, found), facts in zip(kernels_in(source), facts_in(details), strict=False):
        print(told(name, found, facts, args.top))


if __name__ == "__main__":
    main()
