"""Backend: the stages of an operator, as the pipeline calls them.

A backend is a frozen object with one method for each stage. A variant is a subclass that overrides
a stage, or a `dataclasses.replace` of a field; `fla_cp.kernels.using` puts it in place for tests
and measurements. What one stage hands to the next (`chunks`, `dout`, `dscan`) belongs to the
backend: the pipeline only passes it on, so its type is Any here.

Shapes: T tokens, NC chunks of C = 16, 32 or 64 tokens (`Packing.chunk`), S segments, HV value
heads, K and V the dims of keys and values. States are [.., HV, K, V], fp32 (fp64 for fp64). Tensors
of tokens and chunks have the inputs' dtype, or the one in which the backend sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fla_cp.comm import affine
from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.torch.conv import ConvInputs
from fla_cp.kernels.torch.decoding import StepLayer, StepMixer, StepProduct, StepRun
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.partition.packing import Frame, Packing
from fla_cp.partition.whole import Former
from fla_cp.rule import CHUNK, DeltaRule

Shape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Kept = tuple[Tensor | None, ...]
"""What a backend saves for its backward."""

ChunkStates = tuple[Tensor, Tensor]
"""h [NC, HV, K, V], the state at each chunk's start, and v_new [NC, HV, C, V]."""


@dataclass(frozen=True)
class Backend(ABC):
    """Stages in the order in which the pipeline calls them: forward, backward, then operators of
    their own. reads_output: `restore` needs o, which is then saved for the backward. short_chunks:
    tokens in a chunk where no sequence has more, which spares the padding to 64. A call that asks
    for a chunk_size has that size instead."""

    name: str
    reads_output: bool
    short_chunks: tuple[int, ...] = (16, 32)

    def chunk_for(self, longest: int, dtype: torch.dtype) -> int:
        """Tokens in a chunk of a call on inputs in dtype that has no context and asks for no
        chunk_size. longest: how many its longest sequence has."""
        return next((size for size in self.short_chunks if longest <= size), CHUNK)

    # programs that replay a call (tape.py)

    def replay_stream(self, device: torch.device) -> int | None:
        """The address of the current stream; None if calls are not to be replayed."""
        return None

    def replay_constants(self, q: Tensor) -> tuple[Tensor, ...]:
        """Tensors that are read in every call on inputs like q, and never change."""
        return ()

    # forward

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
        """The packing, cut into more segments where that fills the GPU, alike on all ranks.
        backward: the cut serves both directions. extra: the most segments that it may add on a
        rank; None: any number."""
        return packing

    def longest_whole(self, chunks: int, HV: int, V: int, device: torch.device) -> int:
        """How many chunks the longest sequence may have, so that `segment` certainly cuts no
        packing of `chunks` chunks."""
        return 0

    def table_former(
        self, frame: Frame, offsets: torch.dtype, device: torch.device
    ) -> Former | None:
        """A function that forms the tables of packings of whole sequences with this frame on the
        device of their offsets. None if the host takes less time to send them."""
        return None

    def extra_segments(self, HV: int, V: int, device: torch.device) -> int:
        """The most segments that a compiled graph may add, for which it reserves memory."""
        return 0

    @abstractmethod
    def prepare_chunks(self, spec: Spec, x: Inputs, seeds: States | None) -> tuple[Any, AffineMap]:
        """What the scan needs of each chunk, and the affine maps of the segments: transitions of
        `packing.middle`, offsets of `packing.feeding`. seeds: the states that enter segments at
        the beginning of a sequence."""

    def scores(self, spec: Spec, chunks: Any) -> Any:
        """Adds to the chunks what only the output needs. It can run during an exchange."""
        return chunks

    @abstractmethod
    def scan_output(
        self, spec: Spec, chunks: Any, S0: States | None, *, want_states: bool, want_end: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Runs the segments from the states S0 that enter them. Returns o [T, HV, V], and where
        wanted the state at each chunk's start h [NC, HV, K, V], v_new [NC, HV, C, V] and the state
        at each segment's end [S, HV, K, V]."""

    def in_token_order(self, spec: Spec, h: Tensor) -> Tensor:
        """h with its chunks in the order of their tokens."""
        return h

    @abstractmethod
    def keep(self, spec: Spec, chunks: Any, h: Tensor | None, v_new: Tensor | None) -> Kept:
        """What is saved for the backward: tensors of `kept_shapes`."""

    # backward

    @abstractmethod
    def restore(
        self, spec: Spec, x: Inputs, kept: Kept, o: Tensor | None
    ) -> tuple[Any, ChunkStates | None]:
        """The chunks from what `keep` gave, and h and v_new if it kept them; else None."""

    def restores_inputs(self, rule: DeltaRule, x: Inputs) -> bool:
        """Whether what `restore` returns is made of x and of what was kept alone, if the call is
        large enough. Then nothing is gained by keeping it between two ops of a compiled graph."""
        return False

    @abstractmethod
    def output_bwd(self, spec: Spec, chunks: Any, do: Tensor) -> Any:
        """What the reverse scans read: the chunks, and the gradients at the outputs from do
        [T, HV, V]."""

    def runs_concurrently(self, spec: Spec, chunks: Any) -> bool:
        """Whether `scan` runs at the same time as the reverse scans."""
        return False

    @abstractmethod
    def scan(self, spec: Spec, chunks: Any, S0: States | None) -> Callable[[], ChunkStates]:
        """Starts to recompute h and v_new. The call that it returns waits for them."""

    @abstractmethod
    def summarize_bwd(
        self, spec: Spec, dout: Any, seeds: States | None, *, concurrent: bool
    ) -> Tensor | None:
        """Offsets of the adjoint maps of `packing.carried`, [.., HV, K, V]. seeds: the gradients
        of the states at the ends of sequences. concurrent: `scan` runs at the same time."""

    @abstractmethod
    def scan_bwd(
        self,
        spec: Spec,
        x: Inputs,
        dout: Any,
        dS_end: States | None,
        *,
        want_start: bool,
        concurrent: bool,
    ) -> tuple[Any, Tensor | None]:
        """The reverse scan: gradients at the chunks, and where wanted those of the states that
        enter the segments, [S, HV, K, V]."""

    @abstractmethod
    def intra_bwd(
        self, spec: Spec, x: Inputs, chunks: Any, states: ChunkStates, dscan: Any
    ) -> Inputs:
        """Gradients of the inputs, each in its input's shape and dtype."""

    # for compiling ahead

    compiles: ClassVar[bool] = False
    """Whether kernels are compiled at their first launch, so that calls are announced
    (`fla_cp.kernels.rehearsal`)."""

    def rehearsing(self, device: torch.device) -> Self:
        """This backend for tensors without memory that stand for those on `device`."""
        return self

    fold = staticmethod(affine.fold)
    """States through chains of affine maps; a backend may replace it with a kernel."""

    # for torch.compile, which must know shapes before anything runs

    @abstractmethod
    def kept_shapes(
        self, rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
    ) -> list[Shape]:
        """Shapes and dtypes of what `keep` returns."""

    @abstractmethod
    def always_kept(self, rule: DeltaRule) -> tuple[int, ...]:
        """The places, in what `keep` returns with keep_intermediates, of what it returns without
        them as well."""

    # operators of their own

    @abstractmethod
    def conv(self, c: ConvInputs) -> Tensor:
        """Depthwise causal convolution, [T, D] in x's dtype."""

    @abstractmethod
    def conv_bwd(self, c: ConvInputs, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dx, dhalo, dweight and dbias, in fp32 (fp64 for fp64). dx and dweight may be in the
        dtype of x and weight."""

    @abstractmethod
    def gate(
        self, rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tensor:
        """The log decay of raw projections g [.., HV, K], in fp32 (fp64); differentiable."""

    @abstractmethod
    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str
    ) -> Tensor:
        """x / rms(x) * weight * activation(gate) over the last dim, for x, gate [.., H, V] and
        weight [V], in x's dtype. activation: a name in `ACTIVATIONS` of
        kernels/torch/gated_norm.py."""

    @abstractmethod
    def gated_norm_bwd(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, dy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx, dgate and dweight, in their inputs' dtypes."""

    @abstractmethod
    def recurrent(
        self,
        rule: DeltaRule,
        x: Inputs,
        S0: Tensor | None,
        S_end: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        """o [T, HV, V] in v's dtype, token by token; fills S_end, which may be S0."""

    # a decoding step, forward only

    @abstractmethod
    def conv_update(
        self, x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
    ) -> Tensor:
        """y [N, D] of one more token x [N, D] of each sequence, which becomes the last of
        cache [N, D, W]."""

    @abstractmethod
    def step_product(self, p: StepProduct) -> Tensor:
        """The product with what stands around it, [B, G * R], see `StepProduct`."""

    def argmax(self, x: Tensor) -> Tensor:
        """[B] int64, the index of the largest number of each row of x [B, N]."""
        return x.argmax(-1)

    def step_layers(self, layers: Sequence[StepLayer]) -> StepRun | None:
        """Layers of one `kind` that run together; None if it has no kernel for them."""
        return None

    def step_mixer(self, m: StepMixer) -> Tensor:
        """o [B, HV * V] in the dtype of qkv, see `StepMixer`."""
        HV, K, V = m.state.shape[1:]
        y = self.conv_update(m.qkv, m.window, m.taps, m.bias, True)
        q, k, v = y.split((m.key_heads * K, m.key_heads * K, HV * V), 1)
        x = Inputs(
            q.unflatten(1, (-1, K)),
            k.unflatten(1, (-1, K)),
            v.unflatten(1, (HV, V)),
            m.decay if m.rule.per_head else m.decay.unflatten(1, (HV, K)),
            m.beta,
            m.A_log,
            m.dt_bias,
        )
        o = self.recurrent(m.rule, x, m.state, m.state, Sequences(len(y)))
        gate = m.gate.unflatten(1, (HV, V))
        return self.gated_norm(o, gate, m.norm, m.eps, m.activation).flatten(1)
