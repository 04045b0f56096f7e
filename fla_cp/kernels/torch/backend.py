"""The backend of plain PyTorch: any device and dtype, and the reference of every kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.backend import Backend, ChunkStates, Kept, Shape
from fla_cp.kernels.torch import conv as convolution
from fla_cp.kernels.torch import decoding, gate, gated_norm, intra, recurrent, scan
from fla_cp.kernels.torch.intra import Chunks, Inputs, Spec
from fla_cp.rule import DeltaRule, accumulator


@dataclass(frozen=True)
class TorchBackend(Backend):
    """Stages that are one function of this folder are assigned; the others combine several."""

    name: str = "torch"
    reads_output: bool = False

    scores = staticmethod(intra.scores)
    output_bwd = staticmethod(scan.output_bwd)
    summarize_bwd = staticmethod(scan.summarize_bwd)
    scan_bwd = staticmethod(scan.scan_bwd)
    intra_bwd = staticmethod(intra.intra_bwd)
    conv = staticmethod(convolution.conv)
    conv_bwd = staticmethod(convolution.conv_bwd)
    gated_norm_bwd = staticmethod(gated_norm.gated_norm_bwd)
    gated_norm = staticmethod(gated_norm.gated_norm)
    recurrent = staticmethod(recurrent.recurrent)
    conv_update = staticmethod(decoding.conv_update)
    step_product = staticmethod(decoding.step_product)

    def prepare_chunks(
        self, spec: Spec, x: Inputs, seeds: States | None
    ) -> tuple[Chunks, AffineMap]:
        chunks = intra.intra(spec, x)
        return chunks, scan.summarize(spec, chunks, seeds)

    def scan_output(
        self, spec: Spec, chunks: Chunks, S0: States | None, *, want_states: bool, want_end: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, v_new, S_end = scan.scan(spec, chunks, S0)
        return scan.output(spec, chunks, h, v_new), h, v_new, S_end

    def in_token_order(self, spec: Spec, h: Tensor) -> Tensor:
        return h[spec.packing.steps(h.device).natural]

    def keep(self, spec: Spec, chunks: Chunks, h: Tensor | None, v_new: Tensor | None) -> Kept:
        if not spec.rule.keep_intermediates:
            return chunks.T, chunks.Aqk
        return (*(chunks if spec.rule.removal == "p" else chunks[:-1]), h, v_new)

    def restore(
        self, spec: Spec, x: Inputs, kept: Kept, o: Tensor | None
    ) -> tuple[Chunks, ChunkStates | None]:
        if spec.rule.keep_intermediates:
            return Chunks(*kept[:-2]), kept[-2:]  # type: ignore[arg-type, return-value]
        return intra.intra(spec, x, kept), None  # type: ignore[arg-type]

    def scan(self, spec: Spec, chunks: Chunks, S0: States | None) -> Callable[[], ChunkStates]:
        h, v_new, _ = scan.scan(spec, chunks, S0)
        return lambda: (h, v_new)

    def kept_shapes(
        self, rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
    ) -> list[Shape]:
        C = rule.chunk
        square = (NC, HV, C, C)
        shapes: list[tuple[int, ...]] = [square, square]
        if rule.keep_intermediates:
            k, v, gates = (NC, HV, C, K), (NC, HV, C, V), 1 if rule.per_head else K
            beta, gc, decay = (NC, HV, C, 1), (NC, HV, C, gates), (NC, HV, gates)
            p = [k] if rule.removal == "p" else []
            shapes = [k, k, v, beta, gc, square, square, k, k, v, decay, k, *p, (NC, HV, K, V), v]
        return [(shape, accumulator(dtype)) for shape in shapes]

    def always_kept(self, rule: DeltaRule) -> tuple[int, ...]:
        return tuple(map(Chunks._fields.index, ("T", "Aqk")))

    def gate(
        self, rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tensor:
        return gate.activate(rule, g.to(accumulator(g.dtype)), A_log, dt_bias)


TORCH = TorchBackend()
