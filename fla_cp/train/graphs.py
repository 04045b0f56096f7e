"""CUDA graphs of a micro-batch: its forward and backward without work of the host.

With few tokens a rank, the GPU waits for the host, which needs milliseconds for each layer. A graph
repeats the launches and messages of one micro-batch in a fraction of that time. It reads tokens,
labels and the loss's factor from tensors of its own. If a step has one micro-batch, the graph
writes the gradients, always to the same memory. If a step has several, the graph adds to gradients
that stay where they are and are zeroed after each step.

A graph serves only the packing with which it was captured. One graph is enough if all packs have
documents of the same lengths, for example one document each. With `--data.max-documents` the
context of the graph has a fixed shape, and is updated in place for other packings
(docs/cuda_graphs.md).

With `--cuda-graphs auto` there is at most one graph. It is captured when the same packing has come
in a few steps in a row, if it fits into memory, and is dropped as soon as another packing comes.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fla_cp import FLACPContext, build_cp_context
from fla_cp.comm import GraphWaits, captured_exchange, collectives
from fla_cp.kernels import graph_clock
from fla_cp.train.config import TrainConfig
from fla_cp.train.distributed import Ranks, compute_dtype
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.loss import backward
from fla_cp.train.model import has_compiled_blocks
from fla_cp.train.pattern import SOFTMAX, mixers_of
from fla_cp.train.weights import local_tensor

SEEN_BEFORE = 2
"""How many steps of a packing run eagerly before it is captured. They compile kernels and make
tables."""

MAX_GRAPHS = 4
"""The largest number of graphs. They share the memory of a micro-batch's activations."""

MARGIN = 1.15
"""With "auto" a graph is captured only if this many times the memory of an eager step is free."""

PROVEN_RANKS, PROVEN_COMPILED = 4, 2
"""With "auto" nothing is captured on more ranks than the first number, and with compiled blocks on
more than the second. On four GPUs the steps of a 340M model with compiled blocks once did not end,
and it is not known why. Without compiled blocks they ended, and took a quarter of the time that
they took without a graph (docs/log.md)."""

PROVEN_HYBRIDS = 1
"""The same for models with softmax attention or experts."""

MAX_SEEN = 16
"""How many packings without a graph are remembered, with their tables."""


@dataclass
class Graph:
    """One captured micro-batch. factor: the factor on the summed loss. gradients: those of the
    parameters, which the graph writes; empty if it adds to gradients that are there. waits: those
    for other ranks."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    labels: Tensor
    factor: Tensor
    context: FLACPContext
    loss: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    waits: GraphWaits = field(default_factory=GraphWaits)

    def replay(self, tokens: Tensor, labels: Tensor, factor: float) -> Tensor:
        if self.gradients and self.gradients[0][0].grad is not self.gradients[0][1]:
            for parameter, gradient in self.gradients:
                parameter.grad = gradient
        self.tokens.copy_(tokens, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        self.factor.fill_(factor)
        with self.waits.replayed():
            self.graph.replay()
        return self.loss


@dataclass
class Seen:
    """A packing that has no graph yet. context: that of the packing's first step, whose tables have
    been made by the time of a capture. times: in how many steps the packing has come."""

    context: FLACPContext
    times: int = 0


class Graphs:
    """The graphs of a model's micro-batches, by packing. Ranks that share sequences have the same
    packings, and therefore the same graphs.

    max_documents: see DataConfig. auto: see the module. agreed: returns whether its argument is
    true on all ranks that share sequences; it is a collective. single: whether a step has one
    micro-batch, so that graphs write the gradients.

    NCCL cannot end a group while a graph contains messages of that group, so `close` must come
    first.
    """

    def __init__(
        self,
        model: nn.Module,
        max_documents: int | None = None,
        *,
        auto: bool = False,
        agreed: Callable[[bool], bool] = bool,
        single: bool = False,
    ) -> None:
        self.model, self.max_documents = model, max_documents
        self.auto, self.agreed, self.single = auto, agreed, single
        self.ended = False  # whether "auto" captures no more
        self.fixed: FLACPContext | None = None
        self.seen: OrderedDict[tuple[int, ...], Seen] = OrderedDict()
        self.graphs: dict[tuple[int, ...], Graph] = {}
        self.pool: Any = None  # the memory that all graphs share

    def close(self) -> None:
        """Drops all graphs and their memory."""
        for found in self.graphs.values():
            found.graph.reset()
        self.graphs.clear()
        self.ended, self.pool = True, None

    @property
    def hides_waits(self) -> bool:
        """Whether waits for other ranks in one of the graphs are not measured."""
        return any(graph.waits.timer is None for graph in self.graphs.values())

    def reset_gradients(self) -> None:
        """Ends a step, so that the next one begins without its gradients."""
        if not self.single:
            zero_gradients(self.model)
        elif not self.graphs:  # a graph overwrites all gradients
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def context(self, made: FLACPContext) -> FLACPContext:
        """The context of fixed shape, updated to the packing of `made`. It is `made` itself without
        max_documents, for more documents than that, and if a rank has not exactly one range, which
        a context of fixed shape needs."""
        offsets, most = made.global_cu_seqlens, self.max_documents
        if most is None or len(offsets) - 1 > most or any(len(r) != 1 for r in made.token_ranges):
            return made
        host = torch.tensor(offsets, dtype=torch.int32, device="cpu")
        if self.fixed is None:
            self.fixed = build_cp_context(
                host.to(made.cu_seqlens.device, non_blocking=True),
                made.group,
                conv1d_kernel_size=made.conv1d_kernel_size,
                cu_seqlens_cpu=host,
                max_sequences=most,
            )
        else:
            self.fixed.update(host, host)
        return self.fixed

    def loss(self, tokens: Tensor, labels: Tensor, context: FLACPContext, factor: float) -> Tensor:
        """Adds the gradients of factor * (summed loss) to the model's, and returns this product, a
        float32 scalar on the device that is valid until the next call.

        context: an ordinary one, for tokens and labels [1, T_local].
        """
        context = self.context(context)
        packing = () if context is self.fixed else context.global_cu_seqlens
        found = self.graphs.get(packing)
        if found is not None:
            return found.replay(tokens, labels, factor)
        if self.auto and packing not in self.seen:
            self.seen.clear()  # only packings that come in a row count
            if self.graphs:
                self.close()
        seen = self._seen(packing, context)
        if seen.times <= SEEN_BEFORE or len(self.graphs) >= MAX_GRAPHS or not self._may_capture():
            scale = torch.full((), factor, dtype=torch.float32, device=tokens.device)
            if self.single:
                self._drop_gradients()  # those of a graph, which an eager step would add to
            return self._eager(tokens, labels, seen.context, scale)
        if self.single:
            self._drop_gradients()
        try:
            self.graphs[packing] = self._capture(tokens, labels, seen.context)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise RuntimeError(
                f"a micro-batch could not be captured in a CUDA graph: {said}; start again with "
                "--cuda-graphs off"
            ) from error
        return self.graphs[packing].replay(tokens, labels, factor)

    def _may_capture(self) -> bool:
        """Whether a graph may be captured now. With "auto", none is captured any more after one
        that does not fit on all ranks."""
        if not self.auto or self.ended:
            return not self.ended
        self.ended = not self.agreed(fits(next(self.model.parameters()).device))
        return not self.ended

    def _seen(self, packing: tuple[int, ...], context: FLACPContext) -> Seen:
        """Counts a step of a packing. The packing that has not come for longest is forgotten if
        there are too many."""
        seen = self.seen.setdefault(packing, Seen(context))
        seen.times += 1
        self.seen.move_to_end(packing)
        if len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return seen

    def _eager(
        self, tokens: Tensor, labels: Tensor, context: FLACPContext, factor: Tensor
    ) -> Tensor:
        loss: Tensor = self.model(tokens, context, labels) * factor
        backward(loss)
        return loss.detach()

    def _capture(self, tokens: Tensor, labels: Tensor, context: FLACPContext) -> Graph:
        tokens, labels = tokens.clone(), labels.clone()
        factor = torch.ones((), dtype=torch.float32, device=tokens.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # otherwise memory of eager steps would stay beside the graph's
        if self.pool is None:  # graphs never run at the same time, so all share one memory
            self.pool = torch.cuda.graph_pool_handle()
        # Other threads may copy batches or checkpoints meanwhile.
        capture = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
        device = tokens.device
        waited = captured_exchange(graph_clock(device), device)
        with without_collection(), waited as waits, capture:
            loss = self._eager(tokens, labels, context, factor)
        return Graph(graph, tokens, labels, factor, context, loss, self._written(), waits)

    def _written(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters and the gradients that a captured micro-batch has written to them."""
        found = [(p, p.grad) for p in self.model.parameters() if self.single]
        return [(p, g) for p, g in found if g is not None]


@contextmanager
def without_collection() -> Iterator[None]:
    """In the block, Python does not look for objects that only refer to each other. Some of them
    may hold a CUDA graph, and if a graph is destroyed while another one is captured, that capture
    fails. Therefore they are freed before; torch does that only if its configuration asks for it.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graphs_of(model: nn.Module, config: TrainConfig, ranks: Ranks) -> Graphs | None:
    """The graphs that --cuda-graphs asks for, or None. They end before the ranks' groups.

    "auto" captures nothing on CPUs, and nothing that may wait for the host, that has not been
    proven on GPUs, or that reduces gradients only after several micro-batches: more ranks than
    `proven_ranks`, models of transformers, --offload, and --parallel.reduce step.
    """
    parallel, data = config.parallel, config.data
    wanted, packs = parallel.cuda_graphs, data.global_batch_size // parallel.dp
    single = (data.micro_batch_size or packs) == packs
    if wanted == "auto":
        reduces = single or parallel.reduce == "micro_batch"
        eager = config.model.folder is not None or config.model.offload
        eager = eager or ranks.world_size > proven_ranks(model, config, ranks.device)
        if ranks.device.type != "cuda" or eager or not reduces:
            return None
    if wanted == "off":
        return None

    def agreed(here: bool) -> bool:
        if ranks.cp_group is None:
            return here
        missing = torch.tensor([not here], dtype=torch.int32, device=ranks.device)
        return not collectives.all_reduce(missing, ranks.cp_group).item()

    auto = wanted == "auto"
    found = Graphs(model, data.max_documents, auto=auto, agreed=agreed, single=single)
    ranks.at_end.append(found.close)
    return found


def proven_ranks(model: nn.Module, config: TrainConfig, device: torch.device) -> int:
    """The most ranks on which "auto" captures graphs of a model that is not of transformers. In
    float32, products of experts wait for the host, and no graph of softmax attention was tried."""
    proven = PROVEN_COMPILED if has_compiled_blocks(model) else PROVEN_RANKS
    experts = isinstance(model, LanguageModel) and model.balance is not None
    if not experts and not set(mixers_of(config.model)) & set(SOFTMAX):
        return proven
    half = compute_dtype(config.parallel.dtype, device) == torch.bfloat16
    return min(proven, PROVEN_HYBRIDS) if half else 0


def fits(device: torch.device) -> bool:
    """Whether a GPU has room for a graph: as much memory as a micro-batch has taken so far, free or
    kept by torch."""
    if device.type != "cuda":
        return True
    allocated = torch.cuda.memory_allocated(device)
    needed = MARGIN * (torch.cuda.max_memory_allocated(device) - allocated)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - allocated >= needed


def zero_gradients(model: nn.Module) -> None:
    """Zeroes the gradients in place, because a graph adds to that memory."""
    grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    if grads:
        torch._foreach_zero_(grads)
