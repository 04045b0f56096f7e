"""Decoding: steps of one token for each row, which a CUDA graph repeats with little work of the
host.

A step reads the newest tokens, updates the caches, and returns logits, all in memory that stays
where it is. On a GPU the first steps run eagerly, the next one is captured, and all others replay
it. The host then issues one graph a token, whatever the number of layers. Elsewhere, and for the
models that `why_eager` names, every step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fla_cp.nn.cache import AttentionCache, LayerCache, RecurrentCache
from fla_cp.nn.decoding import BlockStep, head_logits, steps_of
from fla_cp.train.graphs import without_collection
from fla_cp.train.model import Decoder

EAGER_CALLS = 2
"""How many calls run before one is captured. They compile kernels and make libraries' workspaces.
"""

GROUPED_ON_DEVICE = ((9, 0), (10, 0))
"""Compute capabilities on which torch's grouped product of bfloat16 does not wait for the host
(torch 2.10 to 2.13)."""


def why_eager(model: Decoder) -> str | None:
    """Why steps of the model are not captured in a CUDA graph; None if they can be."""
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a graph would not call the hooks of modules"
    weight = model.embedding.weight
    if weight.device.type != "cuda":
        return "only GPUs have CUDA graphs"
    capability = torch.cuda.get_device_capability(weight.device)
    for layer in model.expert_layers():
        sizes = layer.experts.gate_up.shape[-1], layer.experts.down.shape[-1]
        aligned = all(size % 8 == 0 for size in sizes)
        on_device = weight.dtype == torch.bfloat16 and capability in GROUPED_ON_DEVICE
        if not (aligned and on_device):
            return "torch's product of experts waits for the host in this dtype or on this GPU"
    return None


def unsteady_steps(device: torch.device) -> int:
    """How many steps at the beginning take longer than the others: those before a capture, which
    compile kernels, and the one that is captured. The number is the same if nothing is captured."""
    return EAGER_CALLS + 1 if device.type == "cuda" else 0


class Replayed:
    """A call of `step` or, after a few calls, a replay of it. step: returns a tensor, which later
    calls overwrite, and writes only memory that existed before. captured: whether to make a
    graph, which needs a GPU. places: returns the addresses of memory that a step uses and that
    other calls may replace. If they have changed, a new graph is made."""

    def __init__(
        self,
        step: Callable[[], Tensor],
        device: torch.device,
        captured: bool,
        places: Callable[[], Sequence[object]] = tuple,
    ) -> None:
        self.step, self.device, self.captured, self.places = step, device, captured, places
        self.calls = 0
        self.left_at: Sequence[object] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.found: Tensor | None = None

    def __call__(self) -> Tensor:
        if not self.captured:
            return self.step()
        if self.places() != self.left_at:
            self.graph, self.calls = None, 0  # a step may now need other kernels
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            found = self._eager()
            self.left_at = self.places()
            return found
        if self.graph is None:
            self._capture()
        assert self.graph is not None and self.found is not None
        self.graph.replay()
        return self.found

    def _eager(self) -> Tensor:
        """Runs a call before the capture, on a stream of its own, as torch requires."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = self.step()
        current.wait_stream(self.stream)
        found.record_stream(current)
        return found

    def _capture(self) -> None:
        """Captures a call. Its work does not run yet."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Other threads may copy or free memory, as a server's do.
        capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
        with without_collection(), capture:
            self.found = self.step()
        self.graph, self.left_at = graph, self.places()


class DecodeStep:
    """A step: the logits [B, vocabulary] after the newest token of each row.

    tokens: [B] int64, the newest tokens, which a call reads and the caller overwrites in place.
    caches: those of the blocks, which have seen each row's earlier tokens. A call updates them, so
    that a later call of the model may go on with them, and steps may follow that call. Those of
    attention must have room for all tokens to come. If two steps use the same caches, a call brings
    the states up to date that the other step has left, but a graph of your own, when you replay it,
    does not. The constructor moves the model's weights, see `fla_cp.nn.decoding.stacked`. impl:
    "auto", "torch" or "triton", for the products.
    """

    def __init__(
        self, model: Decoder, caches: Sequence[LayerCache], rows: int, impl: str = "auto"
    ) -> None:
        weight = model.embedding.weight
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.caches = [c.fixed() if isinstance(c, AttentionCache) else c for c in caches]
        self.blocks = [BlockStep(block, impl) for block in model.blocks]
        self.steps = steps_of(self.blocks, self.caches, weight, impl)
        self.model, self.impl = model, impl

    def places(self) -> list[object]:
        """Where the caches of recurrent layers are in memory. Calls of the model replace them."""
        return [n for c in self.caches if isinstance(c, RecurrentCache) for n in c.places()]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        x = self.model.embedding(self.tokens)
        for step in self.steps:
            step(x)
        return head_logits(x, self.model.norm, self.model.head, self.impl)


class Decoding:
    """The newest token of each row, and the steps to the next ones.

    step: computes logits, and holds the newest tokens. choose: returns the next tokens [B] for
    logits. in_graph: whether a graph may contain `choose`. It may if `choose` only computes; a draw
    also changes a generator. captured: whether a graph is made. shared: is called with the tokens
    after each choice.
    """

    def __init__(
        self,
        step: DecodeStep,
        choose: Callable[[Tensor], Tensor],
        *,
        in_graph: bool,
        captured: bool,
        shared: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.step, self.choose, self.in_graph, self.shared = step, choose, in_graph, shared
        device = step.tokens.device
        run = self._chosen if in_graph else step
        self.replayed = Replayed(run, device, captured, step.places)
        self.host: Tensor | None = None
        if device.type == "cuda":
            shape = step.tokens.shape
            self.host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)

    def take(self, logits: Tensor) -> None:
        """Chooses tokens from logits [B, vocabulary], which become the newest."""
        self.step.tokens.copy_(self.choose(logits))
        if self.shared is not None:
            self.shared(self.step.tokens)

    def advance(self) -> None:
        """Starts a step, which replaces the newest tokens by the next ones."""
        found = self.replayed()
        if not self.in_graph:
            self.take(found)
        elif self.shared is not None:
            self.shared(self.step.tokens)

    def read(self) -> Callable[[], list[int]]:
        """Starts to copy the newest tokens to the host. The function that is returned waits for
        them and returns them. A step that is started in the meantime does not change them."""
        if self.host is None:
            found = self.step.tokens.tolist()
            return lambda: found
        host, event = self.host, torch.cuda.Event()
        host.copy_(self.step.tokens, non_blocking=True)
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            values: list[int] = host.tolist()
            return values

        return wait

    def _chosen(self) -> Tensor:
        return self.step.tokens.copy_(self.choose(self.step()))


def in_dtype(model: Decoder, dtype: torch.dtype) -> Decoder:
    """The same model with its parameters in dtype. Those of the cores of recurrent layers and of
    routers stay in fp32, as in the trainer."""
    exact = {p for part in model.exact_parts() for p in part.parameters()}
    for p in model.parameters():
        if p not in exact:
            p.data = p.data.to(dtype)
    return model


def step_bytes(
    model: Decoder, caches: Sequence[LayerCache], rows: int, *, written: bool = True
) -> int:
    """The bytes of what a step works on. Weights, keys and values are read once, and states and
    windows of convolutions are read and, with `written`, written once. Only one row of the
    embedding is read for each token, and only those experts that tokens take. Activations are not
    counted, because they can stay in the GPU's caches. (A step of many rows writes fewer bytes, see
    fla_cp/kernels/sm90/rows_deferred.py.)"""
    found = 0
    tied = model.head.weight is model.embedding.weight
    for name, p in model.named_parameters():
        if name == "embedding.weight" and not tied:
            found += rows * p.shape[1] * p.element_size()
        else:
            found += p.nbytes
    for layer in model.expert_layers():
        taken = min(1.0, rows * layer.router.experts_per_token / layer.router.num_experts)
        found -= round((1 - taken) * sum(p.nbytes for p in layer.experts.parameters()))
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            held = sum(t.nbytes for t in cache.tensors() if t is not None)
            found += (1 + written) * held
        else:
            found += cache.keys.nbytes + cache.values.nbytes
    return found
