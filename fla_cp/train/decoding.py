"""Decoding: steps of one token for each row, which a CUDA graph repeats without the host.

A step reads the newest tokens, brings the caches up to date, and leaves logits, all in memory that
stays where it is. On a GPU its first calls run as they are written, the next is captured, and all
others replay it: the host then issues one graph a token, and no layer costs it anything. Elsewhere,
and for the models that `why_eager` names, every call runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fla_cp.nn.cache import AttentionCache, LayerCache, RecurrentCache
from fla_cp.nn.decoding import BlockStep, head_logits
from fla_cp.train.model import Decoder

EAGER_CALLS = 2
"""Calls before one is captured: the first ones compile kernels and make libraries' workspaces."""

GROUPED_ON_DEVICE = ((9, 0), (10, 0))
"""Compute capabilities on which torch's grouped product of bfloat16 runs without the host (torch
2.10 to 2.13)."""


def why_eager(model: Decoder) -> str | None:
    """Why steps of the model are not captured in a CUDA graph; None if they can be."""
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
    """How many of the first steps take longer than all others: those before a capture, which
    compile kernels, and the one that is captured. They are the same if nothing is captured."""
    return EAGER_CALLS + 1 if device.type == "cuda" else 0


class Replayed:
    """step(), or a replay of it. step: returns a tensor, which later calls overwrite, and writes
    only memory that was there before. captured: whether a graph is made, on a GPU."""

    def __init__(self, step: Callable[[], Tensor], device: torch.device, captured: bool) -> None:
        self.step, self.device, self.captured = step, device, captured
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.found: Tensor | None = None

    def __call__(self) -> Tensor:
        if not self.captured:
            return self.step()
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            return self._eager()
        if self.graph is None:
            self._capture()
        assert self.graph is not None and self.found is not None
        self.graph.replay()
        return self.found

    def _eager(self) -> Tensor:
        """Calls before a capture run on a stream of their own, as torch asks for."""
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
        """Captures a call, which is not run."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Other threads may copy or free memory, as a server's do.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.found = self.step()
        self.graph = graph


class DecodeStep:
    """The logits [B, vocabulary] behind the newest token of each row.

    tokens: [B] int64, which a call reads: the caller overwrites it in place. caches: of the blocks,
    which have seen each row's tokens before, and which a call brings up to date in place. Those of
    attention must have room for all tokens to come. The model's weights move as `stacked` says.
    impl: of the products, "auto", "torch" or "triton".
    """

    def __init__(
        self, model: Decoder, caches: Sequence[LayerCache], rows: int, impl: str = "auto"
    ) -> None:
        weight = model.embedding.weight
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.caches = [c.fixed() if isinstance(c, AttentionCache) else c for c in caches]
        self.blocks = [BlockStep(block, impl) for block in model.blocks]
        self.model, self.impl = model, impl

    @torch.no_grad()
    def __call__(self) -> Tensor:
        x = self.model.embedding(self.tokens)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            block(x, cache)
        return head_logits(x, self.model.norm, self.model.head, self.impl)


class Decoding:
    """The newest token of each row, and the steps to the next ones.

    step: whose tokens these are. choose: tokens [B] from logits, in place of the newest. in_graph:
    whether it only computes, so that a graph may contain it; drawing changes a generator. captured:
    whether a graph is made. shared: is called with the tokens after each choice.
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
        self.replayed = Replayed(self._chosen if in_graph else step, device, captured)
        self.host: Tensor | None = None
        if device.type == "cuda":
            shape = step.tokens.shape
            self.host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)

    def take(self, logits: Tensor) -> None:
        """The tokens chosen from logits [B, vocabulary] become the newest."""
        self.step.tokens.copy_(self.choose(logits))
        if self.shared is not None:
            self.shared(self.step.tokens)

    def advance(self) -> None:
        """Starts a step, after which the tokens are the next ones."""
        found = self.replayed()
        if not self.in_graph:
            self.take(found)
        elif self.shared is not None:
            self.shared(self.step.tokens)

    def read(self) -> Callable[[], list[int]]:
        """A call that waits for the newest tokens as they are now, also if a later step has been
        started, and returns them."""
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
    """The same model with its parameters in dtype, but for those that the trainer keeps in fp32:
    of the cores of recurrent layers, and of routers."""
    exact = {p for part in model.exact_parts() for p in part.parameters()}
    for p in model.parameters():
        if p not in exact:
            p.data = p.data.to(dtype)
    return model


def step_bytes(model: Decoder, caches: Sequence[LayerCache], rows: int) -> int:
    """The bytes that a step must move: weights read once, states and windows of convolutions read
    and written once, keys and values read. Of the embedding it reads a row for each token, and of
    experts those that the tokens take, at most all. Activations are not counted, since they can
    stay in caches."""
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
            found += sum(2 * t.nbytes for t in (cache.conv, cache.state) if t is not None)
        else:
            found += cache.keys.nbytes + cache.values.nbytes
    return found
