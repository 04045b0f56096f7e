"""Compiles the kernels for sm_90 without a GPU, exactly as the package would launch them.

`python -m tests.aot` compiles every kernel and tile configuration. It fails on a compilation error,
on too much shared memory for a block, on spills other than those of `SPILLS`, on instructions that
read a register which nothing wrote, on pipelines that overwrite operands that products still read,
on tensor descriptors that Triton's launcher cannot pass, and on registers, spills or shared memory
that differ from those in record.json for this Triton (`--write` records new ones).

Inside `launched()`, Triton targets sm_90, and a launch only records what Triton would compile for
it. So an operator called on CPU tensors runs the package's own launch code; the numbers that it
returns mean nothing. Afterwards a few processes compile the recorded kernels, each once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

from tests.aot.compiling import _LATER, Compiled, Launch, compile_together, start_worker
from tests.aot.configurations import configurations
from tests.gpu import kernel_hashes

SM90_SHARED = 227 * 1024
"""Bytes of shared memory that one block may use."""


RECORD = Path(__file__).parent / "record.json"
SPILLS: dict[str, dict[str, dict[str, int]]] = {
    "3.6.0": {"96x64 bf16 safe": {"safe_bwd_kernel": 4}}
}
"""The only spills that are no fault, by Triton's version, configuration and kernel: bytes a thread.
Any other number is a fault for that kernel, also a smaller one.

The backward for a safe gate uses all 255 registers there. A thread stores one address of shared
memory and loads it again once, outside of any loop. With Triton 3.7.1 it takes 254 registers and
spills nothing. Its tile follows from a rule for shapes that were not measured: two or three stages
instead of one would avoid the spill, but would change the kernels of other shapes, too.
"""

TOGETHER = 8
"""Kernels that a worker compiles before it disassembles them."""


def check(name: str, kernels: list[Compiled], spills: dict[str, int]) -> list[str]:
    """The faults of the kernels of one configuration, which must launch one at least. spills: the
    bytes that kernels must spill; all others must spill none."""
    if not kernels:
        return [f"{name}: launches no kernel of that name"]
    unused = sorted(spills.keys() - {k.kernel for k in kernels})
    return [f"{name}: {kernel}: in SPILLS, but not launched" for kernel in unused] + [
        f"{name}: {k.kernel}: {problem}"
        for k in kernels
        for problem in (
            f"{k.shared} bytes of shared memory" if k.shared > SM90_SHARED else "",
            f"reads what nothing wrote: {k.undefined[0]}" if k.undefined else "",
            f"spills {k.spills} bytes" if k.spills != spills.get(k.kernel, 0) else "",
            f"copies over what products read: {k.overwritten}" if k.overwritten else "",
            f"tensor descriptors in tuples: {', '.join(k.bundled)}" if k.bundled else "",
            f"waits for all products: {k.serial[0]}" if k.serial and "sm90" in k.kernel else "",
        )
        if problem
    ]


def record(name: str, kernels: list[Compiled]) -> dict[str, list[list[int]]]:
    """{configuration: {kernel: [[registers, spills, shared], ..]}}, the form of record.json."""
    rows: dict[str, list[list[int]]] = {}
    for k in kernels:
        rows.setdefault(k.kernel, []).append([k.registers, k.spills, k.shared])
    return rows


def changes(kept: dict, now: dict) -> list[str]:
    """The lines of a diff of two records."""
    lines = []
    for name in sorted(kept.keys() | now.keys()):
        if kept.get(name) != now.get(name):
            lines += [f"- {name}: {kept.get(name)}", f"+ {name}: {now.get(name)}"]
    return lines


def compile_all(
    calls: Iterable[tuple[str, Callable[[], list[Launch]]]],
) -> dict[str, list[Compiled]]:
    """The kernels of configurations, by name."""
    torch.set_num_threads(1)
    launches, named = {}, {}
    for name, call in calls:
        launches[name] = call()
        for key in _LATER.calls:
            named.setdefault(key, (name, key))
    todo = list(named.values())
    chunks = [todo[n : n + TOGETHER] for n in range(0, len(todo), TOGETHER)]
    done: dict[str, Compiled] = {}
    fork = multiprocessing.get_context("fork")  # the recorded launches cannot be pickled
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), fork, start_worker) as pool:
        for chunk, kernels in zip(chunks, pool.map(compile_together, chunks), strict=True):
            done.update(zip((key for _, key in chunk), kernels, strict=True))
            print(f"{len(done)} of {len(todo)}: {chunk[-1][0]}", file=sys.stderr, flush=True)
    return {n: list(dict.fromkeys(done[k.key] for k in of)) for n, of in launches.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.aot", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="keep what is compiled in record.json")
    parser.add_argument("--only", help="compile one configuration, by its name in record.json")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="compile all if a kernel file changed since --write, else every 96th configuration",
    )
    args = parser.parse_args()
    if args.write and (args.only or args.changed):
        parser.error("--write keeps all configurations: leave --only and --changed out")
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    key = f"triton {triton.__version__}"
    written_for = f"kernels of {key}"
    every = list(configurations())
    if args.changed and kept.get(written_for) == kernel_hashes():
        every = every[::96]  # the same source and compiler give the same code
    kernels = compile_all(c for c in every if args.only in (None, c[0]))
    if not kernels:
        parser.error(f"--only must name a configuration of record.json, got {args.only!r}")
    rows = {name: record(name, of) for name, of in kernels.items()}
    spills = SPILLS.get(triton.__version__, {})
    problems = [p for name, of in kernels.items() for p in check(name, of, spills.get(name, {}))]
    if args.write:
        kept[key], kept[written_for] = dict(sorted(rows.items())), kernel_hashes()
        lines = (
            f" {json.dumps(v)}: {{\n"
            + ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in kept[v].items())
            + "\n }"
            for v in sorted(kept)
        )
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif key in kept:
        known = kept[key]
        if args.only or args.changed:
            known = {name: known[name] for name in rows if name in known}
        problems += changes(known, rows)
    print("\n".join(problems))
    print(f"{len(rows)} configurations compiled with {key}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
