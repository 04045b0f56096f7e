"""A training step of the trainer: speed, MFU, host time and memory, beside FLA's own model class.

    python -m benchmarks.train [--models 340M,1.3B] [--seq-len 65536] [--data one,packed]
        [--gpus 1,2] [--flags "--remat"] [--peer fla] [--profile] [--out FILE.json]

Each case runs in processes of its own, one for each GPU, which share one sequence. They take steps
of the trainer's code over random tokens: one document of --seq-len tokens, or packed documents of
16 to 8192 tokens. A step reads its batch, runs forward and backward, reads loss and gradient norm,
clips and updates, like a step of `fla_cp.train.main`. A model may be hf:DIR, a folder of
transformers; `--flags "--model.init random"` leaves its weights unread.

--flags takes flags of the trainer; give it several times to compare them. --peer fla measures
`KDAForCausalLM` of flash-linear-attention 0.6.0 (with transformers) on one GPU and with the first
--flags: the same sizes, mixed precision, optimiser and batches, with its fused norms, SwiGLU and
cross-entropy. Its first step tunes its kernels, which are compiled side by side. The file is
written after each case, and a case that it already has is not measured again, so that a run can be
continued. peak_gib is the memory that torch allocated or, where cuda_graph says that steps ran as a
graph, reserved. On a machine without a GPU a tiny model runs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import step_profile, units
from benchmarks.ops import compiled_together, environment
from benchmarks.step_profile import Row
from benchmarks.training_sides import PEER, VOCABULARY, Case, FLAModel, Side, Trainer, meta_model
from fla_cp.train import loopback
from fla_cp.train.allocator import let_segments_grow
from fla_cp.train.config import FOLDER, UserError
from fla_cp.train.distributed import Ranks, joined, threads_per_rank
from fla_cp.train.flops import PEAK_FLOP_S, utilisation
from fla_cp.train.parent import LAUNCHER, STARTED, end_with_launcher

WARM, ISSUED = 3, 3
"""Steps before the timed ones, the first not among them; steps whose host time is taken."""

LOSS_BAND = 0.1
"""The first loss must be so close to that of a uniform guess, ln(vocabulary), relatively."""

SIZES_BAND = 0.02
"""The peer's number of parameters must be so close to ours, relatively."""

OUT_OF_MEMORY = 17
"""Exit code of a rank whose GPU has too little memory."""


# one case


def synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def step(side: Side) -> float:
    """One whole step; the loss before it."""
    side.forward_backward(side.batch())
    loss = side.metrics()
    side.update()
    return loss


def host_times(side: Side, ranks: Ranks) -> tuple[float, float]:
    """ms in which the host issues a step, and ms in which it prepares the batch.

    The device is idle before each of the step's three calls, so that none of them waits for earlier
    work. Reading loss and norm includes the device's time for the norm, which is short.
    """
    issue, prepare = 0.0, 0.0
    begin = time.perf_counter()
    batch = side.batch()
    prepare = time.perf_counter() - begin
    for call in (lambda: side.forward_backward(batch), side.metrics, side.update):
        synchronize(ranks)
        begin = time.perf_counter()
        call()
        issue += time.perf_counter() - begin
    synchronize(ranks)
    return 1e3 * issue, 1e3 * prepare


def timed(side: Side, ranks: Ranks, steps: int) -> list[float]:
    """Seconds of each of `steps` steps, issued one after the other as in training."""
    starts = []
    synchronize(ranks)
    for _ in range(steps):
        starts.append(time.perf_counter())
        step(side)
    synchronize(ranks)
    # From start to start, because a step's update runs while the host prepares the next batch.
    starts.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(starts)]


def measure(side: Side, case: Case, ranks: Ranks, steps: int, profiled: bool) -> Row:
    """The row of a case. Collective.

    Times and memory are those of the worst rank. Raises RuntimeError if the first loss is not that
    of a uniform guess; that of a folder's weights may be larger, since tokens are random.
    """
    on_gpu = ranks.device.type == "cuda"
    synchronize(ranks)
    begin = time.perf_counter()
    loss = step(side)
    synchronize(ranks)
    first = time.perf_counter() - begin
    uniform, config = math.log(case.vocabulary), case.config()
    trained = config.model.folder is not None and config.model.init == "weights"
    most = math.inf if trained else 1 + LOSS_BAND
    if not 1 - LOSS_BAND < loss / uniform < most:
        rule = "at least" if trained else "near"
        raise RuntimeError(
            f"the first loss must be {rule} ln(vocabulary) = {uniform:.2f}, got {loss}"
        )
    say(ranks, f"{case}: first step {first:.1f} s, loss {loss:.3f}")
    timed(side, ranks, WARM)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(side, ranks, steps)
    graphs = isinstance(side, Trainer) and side.graphs is not None and side.graphs.graphs
    read = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
    peak = read() / 2**30 if on_gpu else 0.0
    taken = [host_times(side, ranks) for _ in range(ISSUED)]
    host, prepare = (statistics.median(column) for column in zip(*taken, strict=True))
    found = [first, statistics.median(seconds), max(seconds), host, prepare, peak]
    first, median, slowest, host, prepare, peak = ranks.host_max(found)
    mfu = utilisation(side.flops, median, case.gpus) if side.flops and on_gpu else None
    row: Row = {
        **dataclasses.asdict(case),
        "parameters": side.parameters,
        "loss": round(loss, 4),
        "first_step_s": round(first, 2),
        "step_ms": round(1e3 * median, 2),
        "slowest_step_ms": round(1e3 * slowest, 2),
        "tokens_per_second": round(case.tokens / median, 1),
        "flops": side.flops,
        "mfu": None if mfu is None else round(mfu, 4),
        "host_ms": round(host, 2),
        "batch_ms": round(prepare, 4),
        "peak_gib": round(peak, 2) if on_gpu else None,
        "cuda_graph": bool(graphs),
    }
    if profiled:
        ranks.barrier()
        wait = functools.partial(synchronize, ranks)
        row["profile"] = step_profile.profile(lambda: step(side), wait, on_gpu)
    return row


def say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


# ranks


def rank_main(case: Case, steps: int, profiled: bool, result: Path) -> int:
    """The work of one rank; rank 0 writes the row to `result`. Returns the exit code."""
    end_with_launcher()
    if case.who != PEER:  # as the trainer does
        let_segments_grow()
    config = case.config()
    try:
        with joined(config.parallel) as ranks:
            say(ranks, f"{case}: building")
            side: Side = (Trainer if case.who != PEER else FLAModel)(case, config, ranks)
            say(ranks, f"{case}: {side.parameters / 1e6:.2f} M parameters")
            if case.who == PEER:
                check_sizes(side, case)
                say(ranks, f"{case}: the first step tunes FLA's kernels and may take minutes")
            with tuning(case):
                row = measure(side, case, ranks, steps, profiled)
            if ranks.rank == 0:
                result.write_text(json.dumps(row))
    except torch.OutOfMemoryError as error:
        print(f"{case}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        os._exit(OUT_OF_MEMORY)  # the other ranks may wait in a collective: the parent ends them
    return 0


def tuning(case: Case) -> contextlib.AbstractContextManager[None]:
    """Lets a peer's kernels compile side by side, as ours do."""
    return compiled_together("cuda") if case.who == PEER else contextlib.nullcontext()


def check_sizes(side: Side, case: Case) -> None:
    """Raises SystemExit if the peer's model is not as large as ours."""
    ours = sum(p.numel() for p in meta_model(case).parameters())
    print(f"{case}: ours has {ours / 1e6:.2f} M parameters", flush=True)
    if abs(side.parameters / ours - 1) > SIZES_BAND:
        raise SystemExit(
            f"the peer must have our number of parameters within {SIZES_BAND:.0%}, "
            f"got {side.parameters} and {ours}"
        )


def rank_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.train", *arguments]


@contextlib.contextmanager
def started(
    case: Case, arguments: Sequence[str], environ: Mapping[str, str]
) -> Iterator[list[subprocess.Popen]]:
    """The ranks of a case as processes, which are ended with the block. environ: their environment
    variables, besides those that tell a rank its place."""
    store = loopback.loopback_store()
    command, world = rank_command(arguments), str(case.gpus)
    place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    place |= {"MASTER_ADDR": loopback.ADDRESS, "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"OMP_NUM_THREADS": str(threads_per_rank(case.gpus))}
    place |= {STARTED: "benchmarks.train", LAUNCHER: str(os.getpid())}  # to end with this process
    ranks: list[subprocess.Popen] = []
    try:
        for rank in map(str, range(case.gpus)):
            mine = dict(environ) | place | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(subprocess.Popen(command, env=mine))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def run(case: Case, args: argparse.Namespace, environ: Mapping[str, str]) -> Row:
    """The row of a case that ranks measure; one with an `error` if a GPU has too little memory.
    environ: the ranks' environment variables.

    Raises SystemExit if a rank fails, or after --limit seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "row.json")
        arguments = ["--case", json.dumps(dataclasses.asdict(case)), "--result", str(result)]
        arguments += ["--steps", str(args.steps), *(["--profile"] if args.profile else [])]
        begin, told = time.monotonic(), 60.0
        with started(case, arguments, environ) as ranks:
            while any(codes := [p.poll() for p in ranks]) or None in codes:
                failed = [code for code in codes if code]
                if OUT_OF_MEMORY in failed:
                    return dataclasses.asdict(case) | {"error": "out of memory"}
                if failed:
                    raise SystemExit(f"{case}: a rank ended with exit code {failed[0]}")
                elapsed = time.monotonic() - begin
                if elapsed > args.limit:
                    raise SystemExit(f"{case}: no result after --limit {args.limit:g} s")
                if elapsed > told:
                    print(f"{case}: {told:.0f} s", flush=True)
                    told += 60
                time.sleep(0.2)
        return json.loads(result.read_text())


# all cases


def table(rows: list[Row]) -> str:
    names = ["who", "model", "tokens", "data", "gpus", "flags", "tokens_per_second", "mfu"]
    names += ["step_ms", "host_ms", "batch_ms", "peak_gib", "first_step_s", "error"]
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(str(row.get(n, "")) for n in names) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


SAME = ("gpu", "torch", "triton", "commit")
"""Facts that all rows of a file share."""


def kept(path: Path | None, facts: Row) -> list[Row]:
    """The rows that the file has already. Raises SystemExit if they are not of this machine and
    code."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    # The file itself, once it is committed, makes the working tree differ from its commit.
    was, now = ({n: str(x.get(n)).removesuffix("-dirty") for n in SAME} for x in (found, facts))
    differ = [name for name in SAME if was[name] != now[name]]
    if differ:
        pairs = ", ".join(f"{n}: {was[n]}, now {now[n]}" for n in differ)
        raise SystemExit(f"--out must be a new file or one of the same run, got {path} ({pairs})")
    return found["rows"]


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases in the order in which they are measured."""
    found: list[Case] = []
    for here in itertools.product(args.models, args.seq_len, args.data):
        if not args.peer_only:
            pairs = itertools.product(args.flags, args.gpus)
            found += [Case("fla_cp", *here, gpus, flags) for flags, gpus in pairs]
        if args.peer is not None:
            found.append(Case(args.peer, *here, 1, args.flags[0]))
    return found


def listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def numbers(text: str) -> list[int]:
    return [int(item) for item in listed(text)]


def parser(gpus: int) -> argparse.ArgumentParser:
    """The command line. gpus: how many this machine has."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=__doc__, allow_abbrev=False
    )
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    models, tokens = ("340M,1.3B", "65536") if gpus else ("tiny", "256")
    counts = ",".join(str(n) for n in (1, 2, 4, 8) if n <= max(gpus, 1))
    found.add_argument("--models", type=listed, default=listed(models))
    found.add_argument("--seq-len", type=numbers, default=numbers(tokens))
    found.add_argument("--data", type=listed, default=["one"], help="one, packed")
    found.add_argument("--gpus", type=numbers, default=numbers(counts))
    found.add_argument("--flags", action="append", help="of the trainer; may be given again")
    found.add_argument("--peer", choices=(PEER,))
    found.add_argument("--peer-only", action="store_true", help="measure the peer alone")
    found.add_argument("--steps", type=int, default=10, help="timed steps")
    found.add_argument("--profile", action="store_true", help="of two more steps")
    found.add_argument("--limit", type=float, default=1800, help="seconds of a case")
    found.add_argument("--out", type=Path)
    found.add_argument("--case", help=argparse.SUPPRESS)
    found.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return found


def check(args: argparse.Namespace, gpus: int) -> None:
    """Raises SystemExit for a value that this machine cannot run or that does not exist."""
    folders = [model for model in args.models if model.startswith(FOLDER)]
    named = [model for model in args.models if model not in folders]
    for flag, values, known in (
        ("--models", named, (*VOCABULARY, "hf:DIR")),
        ("--data", args.data, ("one", "packed")),
    ):
        wrong = [value for value in values if value not in known]
        if wrong:
            raise SystemExit(f"{flag} must be of {', '.join(known)}, got {', '.join(wrong)}")
    if args.peer is not None and folders:
        raise SystemExit(f"--peer must be left out with --models {folders[0]}, got {args.peer}")
    if gpus and max(args.gpus) > gpus:
        raise SystemExit(f"--gpus must be at most the {gpus} of this machine, got {max(args.gpus)}")
    if args.peer_only and args.peer is None:
        raise SystemExit("--peer-only needs --peer")
    if args.peer is not None and not gpus:
        raise SystemExit(f"--peer {args.peer} needs a GPU")
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")


def main(argv: Sequence[str] | None = None) -> int:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    args = parser(gpus).parse_args(joined_flags(sys.argv[1:] if argv is None else argv))
    if args.case:
        return rank_main(Case(**json.loads(args.case)), args.steps, args.profile, args.result)
    args.flags = args.flags or [""]
    check(args, gpus)
    environ = dict(os.environ)  # without the ptxas that our backend chooses, also for other kernels
    if gpus:
        import fla_cp.kernels.triton.backend  # noqa: F401, chooses the ptxas that the result names
    facts = environment() | {
        "benchmark": "train",
        "unit": units.TRAIN.format(tflop_s=f"{PEAK_FLOP_S / 1e12:.0f}"),
    }
    rows = kept(args.out, facts)
    wanted = cases(args)
    for case in wanted:
        try:
            case.config()
        except UserError as error:
            of_folder = str(error).startswith(f"--model {FOLDER}")
            raise SystemExit(str(error) if of_folder else f"--flags: {error}") from error
    for case in wanted:
        row = case.found(rows)
        if row is None:
            row = run(case, args, environ)
            rows.append(row)
            if args.out:
                args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
        print(json.dumps({name: value for name, value in row.items() if name != "profile"}))
        if "profile" in row:
            print(step_profile.shown(row["profile"]), flush=True)
    print(table(rows))
    return 0


def joined_flags(argv: Sequence[str]) -> list[str]:
    """The command line with `--flags VALUE` as `--flags=VALUE`: argparse takes a value that begins
    with a dash only so."""
    found: list[str] = []
    for item in argv:
        if found and found[-1] == "--flags":
            found[-1] = f"--flags={item}"
        else:
            found.append(item)
    return found


if __name__ == "__main__":
    sys.exit(main())
