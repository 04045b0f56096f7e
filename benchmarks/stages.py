"""Times one stage of the Triton backend with one tile, for `fla_cp.kernels.triton.tile_table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton import backend, tile_table
from fla_cp.kernels.triton.local import gated_operands, intra, intra_bwd
from fla_cp.kernels.triton.tile_table import Tile, tile
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule

GROUPED = ("dq_head", "dk_head")
"""Stages of calls with several value heads a key head."""


@contextmanager
def forced(choice: dict[str, Tile]) -> Iterator[None]:
    """Inside, the stages named in `choice` take its tiles."""

    def choose(stage: str, *shape: Any) -> Tile:
        return choice.get(stage) or tile(stage, *shape)

    setattr(tile_table, "tile", choose)  # noqa: B010
    try:
        yield
    finally:
        setattr(tile_table, "tile", tile)  # noqa: B010


@contextmanager
def cut_into(chunks: int) -> Iterator[None]:
    """Inside, the kernels cut every sequence into segments of so many chunks."""
    whole = backend.TRITON

    def split(packing: Packing, *shape: Any) -> Packing:
        return packing.cached(("pieces", chunks), lambda: packing.cut(chunks))

    setattr(backend, "TRITON", dataclasses.replace(whole, split=split))  # noqa: B010
    try:
        yield
    finally:
        setattr(backend, "TRITON", whole)  # noqa: B010


def stages(
    K: int, V: int, dtype: torch.dtype, tokens: int, heads: int, *, path: str = "", group: int = 1
) -> dict[str, Callable[[], Any]]:
    """Each stage of one call with norm, gate and beta's sigmoid inside, on random inputs, and the
    summaries that a rank in the middle of a document makes besides. "begin": the chunks of two
    segments and the first one's summary, with one decay a head on two streams. path: of KDA with a
    safe gate "", with any "_any"; of the gated delta rule "_head". group: value heads of a key
    head."""

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
    middle = Packing.build((0, 3 * tokens), [(tokens, 2 * tokens)])
    halves = packing.cut(tokens // CHUNK // 2)
    wanted = {"want_states": False, "want_end": False}
    c = intra(rule, packing, x)
    o, *_ = backend.scan_output(rule, packing, c, None, **wanted)
    c = c._replace(o=o)
    h, v_new = backend.scan(packing, c, None)()
    grads = backend.output_bwd(rule, packing, c, do)
    dscan, _ = backend.scan_bwd(packing, c, grads, None, want_start=False)
    kept = c._replace(rule=dataclasses.replace(rule, keep_intermediates=True))  # no scan beside

    def both_scans() -> tuple:
        states = backend.scan(packing, c, None)
        found = backend.scan_bwd(packing, c, grads, None, want_start=False, concurrent=True)
        return found, states()

    def beside_summary() -> tuple:
        states = backend.scan(middle, c, None)
        found = backend.summarize_bwd(middle, c, grads, None, concurrent=True)
        return found, states()

    def gated() -> tuple:
        return gated_operands(rule, packing, x, c.rows, c.anchors)

    return ({} if head else {"gated": gated}) | {
        f"intra{path}": lambda: intra(rule, packing, x),
        "begin": lambda: backend.prepare_chunks(rule, halves, x, None),
        "scan": lambda: backend.scan_output(rule, packing, c, None, **wanted),
        "scan_states": lambda: backend.scan(packing, kept, None)(),
        "scan_bwd": lambda: backend.scan_bwd(packing, c, grads, None, want_start=False),
        "both_scans": both_scans,
        "beside_summary": beside_summary,
        f"intra_bwd{path}": lambda: intra_bwd(rule, packing, x, c, h, v_new, dscan),
        "scan_ends": lambda: backend.summarize(middle, c, None),
        "scan_bwd_ends": lambda: backend.summarize_bwd(middle, c, grads, None),
    }


def measure(
    stage: str, choice: Tile, K: int, V: int, dtype: torch.dtype, tokens: int, heads: int
) -> float:
    """Median ms of `stage` with `choice`; parts of the local backward are timed inside it, scans
    that run side by side together."""
    path = next((p for p in ("_any", "_head") if stage.endswith(p)), "")
    if stage.endswith("_concurrent"):
        path, timed = "", "beside_summary" if "_ends" in stage else "both_scans"
    elif stage.startswith(("scores_bwd", "dqk", *GROUPED)):
        timed = f"intra_bwd{path}"
    else:
        timed = stage
    group = 2 if stage.startswith(GROUPED) else 1
    run = stages(K, V, dtype, tokens, heads, path=path, group=group)[timed]
    with forced({stage: choice}):
        return triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")
