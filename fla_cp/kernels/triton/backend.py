"""The backend of Triton and Gluon kernels: which stage runs what, and what runs concurrently.

Each stage has a file of its own with its kernels and their launches. A stage with kernels for one
GPU generation asks them first, here `kernels/sm90`; another generation is a folder beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor

from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.backend import Backend, ChunkStates, Kept, Shape
from fla_cp.kernels.torch.decoding import StepLayer, StepMixer, StepRun
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.triton import argmax as largest
from fla_cp.kernels.triton import (
    chunk_tables,
    decoding,
    exchange,
    fold,
    gate,
    gated_norm,
    intra,
    ptxas,
    recurrent,
    scan_gated,
    step_mixer,
    streams,
)
from fla_cp.kernels.triton import conv as convolution
from fla_cp.kernels.triton.device.blocks import unit_rows
from fla_cp.kernels.triton.device.bundles import anchored, by_chunk, terms
from fla_cp.kernels.triton.device.decay_sums import sums
from fla_cp.kernels.triton.generations import GENERATIONS, choose
from fla_cp.kernels.triton.intra_channelwise import gated_operands
from fla_cp.kernels.triton.launch import cdiv, current_stream
from fla_cp.kernels.triton.operands import DENSE, Chunks, ScanGrads, ScanOutputs, planes
from fla_cp.kernels.triton.scan import chunk_buffers, empty_states, launch_scan, state_buffer
from fla_cp.kernels.triton.scan_bwd import launch_scan_bwd
from fla_cp.kernels.triton.tile_table import TUNING, Tuning
from fla_cp.partition import segmentation
from fla_cp.partition.packing import Frame, Packing
from fla_cp.partition.whole import Former
from fla_cp.rule import CHUNK, CHUNK_SIZES, DeltaRule

ptxas.choose()

ALWAYS_KEPT: Final = 6
"""How many of the first fields of the chunks every backward reads; all but T and Aqk are small."""


LONG_CHUNKS, FAST_MEMORY = 256, 4e12
"""See `TritonBackend.one_by_one`: mean chunks of a segment, and bytes a second."""


OutputGrads = tuple[Chunks, Tensor]
"""The chunks, and do as given; the reverse scans form what they need of it."""


def first_chunks(packing: Packing, HV: int, tuning: Tuning) -> int:
    """How many chunks to form before the first summary starts; 0 to form all at once. It is the
    last chunk that a summary reads, rounded up to a multiple for which kernels are not compiled
    again."""
    if not packing.feeding or packing.frame is not None:
        return 0
    chunks = [cdiv(s.stop - s.start, packing.chunk) for s in packing.segments]
    first = 16 * cdiv(sum(chunks[: packing.feeding[-1] + 1]), 16)
    left = sum(chunks) - first
    worth = tuning.later_share * left > sum(chunks) and left * HV > tuning.later_least
    return first if worth else 0


def summarize(
    packing: Packing, c: Chunks, seeds: States | None
) -> tuple[AffineMap, Callable[[], None]]:
    """Memory for the affine maps, and a call that launches the kernels that write them."""
    feeding, middle = packing.feeding, packing.middle
    if not feeding:
        return AffineMap(None, None), lambda: None
    offset = empty_states(c, len(feeding))
    transition = empty_states(c, len(middle), square=True) if middle else None
    out = ScanOutputs(S_end=offset, transition=transition)
    return AffineMap(transition, offset), launch_scan(packing, c, seeds, "feeding", out)


@dataclass(frozen=True)
class TritonBackend(Backend):
    """Stages on CUDA devices. tuning: chooses kernels and tiles. one_stream: nothing runs at the
    same time, in a rehearsal. short_chunks: 32 is left out, because documents of 32 tokens take
    more time in chunks of 32 than in the Gluon kernels' chunks of 64 (docs/log.md)."""

    name: str = "triton"
    reads_output: bool = True
    compiles = True
    tuning: Tuning = TUNING
    one_stream: bool = False
    short_chunks: tuple[int, ...] = (16,)

    fold = exchange.fold if exchange.ENABLED else staticmethod(fold.fold)
    conv = staticmethod(convolution.conv)
    conv_bwd = staticmethod(convolution.conv_bwd)
    gate = staticmethod(gate.gate)
    gated_norm_bwd = staticmethod(gated_norm.gated_norm_bwd)
    gated_norm = staticmethod(gated_norm.gated_norm)
    recurrent = staticmethod(recurrent.recurrent)
    conv_update = staticmethod(decoding.conv_update)
    step_product = staticmethod(decoding.step_product)
    argmax = staticmethod(largest.argmax)

    def step_mixer(self, m: StepMixer) -> Tensor:
        return step_mixer.step_mixer(m) if step_mixer.fits(m) else super().step_mixer(m)

    def step_layers(self, layers: Sequence[StepLayer]) -> StepRun | None:
        first = layers[0].into
        for generation in GENERATIONS:
            if generation.possible(self.tuning, first.dtype):
                processors = self.tuning.sm_count(first.device)
                return generation.step_run.step_layers(layers, processors)
        return None

    def replay_stream(self, device: torch.device) -> int | None:
        return current_stream()

    def replay_constants(self, q: Tensor) -> tuple[Tensor, ...]:
        return tuple(sums(q.dtype, q.device, C) for C in CHUNK_SIZES)

    def segment(
        self,
        packing: Packing,
        HV: int,
        K: int,
        V: int,
        device: torch.device,
        backward: bool,
        extra: int | None = None,
    ) -> Packing:
        value, key = (HV * cdiv(n, segmentation.COLUMNS) for n in (V, K))
        processors = self.tuning.sm_count(device)
        return segmentation.split(packing, value, key, processors, backward, extra)

    def chunk_for(self, longest: int, dtype: torch.dtype) -> int:
        """In fp32 it is 64: kernels of short chunks spill, since each product is three."""
        return CHUNK if dtype == torch.float32 else super().chunk_for(longest, dtype)

    def longest_whole(self, chunks: int, HV: int, V: int, device: torch.device) -> int:
        value = HV * cdiv(V, segmentation.COLUMNS)
        return segmentation.longest_whole(chunks, value, self.tuning.sm_count(device))

    def table_former(self, frame: Frame, offsets: torch.dtype, device: torch.device) -> Former:
        return chunk_tables.table_former(frame, offsets, device)

    def extra_segments(self, HV: int, V: int, device: torch.device) -> int:
        """Twice what it takes to give every SM a program of the scan."""
        return 2 * cdiv(self.tuning.sm_count(device), HV * cdiv(V, segmentation.COLUMNS))

    def prepare_chunks(
        self, spec: Spec, x: Inputs, seeds: States | None
    ) -> tuple[Chunks, AffineMap]:
        rule, packing = spec
        if rule.removal == "p" and not rule.per_head and rule.qk_l2norm:
            raise ValueError(
                "impl='triton' computes removal='p' with a decay a channel for given q, k and p "
                "only, got qk_l2norm=True: use impl='torch'"
            )
        HV, tuning = x.v.shape[1], self.tuning
        key = ("first chunks", HV, tuning)
        first = packing.cached(key, lambda: first_chunks(packing, HV, tuning))
        if not first:
            c = intra.intra(rule, packing, x, tuning)
            maps, summary = summarize(packing, c, seeds)
            summary()
            return c, maps
        c, rest = intra.intra_in_two(rule, packing, x, first, tuning)
        maps, summary = summarize(packing, c, seeds)
        streams.first_then(summary, rest, x.q.device)
        return c, maps

    def scan_output(
        self, spec: Spec, chunks: Chunks, S0: States | None, *, want_states: bool, want_end: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        packing, v = spec.packing, chunks.v
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        h, v_new = chunk_buffers(packing, chunks) if want_states else (None, None)
        if want_states and not spec.rule.keep_intermediates:  # for the caller only
            h, v_new = empty_states(chunks, len(chunks.decay), outside=True, dtype=v.dtype), None
        S_end = empty_states(chunks, len(packing.segments), outside=True) if want_end else None
        launch_scan(packing, chunks, S0, "everything", ScanOutputs(o, h, v_new, S_end))()
        return o, h, v_new, S_end

    def keep(self, spec: Spec, chunks: Chunks, h: Tensor | None, v_new: Tensor | None) -> Kept:
        always = chunks[:ALWAYS_KEPT]
        if not spec.rule.keep_intermediates:
            return always
        gated = () if spec.rule.per_head else (chunks.qg, chunks.k_decayed, chunks.kg)
        return (*always, *gated, h, v_new)

    def restore(
        self, spec: Spec, x: Inputs, kept: Kept, o: Tensor | None
    ) -> tuple[Chunks, ChunkStates | None]:
        given: Any = kept
        rule, states = spec.rule, given[-2:] if spec.rule.keep_intermediates else None
        T, Aqk, decay, rows, anchors, steep = given[:ALWAYS_KEPT]
        formed, more = (T, Aqk, decay, rows, anchors, steep), (unit_rows(x.v), rule, o, self.tuning)
        if rule.per_head:
            qg, k_decayed, kg = map(unit_rows, (x.q, x.k if x.p is None else x.p, x.k))
        elif rule.keep_intermediates:
            qg, k_decayed, kg = given[ALWAYS_KEPT:-2]
        else:
            raw = Chunks(*formed, x.q, x.g, x.k, *more)
            if chunks := scan_gated.on_inputs(spec.packing, x, raw):
                return chunks, None
            qg, k_decayed, kg = gated_operands(*spec, x, rows, anchors, self.tuning)
        return Chunks(*formed, qg, k_decayed, kg, *more), states

    def restores_inputs(self, rule: DeltaRule, x: Inputs) -> bool:
        given = rule.keep_intermediates or rule.per_head or rule.chunk != CHUNK
        return not given and scan_gated.may_gate(rule, x, self.tuning)

    def output_bwd(self, spec: Spec, chunks: Chunks, do: Tensor) -> OutputGrads:
        return chunks, scan_gated.readable(chunks, unit_rows(do))

    def runs_concurrently(self, spec: Spec, chunks: Chunks) -> bool:
        """Whether every program of both scans has an SM of its own, on every rank, and they do not
        take longer at the same time (`one_by_one`). With p and one decay a head the scans never run
        concurrently: tiles of 64 columns then fit into shared memory in two stages only, and both
        scans together take longer than one after the other."""
        (HV, K), V = chunks.decay.shape[1:], chunks.v.shape[2]
        own = chunks.rule.removal == "p" and chunks.rule.per_head
        if own or spec.rule.keep_intermediates:  # chunks may be restored with all of them
            return False
        folder = choose(spec.packing, chunks)
        tiles = (
            self.tuning.tile(stage, K, V, chunks.Aqk.dtype, 0, folder)
            for stage in ("scan_states_concurrent", "scan_bwd_concurrent")
        )
        programs = HV * spec.packing.largest.everything * sum(cdiv(V, t.BV) for t in tiles)
        sms = self.tuning.sm_count(chunks.v.device)
        many = folder != "triton" and 2 * programs > sms
        return 0 < programs <= sms and not (many and self.one_by_one(spec, chunks))

    def one_by_one(self, spec: Spec, chunks: Chunks) -> bool:
        """Whether both scans take longer at the same time because memory is too slow for both: in
        long sequences with one decay a head and as many key heads as value heads, as measured on
        an H100 (docs/log.md). Where states pass from segment to segment or from rank to rank they
        run at the same time nevertheless."""
        most = spec.packing.largest
        if most.carried or not chunks.of_heads or chunks.qg.shape[1] < chunks.v.shape[1]:
            return False
        long = most.chunks >= LONG_CHUNKS * most.everything
        return long and self.tuning.memory_speed(chunks.v.device) < FAST_MEMORY

    def scan(self, spec: Spec, chunks: Chunks, S0: States | None) -> Callable[[], ChunkStates]:
        packing = spec.packing
        h, v_new = chunk_buffers(packing, chunks)
        both = self.runs_concurrently(spec, chunks)
        run = launch_scan(packing, chunks, S0, "everything", ScanOutputs(None, h, v_new), both)
        concurrent = both and bool(packing.segments) and not self.one_stream
        wait = streams.start(run, chunks.v.device, chunks, S0, concurrent=concurrent)

        def result() -> ChunkStates:
            wait()
            return h, v_new

        return result

    def summarize_bwd(
        self, spec: Spec, dout: OutputGrads, seeds: States | None, *, concurrent: bool
    ) -> Tensor | None:
        packing, (chunks, do) = spec.packing, dout
        if not packing.carried:
            return None
        offset = empty_states(chunks, len(packing.carried))
        both = concurrent and self.runs_concurrently(spec, chunks)
        launch_scan_bwd(packing, chunks, do, seeds, "carried", dS0=offset, concurrent=both)
        return offset

    def scan_bwd(
        self,
        spec: Spec,
        x: Inputs,
        dout: OutputGrads,
        dS_end: States | None,
        *,
        want_start: bool,
        concurrent: bool,
    ) -> tuple[ScanGrads, Tensor | None]:
        packing, (chunks, do) = spec.packing, dout
        both = concurrent and self.runs_concurrently(spec, chunks)
        y, dv = None, None
        if intra.reads_dv(packing, x, chunks, do, both):
            dh, dv = state_buffer(packing, chunks), torch.empty_like(do, memory_format=DENSE)
        else:
            dh, y = chunk_buffers(packing, chunks)
        dS0 = empty_states(chunks, len(packing.segments), outside=True) if want_start else None
        out = {"y": y, "dh": dh, "dv": dv, "dS0": dS0}
        launch_scan_bwd(packing, chunks, do, dS_end, "everything", **out, concurrent=both)
        return ScanGrads(do, y, dh, dv), dS0

    def intra_bwd(
        self, spec: Spec, x: Inputs, chunks: Chunks, states: ChunkStates, dscan: ScanGrads
    ) -> Inputs:
        return intra.intra_bwd(spec.packing, x, chunks, states, dscan)

    def rehearsing(self, device: torch.device) -> Self:
        sms = self.tuning.sm_count(device)
        memory = self.tuning.memory_speed(device)
        return replace(self, tuning=replace(self.tuning, sms=sms, memory=memory), one_stream=True)

    def kept_shapes(
        self, rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
    ) -> list[Shape]:
        C = rule.chunk
        k, nothing = (NC, HV, C, K), (0,)
        square = (NC, HV, terms(rule, dtype) * C, C)
        removes = rule.removal != "none"
        shapes: list[Shape] = [
            (square if removes else nothing, dtype),
            (square, dtype),
            ((NC, HV, K), torch.float32),
            ((NC, HV, planes(rule), C), torch.float32),
            ((NC, HV, C // 16, K) if anchored(rule, dtype) else nothing, torch.float32),
            ((NC, HV) if by_chunk(rule, dtype) else nothing, torch.int32),
        ]
        if rule.keep_intermediates:
            if not rule.per_head:
                shapes += [(k, dtype), (k if removes else nothing, dtype), (k, dtype)]
            shapes += [((NC, HV, K, V), dtype), ((NC, HV, C, V), dtype)]
        return shapes

    def always_kept(self, rule: DeltaRule) -> tuple[int, ...]:
        return tuple(range(ALWAYS_KEPT))


TRITON = TritonBackend()
