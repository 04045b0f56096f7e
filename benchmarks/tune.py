"""Times a stage of the Triton backend with each candidate tile, on a GPU.

The best row is printed in the form of tile_table.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from fla_cp.kernels import TORCH, resolve, using
from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.triton.backend import TritonBackend, summarize
from fla_cp.kernels.triton.intra import intra, intra_bwd
from fla_cp.kernels.triton.intra_channelwise import gated_operands
from fla_cp.kernels.triton.tile_table import (
    BF16,
    BROAD,
    DEEP,
    IN_SCANS,
    NARROW,
    QUARTERS_BWD,
    SCORES_BWD,
    STEEP,
    TABLE,
    TALL,
    TALL_BWD,
    TUNING,
    Tile,
    architecture,
    power_of_two,
)
from fla_cp.ops.dplr import ROWS
from fla_cp.ops.family import spread
from fla_cp.ops.options import Tensors
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On the CPU, stages can be tried in Triton's interpreter."""

SCANS = (
    *(Tile(0, BV, 4, stages) for BV, stages in ((32, 3), (32, 2), (32, 1), (64, 2), (64, 1))),
    Tile(0, 128, 8, 2),
    NARROW,
    BROAD,
)
CONCURRENT = (*(Tile(0, 64, 4, stages) for stages in (3, 2)), NARROW)
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "intra": (*(Tile(32, 0, 4, stages) for stages in (3, 2, 1)), Tile(16, 0, 4, 3), TALL),
    "gated": (
        *(Tile(64, 0, 4, 1), Tile(128, 0, 8, 1), Tile(32, 0, 4, 1), Tile(128, 0, 4, 1)),
        IN_SCANS,
    ),
    "intra_any": (Tile(32, 0, 4, 3), Tile(32, 0, 4, 1), Tile(16, 0, 4, 3), STEEP),
    "scan": (*SCANS, DEEP),
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
    "scores_bwd": (*(Tile(0, BV, 4, 1) for BV in (32, 64, 128)), SCORES_BWD),
    "scores_bwd_head": tuple(Tile(0, BV, 4, 1) for BV in (32, 64, 128)),
    "intra_bwd": (
        *(Tile(32, 128, 4, 1), Tile(32, 64, 4, 3), Tile(16, 128, 4, 1)),
        *(TALL_BWD, QUARTERS_BWD),
    ),
    "intra_bwd_any": (Tile(32, 128, 4, 1), Tile(16, 128, 4, 1), QUARTERS_BWD),
    "intra_own": (*(Tile(16, 0, 4, n) for n in (3, 2, 1)), Tile(16, 0, 8, 2), Tile(16, 0, 8, 1)),
    "intra_any_own": (Tile(16, 0, 4, 3), Tile(32, 0, 4, 1), Tile(16, 0, 8, 1), Tile(32, 0, 8, 1)),
    "intra_bwd_own": (*(Tile(16, BV, 4, 1) for BV in (128, 64, 32)), Tile(16, 128, 8, 1)),
    "intra_bwd_any_own": (*(Tile(16, BV, 4, 1) for BV in (128, 64, 32)), Tile(16, 128, 8, 1)),
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


OWN = tuple(stage for stage in CANDIDATES if stage.endswith("_own"))
STAGES = sorted({*(stage for _, stage, *_ in TABLE), *OWN})
"""The stages of the table, and those of DPLR and RWKV-7, for which it may have no row."""

PATHS = ("_any_own", "_own", "_any", "_head")
"""Ends of stages that only some calls run, longest first; see `stages`."""

GROUPED = ("dq_head", "dk_head")
"""Stages of calls with several value heads a key head."""

GATED_BEFORE = TABLE[90, "gated", 128, 128, torch.bfloat16]
"""The tile of "gated" that is Triton's."""

DECAY, FASTEST = 0.6, 10.0
"""Largest decay a token of RWKV-7 (natural log), and one that no chunk takes a safe gate's path
with: over the 8 tokens of 16 rows it is more than 100 powers of two."""


def now() -> TritonBackend:
    """The Triton backend that public calls currently use."""
    backend = resolve("triton", torch.device("cuda"), torch.bfloat16)
    assert isinstance(backend, TritonBackend)
    return backend


@contextmanager
def forced(choice: dict[str, Tile], **thresholds: int | None) -> Iterator[None]:
    """In the block, the stages named in `choice` use its tiles. thresholds: fields of `Tuning` that
    change; None: unchanged."""
    backend = now()
    tuning = replace(backend.tuning, forced=(*choice.items(), *backend.tuning.forced))
    tuning = replace(tuning, **{n: x for n, x in thresholds.items() if x is not None})
    with using(replace(backend, tuning=tuning)):
        yield


def choice_of(stage: str, tile: Tile) -> dict[str, Tile]:
    """What `forced` takes, so that a stage has a tile. The backward of any gate has two kernels; a
    tile of sm90/ is for the first one, which calls with a safe gate run, too. Scans that gate their
    operands have tiles of their own, so a tile of the others forces a pass that gates before."""
    first = tile.folder != "triton" and stage == "intra_bwd_any"
    before = {"gated": GATED_BEFORE} if stage.startswith("scan_") else {}
    return {"intra_bwd" if first else stage: tile} | before


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


Draw = Callable[..., torch.Tensor]
"""Makes a random tensor of the shape given."""


def raw_inputs(
    random: Draw, tokens: int, heads: tuple[int, int], K: int, V: int, path: str
) -> tuple[DeltaRule, Inputs]:
    """A rule, and inputs that its kernels normalize, gate and take the sigmoid of. heads: of q and
    k, and of v. path: "", "_any" or "_head", see `stages`."""
    (H, HV), head = heads, path == "_head"
    x = Inputs(
        random(tokens, H, K),
        random(tokens, H, K),
        random(tokens, HV, V),
        random(tokens, HV) if head else random(tokens, HV, K),
        random(tokens, HV),
        torch.randn(HV, device=DEVICE),
        torch.randn(HV if head else HV * K, device=DEVICE),
    )
    gate: dict[str, Any] = {"gate": "softplus", "per_head": head}
    if not path:
        gate = {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True}
    return DeltaRule(scale=K**-0.5, qk_l2norm=True, beta_factor=1.0, **gate), x


def rows_of_dplr(
    random: Draw, tokens: int, heads: tuple[int, int], K: int, V: int, *, safe: bool
) -> tuple[DeltaRule, Inputs]:
    """A rule, and the rows of DPLR's tokens, two a token. heads: of q and k, and of v.

    safe: whether the caller promises a safe gate. Otherwise one channel decays so fast that no
    chunk takes the path of a safe gate.
    """
    H, HV = heads
    a = torch.nn.functional.normalize(random(1, tokens, H, K), dim=-1)
    b = -a * random(1, tokens, H, 1).sigmoid()  # takes away what a reads: the state stays bounded
    g = -DECAY * random(1, tokens, HV, K).sigmoid()
    if not safe:
        g[..., 0] = -FASTEST
    q, k, v = random(1, tokens, H, K), random(1, tokens, H, K), random(1, tokens, HV, V)
    k = torch.nn.functional.normalize(k, dim=-1)
    rule = DeltaRule(scale=K**-0.5, removal="p", safe_gate=safe)
    x = spread(TORCH, rule, Tensors(q, k, v, g, None, a, b), (None, None), ROWS)
    assert x.p is not None
    return rule, Inputs(x.q[0], x.k[0], x.v[0], x.g[0], None, None, None, x.p[0])


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
    """Each stage of one call on random inputs.

    It includes the summaries that a rank in the middle of a document makes. "begin": the chunks of
    two segments and the summary of the first, with one decay a head, on two streams. path: "" for
    KDA with a safe gate, "_any" with any gate, "_head" for the gated delta rule, all with norm,
    gate and beta's sigmoid inside; "_own" for DPLR with a safe gate, "_any_own" with any gate.
    tokens: rows of the chunks, of which DPLR has two a token. group: value heads of a key head.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    head, own = path == "_head", path.endswith("_own")
    heads_of = heads // group, heads
    if own:
        rule, x = rows_of_dplr(random, tokens // ROWS, heads_of, K, V, safe=path == "_own")
    else:
        rule, x = raw_inputs(random, tokens, heads_of, K, V, path)
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
        return backend.scan_bwd(spec, x, dout, None, want_start=False, concurrent=concurrent)

    dscan, _ = scan_bwd()

    def both_scans() -> tuple:
        states = backend.scan(spec, c, None)
        return scan_bwd(concurrent=True), states()

    def beside_summary() -> tuple:
        states = backend.scan(middle, c, None)
        return backend.summarize_bwd(middle, dout, None, concurrent=True), states()

    def again() -> tuple:
        chunks, _ = backend.restore(spec, x, backend.keep(spec, c, None, None), o)
        states = backend.scan(spec, chunks, None)
        dout = backend.output_bwd(spec, chunks, do)
        return backend.scan_bwd(spec, x, dout, None, want_start=False, concurrent=True), states()

    def gated() -> tuple:
        return gated_operands(rule, packing, x, c.rows, c.anchors, backend.tuning)

    return ({} if head else {"gated": gated, "gated_and_scans": again}) | {
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
    together. With "gated" both scans of the backward are timed, since they may gate their operands.
    """
    path = next((p for p in PATHS if stage.endswith(p)), "")
    if stage.endswith("_concurrent"):
        path, timed = "", "beside_summary" if "_ends" in stage else "both_scans"
    elif stage == "gated":
        timed = "gated_and_scans"
    elif stage.startswith(("scores_bwd", "dqk", *GROUPED)):
        timed = f"intra_bwd{path}"
    else:
        timed = stage
    group = 2 if stage.startswith(GROUPED) else 1
    with forced(choice_of(stage, choice)):
        run = stages(K, V, dtype, tokens, heads, path=path, group=group)[timed]
        return triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")


def row(stage: str, K: int, V: int, dtype: torch.dtype, best: Tile) -> str:
    """The entry of tile_table.py that gives a stage this tile."""
    if best.folder == "sm90":
        return f'SM90_TILES: "{stage}": ((0, {best}),)'
    return f"TABLE: {(architecture(), stage, power_of_two(K), power_of_two(V, 32), dtype)}: {best}"


def main(argv: Sequence[str] | None = None) -> None:
    """Times the stages that the arguments name, and prints each tile's time and the best row."""
    least = TUNING.min_chunk_heads if eligible.GLUON else math.inf
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all")
    parser.add_argument("--K", type=int, default=128)
    parser.add_argument("--V", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    for stage in args.stage or STAGES:
        print(f"{stage}  K={args.K} V={args.V} {args.dtype} T={args.tokens} H={args.heads}")
        chains = args.heads if stage.startswith("scan") else 0
        size = -(-args.tokens // 64) * args.heads
        hopper = (args.K, args.V, dtype) == (128, 128, BF16) and size > least
        folder = "sm90" if hopper else "triton"
        print(f"  now  {TUNING.tile(stage, args.K, args.V, dtype, chains, folder)}", flush=True)
        best: tuple[float, Tile | None] = (float("inf"), None)
        for candidate in candidates(stage, args.K, args.V):
            try:
                ms = measure(stage, candidate, args.K, args.V, dtype, args.tokens, args.heads)
            except Exception as error:  # it does not fit: report it and try the next one
                print(f"       {candidate}: {repr(error)[:80]}", flush=True)
                continue
            print(f"  {ms:7.3f} ms  {candidate}", flush=True)
            best = min(best, (ms, candidate))
        if best[1] is not None:
            print(f"    {row(stage, args.K, args.V, dtype, best[1])},", flush=True)


if __name__ == "__main__":
    main()
