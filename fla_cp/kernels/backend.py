"""The Triton backend, every stage of backend.py; long because a launch is its list of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..backend import Backend
from ..packing import Packing
from ..rule import CHUNK, NORM_EPS, DeltaRule
from ..split import COLUMNS
from ..split import split as cut_by_rule
from ..stages.intra import Inputs
from ..state import AffineMap, States
from ..tables import Build, Columns
from . import assembler
from .conv import conv, conv_bwd
from .gate import GATES
from .gate_op import gate
from .head import (
    dk_head_kernel,
    dq_head_kernel,
    head_gate_bwd_kernel,
    intra_head_kernel,
    scores_head_bwd_kernel,
)
from .intra import intra_kernel
from .intra_bwd import intra_bwd_kernel, scores_bwd_kernel
from .recurrent import recurrent
from .scan import scan_bwd_kernel, scan_kernel
from .sums import sums
from .tiles import unit_rows
from .tuning import BESIDE, tile
from .walk import walk

assembler.choose()


class Chunks(NamedTuple):
    """Operands of the scans, chunk by chunk in token order: T, Aqk [NC, HV, C, C] in the inputs'
    dtype; fp32 decay [NC, HV, K] and rows [NC, HV, planes, C] (beta, what q and k are multiplied
    by, and more in head.py); qg, kin, kg [NC, HV, C, K], with one decay a head the inputs q, k or
    p, and k [T, H, K]; v as given. In a backward also o. Where the rule removes nothing, T is
    empty, and so is kin with a decay a channel."""

    T: Tensor
    Aqk: Tensor
    decay: Tensor
    rows: Tensor
    qg: Tensor
    kin: Tensor
    kg: Tensor
    v: Tensor
    rule: DeltaRule
    o: Tensor | None = None

    @property
    def of_heads(self) -> bool:
        return self.qg.dim() == 3

    def launch(self) -> dict[str, Any]:
        """What both scans are told of the operands."""
        heads = self.decay.shape[1]
        found: dict[str, int] = {}
        for name, x in (("q", self.qg), ("r", self.kin), ("k", self.kg)):
            rows, head, *_ = x.stride() if self.of_heads else (0, 0)
            found |= {f"{name}_t": rows, f"{name}_h": head}
        return {
            **found,
            "HV": heads,
            "G": heads // self.kg.shape[1],
            "HEAD": self.of_heads,
            "REMOVAL": self.rule.removal,
            "PRECISION": _precision(self.Aqk.dtype),
        }


class Tables(NamedTuple):
    """Packing on the device, int32: of chunks [NC] and of segments [S]."""

    chunk_start: Tensor
    chunk_rows: Tensor
    seg_start: Tensor
    seg_stop: Tensor
    seg_chunk: Tensor


class OutputGrads(NamedTuple):
    """do as given; the reverse scan forms what it needs of it."""

    do: Tensor


class ScanGrads(NamedTuple):
    """do as given, y [NC, HV, C, V] and dh [NC, HV, K, V]."""

    do: Tensor
    y: Tensor
    dh: Tensor


def _columns(packing: Packing) -> Columns:
    starts: list[int] = []
    rows: list[int] = []
    first: list[int] = []
    for s in packing.segments:
        first.append(len(starts))
        for a in range(s.start, s.stop, CHUNK):
            starts.append(a)
            rows.append(min(CHUNK, s.stop - a))
    if packing.frame is not None:  # chunks of no tokens, at an address that exists
        more = packing.frame.chunks - len(starts)
        starts, rows = starts + [0] * more, rows + [0] * more
    return (
        starts,
        rows,
        [s.start for s in packing.segments],
        [s.stop for s in packing.segments],
        first,
    )


def tables(packing: Packing, device: torch.device) -> Tables:
    return Tables(*packing.table(_columns, torch.int32, device))


def _precision(dtype: torch.dtype) -> str:
    # three TF32 products are as good as fp32 here; half-precision operands ignore this
    return "tf32x3" if dtype == torch.float32 else "tf32"


SAFE_DTYPES = (torch.bfloat16,)
"""Take the safe gate's path: fp16 cannot hold 2^116, and what it rounds shows in fp32."""


def _safe(rule: DeltaRule, dtype: torch.dtype) -> bool:
    return rule.safe_gate and dtype in SAFE_DTYPES


def _named(stage: str, rule: DeltaRule, dtype: torch.dtype) -> str:
    """Name of a stage in the table of tiles."""
    if rule.per_head:
        return f"{stage}_head"
    return stage if _safe(rule, dtype) else f"{stage}_any"


def _gate_options(rule: DeltaRule, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "GATE": GATES[rule.gate][0],
        "NORM": rule.qk_l2norm,
        "SAFE": _safe(rule, dtype),
        "REMOVES": rule.removal == "k",
        "EXP2": rule.use_exp2,
        "PRECISION": _precision(dtype),
    }


def intra(
    rule: DeltaRule, packing: Packing, x: Inputs, kept: tuple[Tensor, Tensor] | None = None
) -> Chunks:
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    table = tables(packing, x.q.device)
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    t = tile(_named("intra", rule, x.q.dtype), K, V, x.q.dtype)
    gated, removes = (NC, HV, CHUNK, K), rule.removal != "none"
    if rule.per_head:
        qg, kin, kg = x.q, x.k if x.p is None else x.p, x.k
    else:
        qg, kin, kg = (x.q.new_empty(s) for s in (gated, gated if removes else (0,), gated))
    if kept is None:
        square = (NC, HV, CHUNK, CHUNK)
        T, Aqk = x.q.new_empty(square if removes else (0,)), x.q.new_empty(square)
    else:
        T, Aqk = kept
    decay = x.q.new_empty(NC, HV, K, dtype=torch.float32)
    rows = x.q.new_empty(NC, HV, _planes(rule), CHUNK, dtype=torch.float32)
    if NC and rule.per_head:
        intra_head_kernel[(NC, HV)](
            x.q,
            x.k,
            x.p,
            x.g,
            x.beta,
            x.A_log,
            x.dt_bias,
            T,
            Aqk,
            decay,
            rows,
            table.chunk_start,
            table.chunk_rows,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *((0, 0) if x.p is None else x.p.stride()[:2]),
            x.g.stride(0),
            0 if x.beta is None else x.beta.stride(0),
            rule.scale,
            rule.lower_bound or 0.0,
            rule.beta_factor or 1.0,
            HV=HV,
            G=HV // H,
            K=K,
            BT=CHUNK,
            BK=t.BK,
            GATE=GATES[rule.gate][0],
            NORM=rule.qk_l2norm,
            BETA_SIGMOID=rule.beta_factor is not None,
            EXP2=rule.use_exp2,
            SCORES=kept is None,
            REMOVAL=rule.removal,
            EPS=NORM_EPS,
            PRECISION=_precision(x.q.dtype),
            NS=t.stages,
            num_warps=t.warps,
        )
    elif NC:
        intra_kernel[(NC, HV)](
            x.q,
            x.k,
            x.g,
            x.beta,
            x.A_log,
            x.dt_bias,
            sums(x.q.dtype, x.q.device),
            qg,
            kin,
            kg,
            T,
            Aqk,
            decay,
            rows,
            table.chunk_start,
            table.chunk_rows,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *x.g.stride()[:2],
            0 if x.beta is None else x.beta.stride(0),
            triton.cdiv(K, t.BK),
            rule.scale,
            rule.lower_bound or 0.0,
            rule.beta_factor or 1.0,
            HV=HV,
            G=HV // H,
            K=K,
            BT=CHUNK,
            BK=t.BK,
            BETA_SIGMOID=rule.beta_factor is not None,
            EPS=NORM_EPS,
            SCORES=kept is None,
            num_warps=t.warps,
            NS=t.stages,
            maxnreg=t.registers,
            **_gate_options(rule, x.q.dtype),
        )
    return Chunks(T, Aqk, decay, rows, qg, kin, kg, x.v, rule)


def _planes(rule: DeltaRule) -> int:
    """Of `Chunks.rows`."""
    return 7 if rule.per_head else 3


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
    stream: torch.cuda.Stream | None = None,
) -> None:
    """which: segments, a property of the packing; transition: of `Packing.middle`. stream: to run
    on, which takes what was allocated and launched before on the current one."""
    middle = () if transition is None else packing.middle
    segments, names = getattr(packing, which), (which, "middle") if middle else (which,)
    table = tables(packing, c.v.device)
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    stage = "scan" if o is not None else "scan_ends" if h is None else "scan_states"
    if stream is not None:
        stage += "_beside"
    t = tile(stage, K, V, c.Aqk.dtype, HV * len(segments + middle))
    if not segments:
        return
    programs = triton.cdiv(V, t.BV) * len(segments) + triton.cdiv(K, t.BV) * len(middle)
    launch = functools.partial(
        scan_kernel[(programs, HV)],
        c.qg,
        c.kin,
        c.kg,
        c.v,
        c.rows,
        c.T,
        c.Aqk,
        c.decay,
        o,
        h,
        v_new,
        None if S0 is None else S0.value,
        S_end,
        transition,
        packing.table(_chosen(*names), torch.int64, c.v.device)[0],
        table.seg_start,
        table.seg_stop,
        table.seg_chunk,
        _entries(packing, S0, "carried", c.v.device),
        v_t=c.v.stride(0),
        v_h=c.v.stride(1),
        **_strides("S0", None if S0 is None else S0.value),
        **_strides("end", S_end, inner=True),
        **_strides("h", h, inner=True),
        states=len(segments),
        K=K,
        V=V,
        BT=CHUNK,
        BK=t.BK,
        BV=t.BV,
        NS=t.stages,
        num_warps=t.warps,
        **c.launch(),
    )
    if stream is None:
        launch()
        return
    stream.wait_stream(torch.cuda.current_stream(c.v.device))
    with torch.cuda.stream(stream):
        launch()


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


def summarize(packing: Packing, c: Chunks, seeds: States | None) -> AffineMap:
    feeding, middle = packing.feeding, packing.middle
    offset = _states(c, len(feeding)) if feeding else None
    transition = _states(c, len(middle), square=True) if middle else None
    _scan(packing, c, seeds, "feeding", S_end=offset, transition=transition)
    return AffineMap(transition, offset)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """0 without a GPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def split(
    packing: Packing, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device
) -> Packing:
    value, key = (HV * triton.cdiv(n, COLUMNS) for n in (V, K))
    return cut_by_rule(packing, value, key, multiprocessors(device))


def _chunk_buffers(packing: Packing, c: Chunks) -> tuple[Tensor, Tensor]:
    (NC, HV, K), V = c.decay.shape, c.v.shape[2]
    buffers = c.v.new_empty(NC, HV, K, V), c.v.new_empty(NC, HV, CHUNK, V)
    if packing.frame is not None:  # no scan writes chunks of no tokens, but `intra_bwd` reads them
        for x in buffers:
            x[triton.cdiv(packing.tokens, CHUNK) :].zero_()
    return buffers


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _both_fit(packing: Packing, c: Chunks) -> bool:
    """Whether the scans of a backward, which need nothing of each other, run side by side: where
    each leaves half the multiprocessors free, and with one decay a head and no p, whose operands
    fit into shared memory in three stages of 64 columns (with two, they take longer together)."""
    (HV, _), V = c.decay.shape[1:], c.v.shape[2]
    programs = 2 * HV * len(packing.segments) * triton.cdiv(V, BESIDE)
    narrow = c.of_heads and c.rule.removal != "p"
    return narrow and not c.rule.keep_intermediates and programs <= multiprocessors(c.v.device)


def scan(packing: Packing, c: Chunks, S0: States | None) -> Callable[[], tuple[Tensor, Tensor]]:
    h, v_new = _chunk_buffers(packing, c)
    side = _side_stream(c.v.device) if _both_fit(packing, c) else None
    _scan(packing, c, S0, "everything", h=h, v_new=v_new, stream=side)

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
    _scan(packing, c, S0, "everything", o=o, h=h, v_new=v_new, S_end=S_end)
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
) -> None:
    segments = getattr(packing, which)
    table = tables(packing, c.v.device)
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    stage = "scan_bwd_ends" if dh is None else "scan_bwd"
    if dh is not None and _both_fit(packing, c):
        stage += "_beside"
    t = tile(stage, K, V, c.Aqk.dtype, HV * len(segments))
    if not segments:
        return
    scan_bwd_kernel[(triton.cdiv(V, t.BV) * len(segments), HV)](
        c.qg,
        c.kin,
        c.kg,
        do,
        c.rows,
        c.T,
        c.Aqk,
        c.decay,
        y,
        dh,
        None if dS_end is None else dS_end.value,
        dS0,
        packing.table(_chosen(which), torch.int64, c.v.device)[0],
        table.seg_start,
        table.seg_stop,
        table.seg_chunk,
        _entries(packing, dS_end, "feeding", c.v.device),
        do_t=do.stride(0),
        do_h=do.stride(1),
        **_strides("end", None if dS_end is None else dS_end.value),
        **_strides("dS0", dS0, inner=True),
        K=K,
        V=V,
        BT=CHUNK,
        BK=t.BK,
        BV=t.BV,
        NS=t.stages,
        num_warps=t.warps,
        **c.launch(),
    )


def summarize_bwd(
    packing: Packing, c: Chunks, grads: OutputGrads, seeds: States | None
) -> Tensor | None:
    if not packing.carried:
        return None
    offset = _states(c, len(packing.carried))
    _scan_bwd(packing, c, grads.do, seeds, "carried", dS0=offset)
    return offset


def scan_bwd(
    packing: Packing, c: Chunks, grads: OutputGrads, dS_end: States | None, *, want_start: bool
) -> tuple[ScanGrads, Tensor | None]:
    dh, y = _chunk_buffers(packing, c)
    dS0 = _states(c, len(packing.segments), outside=True) if want_start else None
    _scan_bwd(packing, c, grads.do, dS_end, "everything", y=y, dh=dh, dS0=dS0)
    return ScanGrads(grads.do, y, dh), dS0


def intra_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
) -> Inputs:
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    grads = grads._replace(do=unit_rows(grads.do))
    return (_head_bwd if rule.per_head else _channels_bwd)(rule, packing, x, c, h, v_new, grads)


def _head_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
) -> Inputs:
    """One decay a head."""
    table, do = tables(packing, x.q.device), grads.do
    NC, (tokens, H, K), (HV, V) = len(table.chunk_start), x.q.shape, x.v.shape[1:]
    ts, tq, tk = (tile(n, K, V, x.q.dtype) for n in ("scores_bwd_head", "dq_head", "dk_head"))
    device, q_tiles, tiles = x.q.device, triton.cdiv(K, tq.BK), triton.cdiv(K, tk.BK)
    dq, dk = (torch.empty(x.q.shape, dtype=x.q.dtype, device=device) for _ in range(2))
    dv = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)
    dg = torch.empty(x.g.shape, dtype=x.g.dtype, device=device)
    dgc, dp, shift, dbeta, shares = (
        torch.empty(q_tiles + tiles, NC, HV, CHUNK, device=device),
        *[None] * 4,
    )
    if x.p is not None:
        dp, shift = torch.empty_like(dk), torch.empty_like(dgc[:tiles])
    if x.beta is not None:
        dbeta = torch.empty(x.beta.shape, dtype=x.beta.dtype, device=device)
        shares = torch.empty(1 + tiles, tokens, HV, device=device)
    dA_log = None if x.A_log is None else torch.empty(NC, HV, device=device)
    ddt_bias = None if x.dt_bias is None else torch.empty(NC, HV, device=device)
    partial = None  # memory of programs that go through several heads
    if HV > H:
        most = max(q_tiles * tq.BK, 2 * tiles * tk.BK)
        partial = torch.empty(NC, H, most, CHUNK, device=device)
    shape = {
        "H": H,
        "G": HV // H,
        "K": K,
        "V": V,
        "BT": CHUNK,
        "NORM": rule.qk_l2norm,
        "PRECISION": _precision(x.q.dtype),
    }
    weights = torch.empty(NC, HV, 2, CHUNK, CHUNK, dtype=x.q.dtype, device=device)
    of_rows = torch.empty(NC, HV, 3, CHUNK, device=device)
    if NC:
        scores_head_bwd_kernel[(NC, HV)](
            x.v,
            x.g,
            x.A_log,
            x.dt_bias,
            c.rows,
            do,
            c.o,
            v_new,
            grads.y,
            dv,
            shares,
            weights,
            of_rows,
            table.chunk_start,
            table.chunk_rows,
            *x.v.stride()[:2],
            x.g.stride(0),
            *do.stride()[:2],
            rule.lower_bound or 0.0,
            HV=HV,
            V=V,
            BT=CHUNK,
            BV=ts.BV,
            GATE=GATES[rule.gate][0],
            NORM=rule.qk_l2norm,
            QNORM=rule.qk_l2norm and q_tiles > 1,
            EXP2=rule.use_exp2,
            REMOVAL=rule.removal,
            PRECISION=_precision(x.q.dtype),
            num_warps=ts.warps,
        )
        dq_head_kernel[(NC * q_tiles, H)](
            x.q,
            x.k,
            c.rows,
            of_rows,
            weights,
            do,
            h,
            dq,
            dgc,
            partial,
            table.chunk_start,
            table.chunk_rows,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *do.stride()[:2],
            rule.scale,
            BK=tq.BK,
            BV=tq.BV,
            NS=tq.stages,
            num_warps=tq.warps,
            maxnreg=tq.registers,
            **shape,
        )
        dk_head_kernel[(NC * tiles, H)](
            x.q,
            x.k,
            x.p,
            c.decay,
            c.rows,
            of_rows,
            weights,
            h,
            grads.dh,
            v_new,
            grads.y,
            dk,
            dp,
            dgc[q_tiles:],
            shift,
            shares,
            partial,
            table.chunk_start,
            table.chunk_rows,
            tokens,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *((0, 0) if x.p is None else x.p.stride()[:2]),
            BK=tk.BK,
            BV=tk.BV,
            REMOVAL=rule.removal,
            NS=tk.stages,
            num_warps=tk.warps,
            maxnreg=tk.registers,
            **shape,
        )
        head_gate_bwd_kernel[(NC, HV)](
            x.g,
            x.A_log,
            x.dt_bias,
            dgc,
            shift,
            x.beta,
            shares,
            dg,
            dA_log,
            ddt_bias,
            dbeta,
            table.chunk_start,
            table.chunk_rows,
            tokens,
            x.g.stride(0),
            0 if x.beta is None else x.beta.stride(0),
            rule.lower_bound or 0.0,
            rule.beta_factor or 1.0,
            HV=HV,
            BT=CHUNK,
            SHARES=q_tiles + tiles,
            TILES=tiles,
            GATE=GATES[rule.gate][0],
            SLOPE=GATES[rule.gate][1],
            RATE_SCALES_RAW=rule.gate == "sigmoid",
            BETA_SIGMOID=rule.beta_factor is not None,
            num_warps=1,
        )
    dA_log, ddt_bias = _reduced(dA_log, x.A_log), _reduced(ddt_bias, x.dt_bias)
    return Inputs(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dp)


def _channels_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
) -> Inputs:
    """One decay a channel."""
    table, do = tables(packing, x.q.device), grads.do
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    t, ts = (
        tile(name, K, V, x.q.dtype) for name in (_named("intra_bwd", rule, x.q.dtype), "scores_bwd")
    )
    device, tokens = x.q.device, len(x.q)
    per_head = torch.float32 if HV > H else x.q.dtype
    tiles = triton.cdiv(K, t.BK)
    dq, dk = (torch.empty(tokens, HV, K, dtype=per_head, device=device) for _ in range(2))
    dv = torch.empty(tokens, HV, V, dtype=x.v.dtype, device=device)
    dg = torch.empty(x.g.shape, dtype=x.g.dtype, device=device)
    dbeta = torch.empty(1 + tiles, tokens, HV, device=device)
    dA_log = None if x.A_log is None else torch.empty(NC * tiles, HV, device=device)
    ddt_bias = None if x.dt_bias is None else torch.empty(NC, HV, K, device=device)
    dscores = torch.empty(NC, HV, 2, CHUNK, CHUNK, dtype=x.q.dtype, device=device)
    of_rows = torch.empty(NC, HV, 3, CHUNK, device=device)
    if NC:
        scores_bwd_kernel[(NC, HV)](
            x.v,
            c.rows,
            do,
            c.o,
            v_new,
            grads.y,
            dv,
            dbeta,
            dscores,
            of_rows,
            table.chunk_start,
            table.chunk_rows,
            *x.v.stride()[:2],
            *do.stride()[:2],
            HV=HV,
            V=V,
            BT=CHUNK,
            BV=ts.BV,
            PLANES=_planes(rule),
            NORM=rule.qk_l2norm,
            REMOVES=rule.removal != "none",
            PRECISION=_precision(x.q.dtype),
            num_warps=ts.warps,
        )
        intra_bwd_kernel[(NC * tiles, HV)](
            x.q,
            x.k,
            x.g,
            x.A_log,
            x.dt_bias,
            sums(x.q.dtype, x.q.device),
            c.decay,
            c.rows,
            of_rows,
            do,
            h,
            grads.dh,
            v_new,
            grads.y,
            dscores,
            dq,
            dk,
            dg,
            dbeta,
            dA_log,
            ddt_bias,
            table.chunk_start,
            table.chunk_rows,
            tokens,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *x.g.stride()[:2],
            *do.stride()[:2],
            rule.scale,
            rule.lower_bound or 0.0,
            HV=HV,
            G=HV // H,
            K=K,
            V=V,
            BT=CHUNK,
            BK=t.BK,
            BV=t.BV,
            SLOPE=GATES[rule.gate][1],
            RATE_SCALES_RAW=rule.gate == "sigmoid",
            num_warps=t.warps,
            NS=t.stages,
            maxnreg=t.registers,
            **_gate_options(rule, x.q.dtype),
        )
    if HV > H:

        def of_keys(d: Tensor) -> Tensor:
            return d.unflatten(1, (H, HV // H)).sum(2).to(x.q.dtype)

        dq, dk = of_keys(dq), of_keys(dk)
    return Inputs(
        dq,
        dk,
        dv,
        dg,
        None if x.beta is None else _beta_bwd(rule, x.beta, dbeta.sum(0)),
        _reduced(dA_log, x.A_log),
        _reduced(ddt_bias, x.dt_bias),
    )


def _beta_bwd(rule: DeltaRule, beta: Tensor, dbeta: Tensor) -> Tensor:
    if rule.beta_factor is not None:
        b = torch.sigmoid(beta.float())
        dbeta *= rule.beta_factor * b * (1 - b)
    return dbeta.to(beta.dtype)


def _reduced(partial: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Sum over chunks, in fp32."""
    return None if partial is None or like is None else partial.sum(0).view_as(like)


def keep(
    rule: DeltaRule, c: Chunks, h: Tensor | None, v_new: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not rule.keep_intermediates:  # decay and rows are small where a head has one decay
        return (c.T, c.Aqk, c.decay, c.rows) if rule.per_head else (c.T, c.Aqk)
    gated = () if rule.per_head else (c.qg, c.kin, c.kg)
    return (c.T, c.Aqk, c.decay, c.rows, *gated, h, v_new)


def kept_shapes(
    rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what `keep` returns."""
    square, k, nothing = (NC, HV, CHUNK, CHUNK), (NC, HV, CHUNK, K), (0,)
    T, kin = (nothing, nothing) if rule.removal == "none" else (square, k)
    triangles = [(T, dtype), (square, dtype)]
    factors = [
        ((NC, HV, K), torch.float32),
        ((NC, HV, _planes(rule), CHUNK), torch.float32),
    ]
    if not rule.keep_intermediates:
        return triangles + factors * rule.per_head
    return [
        *triangles,
        *factors,
        *(() if rule.per_head else ((k, dtype), (kin, dtype), (k, dtype))),
        ((NC, HV, K, V), dtype),
        ((NC, HV, CHUNK, V), dtype),
    ]


def restore(
    rule: DeltaRule, packing: Packing, x: Inputs, kept: tuple[Tensor, ...], o: Tensor
) -> tuple[Chunks, Tensor | None, Tensor | None]:
    if rule.keep_intermediates or rule.per_head:
        *tensors, h, v_new = kept if rule.keep_intermediates else (*kept, None, None)
        if rule.per_head:
            tensors += [unit_rows(t) for t in (x.q, x.k if x.p is None else x.p, x.k)]
        return Chunks(*tensors, unit_rows(x.v), rule, o), h, v_new  # type: ignore[arg-type, call-arg]
    T, Aqk = kept
    return intra(rule, packing, x, kept=(T, Aqk))._replace(o=o), None, None


def in_token_order(packing: Packing, h: Tensor) -> Tensor:
    return h


TRITON = Backend(
    name="triton",
    reads_output=True,
    always_kept=lambda rule: (0, 1, 2, 3) if rule.per_head else (0, 1),
    kept_shapes=kept_shapes,
    state_dtype=lambda dtype: dtype,
    intra=intra,
    summarize=summarize,
    scores=scores,
    scan_output=scan_output,
    in_token_order=in_token_order,
    keep=keep,
    restore=restore,
    output_bwd=output_bwd,
    summarize_bwd=summarize_bwd,
    scan=scan,
    scan_bwd=scan_bwd,
    intra_bwd=intra_bwd,
    walk=walk,
    split=split,
    conv=conv,
    conv_bwd=conv_bwd,
    gate=gate,
    recurrent=recurrent,
)
