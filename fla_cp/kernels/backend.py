"""Backend: the stages of an operator, as the pipeline calls them.

A backend is a frozen object with one method a stage. A variant is a subclass that overrides a
stage, or `dataclasses.replace` of a field; `fla_cp.kernels.using` puts it in place for tests and
measurements. The chunks and the gradients that the stages hand each other belong to the backend:
the pipeline only passes them on, so that their type is Any here.

Shapes: T tokens, NC chunks of C = 64 tokens, S segments, HV value heads, K and V the dims of keys
and values. States are [.., HV, K, V], fp32 (fp64 for fp64).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla_cp.comm.affine import Steps
from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.torch.conv import ConvRows
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule

Shape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class Backend(ABC):
    """Stages in the order in which the pipeline calls them: forward, backward, then operators of
    their own. reads_output: `restore` needs o, which is then saved for the backward."""

    name: str
    reads_output: bool

    # forward

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
        """The packing, cut into more segments where that fills the GPU, alike on all ranks.
        backward: the cut serves both directions."""
        return packing

    @abstractmethod
    def prepare_chunks(
        self, rule: DeltaRule, packing: Packing, x: Inputs, seeds: States | None
    ) -> tuple[Any, AffineMap]:
        """All that the scan needs of each chunk, and the affine maps of the segments: transitions
        of `packing.middle`, offsets of `packing.feeding`. seeds: states that enter segments which
        begin a sequence."""

    def scores(self, rule: DeltaRule, packing: Packing, chunks: Any) -> Any:
        """The chunks with what only the output needs. An exchange may be under way meanwhile."""
        return chunks

    @abstractmethod
    def scan_output(
        self,
        rule: DeltaRule,
        packing: Packing,
        chunks: Any,
        S0: States | None,
        *,
        want_states: bool,
        want_end: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Runs the segments from the states S0 that enter them: o [T, HV, V], and where wanted the
        state at each chunk's start h [NC, HV, K, V], v_new [NC, HV, C, V] and the state at each
        segment's end [S, HV, K, V]."""

    def in_token_order(self, packing: Packing, h: Tensor) -> Tensor:
        """h with its chunks in the order of their tokens."""
        return h

    @abstractmethod
    def keep(
        self, rule: DeltaRule, chunks: Any, h: Tensor | None, v_new: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """What is saved for the backward."""

    # backward

    @abstractmethod
    def restore(
        self,
        rule: DeltaRule,
        packing: Packing,
        x: Inputs,
        kept: tuple[Tensor | None, ...],
        o: Tensor | None,
    ) -> tuple[Any, Tensor | None, Tensor | None]:
        """The chunks from what `keep` gave, and h and v_new, or None where the scan runs again."""

    @abstractmethod
    def output_bwd(self, rule: DeltaRule, packing: Packing, chunks: Any, do: Tensor) -> Any:
        """Gradients at the outputs, from do [T, HV, V]."""

    def runs_concurrently(self, packing: Packing, chunks: Any) -> bool:
        """Whether `scan` runs at the same time as the reverse scans."""
        return False

    @abstractmethod
    def scan(
        self, packing: Packing, chunks: Any, S0: States | None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Starts to form h and v_new again; the call that is returned waits for them."""

    @abstractmethod
    def summarize_bwd(
        self,
        packing: Packing,
        chunks: Any,
        dout: Any,
        seeds: States | None,
        *,
        concurrent: bool = False,
    ) -> Tensor | None:
        """Offsets of the adjoint maps of `packing.carried`, [.., HV, K, V]. concurrent: while
        `scan` runs."""

    @abstractmethod
    def scan_bwd(
        self,
        packing: Packing,
        chunks: Any,
        dout: Any,
        dS_end: States | None,
        *,
        want_start: bool,
        concurrent: bool = False,
    ) -> tuple[Any, Tensor | None]:
        """The reverse scan: gradients at the chunks, and where wanted of the states that enter the
        segments [S, HV, K, V]."""

    @abstractmethod
    def intra_bwd(
        self,
        rule: DeltaRule,
        packing: Packing,
        x: Inputs,
        chunks: Any,
        h: Tensor,
        v_new: Tensor,
        dscan: Any,
    ) -> Inputs:
        """Gradients of the inputs."""

    @abstractmethod
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
        """States through chains of affine maps; see `fla_cp.comm.affine.fold`."""

    # for torch.compile, which must know shapes before anything runs

    @abstractmethod
    def kept_shapes(
        self, rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
    ) -> list[Shape]:
        """Shapes and dtypes of what `keep` returns."""

    @abstractmethod
    def always_kept(self, rule: DeltaRule) -> tuple[int, ...]:
        """Where, among what `keep` returns with keep_intermediates, stands what it returns
        without."""

    # operators of their own

    @abstractmethod
    def conv(
        self,
        x: Tensor,
        halo: Tensor,
        where: ConvRows,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
    ) -> Tensor:
        """Depthwise causal convolution of x [T, D]; halo [ranges * (W-1), D] holds the tokens
        before each range, weight is [D, W]."""

    @abstractmethod
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
        """dx, dhalo, dweight and dbias."""

    @abstractmethod
    def gate(
        self, rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tensor:
        """The log decay of raw projections g [.., HV, K], in fp32 (fp64); differentiable."""

    @abstractmethod
    def recurrent(
        self,
        rule: DeltaRule,
        x: Inputs,
        S0: Tensor | None,
        S_end: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        """o [T, HV, V], token by token; fills S_end."""
