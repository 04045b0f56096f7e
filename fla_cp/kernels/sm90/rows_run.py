"""A decoding step of several sequences through layers that follow each other: which layers it
takes, and the launches of rows_product.py, rows_conv.py, rows_state.py and triton/rows_sum.py.

A layer is eight launches. There is one more where its matrices of low ranks do not lie side by
side, and one more where its convolution has other than four taps. Each kernel starts before the one
ahead of it has ended (triton/early.py) and loads weights or states meanwhile. A last launch of the
step counts it (rows_deferred.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.kernels.sm90.rows_conv import TAPS, ConvShape, rows_conv_kernel
from fla_cp.kernels.sm90.rows_deferred import Deferred
from fla_cp.kernels.sm90.rows_product import ROWS, STEP, RowsShape, rows_product_kernel
from fla_cp.kernels.sm90.rows_state import StateShape, rows_state_kernel
from fla_cp.kernels.sm90.tma import Described, describe
from fla_cp.kernels.torch.decoding import StepLayer
from fla_cp.kernels.triton.conv import MAX_TAPS
from fla_cp.kernels.triton.decoding import conv_update
from fla_cp.kernels.triton.device.bundles import Beta, Gate, Rows
from fla_cp.kernels.triton.early import launch_early, starts_early
from fla_cp.kernels.triton.launch import cdiv
from fla_cp.kernels.triton.rows_sum import rows_sum_kernel
from fla_cp.kernels.triton.tile_table import power_of_two

ENABLED = True
"""Whether steps may run layers in these kernels. `python -m benchmarks.decode` measures both."""

LEAST = 2
"""The fewest sequences: there is a kernel of its own for one (step_layers.py)."""

TILE = 128
"""Rows of a weight in a tile; half as many of the first product, and of each part of SwiGLU."""

SPLIT, STEPS = 8, 8
"""The most programs that share columns of a result, and the fewest tiles that each of them has: the
sum of their parts has to be written and read."""

SHARED = 208 * 1024
"""Bytes of the tiles of a program. An SM has room for one program of that size. With 96 KiB, some
SMs had two programs of a kernel that started early, and others none."""

FIRST = 168 * 1024
"""The same for the first product, so that a program of the kernel behind it may start beside it."""

LOW_TILE = 64
"""As TILE, of the second products of low ranks."""

CONV_ROWS, CONV_COLUMNS = 16, 256
"""Sequences and channels of a program of the convolution."""

STATE, STATES = 8192, 64 * 1024
"""Elements of a tile of a state, and bytes of the tiles of a program of the recurrence. Its other
tensors take 30 KiB with K = V = 128."""

TOGETHER = 2
"""Programs of the recurrence on an SM: one computes while the other one waits."""

ROUND = 4
"""Steps in which a head writes its state once, a power of two. With more of them there are more
updates, which take memory, and have to be read and written."""

PACE = 1
"""How many tiles such a program may have on their way, beside the newest, while it copies its first
ones. With more, the kernel ahead waits longer for its own inputs."""

WARPS, SUM_WARPS = 4, 16
"""Warps of a program, which have to be four where they multiply, and of a sum of parts."""

REGISTERS, STATE_REGISTERS = 96, 128
"""Registers of a thread of products, and of the recurrence, on average. The other warps take those
of the warp that copies; without a limit, a program would take all that an SM has."""

Call = Callable[[Tensor], object]
"""A launch, as a call with the residual stream."""


class Product(NamedTuple):
    """A launch of rows_product.py: its grid and arguments."""

    grid: tuple[int, int]
    x: Described | None
    w: Described | None
    y: Tensor | None
    bias: Tensor | None
    S: RowsShape | None


class Low(NamedTuple):
    """Second products of low ranks that are one launch: the first column of their tokens, weights
    [groups * R, rank], how many there are, and biases or None."""

    column: int
    weight: Tensor
    groups: int
    bias: Tensor | None


def takes(s: StepLayer) -> bool:
    """Whether the kernels take the layer: two sequences at least, and at most 64;
    normalised q and k; KDA, the gated delta rule, GLA and simple GLA; heads of at most 256 channels
    and of 64, 128 or 256 values; and sizes that TMA can copy, multiples of 8."""
    B, _, K, V = s.state.shape
    ups = [w for w in (s.decay_up, s.gate_up) if w is not None]
    sizes = [*s.down.shape, s.decay, s.gate, *(w.shape[1] for w in ups)]
    return (
        LEAST <= B <= int(ROWS)
        and s.rule.removal != "p"
        and s.rule.gate != "given"
        and s.rule.qk_l2norm
        and not s.rule.state_v_first
        and (s.decay_up is None) == s.rule.per_head
        and K <= 256
        and V in (64, 128, 256)
        and s.window.shape[2] <= MAX_TAPS
        and all(n % 8 == 0 for n in sizes)
        and (s.bias is None or s.bias.is_contiguous())
    )


def follows(a: Tensor, b: Tensor) -> bool:
    """Whether b is as large as a and lies right behind it in the same memory."""
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and a.shape == b.shape and a.data_ptr() + a.nbytes == b.data_ptr()


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
    updates their windows in place, and their states or what these lack: `deferred` has a `Deferred`
    for each layer.

    Weights, windows and states must stay where they are. Between two steps of one run there must be
    a launch that does not start early, such as that of torch's lookup of embeddings, because a step
    reads windows, states and what they lack before it waits. A CUDA graph may hold a step.
    programs: as many as the GPU has SMs.
    """

    def __init__(self, layers: Sequence[StepLayer], programs: int) -> None:
        self.layers, self.programs, s = layers, programs, layers[0]
        self.B, self.HV, _, self.V = s.state.shape
        self.C, self.early, self.device = s.into.shape[1], starts_early(s.into), s.into.device
        self.kept: dict[tuple[object, ...], Tensor] = {}
        self.normed = self._buffer("normed", self.B, self.C, dtype=torch.bfloat16)
        self.inner = self._half("inner", s.down.shape[1])
        self.projected = self._half("projected", len(s.into))
        self.o = self._half("o", self.HV * self.V)
        self.qkv = torch.empty(self.B, s.window.shape[1], dtype=torch.bfloat16, device=self.device)
        # Counts of each layer are 16 bytes apart, since Triton compiles for addresses that are
        # multiples of 16 and for others. They may be made in inference mode and counted outside.
        with torch.inference_mode(False):
            self.steps = torch.zeros(len(layers), 4, dtype=torch.int32, device=self.device)
        self.deferred: list[Deferred] = []
        self.begin = self._sum(None, s.norm, s.eps)
        self.calls = [self._calls(i) for i in range(len(layers))]

    def __call__(self, x: Tensor) -> None:
        self.begin(x)
        for calls in self.calls:
            for call in calls:
                call(x)
        self.steps.add_(1)

    def _calls(self, i: int) -> list[Call]:
        """The launches of a layer, as calls with the residual stream."""
        s, made, lows = self.layers[i], {}, []
        for n, low in enumerate(low_ranks(s)):
            R, rank = low.weight.shape
            tokens = self.projected[:, low.column : low.column + low.groups * rank]
            y = self._half(f"low {n}", R)
            given = tokens, low.weight, y
            lows.append(self._given(*given, tile=LOW_TILE, groups=low.groups, bias=low.bias))
            for g, part in enumerate(y.chunk(low.groups, 1)):
                made[low.column + g * rank] = part
        into = self._given(self.normed, s.into, self.projected, tile=TILE // 2, shared=FIRST)
        up = self._given(self.normed, s.up, self.inner, tile=TILE // 2, swiglu=True)
        last = i + 1 == len(self.layers)
        behind = None if last else self.layers[i + 1].norm
        return [
            self._product(into),
            *self._convolution(s, lows),
            self._recurrence(s, made),
            *self._onto(self.o, s.out, s.ffn_norm, s.ffn_eps),
            self._product(up),
            *self._onto(self.inner, s.down, behind, s.eps),
        ]

    def _given(
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
        shared: int = 0,
    ) -> Product:
        """What a product is launched with. y: [B, groups * N], or with `split` [split, 64, N] for
        its parts."""
        parts, shared = 2 if swiglu else 1, shared or SHARED
        N, C = len(weight) // max(parts, groups), weight.shape[1]
        steps = cdiv(cdiv(C, int(STEP)), max(split, 1))
        slots = min(steps, shared // (2 * int(STEP) * (int(ROWS) + parts * tile)))
        sizes = y.stride(-2), groups, tile, split, slots, swiglu
        S = RowsShape(self.B, C, N, *sizes, self.early)
        copies = describe(x[:, None], int(ROWS), int(STEP)), describe(weight, tile, int(STEP))
        return Product((groups * cdiv(N, tile), max(split, 1)), *copies, y, bias, S)

    def _product(self, p: Product) -> Call:
        grid, *given = p
        launch = partial(launch_early, rows_product_kernel, grid, *given, early=self.early)
        return lambda _: launch(num_warps=WARPS, maxnreg=REGISTERS)

    def _onto(self, x: Tensor, weight: Tensor, norm: Tensor | None, eps: float) -> list[Call]:
        """A product that is added to the residual stream, and the norm behind it if there is
        one."""
        N, C = weight.shape
        split = max(1, min(SPLIT, C // int(STEP) // STEPS, self.programs // cdiv(N, TILE)))
        parts = self._buffer("parts", split, int(ROWS), N)
        product = self._given(x, weight, parts, tile=TILE, split=split)
        return [self._product(product), self._sum(parts, norm, eps)]

    def _sum(self, parts: Tensor | None, norm: Tensor | None, eps: float) -> Call:
        """The sum of the parts of a product is added to the residual stream; then the norm."""
        C, early, split = self.C, self.early, 0 if parts is None else len(parts)
        rest = norm, None if norm is None else self.normed, eps, C, power_of_two(C), split, early
        launch = partial(launch_early, rows_sum_kernel, (self.B,), parts)
        return lambda stream: launch(stream, *rest, early=early, num_warps=SUM_WARPS)

    def _convolution(self, s: StepLayer, lows: list[Product]) -> list[Call]:
        """The convolution and second products of low ranks, in one launch if there are as many taps
        as the kernel has."""
        (B, D, W), early, qkv, y = s.window.shape, self.early, self.projected, self.qkv
        if int(TAPS) != W:
            calls = [self._product(p) for p in lows]
            update = partial(conv_update, qkv[:, :D], s.window, s.taps, s.bias, True, early, y)
            return [*calls, lambda _: update()]
        *before, (grid, *product) = lows or [Product((0, 1), None, None, None, None, None)]
        rows, columns = CONV_ROWS, CONV_COLUMNS
        words = (t.view(torch.int64).view(t.shape[:-1]) for t in (s.window, s.taps))
        S = ConvShape(B, D, rows, columns, early)
        given = qkv, qkv.stride(0), *words, s.bias, y, *product[:-1], S, product[-1]
        programs = grid[0] + cdiv(B, rows) * cdiv(D, columns)
        launch = partial(launch_early, rows_conv_kernel, (programs, 1), *given, early=early)
        registers = REGISTERS if lows else None

        def call(_: Tensor) -> None:
            launch(num_warps=WARPS, maxnreg=registers)
            if not s.window.is_inference():
                torch.autograd.graph.increment_version(s.window)

        return [*(self._product(p) for p in before), call]

    def _recurrence(self, s: StepLayer, made: dict[int, Tensor]) -> Call:
        """The recurrence of a layer and the gated norm behind it. made: results of second products,
        by the first column of their tokens."""
        B, HV, K, V = s.state.shape
        rule, wide = s.rule, HV if s.rule.per_head else HV * K
        H = (s.window.shape[1] - HV * V) // (2 * K)

        def part(column: int, width: int) -> Tensor:
            return made.get(column, self.projected[:, column : column + width])

        decay, gate = part(s.decay, wide), part(s.gate, HV * V)
        beta = None if s.beta is None else self.projected[:, s.beta : s.beta + HV]
        BK, heads = power_of_two(K), B * HV
        BV = min(V, max(16, STATE // BK))
        programs, slots = min(heads, TOGETHER * self.programs), max(2, STATES // (4 * BK * BV))
        S = StateShape(
            B, H, HV, K, V, BK, BV, programs, ROUND, slots, PACE, WARPS, rule.gate, rule.per_head,
            rule.removal == "k", rule.beta_factor is not None, s.activation == "silu", self.early,
        )  # fmt: skip
        self.deferred.append(Deferred(s.state, self.steps[len(self.deferred)], S))
        given = (
            describe(s.state, BK, BV),
            s.state,
            Rows(self.qkv, self.qkv.stride(0), 0),
            Gate(decay, decay.stride(0), 0, s.A_log, s.dt_bias, rule.lower_bound or 0.0),
            Rows(gate, gate.stride(0), 0),
            Beta(beta, 0 if beta is None else beta.stride(0), rule.beta_factor or 1.0),
            self.deferred[-1].updates,
            s.o_norm,
            self.o,
            rule.scale,
            s.o_eps,
            S,
        )
        launch = partial(launch_early, rows_state_kernel, (programs, 1), *given, early=self.early)

        def call(_: Tensor) -> None:
            launch(num_warps=WARPS, maxnreg=STATE_REGISTERS)
            if not s.state.is_inference():
                torch.autograd.graph.increment_version(s.state)

        return call

    def _half(self, name: str, columns: int) -> Tensor:
        wide = self._buffer(name, self.B, cdiv(columns, 16) * 16, dtype=torch.bfloat16)
        return wide[:, :columns]  # rows begin at multiples of 32 bytes: TMA needs 16, vectors 32

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
