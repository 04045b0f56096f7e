"""The backend of Triton and Gluon kernels: which stage runs what, and what runs concurrently.

Each stage has a file of its own with its kernels and their launches. A stage with kernels for one
GPU generation asks them first, here `kernels/sm90`; another generation is a folder beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla_cp.comm.affine import Steps
from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.backend import Backend, Shape
from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.conv import ConvRows
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.kernels.triton import conv, fold, gate, ptxas, recurrent, streams
from fla_cp.kernels.triton.device.blocks import unit_rows
from fla_cp.kernels.triton.device.bundles import safe, terms
from fla_cp.kernels.triton.intra import intra, intra_bwd, intra_in_two
from fla_cp.kernels.triton.intra_channelwise import gated_operands
from fla_cp.kernels.triton.launch import cdiv
from fla_cp.kernels.triton.operands import Chunks, OutputGrads, ScanGrads, planes
from fla_cp.kernels.triton.scan import chunk_buffers, empty_states, launch_scan
from fla_cp.kernels.triton.scan_bwd import launch_scan_bwd
from fla_cp.kernels.triton.tile_table import TUNING, Tuning
from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.packing import Packing
from fla_cp.partition.segmentation import COLUMNS
from fla_cp.partition.segmentation import split as cut_by_rule
from fla_cp.rule import CHUNK, DeltaRule

ptxas.choose()

ALWAYS_KEPT = ("T", "Aqk", "decay", "rows", "anchors")
"""Fields of the chunks that every backward reads; all but T and Aqk are small."""


def first_chunks(packing: Packing, HV: int, tuning: Tuning) -> int:
    """How many chunks to form before the first summary starts: up to the last that a summary reads,
    rounded up to a multiple for which kernels are not compiled again; 0 to form all at once."""
    if not packing.feeding or packing.frame is not None:
        return 0
    chunks = [cdiv(s.stop - s.start, CHUNK) for s in packing.segments]
    first = 16 * cdiv(sum(chunks[: packing.feeding[-1] + 1]), 16)
    left = sum(chunks) - first
    worth = tuning.later_share * left > sum(chunks) and left * HV > tuning.later_least
    return first if worth else 0


@dataclass(frozen=True)
class TritonBackend(Backend):
    """Stages on CUDA. tuning: decides kernels and tiles."""

    name: str = "triton"
    reads_output: bool = True
    tuning: Tuning = TUNING

    def segment(
        self,
        packing: Packing,
        HV: int,
        K: int,
        V: int,
        dtype: torch.dtype,
        device: torch.device,
        backward: bool,
    ) -> Packing:
        value, key = (HV * cdiv(n, COLUMNS) for n in (V, K))
        return cut_by_rule(packing, value, key, self.tuning.sm_count(device), backward)

    def prepare_chunks(
        self, rule: DeltaRule, packing: Packing, x: Inputs, seeds: States | None
    ) -> tuple[Chunks, AffineMap]:
        if rule.removal == "p" and not rule.per_head:
            raise ValueError(
                "impl='triton' computes removal='p' with one decay a head only, got "
                "per_head=False: use impl='torch'"
            )
        first, HV, tuning = 0, x.v.shape[1], self.tuning
        if rule.per_head:  # with a decay a channel, a summary slows the rest as much as it gains
            key = ("first chunks", HV, tuning)
            first = packing.cached(key, lambda: first_chunks(packing, HV, tuning))
        if not first:
            c = intra(rule, packing, x, tuning)
            return c, self.summarize(packing, c, seeds)
        c, rest = intra_in_two(rule, packing, x, first, tuning)
        maps, summary = _summary(packing, c, seeds)
        streams.first_then(summary, rest, x.q.device)
        return c, maps

    def summarize(self, packing: Packing, c: Chunks, seeds: States | None) -> AffineMap:
        """The affine maps alone."""
        maps, start = _summary(packing, c, seeds)
        start()
        return maps

    def scan_output(
        self,
        rule: DeltaRule,
        packing: Packing,
        chunks: Chunks,
        S0: States | None,
        *,
        want_states: bool,
        want_end: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        v = chunks.v
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        h, v_new = chunk_buffers(packing, chunks) if want_states else (None, None)
        if want_states and not rule.keep_intermediates:  # for the caller only
            h, v_new = empty_states(chunks, len(chunks.decay), outside=True, dtype=v.dtype), None
        S_end = empty_states(chunks, len(packing.segments), outside=True) if want_end else None
        launch_scan(packing, chunks, S0, "everything", o=o, h=h, v_new=v_new, S_end=S_end)()
        return o, h, v_new, S_end

    def keep(
        self, rule: DeltaRule, chunks: Chunks, h: Tensor | None, v_new: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        always = tuple(getattr(chunks, name) for name in ALWAYS_KEPT)
        if not rule.keep_intermediates:
            return always
        gated = () if rule.per_head else (chunks.qg, chunks.k_decayed, chunks.kg)
        return (*always, *gated, h, v_new)

    def restore(
        self,
        rule: DeltaRule,
        packing: Packing,
        x: Inputs,
        kept: tuple[Tensor | None, ...],
        o: Tensor | None,
    ) -> tuple[Chunks, Tensor | None, Tensor | None]:
        given: Any = kept
        always: dict[str, Tensor] = dict(zip(ALWAYS_KEPT, given, strict=False))
        h, v_new = kept[-2:] if rule.keep_intermediates else (None, None)
        if rule.per_head:
            gated = tuple(unit_rows(t) for t in (x.q, x.k if x.p is None else x.p, x.k))
        elif rule.keep_intermediates:
            gated = given[len(ALWAYS_KEPT) : -2]
        else:
            rows, anchors = always["rows"], always["anchors"]
            gated = gated_operands(rule, packing, x, rows, anchors, self.tuning)
        named = dict(zip(("qg", "k_decayed", "kg"), gated, strict=True))
        chunks = Chunks(**always, **named, v=unit_rows(x.v), rule=rule, o=o, tuning=self.tuning)
        return chunks, h, v_new

    def output_bwd(
        self, rule: DeltaRule, packing: Packing, chunks: Chunks, do: Tensor
    ) -> OutputGrads:
        return OutputGrads(unit_rows(do))

    def runs_concurrently(self, packing: Packing, chunks: Chunks) -> bool:
        """Where every program of both scans has an SM of its own, on every rank. With p they do not
        run concurrently: tiles of 64 columns then fit into shared memory in two stages only, and
        both scans together take longer than one after the other."""
        (HV, K), V = chunks.decay.shape[1:], chunks.v.shape[2]
        if chunks.rule.removal == "p" or chunks.rule.keep_intermediates:
            return False
        sm90 = eligible.supports(chunks) and eligible.pays(packing, chunks)
        tiles = (
            self.tuning.tile(stage, K, V, chunks.Aqk.dtype, 0, sm90)
            for stage in ("scan_states_concurrent", "scan_bwd_concurrent")
        )
        programs = HV * packing.largest.everything * sum(cdiv(V, t.BV) for t in tiles)
        return 0 < programs <= self.tuning.sm_count(chunks.v.device)

    def scan(
        self, packing: Packing, chunks: Chunks, S0: States | None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        h, v_new = chunk_buffers(packing, chunks)
        both = self.runs_concurrently(packing, chunks)
        run = launch_scan(packing, chunks, S0, "everything", h=h, v_new=v_new, concurrent=both)
        concurrent = both and bool(packing.segments)
        wait = streams.start(run, chunks.v.device, chunks, S0, concurrent=concurrent)

        def result() -> tuple[Tensor, Tensor]:
            wait()
            return h, v_new

        return result

    def summarize_bwd(
        self,
        packing: Packing,
        chunks: Chunks,
        dout: OutputGrads,
        seeds: States | None,
        *,
        concurrent: bool = False,
    ) -> Tensor | None:
        if not packing.carried:
            return None
        offset = empty_states(chunks, len(packing.carried))
        concurrent = concurrent and self.runs_concurrently(packing, chunks)
        launch_scan_bwd(
            packing, chunks, dout.do, seeds, "carried", dS0=offset, concurrent=concurrent
        )
        return offset

    def scan_bwd(
        self,
        packing: Packing,
        chunks: Chunks,
        dout: OutputGrads,
        dS_end: States | None,
        *,
        want_start: bool,
        concurrent: bool = False,
    ) -> tuple[ScanGrads, Tensor | None]:
        dh, y = chunk_buffers(packing, chunks)
        dS0 = empty_states(chunks, len(packing.segments), outside=True) if want_start else None
        concurrent = concurrent and self.runs_concurrently(packing, chunks)
        out = {"y": y, "dh": dh, "dS0": dS0}
        launch_scan_bwd(
            packing, chunks, dout.do, dS_end, "everything", **out, concurrent=concurrent
        )
        return ScanGrads(dout.do, y, dh), dS0

    def intra_bwd(
        self,
        rule: DeltaRule,
        packing: Packing,
        x: Inputs,
        chunks: Chunks,
        h: Tensor,
        v_new: Tensor,
        dscan: ScanGrads,
    ) -> Inputs:
        return intra_bwd(rule, packing, x, chunks, h, v_new, dscan)

    def fold(
        self,
        owner: Tabled,
        steps: Steps,
        transition: Tensor | None,
        offset: Tensor | None,
        start: Tensor | None,
        out: Tensor,
        *,
        transposed: bool,
    ) -> Tensor:
        return fold.fold(owner, steps, transition, offset, start, out, transposed=transposed)

    def kept_shapes(
        self, rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
    ) -> list[Shape]:
        k, nothing = (NC, HV, CHUNK, K), (0,)
        square = (NC, HV, terms(rule, dtype) * CHUNK, CHUNK)
        removes = rule.removal != "none"
        shapes: list[Shape] = [
            (square if removes else nothing, dtype),
            (square, dtype),
            ((NC, HV, K), torch.float32),
            ((NC, HV, planes(rule), CHUNK), torch.float32),
            ((NC, HV, 3, K) if safe(rule, dtype) else nothing, torch.float32),
        ]
        if rule.keep_intermediates:
            if not rule.per_head:
                shapes += [(k, dtype), (k if removes else nothing, dtype), (k, dtype)]
            shapes += [((NC, HV, K, V), dtype), ((NC, HV, CHUNK, V), dtype)]
        return shapes

    def always_kept(self, rule: DeltaRule) -> tuple[int, ...]:
        return tuple(range(len(ALWAYS_KEPT)))

    def conv(
        self,
        x: Tensor,
        halo: Tensor,
        where: ConvRows,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
    ) -> Tensor:
        return conv.conv(x, halo, where, weight, bias, silu)

    def conv_bwd(
        self,
        x: Tensor,
        halo: Tensor,
        where: ConvRows,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        dy: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return conv.conv_bwd(x, halo, where, weight, bias, silu, dy)

    def gate(
        self, rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tensor:
        return gate.gate(rule, g, A_log, dt_bias)

    def recurrent(
        self,
        rule: DeltaRule,
        x: Inputs,
        S0: Tensor | None,
        S_end: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        return recurrent.recurrent(rule, x, S0, S_end, sequences)


def _summary(
    packing: Packing, c: Chunks, seeds: States | None
) -> tuple[AffineMap, Callable[[], None]]:
    """Memory for the affine maps, and a call that launches what forms them."""
    feeding, middle = packing.feeding, packing.middle
    if not feeding:
        return AffineMap(None, None), lambda: None
    offset = empty_states(c, len(feeding))
    transition = empty_states(c, len(middle), square=True) if middle else None
    start = launch_scan(packing, c, seeds, "feeding", S_end=offset, transition=transition)
    return AffineMap(transition, offset), start


TRITON = TritonBackend()
