"""Launches of the kernel of step_layers.py: which layers it takes, its table and its memory.

`step_layers` is asked once, before the first step. For several sequences it returns the launches of
rows_run.py, and None for layers that none of these kernels takes: they run as on other GPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fla_cp.kernels.sm90.rows_run import RowsRun, rows_layers
from fla_cp.kernels.sm90.step_layers import step_layers_kernel
from fla_cp.kernels.sm90.step_layouts import LayersShape
from fla_cp.kernels.sm90.step_words import FIELDS, SEGMENT
from fla_cp.kernels.torch.decoding import StepLayer
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.tile_table import power_of_two

ENABLED = True
"""Whether steps may run layers in this kernel. `python -m benchmarks.decode` measures both."""

APART = False
"""Whether each phase of each layer is a launch of its own, in which no program waits for another.
Tests compare both."""

ROWS, COLUMNS = 16, 1024
"""Rows and columns of a tile: 32 KiB, of which each of 8 warps has two rows."""

WARPS, SPLIT, SLOTS = 8, 8, 6
"""Warps of a program, the most programs that share a head, and the most buffers of the ring. On an
H200, 24 layers of the 1.3B model with KDA take 0.865 ms; with 5, 4 and 3 buffers 0.888, 0.870 and
0.875; with 4 programs a head and 4 buffers 0.876."""

SHARED = 224 * 1024
"""Bytes of shared memory for the buffers that a program allocates. The compiler needs some more."""

REGISTERS = 65536
"""Registers of an SM. A launch says that one program may have all of them. Otherwise the assembler
of Triton 3.6.0 spills some, so that two programs would fit; the AOT record shows spills."""

PHASES = 6
"""Phases of a launch: x is taken in, and the five phases of a layer."""


def shape(layer: StepLayer, processors: int) -> LayersShape | None:
    """What the kernel is compiled for; None if it does not take the layer.

    It takes one sequence (B = 1); a convolution of width 4 without a bias; normalised q and k; KDA,
    the gated delta rule, GLA and simple GLA, with as many value heads as heads of q and k; a power
    of two of heads, at most as many as SMs; K, V and ranks that are powers of two from 16 to 128;
    and hidden and inner sizes that are multiples of 8. processors: SMs of the GPU."""
    s, rule = layer, layer.rule
    B, H, K, V = s.state.shape
    (N, C), F = s.into.shape, s.down.shape[1]
    D, ranks = H * (2 * K + V), {w.shape[1] for w in (s.decay_up, s.gate_up) if w is not None}
    if len(ranks) > 1 or (s.decay_up is None) != rule.per_head:
        return None
    rank = ranks.pop() if ranks else V
    programs = min(processors, N // 2, C // 2, F // 2)
    sizes = K, V, rank
    columns = [s.decay, s.gate, 0 if s.beta is None else s.beta, N]
    if (
        B != 1
        or s.bias is not None
        or s.window.shape != (1, D, 4)
        or rule.removal == "p"
        or rule.gate == "given"
        or not rule.qk_l2norm
        or rule.state_v_first
        or H & (H - 1)
        or any(n != power_of_two(n) or not 16 <= n <= 2 * int(SEGMENT) for n in sizes)
        or any(n % 8 for n in (C, F))
        or any(n % 2 for n in columns)
        or programs < H
        or ROWS < 2 * WARPS
    ):
        return None
    split, tile = 1, min(COLUMNS, H * V, power_of_two(C))
    while 2 * split <= min(SPLIT, programs // H, V // 16):
        split *= 2
    held = 2 * max(power_of_two(C), H * V, tile) + 2 * max(power_of_two(F), tile)
    slots = min(SLOTS, (SHARED - held - 96 * int(SEGMENT)) // (2 * ROWS * tile))
    if slots < 2 or tile < 32:  # four threads next to each other have eight columns each
        return None
    return LayersShape(
        C=C,
        N=N,
        D=D,
        H=H,
        K=K,
        V=V,
        F=F,
        RANK=rank,
        DECAY=s.decay,
        GATE=s.gate,
        BETA=-1 if s.beta is None else s.beta,
        P=programs,
        SPLIT=split,
        ROWS=ROWS,
        COLUMNS=tile,
        SLOTS=slots,
        WARPS=WARPS,
        HEAD=rule.per_head,
        LOW_GATE=s.gate_up is not None,
        BIAS=s.gate_bias is not None,
        REMOVES=rule.removal == "k",
        KIND=rule.gate,
        SILU=s.activation == "silu",
    )


def tensors(s: StepLayer) -> tuple[list[Tensor | None], list[Tensor]]:
    """Tensors in bf16, the first ones in the order of the table, and those in fp32."""
    half = [s.into, s.out, s.up, s.down, s.decay_up, s.gate_up, s.norm, s.ffn_norm]
    half += [s.window, s.taps, s.o_norm, s.gate_bias]
    return half, [s.state, s.A_log, s.dt_bias]


def readable(s: StepLayer) -> bool:
    """Whether the kernel can read the layer's tensors where they are: weights and windows in bf16,
    the state and what forms decays in fp32, all contiguous and aligned to 16 bytes."""
    half, single = tensors(s)
    given = [(t, torch.bfloat16) for t in half if t is not None]
    given += [(t, torch.float32) for t in single]
    return all(
        t.dtype == dtype and t.is_contiguous() and t.data_ptr() % 16 == 0 and t.numel() < 2**31
        for t, dtype in given
    )


def addresses(s: StepLayer) -> list[int]:
    """A row of the table: addresses in units of 16 bytes, and 0 for what the layer has not."""
    half, (state, A_log, dt_bias) = tensors(s)
    *first, window, taps, o_norm, gate_bias = half
    row = [*first, window, taps, state, A_log, dt_bias, o_norm, gate_bias]
    found = [0 if t is None else t.data_ptr() // 16 for t in row]
    return found + [0] * (int(FIELDS) - len(found))


class Run:
    """A step of several layers: a call replaces x [1, C], bf16, by the residual stream behind them,
    and updates their windows and states in place.

    The table has the addresses of the layers' tensors, so these must stay where they are. The words
    and the epoch are kept from step to step, so two steps of one run must not overlap. A CUDA graph
    may hold a step.
    """

    deferred = ()
    """A step writes all states."""

    def __init__(self, layers: Sequence[StepLayer], S: LayersShape) -> None:
        self.layers, self.shape, device = layers, S, layers[0].into.device
        self.table = torch.tensor([addresses(s) for s in layers], dtype=torch.int64, device=device)
        size = (S.N + 2 * S.C + S.F + S.H * S.V) // 2 + S.H * S.SPLIT + 4
        self.memory = torch.zeros(size, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        whole = [(0, len(layers), 0, PHASES)]
        apart = [(i, i + 1, n, n + 1) for i in range(len(layers)) for n in range(PHASES)]
        self.spans = torch.tensor(whole + apart, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> None:
        if APART:
            for span in self.spans[1:]:
                self._launch(x, span)
            self.count += len(self.layers) + 1
        else:
            self._launch(x, self.spans[0])
        for s in self.layers:
            for cache in (s.window, s.state):
                if not cache.is_inference():
                    torch.autograd.graph.increment_version(cache)

    def _launch(self, x: Tensor, span: Tensor) -> None:
        s, S = self.layers[0], self.shape
        launch(
            step_layers_kernel,
            (S.P,),
            x.view(torch.int32)[0],
            self.table,
            self.memory,
            self.count,
            span,
            s.eps,
            s.ffn_eps,
            s.o_eps,
            s.rule.scale,
            s.rule.lower_bound or 0.0,
            s.rule.beta_factor or 1.0,
            S,
            num_warps=S.WARPS,
            maxnreg=min(255, REGISTERS // (32 * S.WARPS)),
            launch_cooperative_grid=not APART,
        )


def step_layers(layers: Sequence[StepLayer], processors: int) -> Run | RowsRun | None:
    """A step of layers of one `kind`, in one kernel for one sequence, and in those of rows_run.py
    for several; None if neither takes them. processors: SMs of the GPU, the most programs that run
    at the same time."""
    if not all(map(readable, layers)):
        return None
    if len(layers[0].state) > 1:
        return rows_layers(layers, processors)
    S = shape(layers[0], processors) if ENABLED else None
    return None if S is None else Run(layers, S)
