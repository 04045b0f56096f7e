"""Entry point of `fla-cp-memory`: predicts the peak memory of a training step on each rank.

    fla-cp-memory --model 1.3B --seq-len 131072 --cp 4 --remat full --memory-gib 80

It takes the trainer's flags, needs no GPU and reads no data. A step has its peak in the forward or
backward of some block, in the loss, or in the optimiser. The memory at each of these moments is a
sum of parts. These follow from the shapes of the model, from what FSDP holds, and from a count of
each kind of block (block_memory.py). Only the gaps of CUDA graphs are a share that was measured.
Measured steps of the trainer are predicted within 6% (tests/train/test_memory.py). Models of
transformers are not predicted.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp import FLACPContext, build_cp_context
from fla_cp.nn.experts import Experts
from fla_cp.train.arguments import Parser
from fla_cp.train.block_memory import (
    BlockMemory,
    eager,
    first_tensor,
    kept_compiled,
    kernels_without_launches,
    pretended_ranks,
    rounded,
)
from fla_cp.train.config import ModelConfig, TrainConfig, UserError
from fla_cp.train.distributed import frees_after_forward
from fla_cp.train.ending import say
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.loader import token_ranges
from fla_cp.train.loss import chunk_rows
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.model import Block, Decoder
from fla_cp.train.optim import block_matrices
from fla_cp.train.parse import parse
from fla_cp.train.pattern import block_mixers
from fla_cp.train.token_layout import layout_of
from fla_cp.train.tokenizer import Tokenizer
from fla_cp.train.weights import on_meta

GIB = 2**30

MEMORY_GIB = 139.0
"""The memory of an H200."""

RESERVED = 0.06
"""The share of memory that is left for CUDA, NCCL and gaps between tensors at the longest length.
"""

GRAPH_GAPS = {True: 0.03, False: 0.10}
"""The gaps between a CUDA graph's tensors, as a share of these tensors, by whether blocks are
compiled. Measured on one, two and four GPUs, these shares were 3%, and 8 to 16%."""

WIDE = 4
"""The bytes of an element of parameters, gradients and the optimiser's state, which are float32."""

Remat = Literal["none", "selective", "full"]

TILE = 64
"""The lengths that are tried are multiples of this many tokens a rank, which is a chunk."""


@dataclass(frozen=True)
class Part:
    """A part of the peak, in bytes on one rank."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Prediction:
    """The peak of a step on one rank. when: the moment of the peak. host: bytes in the host's
    memory, with --offload."""

    seq_len: int
    when: str
    parts: tuple[Part, ...]
    host: int = 0

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def gib(self) -> float:
        return self.bytes / GIB

    def table(self) -> str:
        """A line for each part, and the sum, in GiB or, if it is less than one, in MiB."""
        rows = [(part.name, part.bytes) for part in self.parts if part.bytes]
        rows.append((f"peak, {self.when}", self.bytes))
        if self.host:
            rows.append(("in the host memory", self.host))
        width = max(len(name) for name, _ in rows)
        unit, size = ("GiB", GIB) if self.bytes >= GIB else ("MiB", GIB // 1024)
        return "\n".join(f"  {name:<{width}}  {n / size:8.2f} {unit}" for name, n in rows)


@dataclass
class Sizes:
    """What does not depend on the length of sequences. Parameters are sharded over the ranks.

    parameters, optimizer, gradients: bytes on this rank. gathered: bytes of the parameters, in the
    compute dtype, that stay gathered for a whole step. block: how many elements the parameters of
    each block have. root: how many those of embedding, last norm and head have.
    """

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    block: list[int] = field(default_factory=list)
    root: int = 0


class _Moment(NamedTuple):
    """A moment of a step. blocks: how many blocks, from the first one on, have activations.
    gradients: bytes. work: what is held only at this moment."""

    when: str
    blocks: int
    gradients: int
    work: tuple[Part, ...]


class Predictor:
    """Predicts steps of one configuration, with sequences of any length.

    config: that of the trainer. vocab_size: how many rows the embedding has; None: as the flags
    say. Raises UserError for a configuration that is not predicted.
    """

    def __init__(self, config: TrainConfig, vocab_size: int | None = None) -> None:
        if config.model.folder is not None:
            raise UserError(
                "--model must be a named size, since models of transformers are not predicted, "
                f"got {config.model.size}"
            )
        if config.parallel.device == "cpu":
            raise UserError("--device must be cuda or auto, since GPUs are predicted, got cpu")
        self.config = config
        self.vocab_size = vocabulary_of(config) if vocab_size is None else vocab_size
        narrow = config.parallel.dtype != "float32"
        self.dtype = torch.bfloat16 if narrow else torch.float32
        auto = config.model.compile == "auto" and config.model.remat != "selective"
        auto = auto and config.data.max_documents is None
        self.compiles = config.model.compile == "on" or auto
        parallel = config.parallel
        self.shards = parallel.cp * parallel.dp_shard
        self.packs = config.data.micro_batch_size or max(
            1, config.data.global_batch_size // parallel.dp
        )
        self.micro_batches = max(1, config.data.global_batch_size // (parallel.dp * self.packs))

    def model(self, config: ModelConfig) -> Decoder:
        """The model on "meta", with its parameters in the dtypes that a forward uses."""
        with on_meta():
            model = Decoder(config, self.vocab_size)
        exact = {p for part in model.exact_parts() for p in part.parameters()}
        for p in model.parameters():
            if p not in exact:
                p.data = p.data.to(self.dtype)
        return model

    def sizes(self, model: Decoder) -> Sizes:
        """The `Sizes` of a model."""

        def shard(elements: int) -> int:
            return math.ceil(elements / self.shards)

        total = sum(p.numel() for p in model.parameters())
        momenta = 2 * total
        if self.config.optim.name == "muon":
            momenta -= sum(p.numel() for p in block_matrices(model))
        block = [sum(p.numel() for p in b.parameters()) for b in model.blocks]
        root, item = total - sum(block), self.dtype.itemsize
        frees = frees_after_forward(self.config.parallel.reshard, self.shards, item * sum(block))
        # FSDP never frees the root's group. One block is in use while the next one is gathered.
        gathered = root + sum(sorted(block)[-2:]) if frees else total
        whole = self.micro_batches > 1 and self.config.parallel.reduce == "step"
        return Sizes(
            parameters=WIDE * shard(total),
            optimizer=WIDE * shard(momenta),
            gradients=WIDE * (total if whole else shard(total)),
            gathered=item * gathered if item < WIDE or self.shards > 1 else 0,
            block=block,
            root=root,
        )

    def context(self, seq_len: int, group: dist.ProcessGroup | None) -> FLACPContext:
        """The context of a micro-batch whose packs hold one document each."""
        total = self.packs * seq_len
        offsets = torch.arange(0, total + 1, seq_len, dtype=torch.int32, device="cpu")
        parallel = self.config.parallel
        return build_cp_context(
            offsets,
            group,
            conv1d_kernel_size=CONV_SIZE,
            token_ranges=token_ranges(total, parallel.cp, layout_of(self.config)),
            exchange=parallel.exchange,
            check=False,
        )

    def predict(self, seq_len: int) -> Prediction:
        """The peak of a step with packs of `seq_len` tokens."""
        with (
            pretended_ranks(self.config.parallel.cp) as group,
            kernels_without_launches(self.config.model.impl) as impl,
        ):
            model = self.model(dataclasses.replace(self.config.model, impl=impl))
            context = self.context(seq_len, group)
            tokens = context.local_tokens
            shape = 1, tokens, model.shape.hidden_size
            x = torch.empty(shape, dtype=self.dtype, device="meta")
            kinds = self._kinds(model)
            found: dict[str, BlockMemory] = {}
            for block, kind in zip(model.blocks, kinds, strict=True):
                assert isinstance(block, Block)
                if kind not in found:
                    found[kind] = self._block(model, block, x, context)
        return self._peak(seq_len, tokens, model, kinds, found)

    def _kinds(self, model: Decoder) -> list[str]:
        """The kind of each block. Blocks of one kind take the same memory."""
        config = self.config.model
        mixers = block_mixers(config.pattern or config.mixer or "kda", len(model.blocks))
        ffns = (isinstance(b.get_submodule("ffn"), Experts) for b in model.blocks)
        return [
            f"{mixer} and {'experts' if experts else 'SwiGLU'}"
            for mixer, experts in zip(mixers, ffns, strict=True)
        ]

    def _block(self, model: Decoder, block: Block, x: Tensor, context: FLACPContext) -> BlockMemory:
        """The memory of a block. With --offload it is counted as if everything stayed on the GPU,
        and `_peak` takes off what does not. The forward stays as it is: copies to the host's memory
        are slower than kernels, and what they read is held until they end."""
        model.offload = False
        remat = self.config.model.remat
        if not self.compiles:
            found = self._eager(model, block, x, context, remat)
            if self.config.model.offload and remat == "none":
                again = self._eager(model, block, x, context, remat, offload=True)
                found = dataclasses.replace(found, offloaded=again.backward)
            return found
        plain = self._eager(model, block, x, context, "none")
        kept = kept_compiled(block, x, context)
        # A compiled backward holds no more than an eager one beyond what was kept.
        whole = BlockMemory(kept, max(kept, plain.forward - plain.kept + kept), plain.backward)
        if remat == "none":
            return whole
        # The checkpoint keeps the input, which is the result of the block before.
        result = rounded(x.numel() * x.element_size())
        return BlockMemory(result, whole.forward, kept - result + whole.backward)

    def _eager(
        self,
        model: Decoder,
        block: Block,
        x: Tensor,
        context: FLACPContext,
        remat: Remat,
        offload: bool = False,
    ) -> BlockMemory:
        model.remat = remat
        for p in block.parameters():
            p.grad = None

        def run(x: Tensor, context: FLACPContext) -> Tensor:
            return first_tensor(model.run_block(block, x, context))

        return eager(block, run, x, context, offload)

    def _peak(
        self,
        seq_len: int,
        tokens: int,
        model: Decoder,
        kinds: list[str],
        found: dict[str, BlockMemory],
    ) -> Prediction:
        """The moment of a step at which most memory is held. tokens: those of a micro-batch on one
        rank. kinds: of each block. found: the memory of a block of each kind."""
        blocks, host = [found[kind] for kind in kinds], 0
        if self.config.model.offload:
            host = sum(block.kept for block in blocks)
            blocks = [_offloaded(block) for block in blocks]
        sizes, hidden = self.sizes(model), model.shape.hidden_size
        fixed = [
            Part("parameters", sizes.parameters),
            Part("optimiser", sizes.optimizer),
            Part("gathered parameters", sizes.gathered),
            # int64 tokens and labels, of this micro-batch and of the next one
            Part("tokens and labels", 4 * rounded(8 * tokens)),
        ]
        embedded = rounded(tokens * hidden * self.dtype.itemsize)
        graph = self.config.parallel.cuda_graphs == "on"
        share = GRAPH_GAPS[self.compiles] if graph else 0.0

        def everything(moment: _Moment) -> Prediction:
            """The memory at one moment. It includes what is held throughout a step, and what the
            forward keeps."""
            activations = self._activations(kinds[: moment.blocks], blocks)
            activations.append(Part("embedded tokens", embedded if moment.blocks else 0))
            gradients = Part("gradients", moment.gradients)
            parts = (*fixed, gradients, *activations, *moment.work)
            gaps = share * sum(part.bytes for part in parts)
            parts = (*parts, Part("gaps in the CUDA graph", int(gaps)))
            return Prediction(seq_len, moment.when, parts, host)

        moments = self._moments(blocks, sizes, tokens, hidden)
        return max(map(everything, moments), key=lambda prediction: prediction.bytes)

    def _moments(
        self, blocks: Sequence[BlockMemory], sizes: Sizes, tokens: int, hidden: int
    ) -> Iterator[_Moment]:
        """The moments of a step at which memory may have its peak, in their order.

        In the backward of a block, the gradients of later blocks are sharded, and the block's own
        are exchanged whole. Example: three blocks of 10 parameters each on 2 ranks, in a step of
        one micro-batch. In the backward of the first block, the gradients of the other two take
        4 * 20 / 2 = 40 bytes on each rank, and the exchange of its own takes another 4 * 10.
        """
        earlier = sizes.gradients if self.micro_batches > 1 else 0  # of earlier micro-batches
        for i, block in enumerate(blocks):
            work = Part("work in a forward", block.forward - block.kept)
            yield _Moment("in a forward", i + 1, earlier, (work,))

        item = self.dtype.itemsize
        loss = Part("logits and loss", loss_bytes(tokens, hidden, self.vocab_size, item))
        yield _Moment("in the loss", len(blocks), earlier, (loss,))

        # The head's gradient stays until the end, when the root's group is reduced.
        head = Part("logits and loss", item * self.vocab_size * hidden)
        done = 0  # the parameters whose gradients are formed
        for i in reversed(range(len(blocks))):
            gradients = earlier or WIDE * math.ceil(done / self.shards)
            work = Part("work in a backward", blocks[i].backward)
            sent = Part("exchange of gradients", WIDE * sizes.block[i] if self.shards > 1 else 0)
            yield _Moment("in a backward", i + 1, gradients, (head, work, sent))
            done += sizes.block[i]

        yield _Moment("in the optimiser", 0, sizes.gradients, ())

    def _activations(self, kinds: Sequence[str], blocks: Sequence[BlockMemory]) -> list[Part]:
        """What the first blocks keep: a part for each kind of block. kinds: of these blocks."""
        held = Counter[str]()
        for kind, block in zip(kinds, blocks, strict=False):
            held[kind] += block.kept
        remat = self.config.model.remat
        how = f", --remat {remat}" if remat != "none" else ""
        return [
            Part(f"activations of {kinds.count(kind)} x {kind}{how}", size)
            for kind, size in held.items()
        ]


def _offloaded(block: BlockMemory) -> BlockMemory:
    """The memory of a block on the GPU with --offload: what it kept comes back for its own
    backward."""
    back = block.offloaded
    return BlockMemory(0, block.forward, block.backward + block.kept if back is None else back)


def loss_bytes(tokens: int, hidden: int, vocabulary: int, item: int) -> int:
    """The most bytes that the loss and its input hold at once, if the pointwise part of the loss is
    one kernel.

    Each chunk has logits and their gradient. After all chunks, the backward rounds the gradient of
    the input, which is freed by then, and that of the head. item: bytes of an element of the
    compute dtype.
    """
    rows, head = chunk_rows(tokens, vocabulary, item), vocabulary * hidden
    chunk = 2 * rows * vocabulary * item + 4 * tokens
    return max(chunk, item * head) + 2 * rounded(tokens * hidden * item) + WIDE * head


def vocabulary_of(config: TrainConfig) -> int:
    """How many rows the embedding has, from the flags alone. Raises UserError if they lack it."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.data.tokenizer is not None:
        try:
            return Tokenizer(config.data.tokenizer).vocab_size
        except ValueError as error:
            raise UserError(str(error)) from None
    source = config.data.source
    if source == "stdlib" or (source.startswith("text:") and "," not in source):
        return 256  # bytes
    raise UserError(
        "--model.vocab-size must be given where neither --tokenizer nor the bytes of stdlib or "
        f"text:PATH are the tokens, got --data {source}"
    )


def longest_that_fits(predict: Callable[[int], Prediction], room: float, unit: int) -> int:
    """The greatest multiple of `unit` tokens whose peak is at most `room` bytes; 0 if there is
    none.

    The peak grows with the length. If it grows nearly linearly, this takes few predictions.
    """
    low, high = 0, unit
    at: dict[int, int] = {}

    def peak(n: int) -> int:
        if n not in at:
            at[n] = predict(n).bytes
        return at[n]

    while peak(high) <= room:
        if low:  # the length at which the line through the last two points reaches `room`
            slope = max(1e-9, (at[high] - at[low]) / (high - low))
            guess = high + (room - at[high]) / slope
        else:
            guess = 64 * high
        low, high = high, max(high + unit, int(guess * 1.02) // unit * unit)
    while high - low > unit:
        middle = (low + high) // 2
        if low:
            slope = max(1e-9, (at[high] - at[low]) / (high - low))
            middle = int(low + (room - at[low]) / slope)
        # keeps a little away from both ends, so that each try narrows the range
        least = max(unit, (high - low) // 50)
        middle = min(max(middle, low + least), high - least) // unit * unit
        middle = min(max(middle, low + unit), high - unit)
        if peak(middle) <= room:
            low = middle
        else:
            high = middle
        if low and high - low <= max(unit, low // 500):
            break
    return low


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts as the arguments say and returns the exit code, see fla_cp/train/exit_codes.py."""
    parser = Parser(
        "fla-cp-memory",
        description="Predicts the peak memory of a training step on each rank, and the longest "
        "--seq-len that fits into --memory-gib. It also takes all flags of fla-cp-train.",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=MEMORY_GIB,
        help="memory of each GPU, in which the longest --seq-len is searched (default: "
        "%(default)s, which an H200 has)",
    )
    parser.add_argument(
        "--no-longest",
        action="store_true",
        help="predict only the given --seq-len, and skip the search for the longest one that fits, "
        "which takes most of the time",
    )
    own, flags = parser.parse_known_args(argv)
    try:
        if not 0 < own.memory_gib < math.inf:
            raise UserError(f"--memory-gib must be finite and above 0, got {own.memory_gib}")
        config = parse(flags, others=("--memory-gib", "--no-longest"))
        predictor = Predictor(config)
        say(report(predictor, None if own.no_longest else own.memory_gib))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    return 0


def report(predictor: Predictor, memory_gib: float | None) -> str:
    """What the program prints. memory_gib: None leaves out the longest length."""
    config, found = predictor.config, predictor.predict(predictor.config.data.seq_len)
    ranks = config.parallel.world_size
    where = f"each of {ranks} ranks" if ranks > 1 else "the one rank"
    lines = [
        f"{config.model.name}, {found.seq_len} tokens over cp {config.parallel.cp}, "
        f"{predictor.packs} to a micro-batch; on {where}:",
        found.table(),
    ]
    if memory_gib is not None:
        pieces = config.parallel.cp * (2 if layout_of(config) == "zigzag" else 1)
        room = (1 - RESERVED) * memory_gib * GIB
        longest = longest_that_fits(predictor.predict, room, TILE * pieces)
        if longest:
            left = f"{RESERVED:.0%} of it left for CUDA, NCCL and gaps"
            lines.append(f"longest --seq-len in {memory_gib:g} GiB, {left}: {longest}")
        else:
            lines.append(f"no length fits into {memory_gib:g} GiB")
    return "\n".join(lines)
