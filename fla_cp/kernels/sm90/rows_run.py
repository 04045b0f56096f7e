"""A decoding step of several sequences through layers that follow each other: which layers it
takes, and the launches of rows_product.py and triton/rows_mixer.py.

A layer is eight launches, or seven without low ranks. Each kernel starts before the one ahead of it
has ended (triton/early.py) and loads weights or states meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.kernels.sm90.rows_product import ROWS, STEP, RowsShape, rows_product_kernel
from fla_cp.kernels.sm90.tma import describe
from fla_cp.kernels.torch.decoding import StepLayer
from fla_cp.kernels.triton.conv import MAX_TAPS
from fla_cp.kernels.triton.decoding import FUSED_ROWS, conv_update
from fla_cp.kernels.triton.device.bundles import Beta, Gate, Rows, rule_options, state
from fla_cp.kernels.triton.early import launch_early, starts_early
from fla_cp.kernels.triton.launch import cdiv
from fla_cp.kernels.triton.rows_mixer import StateShape, rows_state_kernel, rows_sum_kernel
from fla_cp.kernels.triton.tile_table import power_of_two

ENABLED = True
"""Whether steps may run layers in these kernels. `python -m benchmarks.decode` measures both."""

TILE = 128
"""Rows of a weight in a tile."""

SPLIT = 8
"""The most programs that share columns of a result."""

SHARED = 208 * 1024
"""Bytes of the tiles of a program. An SM has room for one program of that size. With 96 KiB, some
SMs had two programs of a kernel that started early, and others none."""

STATE = 8192
"""Elements of the state of a program: 64 for each of 128 threads."""

Call = Callable[[Tensor], object]
"""A launch, as a call with the residual stream."""


class Low(NamedTuple):
    """Second products of low ranks that are one launch: the first column of their tokens, weights
    [groups * R, rank], how many there are, and biases or None."""

    column: int
    weight: Tensor
    groups: int
    bias: Tensor | None


def takes(s: StepLayer) -> bool:
    """Whether the kernels take the layer: more sequences than fit one kernel, and at most 64;
    normalised q and k; KDA, the gated delta rule, GLA and simple GLA; heads of 64, 128 or 256
    values; and sizes that TMA can copy, multiples of 8."""
    B, V = len(s.state), s.state.shape[3]
    ups = [w for w in (s.decay_up, s.gate_up) if w is not None]
    sizes = [*s.down.shape, s.decay, s.gate, *(w.shape[1] for w in ups)]
    return (
        FUSED_ROWS < B <= int(ROWS)
        and s.rule.removal != "p"
        and s.rule.gate != "given"
        and s.rule.qk_l2norm
        and not s.rule.state_v_first
        and (s.decay_up is None) == s.rule.per_head
        and V in (64, 128, 256)
        and s.window.shape[2] <= MAX_TAPS
        and all(n % 8 == 0 for n in sizes)
    )


def follows(a: Tensor, b: Tensor) -> bool:
    """Whether b is as large as a and lies right behind it in memory."""
    return a.shape == b.shape and a.data_ptr() + a.nbytes == b.data_ptr()


def low_ranks(s: StepLayer) -> list[Low]:
    """The second products of a layer, in one launch if its weights lie together."""
    parts = [Low(s.gate, s.gate_up, 1, s.gate_bias)] if s.gate_up is not None else []
    if s.decay_up is not None:
        parts.append(Low(s.decay, s.decay_up, 1, None))
    parts.sort(key=lambda low: low.column)
    if len(parts) < 2:
        return parts
    a, b = parts
    R, rank = a.weight.shape
    apart = b.column != a.column + rank or not follows(a.weight, b.weight)
    if apart or rank % int(STEP):
        return parts
    both = a.weight.as_strided((2 * R, rank), (rank, 1))
    if s.gate_bias is None:
        return [Low(a.column, both, 2, None)]
    biases = [torch.zeros_like(s.gate_bias) if low.bias is None else low.bias for low in parts]
    return [Low(a.column, both, 2, torch.cat(biases))]


class RowsRun:
    """A step of several layers: a call replaces x [B, C], bf16, by the residual stream behind them,
    and updates their windows and states in place.

    Weights, windows and states must stay where they are, and two steps of one run must not overlap.
    A CUDA graph may hold a step. programs: as many as the GPU has SMs.
    """

    def __init__(self, layers: Sequence[StepLayer], programs: int) -> None:
        self.layers, self.programs, s = layers, programs, layers[0]
        self.B, self.HV, self.K, self.V = s.state.shape
        self.C, self.early, self.device = s.into.shape[1], starts_early(s.into), s.into.device
        self.BV = min(power_of_two(self.V), max(16, STATE // power_of_two(self.K)))
        self.kept: dict[tuple[object, ...], Tensor] = {}
        self.normed, self.inner = self._half("normed", self.C), self._half("inner", s.down.shape[1])
        self.projected = self._half("projected", len(s.into))
        self.o = self._half("o", self.HV * self.V)
        self.qkv = torch.empty(self.B, s.window.shape[1], dtype=torch.bfloat16, device=self.device)
        self.squares = self._buffer("squares", self.B, self.HV, cdiv(self.V, self.BV))
        self.begin = self._sum(None, s.norm, s.eps)
        self.calls = [self._calls(i) for i in range(len(layers))]

    def __call__(self, x: Tensor) -> None:
        self.begin(x)
        for calls in self.calls:
            for call in calls:
                call(x)

    def _calls(self, i: int) -> list[Call]:
        """The launches of a layer, as calls with the residual stream."""
        s, made, lows = self.layers[i], {}, []
        for n, low in enumerate(low_ranks(s)):
            R, rank = low.weight.shape
            tokens = self.projected[:, low.column : low.column + low.groups * rank]
            y = self._half(f"low {n}", R)
            given = tokens, low.weight, y
            lows.append(self._product(*given, tile=TILE, groups=low.groups, bias=low.bias))
            for g, part in enumerate(y.chunk(low.groups, 1)):
                made[low.column + g * rank] = part
        last = i + 1 == len(self.layers)
        behind = None if last else self.layers[i + 1].norm
        return [
            self._product(self.normed, s.into, self.projected, tile=TILE // 2),
            *lows,
            self._convolution(s),
            self._recurrence(s, made),
            *self._onto(self.o, s.out, s.ffn_norm, s.ffn_eps, o_eps=s.o_eps),
            self._product(self.normed, s.up, self.inner, tile=TILE // 2, swiglu=True),
            *self._onto(self.inner, s.down, behind, s.eps),
        ]

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        *,
        tile: int,
        split: int = 0,
        groups: int = 1,
        bias: Tensor | None = None,
        swiglu: bool = False,
        o_eps: float | None = None,
    ) -> Call:
        """A product. y: [B, groups * N], or with `split` [split, 64, N] for its parts. o_eps: x is
        divided by the roots of its heads."""
        N, C = len(weight) // (2 if swiglu else groups), weight.shape[1]
        head, squares = (0, None) if o_eps is None else (self.V // int(STEP), self.squares)
        steps = cdiv(cdiv(C, int(STEP) * max(head, 1)), max(split, 1)) * max(head, 1)
        size = 2 * int(STEP) * (int(ROWS) + (2 if swiglu else 1) * tile)
        slots = min(steps, SHARED // size)
        sizes = y.stride(-2), groups, tile, split, slots, swiglu, head, self.squares.shape[2]
        S = RowsShape(self.B, C, N, *sizes, self.early)
        copies = describe(x[:, None], int(ROWS), int(STEP)), describe(weight, tile, int(STEP))
        grid = groups * cdiv(N, tile), max(split, 1)
        given = *copies, y, bias, squares, o_eps or 0.0, S
        launch = partial(launch_early, rows_product_kernel, grid, *given, early=self.early)
        return lambda _: launch(num_warps=4)

    def _onto(
        self, x: Tensor, weight: Tensor, norm: Tensor | None, eps: float, o_eps: float | None = None
    ) -> list[Call]:
        """A product that is added to the residual stream, and the norm behind it if there is one.
        o_eps: see `_product`."""
        N, C = weight.shape
        tiles, steps = cdiv(N, TILE), C // (self.V if o_eps is not None else int(STEP))
        split = max(1, min(SPLIT, steps, self.programs // tiles))
        parts = self._buffer("parts", split, int(ROWS), N)
        product = self._product(x, weight, parts, tile=TILE, split=split, o_eps=o_eps)
        return [product, self._sum(parts, norm, eps)]

    def _sum(self, parts: Tensor | None, norm: Tensor | None, eps: float) -> Call:
        """The sum of the parts of a product is added to the residual stream; then the norm."""
        C, early, split = self.C, self.early, 0 if parts is None else len(parts)
        rest = norm, None if norm is None else self.normed, eps, C, power_of_two(C), split, early
        launch = partial(launch_early, rows_sum_kernel, (self.B,), parts)
        return lambda stream: launch(stream, *rest, early=early, num_warps=8)

    def _convolution(self, s: StepLayer) -> Call:
        early, qkv, y = self.early, self.projected[:, : s.window.shape[1]], self.qkv
        return lambda _: conv_update(qkv, s.window, s.taps, s.bias, True, early=early, y=y)

    def _recurrence(self, s: StepLayer, made: dict[int, Tensor]) -> Call:
        """The recurrence of a layer with the gate of its norm. made: results of second products, by
        the first column of their tokens."""
        B, HV, K, V = s.state.shape
        rule, wide = s.rule, HV if s.rule.per_head else HV * K
        H = (s.window.shape[1] - HV * V) // (2 * K)

        def part(column: int, width: int) -> Tensor:
            return made.get(column, self.projected[:, column : column + width])

        decay, gate = part(s.decay, wide), part(s.gate, HV * V)
        beta = None if s.beta is None else self.projected[:, s.beta : s.beta + HV]
        S = StateShape(
            H, HV, K, V, power_of_two(K), self.BV, rule.per_head, rule.removal == "k",
            s.activation == "silu", self.early,
        )  # fmt: skip
        given = (
            Rows(self.qkv, self.qkv.stride(0), 0),
            state(s.state),
            Gate(decay, decay.stride(0), 0, s.A_log, s.dt_bias, rule.lower_bound or 0.0),
            Rows(gate, gate.stride(0), 0),
            Beta(beta, 0 if beta is None else beta.stride(0), rule.beta_factor or 1.0),
            s.o_norm,
            self.o,
            self.squares,
            rule.scale,
            S,
            rule_options(rule, torch.bfloat16),
        )
        grid = cdiv(V, self.BV) * B, HV
        launch = partial(launch_early, rows_state_kernel, grid, *given, early=self.early)

        def call(_: Tensor) -> None:
            launch(num_warps=4)
            if not s.state.is_inference():
                torch.autograd.graph.increment_version(s.state)

        return call

    def _half(self, name: str, columns: int) -> Tensor:
        wide = self._buffer(name, self.B, cdiv(columns, 8) * 8, dtype=torch.bfloat16)
        return wide[:, :columns]  # rows begin at multiples of 16 bytes, as TMA wants

    def _buffer(self, name: str, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that is zero at first, and that all layers share."""
        key = name, size
        if key not in self.kept:
            self.kept[key] = torch.zeros(size, dtype=dtype, device=self.device)
        return self.kept[key]


def rows_layers(layers: Sequence[StepLayer], programs: int) -> RowsRun | None:
    """A step of layers of one `kind`; None if the kernels do not take them. programs: as many as
    the GPU has SMs. All tensors of a layer are contiguous and in the dtypes of `readable`."""
    return RowsRun(layers, programs) if ENABLED and takes(layers[0]) else None
