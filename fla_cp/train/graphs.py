"""CUDA graphs of a micro-batch: its forward and backward without the host.

At few tokens a rank the GPU waits for the host, which needs milliseconds for each layer. A graph
repeats the launches and messages of one micro-batch in a fraction of that. It reads tokens, labels
and the loss's factor from tensors of its own, and adds to gradients that stay where they are.

A graph serves the packing of its capture. Where every pack has as many documents of the same
lengths, one document for example, that is all there are. With `--data.max-documents` the graph's
context is of fixed shape, and is updated in place (docs/cuda_graphs.md).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fla_cp import FLACPContext, build_cp_context
from fla_cp.comm import unmeasured
from fla_cp.train.weights import local_tensor

SEEN_BEFORE = 2
"""Steps that a packing takes before it is captured: the first ones compile and make tables."""

MAX_GRAPHS = 4
"""The most graphs, each with the memory of a micro-batch's activations."""


MAX_SEEN = 16
"""The most packings without a graph that are remembered, with their tables."""


@dataclass
class Graph:
    """One captured micro-batch. factor: what the summed loss is multiplied by."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    labels: Tensor
    factor: Tensor
    context: FLACPContext
    loss: Tensor

    def replay(self, tokens: Tensor, labels: Tensor, factor: float) -> Tensor:
        self.tokens.copy_(tokens, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        self.factor.fill_(factor)
        self.graph.replay()
        return self.loss


@dataclass
class Seen:
    """A packing that has no graph yet. context: of its first step, which has made its tables by the
    time it is captured. times: how many steps it took."""

    context: FLACPContext
    times: int = 0


class Graphs:
    """The graphs of a model's micro-batches, by packing. All ranks have the same ones, since they
    have the same packings. max_documents: see DataConfig."""

    def __init__(self, model: nn.Module, max_documents: int | None = None) -> None:
        self.model, self.max_documents = model, max_documents
        self.fixed: FLACPContext | None = None
        self.seen: OrderedDict[tuple[int, ...], Seen] = OrderedDict()
        self.graphs: dict[tuple[int, ...], Graph] = {}

    def context(self, made: FLACPContext) -> FLACPContext:
        """The context of fixed shape, updated to the packing of `made`; or `made` itself, without
        max_documents, for more documents than that, and for ranges that no fixed context has."""
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
        """Adds the gradients of factor * (summed loss) to the model's, and returns that product:
        a float32 scalar on the device, valid until the next call.

        context: an ordinary one, for tokens and labels [1, T_local].
        """
        context = self.context(context)
        packing = () if context is self.fixed else context.global_cu_seqlens
        found = self.graphs.get(packing)
        if found is not None:
            return found.replay(tokens, labels, factor)
        seen = self._seen(packing, context)
        if seen.times <= SEEN_BEFORE or len(self.graphs) >= MAX_GRAPHS:
            scale = torch.full((), factor, dtype=torch.float32, device=tokens.device)
            return self._eager(tokens, labels, seen.context, scale)
        self.graphs[packing] = self._capture(tokens, labels, seen.context)
        return self.graphs[packing].replay(tokens, labels, factor)

    def _seen(self, packing: tuple[int, ...], context: FLACPContext) -> Seen:
        """Counts a step of a packing. A packing that has not come for long is forgotten."""
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
        loss.backward()
        return loss.detach()

    def _capture(self, tokens: Tensor, labels: Tensor, context: FLACPContext) -> Graph:
        tokens, labels = tokens.clone(), labels.clone()
        factor = torch.ones((), dtype=torch.float32, device=tokens.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # The backward runs in a thread of its own, and others may copy batches or checkpoints.
        with unmeasured(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self._eager(tokens, labels, context, factor)
        return Graph(graph, tokens, labels, factor, context, loss)


def zero_gradients(model: nn.Module) -> None:
    """Zeroes the gradients where they are, since a graph adds to that memory."""
    grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    if grads:
        torch._foreach_zero_(grads)
