"""The Triton backend, every stage of backend.py: the local ones from local.py, the scans here;
long because a launch is its list of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.backend import Backend
from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton import ptxas, tile_table
from fla_cp.kernels.triton.conv import conv, conv_bwd
from fla_cp.kernels.triton.device.blocks import unit_rows
from fla_cp.kernels.triton.fold import fold
from fla_cp.kernels.triton.gate import gate
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.local import gated_operands, intra, intra_bwd, intra_in_two, planes, safe
from fla_cp.kernels.triton.operands import Chunks, OutputGrads, ScanGrads, tables, terms
from fla_cp.kernels.triton.recurrent import recurrent
from fla_cp.kernels.triton.scan import scan_bwd_kernel, scan_kernel
from fla_cp.partition.device_tables import Build, Columns
from fla_cp.partition.packing import Packing
from fla_cp.partition.segmentation import COLUMNS
from fla_cp.partition.segmentation import split as cut_by_rule
from fla_cp.rule import CHUNK, DeltaRule

ptxas.choose()


def scores(rule: DeltaRule, packing: Packing, c: Chunks) -> Chunks:
    return c


@functools.cache
def _chosen(*names: str) -> Build:
    """Some of a packing's segments, by the names of its properties."""
    return lambda packing: (sum((getattr(packing, name) for name in names), ()),)


@functools.cache
def _places(name: str) -> Build:
    """For each segment its place among those of one property, -1 where it is none."""

    def columns(packing: Packing) -> Columns:
        place = {i: e for e, i in enumerate(getattr(packing, name))}
        return ([place.get(i, -1) for i in packing.everything],)

    return columns


def _entries(
    packing: Packing, states: States | None, name: str, device: torch.device
) -> Tensor | None:
    """Row of `states` for each segment, -1 where it has none; in a frame they are of `name`."""
    if states is None:
        return None
    if packing.frame is not None:
        return packing.table(_places(name), torch.int64, device)[0]
    row = {i: e for e, i in enumerate(states.segments)}
    return packing.index([row.get(i, -1) for i in packing.everything], device)


def _scan(
    packing: Packing,
    c: Chunks,
    S0: States | None,
    which: str,
    *,
    o: Tensor | None = None,
    h: Tensor | None = None,
    v_new: Tensor | None = None,
    S_end: Tensor | None = None,
    transition: Tensor | None = None,
    concurrent: bool = False,
) -> Callable[[], None]:
    """Returns a call that launches it and allocates nothing: another stream may run it. which:
    segments, a property of the packing; transition: of `Packing.middle`. beside: the reverse scan
    runs meanwhile."""
    middle = () if transition is None else packing.middle
    segments, names = getattr(packing, which), (which, "middle") if middle else (which,)
    table = tables(packing, c.v.device)
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    stage = "scan" if o is not None else "scan_ends" if h is None else "scan_states"
    if concurrent:
        stage += "_concurrent"
    if o is not None and h is not None:
        stage += "_kept"
    t = _tile(stage, packing, c, _chains(packing, which), (h, v_new), c.v)
    if not segments:
        return lambda: None
    programs = cdiv(V, t.BV) * len(segments) + cdiv(K, t.BV) * len(middle)
    arguments: dict[str, Any] = {
        "S0": None if S0 is None else S0.value,
        "S_end": S_end,
        "transition": transition,
        "segments": packing.table(_chosen(*names), torch.int64, c.v.device)[0],
        "seg_start": table.seg_start,
        "seg_stop": table.seg_stop,
        "seg_chunk": table.seg_chunk,
        "seg_entry": _entries(packing, S0, "carried", c.v.device),
        **_strides("S0", None if S0 is None else S0.value),
        **_strides("end", S_end, inner=True),
        "states": len(segments),
        **_compiled(t, K, V),
    }
    if t.hopper:
        kernel = eligible.sm90_scan.scan_hopper_kernel
        arguments |= eligible.sm90_scan.described(c, t.BV, v=c.v, o=o, h=h, v_new=v_new)
        arguments |= {"v_h": c.v.stride(1), "o_rows": o}
    else:
        kernel = scan_kernel
        arguments |= {"v": c.v, "v_t": c.v.stride(0), "v_h": c.v.stride(1)} | c.scan_operands()
        arguments |= {"o": o, "h": h, "v_new": v_new, **_strides("h", h, inner=True), "BK": t.BK}
    return functools.partial(launch, kernel, (programs, HV), **arguments)


def _chains(packing: Packing, which: str) -> int:
    """Segments of a scan on the rank that has most, and of the transitions that a summary forms
    besides."""
    counts = packing.largest
    return int(getattr(counts, which)) + (counts.middle if which == "feeding" else 0)


def _tile(
    stage: str,
    packing: Packing,
    c: Chunks,
    segments: int,
    dense: tuple[Tensor | None, ...],
    rows: Tensor,
) -> tile_table.Tile:
    """Of a scan that reads rows [T, HV, V] and writes what must be dense for hopper.py. segments:
    on the rank that has most, so that ranks take the same tile, as everywhere here."""
    supports = eligible.supports(c, rows) and all(x is None or x.is_contiguous() for x in dense)
    whether, chains = (
        supports and eligible.sm90_scan.enough(packing, c),
        segments * c.decay.shape[1],
    )
    if c.of_heads and not whether:
        chains = min(
            chains, tile_table.FULL_V_MIN_CHAINS - 1
        )  # with one decay a head those tiles spill
    t = tile_table.tile(stage, c.decay.shape[2], c.v.shape[2], c.Aqk.dtype, chains, whether)
    if t.hopper and not supports:
        raise ValueError(f"{t} of {stage} takes bf16 and K = V = 128 only, and aligned tensors")
    return t if c.terms == 1 else tile_table.in_two_terms(stage, t)


def _compiled(t: tile_table.Tile, K: int, V: int) -> dict[str, int]:
    return {"K": K, "V": V, "BT": CHUNK, "BV": t.BV, "NS": t.stages, "num_warps": t.warps}


def _strides(name: str, x: Tensor | None, *, inner: bool = False) -> dict[str, int]:
    """Of states [.., HV, K, V], by argument; inner: of K and V only."""
    axes = "kv" if inner else "nhkv"
    strides = (0,) * len(axes) if x is None else x.stride()[-len(axes) :]
    return {f"{name}_{axis}": s for axis, s in zip(axes, strides, strict=True)}


def _states(
    c: Chunks,
    count: int,
    *,
    square: bool = False,
    outside: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[count, HV, K, V], or with square [.., K, K]; outside: in the caller's layout in memory."""
    HV, K = c.decay.shape[1:]
    V = K if square else c.v.shape[2]
    v_first = outside and c.rule.state_v_first
    shape = (V, K) if v_first else (K, V)
    x = torch.empty(count, HV, *shape, dtype=dtype, device=c.v.device)
    return x.mT if v_first else x


LATER_SHARE, LATER_LEAST = 4, 2048
"""The chunks that no summary reads are formed after the others, while these are summarised, where
they are more than one in LATER_SHARE and, times heads, more than LATER_LEAST."""


def first_chunks(packing: Packing, HV: int) -> int:
    """The number of chunks up to the last that a summary reads, rounded up to one that kernels are
    not compiled for anew; 0 where all are formed at once."""
    if not packing.feeding or packing.frame is not None:
        return 0
    chunks = [cdiv(s.stop - s.start, CHUNK) for s in packing.segments]
    first = 16 * cdiv(sum(chunks[: packing.feeding[-1] + 1]), 16)
    left = sum(chunks) - first
    return first if LATER_SHARE * left > sum(chunks) and left * HV > LATER_LEAST else 0


def prepare_chunks(
    rule: DeltaRule, packing: Packing, x: Inputs, seeds: States | None
) -> tuple[Chunks, AffineMap]:
    if rule.removal == "p" and not rule.per_head:
        raise ValueError(
            "impl='triton' computes removal='p' with one decay a head only, got per_head=False: "
            "use impl='torch'"
        )
    device, HV = x.q.device, x.v.shape[1]
    first = 0
    if rule.per_head:  # with a decay a channel a summary takes from the other as much as it gains
        first = packing.cached(("first chunks", HV), lambda: first_chunks(packing, HV))
    if not first:
        c = intra(rule, packing, x)
        return c, summarize(packing, c, seeds)
    c, rest = intra_in_two(rule, packing, x, first)
    maps, summary = _summary(packing, c, seeds)
    if device.type != "cuda":
        summary()
        rest()
        return c, maps
    # the few long programs of the summary find multiprocessors before the many short ones of the
    # rest: theirs is the urgent stream, whose start the current one waits for, a little longer
    stream = torch.cuda.current_stream(device)
    urgent = _side_stream(device, stream.stream_id, -1)
    urgent.wait_stream(stream)
    ready = urgent.record_event()
    with torch.cuda.stream(urgent):
        summary()
    stream.wait_event(ready)
    rest()
    stream.wait_stream(urgent)
    return c, maps


def summarize(packing: Packing, c: Chunks, seeds: States | None) -> AffineMap:
    maps, start = _summary(packing, c, seeds)
    start()
    return maps


def _summary(
    packing: Packing, c: Chunks, seeds: States | None
) -> tuple[AffineMap, Callable[[], None]]:
    """The maps, and a call that launches what forms them."""
    feeding, middle = packing.feeding, packing.middle
    if not feeding:
        return AffineMap(None, None), lambda: None
    offset = _states(c, len(feeding))
    transition = _states(c, len(middle), square=True) if middle else None
    start = _scan(packing, c, seeds, "feeding", S_end=offset, transition=transition)
    return AffineMap(transition, offset), start


def split(
    packing: Packing,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
) -> Packing:
    value, key = (HV * cdiv(n, COLUMNS) for n in (V, K))
    return cut_by_rule(packing, value, key, eligible.sm_count(device), backward)


def _chunk_buffers(packing: Packing, c: Chunks) -> tuple[Tensor, Tensor]:
    (NC, HV, K), V = c.decay.shape, c.v.shape[2]
    buffers = c.v.new_empty(NC, HV, K, V), c.v.new_empty(NC, HV, CHUNK, V)
    if packing.frame is not None:  # no scan writes chunks of no tokens, but `intra_bwd` reads them
        for x in buffers:
            x[cdiv(packing.tokens, CHUNK) :].zero_()
    return buffers


@functools.lru_cache
def _side_stream(device: torch.device, other: int, priority: int = 0) -> torch.cuda.Stream:
    """A stream for what runs beside the stream of that number. It allocates nothing."""
    return torch.cuda.Stream(device, priority)


def runs_concurrently(packing: Packing, c: Chunks) -> bool:
    """Whether the forward's and the reverse scan of a backward, which need nothing of each other,
    run side by side: where all programs have a multiprocessor of their own, on every rank. With p
    they would not: operands of 64 columns fit into shared memory in two stages only (together they
    take longer)."""
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    if c.rule.removal == "p" or c.rule.keep_intermediates:
        return False
    supports = eligible.supports(c) and eligible.sm90_scan.enough(packing, c)
    names = ("scan_states_concurrent", "scan_bwd_concurrent")
    tiles = (tile_table.tile(n, K, V, c.Aqk.dtype, 0, supports) for n in names)
    programs = HV * packing.largest.everything * sum(cdiv(V, t.BV) for t in tiles)
    return 0 < programs <= eligible.sm_count(c.v.device)


def scan(packing: Packing, c: Chunks, S0: States | None) -> Callable[[], tuple[Tensor, Tensor]]:
    h, v_new = _chunk_buffers(packing, c)
    side, both = None, runs_concurrently(packing, c)
    start = _scan(packing, c, S0, "everything", h=h, v_new=v_new, concurrent=both)
    if both and packing.segments:
        stream = torch.cuda.current_stream(c.v.device)
        side = _side_stream(c.v.device, stream.stream_id)
        side.wait_stream(stream)
    with nullcontext() if side is None else torch.cuda.stream(side):
        start()

    held: tuple | None = (c, S0)  # the side stream reads them until it is waited for

    def result() -> tuple[Tensor, Tensor]:
        nonlocal held
        if side is not None:
            torch.cuda.current_stream(c.v.device).wait_stream(side)
        held = None
        return h, v_new

    return result


def scan_output(
    rule: DeltaRule,
    packing: Packing,
    c: Chunks,
    S0: States | None,
    *,
    want_states: bool,
    want_end: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    o = torch.empty(c.v.shape, dtype=c.v.dtype, device=c.v.device)
    h, v_new = _chunk_buffers(packing, c) if want_states else (None, None)
    if want_states and not rule.keep_intermediates:  # for the caller only
        h, v_new = _states(c, len(c.decay), outside=True, dtype=c.v.dtype), None
    S_end = _states(c, len(packing.segments), outside=True) if want_end else None
    _scan(packing, c, S0, "everything", o=o, h=h, v_new=v_new, S_end=S_end)()
    return o, h, v_new, S_end


def output_bwd(rule: DeltaRule, packing: Packing, c: Chunks, do: Tensor) -> OutputGrads:
    return OutputGrads(unit_rows(do))


def _scan_bwd(
    packing: Packing,
    c: Chunks,
    do: Tensor,
    dS_end: States | None,
    which: str,
    *,
    y: Tensor | None = None,
    dh: Tensor | None = None,
    dS0: Tensor | None = None,
    concurrent: bool = False,
) -> None:
    segments = getattr(packing, which)
    table = tables(packing, c.v.device)
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    stage = "scan_bwd_ends" if dh is None else "scan_bwd"
    if concurrent and runs_concurrently(packing, c):
        stage += "_concurrent"
    t = _tile(stage, packing, c, _chains(packing, which), (dh, y), do)
    if not segments:
        return
    arguments: dict[str, Any] = {
        "dS_end": None if dS_end is None else dS_end.value,
        "dS0": dS0,
        "segments": packing.table(_chosen(which), torch.int64, c.v.device)[0],
        "seg_start": table.seg_start,
        "seg_stop": table.seg_stop,
        "seg_chunk": table.seg_chunk,
        "seg_exit": _entries(packing, dS_end, "feeding", c.v.device),
        **_strides("end", None if dS_end is None else dS_end.value),
        **_strides("dS0", dS0, inner=True),
        **_compiled(t, K, V),
    }
    if t.hopper:
        kernel = eligible.sm90_scan.scan_bwd_hopper_kernel
        arguments |= eligible.sm90_scan.described(c, t.BV, do=do, y=y, dh=dh) | {
            "do_h": do.stride(1)
        }
    else:
        kernel = scan_bwd_kernel
        arguments |= {"do": do, "do_t": do.stride(0), "do_h": do.stride(1)} | c.scan_operands()
        arguments |= {"y": y, "dh": dh, "BK": t.BK, "FLIP": t.BV >= 64 and not c.of_heads}
    launch(kernel, (cdiv(V, t.BV) * len(segments), HV), **arguments)


def summarize_bwd(
    packing: Packing,
    c: Chunks,
    grads: OutputGrads,
    seeds: States | None,
    *,
    concurrent: bool = False,
) -> Tensor | None:
    if not packing.carried:
        return None
    offset = _states(c, len(packing.carried))
    _scan_bwd(packing, c, grads.do, seeds, "carried", dS0=offset, concurrent=concurrent)
    return offset


def scan_bwd(
    packing: Packing,
    c: Chunks,
    grads: OutputGrads,
    dS_end: States | None,
    *,
    want_start: bool,
    concurrent: bool = False,
) -> tuple[ScanGrads, Tensor | None]:
    dh, y = _chunk_buffers(packing, c)
    dS0 = _states(c, len(packing.segments), outside=True) if want_start else None
    _scan_bwd(
        packing, c, grads.do, dS_end, "everything", y=y, dh=dh, dS0=dS0, concurrent=concurrent
    )
    return ScanGrads(grads.do, y, dh), dS0


def keep(
    rule: DeltaRule, c: Chunks, h: Tensor | None, v_new: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not rule.keep_intermediates:
        return _always(c)
    gated = () if rule.per_head else (c.qg, c.k_decayed, c.kg)
    return (*_always(c), *gated, h, v_new)


def _always(c: Chunks) -> tuple[Tensor, ...]:
    """What is kept of a forward in any case; all but T and Aqk is small."""
    return c.T, c.Aqk, c.decay, c.rows, c.anchors


def kept_shapes(
    rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what `keep` returns."""
    k, nothing = (NC, HV, CHUNK, K), (0,)
    square = (NC, HV, terms(rule, dtype) * CHUNK, CHUNK)
    T, k_decayed = (nothing, nothing) if rule.removal == "none" else (square, k)
    always = [
        (T, dtype),
        (square, dtype),
        ((NC, HV, K), torch.float32),
        ((NC, HV, planes(rule), CHUNK), torch.float32),
        ((NC, HV, 3, K) if safe(rule, dtype) else nothing, torch.float32),
    ]
    if not rule.keep_intermediates:
        return always  # type: ignore[return-value]  # tuples of several lengths
    return [
        *always,
        *(() if rule.per_head else ((k, dtype), (k_decayed, dtype), (k, dtype))),
        ((NC, HV, K, V), dtype),
        ((NC, HV, CHUNK, V), dtype),
    ]


def restore(
    rule: DeltaRule, packing: Packing, x: Inputs, kept: tuple[Tensor, ...], o: Tensor
) -> tuple[Chunks, Tensor | None, Tensor | None]:
    h, v_new = kept[-2:] if rule.keep_intermediates else (None, None)
    if rule.per_head:
        gated = tuple(unit_rows(t) for t in (x.q, x.k if x.p is None else x.p, x.k))
    elif rule.keep_intermediates:
        gated = kept[5:-2]
    else:
        gated = gated_operands(rule, packing, x, rows=kept[3], anchors=kept[4])
    return Chunks(*kept[:5], *gated, unit_rows(x.v), rule, o), h, v_new  # type: ignore[arg-type, call-arg]


def in_token_order(packing: Packing, h: Tensor) -> Tensor:
    return h


TRITON = Backend(
    name="triton",
    reads_output=True,
    always_kept=lambda rule: (0, 1, 2, 3, 4),
    kept_shapes=kept_shapes,
    prepare_chunks=prepare_chunks,
    scores=scores,
    scan_output=scan_output,
    in_token_order=in_token_order,
    keep=keep,
    restore=restore,
    output_bwd=output_bwd,
    summarize_bwd=summarize_bwd,
    runs_concurrently=runs_concurrently,
    scan=scan,
    scan_bwd=scan_bwd,
    intra_bwd=intra_bwd,
    fold=fold,
    split=split,
    conv=conv,
    conv_bwd=conv_bwd,
    gate=gate,
    recurrent=recurrent,
)
