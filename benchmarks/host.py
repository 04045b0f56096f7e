"""What the host does in an operator call, and what a new packing costs.

    python -m benchmarks.host --packings [COUNT] [--tokens 2048,8192,32768] [--heads 4,32]
        [--op kda,gdn] [--out FILE]

times COUNT calls, forward and backward, each with a packing that was never seen before, and calls
with some of these packings again. `benchmarks.ops` uses the other functions here: they find the
programs that a call replays, count what these do, and time their launches alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import units
from benchmarks.members import MEMBERS, draws, options
from benchmarks.shapes import Shape

COUNTS = {
    "launches": "launches",
    "torch_ops": "ops",
    "allocations": "allocations",
    "descriptors": "descriptors",
}
"""What is counted in a call, and the field of `fla_cp.program.Program` that has it."""

LEAST_DOCUMENTS, MOST_DOCUMENTS = 8, 24
"""How many documents a packing has at random."""

WARM_PACKINGS = 100
"""The most calls before the timed ones, each with a packing of its own. They compile kernels."""

REPEATS = 50
"""Calls in a row with the same packing."""

UNIT = units.PACKINGS


class Replay(NamedTuple):
    """A program that ran, and what it was given: a plan, input tensors and a stream's address."""

    program: Any
    plan: Any
    inputs: tuple[Tensor | None, ...]
    stream: int


class Launch(NamedTuple):
    """A kernel's launcher and all its arguments."""

    run: Callable[..., None]
    args: tuple


def host_milliseconds(f: Callable, device: str, calls: int = 20) -> float | None:
    """Time until a call returns, with nothing queued before it; small calls take this long."""
    if device != "cuda":
        return None
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        f()
        times.append(1e3 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return round(statistics.median(times), 3)


IN_A_ROW, BEFORE, ROUNDS = 16, 4, 7
"""Calls that are timed together, those before them that are not timed, and how often this is done.
A GPU takes 1024 launches before the host has to wait for it, and a call makes a dozen."""


def steady_milliseconds(f: Callable, device: str) -> float | None:
    """The host's time for a call, of calls that follow each other as in a model that is trained:
    the host does not wait for the GPU between them, and finds the code of the last call in its
    caches. Results of a call are dropped before the next one."""
    if device != "cuda":
        return None
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        for _ in range(BEFORE):
            f()
        started = time.perf_counter()
        for _ in range(IN_A_ROW):
            f()
        times.append(1e3 * (time.perf_counter() - started) / IN_A_ROW)
    torch.cuda.synchronize()
    return round(statistics.median(times), 3)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Inside, all threads of the process share one core of the host. Autograd then hands a backward
    over to its thread without waking up another core, which takes the host 0.05 to 0.4 ms a call on
    virtual machines, whatever the call does."""
    usual: dict[int, set[int]] = {}
    mine = os.sched_getaffinity(0)
    try:
        for thread in _threads():
            with suppress(ProcessLookupError):  # it has ended
                usual[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {max(mine)})
        yield
    finally:
        for thread in _threads():  # those that have started meanwhile have one core, too
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, usual.get(thread, mine))


def _threads() -> list[int]:
    """The threads of this process, as the kernel numbers them."""
    return [int(p.name) for p in Path("/proc/self/task").iterdir()]


def replays(f: Callable) -> tuple[list[Replay], str]:
    """The programs that a call of f replays, in their order, and why there are none, or not all.

    f calls operators of fla_cp. It runs three times: what was recorded before is forgotten, so that
    the programs found are those of f and no others.
    """
    ours = sys.modules.get("fla_cp.ops.known")  # a peer's process may not have imported ours
    if ours is None:
        return [], "fla_cp is not imported"
    ours.known_calls.clear()
    f()
    f()
    known = [d.known for x in ours.known_calls.values() for d in (x.kind.forward, x.kind.backward)]
    recorded = [(where, key, p) for where in known for key, p in where.items()]
    why = [p for _, _, p in recorded if isinstance(p, str)]
    programs = [entry for entry in recorded if not isinstance(entry[2], str)]
    if not programs:
        return [], "; ".join(why) or "no call was recorded"
    found: list[Replay] = []

    def note(program: Any, plan: Any, inputs: tuple, stream: int) -> tuple:
        found.append(Replay(program, plan, tuple(inputs), stream))
        return program.run(plan, inputs, stream)

    for where, key, program in programs:
        where.keep(key, program._replace(run=partial(note, program)))
    try:
        f()
    finally:
        for where, key, program in programs:
            where.keep(key, program)
    return found, "; ".join(why)


_LAUNCH = re.compile(r"^    (c\d+)\(\d+, \d+, \d+, w\d+a, ", re.MULTILINE)
"""A line of a program that launches a kernel: no other takes a stream's address."""


def launches(replay: Replay) -> tuple[list[Launch], dict[str, object]]:
    """The launches of a replay with fixed addresses, and what must be kept alive as long as they
    are used. The program runs once, in earnest."""
    program, found = replay.program, []
    names = dict(program.run.__globals__)

    def noting(run: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: object) -> None:
            found.append(Launch(run, args))
            run(*args)

        return launch

    for name in set(_LAUNCH.findall(program.source)):
        names[name] = noting(names[name])
    head, _ = program.source.rsplit("\n    return ", 1)
    exec(f"{head}\n    return locals()", names)
    kept = names["run"](replay.plan, replay.inputs, replay.stream)
    if len(found) != program.launches:
        raise RuntimeError(f"a program of {program.launches} launches made {len(found)}")
    return found, kept


class Bare:
    """A call that makes the launches of replays again, one after another, with the addresses of one
    run. It does nothing else: no allocation, no torch op, no wait between streams, no autograd.
    What the kernels compute is therefore meaningless."""

    def __init__(self, found: list[Replay]) -> None:
        made = [launches(replay) for replay in found]
        self._launches = [tuple(launch) for each, _ in made for launch in each]
        self._kept = [kept for _, kept in made]

    def __call__(self) -> None:
        for run, args in self._launches:
            run(*args)


class _InAutograd(torch.autograd.Function):
    """Two calls, one as the forward of x and one as its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable, back: Callable) -> Tensor:
        ctx.back = back
        ahead()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.back()
        return gradients[0], None, None


def in_autograd(ahead: Callable, back: Callable, like: Tensor) -> Callable[[], object]:
    """A call of `ahead`, and of `back` where autograd calls a backward of a tensor on the device of
    `like`. For a GPU that is another thread, for which the caller waits, however little the
    backward does."""
    x = torch.zeros(1, device=like.device, requires_grad=True)
    return lambda: torch.autograd.grad(_InAutograd.apply(x, ahead, back), x)


def facts(f: Callable, device: str) -> dict[str, Any]:
    """What a call of f does on the host, by `COUNTS`, and the host's time for its launches alone,
    which is None without a GPU: bare_ms, and bare_autograd_ms for a call with a backward, whose
    launches are then made by a backward, too (`in_autograd`). Counted is what the replayed programs
    do: an operator's own torch ops outside of them are not. If a direction is not replayed, there
    is nothing but `not_replayed`, which says why."""
    found, why = replays(f)
    if why or not found:
        return {"not_replayed": why}
    counts = {n: sum(getattr(r.program, x) for r in found) for n, x in COUNTS.items()}
    bare = {"bare_ms": host_milliseconds(Bare(found), device)}
    if len(found) > 1:
        like = next(x for x in found[0].inputs if x is not None)
        both = in_autograd(Bare(found[:1]), Bare(found[1:]), like)
        bare["bare_autograd_ms"] = host_milliseconds(both, device)
        bare["steady_bare_autograd_ms"] = steady_milliseconds(both, device)
    return {**counts, **bare}


def packings(count: int, T: int, seed: int, device: str) -> list[dict[str, Tensor]]:
    """Keywords of calls whose T tokens are cut into 8 to 24 documents at random places."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        inner = draw.sample(range(1, T), draw.randint(LEAST_DOCUMENTS, MOST_DOCUMENTS) - 1)
        on_host = torch.tensor([0, *sorted(inner), T])
        found.append({"cu_seqlens": on_host.to(device), "cu_seqlens_cpu": on_host})
    return found


def _variants() -> int:
    """How many variants of kernels were compiled or loaded until now."""
    module = sys.modules.get("fla_cp.kernels.triton.launch")
    return 0 if module is None else len(module._known)


def measure_packings(name: str, shape: Shape, count: int, device: str) -> dict[str, Any]:
    """A row: the time of `count` calls, each with a new packing, over that of calls whose packing
    was there before.

    After every `REPEATS` new packings, one of them is called as often in a row. So both sides have
    documents of the same lengths on average, on which the device's time depends (a scan takes as
    long as its longest document), and share whatever slows the host for a while.

    Kernels are compiled before, by calls with other packings; `variants` says how many were
    nevertheless compiled or loaded while the new packings were timed.
    """
    import fla_cp

    member = MEMBERS[name]
    x, do = draws(member, shape, device)
    keywords, op = options(member, shape), getattr(fla_cp, member.ours)

    def milliseconds(given: list[dict[str, Tensor]]) -> float:
        started = time.perf_counter()
        for packing in given:
            o = op(**x, **keywords, **packing)[0]
            torch.autograd.grad(o, list(x.values()), do)
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)

    new = packings(count, shape.T, 0, device)
    milliseconds(packings(min(count, WARM_PACKINGS), shape.T, 1, device))
    variants, many, one, calls = 0, 0.0, 0.0, 0
    for first in range(0, count, REPEATS):
        some, before = new[first : first + REPEATS], _variants()
        many += milliseconds(some)
        variants += _variants() - before
        again = some[:1] * len(some)
        milliseconds(again[:1])
        one, calls = one + milliseconds(again), calls + len(again)
    return {
        "op": name,
        "T": shape.T,
        "H": shape.HV,
        "packings": count,
        "new_ms": round(many / count, 4),
        "one_ms": round(one / calls, 4),
        "ratio": round(many / count / (one / calls), 3),
        "variants": variants,
    }


def table(rows: list[dict]) -> str:
    """The rows of `measure_packings`, in Markdown."""
    lines = [
        "| calls | op | H | T | known packing, ms a call | new packings, ms a call | ratio "
        "| variants compiled meanwhile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['packings']} packings | {r['op']} | {r['H']} | {r['T']} | {r['one_ms']:.3f} "
        f"| {r['new_ms']:.3f} | {r['ratio']:.2f}x | {r['variants']} |"
        for r in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    from benchmarks.ops import environment

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--packings", nargs="?", type=int, const=1000, required=True, help="1000")
    parser.add_argument("--tokens", default="2048,8192,32768" if cuda else "256")
    parser.add_argument("--heads", default="4,32" if cuda else "2")
    parser.add_argument("--op", default="kda,gdn", help=f"of {', '.join(MEMBERS)}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    device, size = ("cuda", {}) if cuda else ("cpu", {"K": 16, "V": 16})
    rows: list[dict] = []
    for name in args.op.split(","):
        sizes = itertools.product(args.heads.split(","), args.tokens.split(","))
        for H, T in (map(int, pair) for pair in sizes):
            shape = Shape(f"packed {T}", T, H=H, HV=H, **size)
            rows.append(measure_packings(name, shape, args.packings, device))
            print(rows[-1], flush=True)
            if args.out:  # after each row, since a run may be stopped
                found = {**environment(), "benchmark": "packings", "unit": UNIT, "rows": rows}
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
