"""Launches of the kernels that are local to a chunk; long because a launch is its list of
arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.device.blocks import unit_rows
from fla_cp.kernels.triton.device.decay_sums import sums
from fla_cp.kernels.triton.device.gates import GATES
from fla_cp.kernels.triton.intra_channelwise import gated_kernel, intra_kernel
from fla_cp.kernels.triton.intra_channelwise_bwd import (
    beta_bwd_kernel,
    intra_bwd_kernel,
    scores_bwd_kernel,
)
from fla_cp.kernels.triton.intra_channelwise_bwd_safe import safe_bwd_kernel
from fla_cp.kernels.triton.intra_headwise import (
    dk_head_kernel,
    dq_head_kernel,
    dqk_head_kernel,
    head_gate_bwd_kernel,
    head_rows_kernel,
    intra_head_kernel,
    scores_head_bwd_kernel,
)
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, ScanGrads, Tables, precision, tables, terms
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, NORM_EPS, DeltaRule

SAFE_DTYPES = (torch.bfloat16,)
"""Take the safe gate's path: fp16 cannot hold 2^116, and what it rounds shows in fp32."""


def safe(rule: DeltaRule, dtype: torch.dtype) -> bool:
    """Whether the local kernels take the path of a safe gate."""
    return rule.safe_gate and not rule.per_head and dtype in SAFE_DTYPES


def _named(stage: str, rule: DeltaRule, dtype: torch.dtype) -> str:
    """Name of a stage in the table of tiles."""
    if rule.per_head:
        return f"{stage}_head"
    return stage if safe(rule, dtype) else f"{stage}_any"


def _gate_options(rule: DeltaRule, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "GATE": GATES[rule.gate][0],
        "NORM": rule.qk_l2norm,
        "SAFE": safe(rule, dtype),
        "REMOVES": rule.removal == "k",
        "EXP2": rule.use_exp2,
        "PRECISION": precision(dtype),
    }


def intra(rule: DeltaRule, packing: Packing, x: Inputs) -> Chunks:
    table, x, c = _unformed(rule, packing, x)
    NC = len(table.chunk_start)
    if NC and rule.per_head:
        _intra_head(rule, packing, c, x)(0, NC)
    elif NC:
        _intra_channels(rule, table, c, x)
    return c


def intra_in_two(
    rule: DeltaRule, packing: Packing, x: Inputs, first: int
) -> tuple[Chunks, Callable[[], None]]:
    """With one decay a head: the chunks, of which the first are formed, and a call that forms the
    others. It allocates nothing: another stream may run it."""
    table, x, c = _unformed(rule, packing, x)
    form = _intra_head(rule, packing, c, x)
    form(0, first)
    return c, functools.partial(form, first, len(table.chunk_start))


def _unformed(rule: DeltaRule, packing: Packing, x: Inputs) -> tuple[Tables, Inputs, Chunks]:
    """The packing's tables, the inputs as kernels take them, and memory for the chunks."""
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    table = tables(packing, x.q.device)
    NC, K, HV = len(table.chunk_start), x.q.shape[2], x.v.shape[1]
    if rule.per_head:
        qg, k_decayed, kg = x.q, x.k if x.p is None else x.p, x.k
    else:
        qg, k_decayed, kg = _gated(rule, NC, x)
    square = (NC, HV, terms(rule, x.q.dtype) * CHUNK, CHUNK)
    T, Aqk = x.q.new_empty((0,) if rule.removal == "none" else square), x.q.new_empty(square)
    decay = x.q.new_empty(NC, HV, K, dtype=torch.float32)
    rows = x.q.new_empty(NC, HV, planes(rule), CHUNK, dtype=torch.float32)
    anchors = decay.new_empty((NC, HV, 3, K) if safe(rule, x.q.dtype) else (0,))
    return table, x, Chunks(T, Aqk, decay, rows, anchors, qg, k_decayed, kg, x.v, rule)


def _intra_channels(rule: DeltaRule, table: Tables, c: Chunks, x: Inputs) -> None:
    """A decay a channel."""
    NC, (H, K), HV = len(table.chunk_start), x.q.shape[1:], x.v.shape[1]
    t = tile_table.tile(_named("intra", rule, x.q.dtype), K, x.v.shape[2], x.q.dtype)
    launch(
        intra_kernel,
        (NC, HV),
        x.q,
        x.k,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        sums(x.q.dtype, x.q.device),
        c.qg,
        c.k_decayed,
        c.kg,
        c.T,
        c.Aqk,
        c.decay,
        c.anchors,
        c.rows,
        table.chunk_start,
        table.chunk_rows,
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        *x.g.stride()[:2],
        0 if x.beta is None else x.beta.stride(0),
        cdiv(K, t.BK),
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
        num_warps=t.warps,
        NS=t.stages,
        maxnreg=t.registers,
        TERMS=c.terms,
        **_gate_options(rule, x.q.dtype),
    )


def _intra_head(
    rule: DeltaRule, packing: Packing, c: Chunks, x: Inputs
) -> Callable[[int, int], None]:
    """One decay a head. Returns a call that forms the chunks from a first to before another."""
    table = tables(packing, x.q.device)
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    whole = (
        eligible.supports(c)
        and eligible.sm90_scan.enough(packing, c)
        and eligible.sm90_intra.reads(x)
    )
    t = tile_table.tile("intra_head", K, V, x.q.dtype, 0, whole)
    if c.terms > 1:
        t = t._replace(registers=None)  # would spill
    p_strides = (0, 0) if x.p is None else x.p.stride()[:2]
    strides = x.g.stride(0), 0 if x.beta is None else x.beta.stride(0)
    bounds = rule.lower_bound or 0.0, rule.beta_factor or 1.0
    given = x.A_log, x.dt_bias
    of_rows = {
        "HV": HV,
        "BT": CHUNK,
        "GATE": GATES[rule.gate][0],
        "BETA_SIGMOID": rule.beta_factor is not None,
        "EXP2": rule.use_exp2,
        "REMOVAL": rule.removal,
    }
    where = table.chunk_start, table.chunk_rows
    if t.hopper:
        BH = min(32, tile_table.power_of_two(HV))
        grid = NC, cdiv(HV, BH)
        some = x.g, x.beta, *given, c.rows, *where, *strides, *bounds
        launch(head_rows_kernel, grid, *some, BH=BH, **of_rows)
        return functools.partial(eligible.sm90_intra.intra_head, rule, table, x, c)

    def form(first: int, stop: int) -> None:
        launch(
            intra_head_kernel,
            (stop - first, HV),
            x.q,
            x.k,
            x.p,
            x.g,
            x.beta,
            *given,
            c.T,
            c.Aqk,
            c.decay,
            c.rows,
            *where,
            first,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *p_strides,
            *strides,
            rule.scale,
            *bounds,
            G=HV // H,
            K=K,
            BK=t.BK,
            NORM=rule.qk_l2norm,
            EPS=NORM_EPS,
            TERMS=c.terms,
            PRECISION=precision(x.q.dtype),
            NS=t.stages,
            num_warps=t.warps,
            maxnreg=t.registers,
            **of_rows,
        )

    return form


def _gated(rule: DeltaRule, NC: int, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for qg, kin and kg."""
    shape = (NC, x.v.shape[1], CHUNK, x.q.shape[2])
    k_decayed = (0,) if rule.removal == "none" else shape
    return x.q.new_empty(shape), x.q.new_empty(k_decayed), x.q.new_empty(shape)


def gated_operands(
    rule: DeltaRule, packing: Packing, x: Inputs, rows: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """qg, kin and kg of the forward, formed again; with a decay a channel."""
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    table = tables(packing, x.q.device)
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    t = tile_table.tile("gated", K, V, x.q.dtype)
    qg, k_decayed, kg = _gated(rule, NC, x)
    options = _gate_options(rule, x.q.dtype)
    del options["NORM"]
    if NC:
        launch(
            gated_kernel,
            (NC * cdiv(K, t.BK), HV),
            x.q,
            x.k,
            x.g,
            x.A_log,
            x.dt_bias,
            sums(x.q.dtype, x.q.device),
            qg,
            k_decayed,
            kg,
            anchors,
            rows,
            table.chunk_start,
            table.chunk_rows,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *x.g.stride()[:2],
            rule.lower_bound or 0.0,
            HV=HV,
            G=HV // H,
            K=K,
            BT=CHUNK,
            BK=t.BK,
            num_warps=t.warps,
            **options,
        )
    return qg, k_decayed, kg


def planes(rule: DeltaRule) -> int:
    """Of `Chunks.rows`."""
    return 9 if rule.per_head else 3


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


def _tiles(
    names: tuple[str, ...],
    packing: Packing,
    x: Inputs,
    c: Chunks,
    grads: ScanGrads,
    rows: tuple[Tensor, ...],
) -> tuple[tile_table.Tile, ...]:
    """Of stages that one kernel in Gluon does together: all there, or none. rows: what it reads
    [T, H, K], none if it does not do this."""
    K, V = x.q.shape[2], x.v.shape[2]
    supports = bool(rows) and eligible.supports(c, *rows, x.v, grads.do)
    supports = supports and eligible.sm90_scan.enough(packing, c)
    for whole in (supports, False):
        tiles = tuple(tile_table.tile(name, K, V, x.q.dtype, 0, whole) for name in names)
        if all(t.hopper for t in tiles):
            break
    return tiles


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
    groups = HV > H or x.p is not None  # with p one kernel takes smaller tiles and is slower
    q_stage, k_stage = ("dq_head", "dk_head") if groups else ("dqk_head", "dqk_head")
    k_stage += "_two" * (x.p is not None and HV > H)
    read = (x.q, x.k) if x.p is None else () if HV > H else (x.q, x.k, x.p)
    ts, tq, tk = _tiles(("scores_bwd_head", q_stage, k_stage), packing, x, c, grads, read)
    whole = tk.hopper
    device, q_tiles, tiles = x.q.device, cdiv(K, tq.BK), cdiv(K, tk.BK)
    parts = q_tiles + tiles if groups and not whole else tiles
    dq, dk = (torch.empty(x.q.shape, dtype=x.q.dtype, device=device) for _ in range(2))
    dv = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)
    dg = torch.empty(x.g.shape, dtype=x.g.dtype, device=device)
    dgc, dp, shift, dbeta, shares = (
        torch.empty(parts, NC, HV, CHUNK, dtype=torch.float32, device=device),
        *[None] * 4,
    )
    if x.p is not None:
        dp, shift = torch.empty_like(dk), torch.empty_like(dgc[:tiles])
    if x.beta is not None:
        dbeta = torch.empty(x.beta.shape, dtype=x.beta.dtype, device=device)
        shares = torch.empty(1 + tiles, tokens, HV, dtype=torch.float32, device=device)
    dA_log = None if x.A_log is None else torch.empty(NC, HV, dtype=torch.float32, device=device)
    ddt_bias = (
        None if x.dt_bias is None else torch.empty(NC, HV, dtype=torch.float32, device=device)
    )
    shape = {
        "H": H,
        "K": K,
        "V": V,
        "BT": CHUNK,
        "NORM": rule.qk_l2norm,
        "PRECISION": precision(x.q.dtype),
    }
    if not whole:
        weights = torch.empty(NC, HV, 2, CHUNK, CHUNK, dtype=x.q.dtype, device=device)
        of_rows = torch.empty(NC, HV, 3, CHUNK, dtype=torch.float32, device=device)
    if NC and whole:
        out = {"dq": dq, "dk": dk, "dp": dp, "dv": dv, "dgc": dgc, "shift": shift, "shares": shares}
        programs = eligible.sm_count(device) or 1
        eligible.sm90_intra_bwd.head_bwd(rule, table, x, c, h, v_new, grads, out, programs)
    elif NC:
        launch(
            scores_head_bwd_kernel,
            (NC, HV),
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
            PRECISION=precision(x.q.dtype),
            num_warps=ts.warps,
        )
        if groups:
            launch(
                dq_head_kernel,
                (NC * q_tiles, H),
                x.q,
                x.k,
                c.rows,
                of_rows,
                weights,
                do,
                h,
                dq,
                dgc,
                table.chunk_start,
                table.chunk_rows,
                *x.q.stride()[:2],
                *x.k.stride()[:2],
                *do.stride()[:2],
                rule.scale,
                G=HV // H,
                BK=tq.BK,
                BV=tq.BV,
                NS=tq.stages,
                num_warps=tq.warps,
                maxnreg=tq.registers,
                **shape,
            )
            launch(
                dk_head_kernel,
                (NC * tiles, H),
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
                table.chunk_start,
                table.chunk_rows,
                tokens,
                *x.q.stride()[:2],
                *x.k.stride()[:2],
                *((0, 0) if x.p is None else x.p.stride()[:2]),
                G=HV // H,
                BK=tk.BK,
                BV=tk.BV,
                REMOVAL=rule.removal,
                NS=tk.stages,
                num_warps=tk.warps,
                maxnreg=tk.registers,
                **shape,
            )
        else:
            launch(
                dqk_head_kernel,
                (NC * tiles, H),
                x.q,
                x.k,
                c.decay,
                c.rows,
                of_rows,
                weights,
                do,
                h,
                grads.dh,
                v_new,
                grads.y,
                dq,
                dk,
                dgc,
                shares,
                table.chunk_start,
                table.chunk_rows,
                tokens,
                *x.q.stride()[:2],
                *x.k.stride()[:2],
                *do.stride()[:2],
                rule.scale,
                BK=tk.BK,
                BV=tk.BV,
                REMOVAL=rule.removal,
                NS=tk.stages,
                num_warps=tk.warps,
                maxnreg=tk.registers,
                **shape,
            )
    if NC:
        launch(
            head_gate_bwd_kernel,
            (NC, HV),
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
            SHARES=parts,
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
        tile_table.tile(name, K, V, x.q.dtype)
        for name in (_named("intra_bwd", rule, x.q.dtype), "scores_bwd")
    )
    device, tokens = x.q.device, len(x.q)
    per_head = torch.float32 if HV > H else x.q.dtype
    tiles = cdiv(K, t.BK)
    dq, dk = (torch.empty(tokens, HV, K, dtype=per_head, device=device) for _ in range(2))
    dv = torch.empty(tokens, HV, V, dtype=x.v.dtype, device=device)
    dg = torch.empty(x.g.shape, dtype=x.g.dtype, device=device)
    dbeta = torch.empty(1 + tiles, tokens, HV, dtype=torch.float32, device=device)
    dA_log = (
        None if x.A_log is None else torch.empty(NC * tiles, HV, dtype=torch.float32, device=device)
    )
    ddt_bias = (
        None if x.dt_bias is None else torch.empty(NC, HV, K, dtype=torch.float32, device=device)
    )
    dscores = torch.empty(NC, HV, 2, CHUNK, CHUNK, dtype=x.q.dtype, device=device)
    of_rows = torch.empty(NC, HV, 3, CHUNK, dtype=torch.float32, device=device)
    if NC:
        options = _gate_options(rule, x.q.dtype)
        safe_gate = options.pop("SAFE")
        launch(
            scores_bwd_kernel,
            (NC, HV),
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
            PLANES=planes(rule),
            NORM=rule.qk_l2norm,
            REMOVES=rule.removal != "none",
            MIRRORED=not safe_gate,
            PRECISION=precision(x.q.dtype),
            num_warps=ts.warps,
        )
        kernel = safe_bwd_kernel if safe_gate else intra_bwd_kernel
        launch(
            kernel,
            (NC * tiles, HV),
            x.q,
            x.k,
            x.g,
            x.A_log,
            x.dt_bias,
            sums(x.q.dtype, x.q.device),
            c.anchors if safe_gate else c.decay,
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
            **options,
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
        None if x.beta is None else _beta_bwd(rule, x.beta, dbeta),
        _reduced(dA_log, x.A_log),
        _reduced(ddt_bias, x.dt_bias),
    )


def _beta_bwd(rule: DeltaRule, beta: Tensor, shares: Tensor) -> Tensor:
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    if dbeta.numel():
        launch(
            beta_bwd_kernel,
            (cdiv(dbeta.numel(), 1024),),
            beta,
            shares,
            dbeta,
            dbeta.numel(),
            beta.stride(0),
            rule.beta_factor or 1.0,
            HV=beta.shape[1],
            SHARES=len(shares),
            BETA_SIGMOID=rule.beta_factor is not None,
            B=1024,
        )
    return dbeta


def _reduced(partial: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Sum over chunks, in fp32."""
    return None if partial is None or like is None else partial.sum(0).view_as(like)
