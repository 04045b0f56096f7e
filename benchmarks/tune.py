"""Times a stage of the Triton backend with each candidate tile, on a GPU.

The best row is printed in the form of tile_table.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from fla_cp.kernels import resolve, using
from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.triton.backend import TritonBackend, summarize
from fla_cp.kernels.triton.intra import intra, intra_bwd
from fla_cp.kernels.triton.intra_channelwise import gated_operands
from fla_cp.kernels.triton.tile_table import (
    BF16,
    BROAD,
    DEEP,
    NARROW,
    TABLE,
    TALL,
    TALL_BWD,
    TUNING,
    Tile,
    architecture,
    power_of_two,
)
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule

SCANS = (
    *(Tile(0, BV, 4, stages) for BV, stages in ((32, 3), (32, 2), (32, 1), (64, 2), (64, 1))),
    Tile(0, 128, 8, 2),
    NARROW,
    BROAD,
)
CONCURRENT = (*(Tile(0, 64, 4, stages) for stages in (3, 2)), NARROW)
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "intra": (*(Tile(32, 0, 4, stages) for stages in (3, 2, 1)), Tile(16, 0, 4, 3), TALL),
    "gated": (Tile(64, 0, 4, 1), Tile(128, 0, 8, 1), Tile(32, 0, 4, 1), Tile(128, 0, 4, 1)),
    "intra_any": (Tile(32, 0, 4, 3), Tile(32, 0, 4, 1), Tile(16, 0, 4, 3)),
    "scan": SCANS,
    "scan_states": (*SCANS, Tile(0, 64, 4, 3), DEEP),
    "scan_ends": (*SCANS, Tile(0, 64, 4, 3), DEEP),
    "scan_bwd": SCANS,
    "scan_bwd_ends": (*SCANS, DEEP),
    "scan_states_concurrent": (*CONCURRENT, DEEP),
    "scan_bwd_concurrent": CONCURRENT,
    "scan_bwd_ends_concurrent": (*CONCURRENT, DEEP),
    "intra_head": (
        Tile(64, 0, 4, 3, 168),
        Tile(64, 0, 4, 2, 168),
        Tile(32, 0, 4, 5),
        Tile(32, 0, 4, 3),
        Tile(32, 0, 4, 1),
        Tile(64, 0, 4, 1),
        Tile(64, 0, 4, 2),
        Tile(128, 0, 4, 1),
    ),
    "dq_head": tuple(
        Tile(BK, BV, 4, stages)
        for BK, BV, stages in ((128, 128, 1), (128, 64, 1), (64, 128, 1), (64, 64, 2))
    ),
    "dk_head": tuple(
        Tile(BK, BV, 4, stages)
        for BK, BV, stages in ((64, 128, 1), (64, 64, 3), (64, 64, 1), (32, 128, 1))
    ),
    "dqk_head": tuple(
        Tile(BK, BV, warps, stages)
        for BK, BV, warps, stages in (
            (32, 64, 4, 2),
            (32, 64, 4, 3),
            (32, 32, 4, 3),
            (64, 64, 8, 2),
        )
    ),
    "scores_bwd": tuple(Tile(0, BV, 4, 1) for BV in (32, 64, 128)),
    "intra_bwd": (Tile(32, 128, 4, 1), Tile(32, 64, 4, 3), Tile(16, 128, 4, 1), TALL_BWD),
    "intra_bwd_any": (Tile(32, 128, 4, 1), Tile(16, 128, 4, 1)),
}
"""What is tried for a row, each also checked on a GPU (tests/gpu.py); BK 0: all of K. A stage takes
those of the longest name here that it begins with."""


def candidates(stage: str, K: int, V: int) -> tuple[Tile, ...]:
    """Tiles for one stage and shape, none wider than the shape."""
    name = max((n for n in CANDIDATES if stage.startswith(n)), key=len)
    k, v = power_of_two(K), power_of_two(V, 32)
    rows = (
        t._replace(BK=min(t.BK, k) or (k if name.startswith("scan") else 0), BV=min(t.BV, v))
        for t in CANDIDATES[name]
        if t.folder == "triton" or (k, v) == (128, 128)
    )
    return tuple(dict.fromkeys(rows))


GROUPED = ("dq_head", "dk_head")
"""Stages of calls with several value heads a key head."""


def now() -> TritonBackend:
    """The Triton backend that public calls currently use."""
    backend = resolve("triton", torch.device("cuda"), torch.bfloat16)
    assert isinstance(backend, TritonBackend)
    return backend


@contextmanager
def forced(choice: dict[str, Tile]) -> Iterator[None]:
    """In the block, the stages named in `choice` use its tiles."""
    backend = now()
    tuning = replace(backend.tuning, forced=(*choice.items(), *backend.tuning.forced))
    with using(replace(backend, tuning=tuning)):
        yield


@dataclass(frozen=True)
class Cut(TritonBackend):
    """Cuts every sequence into segments of `chunks` chunks."""

    chunks: int = 1

    def segment(self, packing: Packing, *shape: Any) -> Packing:
        return packing.cached(("pieces", self.chunks), lambda: packing.cut(self.chunks))


@contextmanager
def cut_into(chunks: int) -> Iterator[None]:
    """In the block, the kernels cut every sequence into segments of this many chunks."""
    with using(Cut(tuning=now().tuning, chunks=chunks)):
        yield


def stages(
    K: int,
    V: int,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    *,
    path: str = "",
    group: int = 1,
    backend: TritonBackend | None = None,
) -> dict[str, Callable[[], Any]]:
    """Each stage of one call with norm, gate and beta's sigmoid inside, on random inputs.

    It includes the summaries that a rank in the middle of a document makes. "begin": the chunks of
    two segments and the summary of the first, with one decay a head, on two streams. path: "" for
    KDA with a safe gate, "_any" with any gate, "_head" for the gated delta rule. group: value heads
    of a key head.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    head = path == "_head"
    x = Inputs(
        random(tokens, heads // group, K),
        random(tokens, heads // group, K),
        random(tokens, heads, V),
        random(tokens, heads) if head else random(tokens, heads, K),
        random(tokens, heads),
        torch.randn(heads, device="cuda"),
        torch.randn(heads if head else heads * K, device="cuda"),
    )
    gate: dict[str, Any] = {"gate": "softplus", "per_head": head}
    if not path:
        gate = {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True}
    rule = DeltaRule(scale=K**-0.5, qk_l2norm=True, beta_factor=1.0, **gate)
    packing, do = Packing.build((0, tokens)), random(tokens, heads, V)
    spec = Spec(rule, packing)
    middle = Spec(rule, Packing.build((0, 3 * tokens), [(tokens, 2 * tokens)]))
    halves = Spec(rule, packing.cut(tokens // CHUNK // 2))
    wanted = {"want_states": False, "want_end": False}
    backend = now() if backend is None else backend
    c = intra(rule, packing, x, backend.tuning)
    o, *_ = backend.scan_output(spec, c, None, **wanted)
    c = c._replace(o=o)
    h, v_new = backend.scan(spec, c, None)()
    dout = backend.output_bwd(spec, c, do)
    kept = c._replace(rule=rule._replace(keep_intermediates=True))  # no concurrent scan

    def scan_bwd(concurrent: bool = False) -> tuple:
        return backend.scan_bwd(spec, dout, None, want_start=False, concurrent=concurrent)

    dscan, _ = scan_bwd()

    def both_scans() -> tuple:
        states = backend.scan(spec, c, None)
        return scan_bwd(concurrent=True), states()

    def beside_summary() -> tuple:
        states = backend.scan(middle, c, None)
        return backend.summarize_bwd(middle, dout, None, concurrent=True), states()

    def gated() -> tuple:
        return gated_operands(rule, packing, x, c.rows, c.anchors, backend.tuning)

    return ({} if head else {"gated": gated}) | {
        f"intra{path}": lambda: intra(rule, packing, x, backend.tuning),
        "begin": lambda: backend.prepare_chunks(halves, x, None),
        "scan": lambda: backend.scan_output(spec, c, None, **wanted),
        "scan_states": lambda: backend.scan(spec, kept, None)(),
        "scan_bwd": scan_bwd,
        "both_scans": both_scans,
        "beside_summary": beside_summary,
        f"intra_bwd{path}": lambda: intra_bwd(packing, x, c, (h, v_new), dscan),
        "scan_ends": lambda: summarize(middle.packing, c, None)[1](),
        "scan_bwd_ends": lambda: backend.summarize_bwd(middle, dout, None, concurrent=False),
    }


def measure(
    stage: str, choice: Tile, K: int, V: int, dtype: torch.dtype, tokens: int, heads: int
) -> float:
    """Median ms of `stage` with `choice`.

    Parts of the local backward are timed inside it, and scans that run concurrently are timed
    together.
    """
    path = next((p for p in ("_any", "_head") if stage.endswith(p)), "")
    if stage.endswith("_concurrent"):
        path, timed = "", "beside_summary" if "_ends" in stage else "both_scans"
    elif stage.startswith(("scores_bwd", "dqk", *GROUPED)):
        timed = f"intra_bwd{path}"
    else:
        timed = stage
    group = 2 if stage.startswith(GROUPED) else 1
    with forced({stage: choice}):
        run = stages(K, V, dtype, tokens, heads, path=path, group=group)[timed]
        return triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")


def main() -> None:
    least = TUNING.min_chunk_heads if eligible.GLUON else math.inf
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    stages = sorted({name for _, name, *_ in TABLE})
    parser.add_argument("--stage", choices=stages, action="append", help="default: all")
    parser.add_argument("--K", type=int, default=128)
    parser.add_argument("--V", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    for stage in args.stage or stages:
        print(f"{stage}  K={args.K} V={args.V} {args.dtype} T={args.tokens} H={args.heads}")
        chains = args.heads if stage.startswith("scan") else 0
        size = -(-args.tokens // 64) * args.heads
        hopper = (args.K, args.V, dtype) == (128, 128, BF16) and size > least
        print(f"  now  {TUNING.tile(stage, args.K, args.V, dtype, chains, hopper)}", flush=True)
        best: tuple[float, Tile | None] = (float("inf"), None)
        for candidate in candidates(stage, args.K, args.V):
            try:
                ms = measure(stage, candidate, args.K, args.V, dtype, args.tokens, args.heads)
            except Exception as error:  # it does not fit: report it and try the next one
                print(f"       {candidate}: {str(error).splitlines()[0][:80]}", flush=True)
                continue
            print(f"  {ms:7.3f} ms  {candidate}", flush=True)
            best = min(best, (ms, candidate))
        key = (architecture(), stage, power_of_two(args.K), power_of_two(args.V, 32), dtype)
        row = f'SM90_TILES: "{stage}": ((0, {best[1]}),)' if best[1] and best[1].hopper else None
        print(f"    {row or f'TABLE: {key}: {best[1]}'},", flush=True)


if __name__ == "__main__":
    main()
