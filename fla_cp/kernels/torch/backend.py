"""The backend of plain PyTorch: any device and dtype, and the reference of every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fla_cp.comm import affine
from fla_cp.comm.affine import Steps
from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.backend import Backend, Shape
from fla_cp.kernels.torch import conv, gate, intra, recurrent, scan
from fla_cp.kernels.torch.conv import ConvRows
from fla_cp.kernels.torch.intra import Chunks, Inputs, ScanGrads
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.kernels.torch.scan import OutputGrads
from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule, accumulator


@dataclass(frozen=True)
class TorchBackend(Backend):
    """Each stage as in its own file of this folder."""

    name: str = "torch"
    reads_output: bool = False

    def prepare_chunks(
        self, rule: DeltaRule, packing: Packing, x: Inputs, seeds: States | None
    ) -> tuple[Chunks, AffineMap]:
        chunks = intra.intra(rule, packing, x)
        return chunks, scan.summarize(packing, chunks, seeds)

    def scores(self, rule: DeltaRule, packing: Packing, chunks: Chunks) -> Chunks:
        return intra.scores(rule, packing, chunks)

    def scan_output(
        self,
        rule: DeltaRule,
        packing: Packing,
        chunks: Chunks,
        S0: States | None,
        *,
        want_states: bool,
        want_end: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, v_new, S_end = scan.scan(packing, chunks, S0)
        return scan.output(rule, packing, chunks, h, v_new), h, v_new, S_end

    def in_token_order(self, packing: Packing, h: Tensor) -> Tensor:
        return h[packing.steps(h.device).natural]

    def keep(
        self, rule: DeltaRule, chunks: Chunks, h: Tensor | None, v_new: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if not rule.keep_intermediates:
            return chunks.T, chunks.Aqk
        return (*(chunks if rule.removal == "p" else chunks[:-1]), h, v_new)

    def restore(
        self,
        rule: DeltaRule,
        packing: Packing,
        x: Inputs,
        kept: tuple[Tensor | None, ...],
        o: Tensor | None,
    ) -> tuple[Chunks, Tensor | None, Tensor | None]:
        if rule.keep_intermediates:
            return Chunks(*kept[:-2]), kept[-2], kept[-1]  # type: ignore[arg-type]
        again = intra.intra(rule, packing, x, kept=(kept[0], kept[1]))  # type: ignore[arg-type]
        return again, None, None

    def output_bwd(
        self, rule: DeltaRule, packing: Packing, chunks: Chunks, do: Tensor
    ) -> OutputGrads:
        return scan.output_bwd(rule, packing, chunks, do)

    def scan(
        self, packing: Packing, chunks: Chunks, S0: States | None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        h, v_new, _ = scan.scan(packing, chunks, S0)
        return lambda: (h, v_new)

    def summarize_bwd(
        self,
        packing: Packing,
        chunks: Chunks,
        dout: OutputGrads,
        seeds: States | None,
        *,
        concurrent: bool = False,
    ) -> Tensor | None:
        return scan.summarize_bwd(packing, chunks, dout, seeds)

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
        return scan.scan_bwd(packing, chunks, dout, dS_end, want_start=want_start)

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
        return intra.intra_bwd(rule, packing, x, chunks, h, v_new, dscan)

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
        return affine.fold(owner, steps, transition, offset, start, out, transposed=transposed)

    def kept_shapes(
        self, rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
    ) -> list[Shape]:
        square = (NC, HV, CHUNK, CHUNK)
        shapes: list[tuple[int, ...]] = [square, square]
        if rule.keep_intermediates:
            k, v, gates = (NC, HV, CHUNK, K), (NC, HV, CHUNK, V), 1 if rule.per_head else K
            beta, gc, decay = (NC, HV, CHUNK, 1), (NC, HV, CHUNK, gates), (NC, HV, gates)
            p = [k] if rule.removal == "p" else []
            shapes = [k, k, v, beta, gc, square, square, k, k, v, decay, k, *p, (NC, HV, K, V), v]
        return [(shape, accumulator(dtype)) for shape in shapes]

    def always_kept(self, rule: DeltaRule) -> tuple[int, ...]:
        return tuple(map(Chunks._fields.index, ("T", "Aqk")))

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
        return gate.activate(rule, g.to(accumulator(g.dtype)), A_log, dt_bias)

    def recurrent(
        self,
        rule: DeltaRule,
        x: Inputs,
        S0: Tensor | None,
        S_end: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        return recurrent.recurrent(rule, x, S0, S_end, sequences)


TORCH = TorchBackend()
