"""Activation checkpointing that repeats no exchange, and activations in the host's memory.

A checkpointed function runs once in the forward and again in the backward. Most of it is cheap to
run again, but an operator's kernels are not, and an exchange would let every rank wait for the
others once more. Under `selective_checkpoint` the first run therefore hands over what was costly
with `keep`, and the second takes it with `kept`, in the same order:

    first run       operator computes and exchanges -> keep(call, tensors)
    second run      kept(call) -> tensors; nothing is computed, nothing is sent

Calls may nest. The innermost second run supplies the tensors; first runs inside it keep them too.
A compiled graph has no second run. There the compiler keeps what the ops of `COMPILED` return.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Tensors = tuple[Tensor | None, ...]

COMPILED = (
    "causal_attention",
    "delta_rule",
    "delta_rule_begin",
    "delta_rule_finish",
    "latent_attention",
    "received_halo",
)
"""The ops `fla_cp::` whose results a compiled graph keeps."""


def selective_checkpoint(
    function: Callable[..., Any], *args: Any, offload: bool = False, **keywords: Any
) -> Any:
    """Returns `function(*args)`. The backward recomputes all of it except the operators of this
    package.

    The operators' outputs are kept, together with what their backward reads: T, Aqk and the
    exchanged states, and for attention the log-sum-exp and the exchanged keys and values. The
    exchanged tokens of convolutions are kept, too. The recomputation launches no kernel of an
    operator and issues no collective of this package, except those of `FLACPContext.unshard`.

    offload: whether what is kept waits for the backward in the host's memory, see `HostCopy`.
    keywords: those of torch.utils.checkpoint.checkpoint, such as preserve_rng_state=False for a
        function without dropout; others go to the function. use_reentrant is always False.
    Under torch.compile the call has to be inside the compiled function, and offload is ignored.
    Raises ValueError in the backward if the function then calls other operators than before.
    """
    if torch.compiler.is_compiling():
        contexts: Callable[[], Any] = _compiled_contexts
    else:
        contexts = partial(selective_contexts, offload=offload)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **keywords)


def selective_contexts(*, offload: bool = False) -> tuple[Any, Any]:
    """The contexts of the two runs of one checkpointed call, for `context_fn` of
    torch.utils.checkpoint.checkpoint with use_reentrant=False. offload: as above."""
    store = _Store(offload)
    return _FirstRun(store), _SecondRun(store)


def _compiled_contexts() -> Any:
    return create_selective_checkpoint_contexts(
        [getattr(torch.ops.fla_cp, name).default for name in COMPILED]
    )


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A copy of a tensor in the host's memory, which is pinned for a tensor on a GPU.

    The host waits for neither copy. The one to the host runs beside other work of the GPU, and
    `restore` copies back on the stream that needs the tensor. Each moves the tensor's bytes over
    the bus.
    """

    def __init__(self, x: Tensor):
        self._device = x.device
        self._host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        self._copied: torch.cuda.Event | None = None
        if not x.is_cuda:
            self._host.copy_(x)
            return
        stream = _copy_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        x.record_stream(stream)  # the memory of x may be used again only after the copy
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
        self._copied = stream.record_event()

    def restore(self) -> Tensor:
        """The tensor on its device."""
        if self._copied is None:
            return self._host.to(self._device, copy=True)
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._host.to(self._device, non_blocking=True)


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """In this context, tensors of `device` that autograd saves wait in the host's memory.

    module: its parameters, and views of them, stay on the device. Around a checkpointed call only
    the call's inputs are saved.
    """

    def __init__(self, device: torch.device, module: nn.Module):
        resident: set[int] = set()

        def pack(x: Tensor) -> Tensor | HostCopy:
            if x.device != device or not x.numel():
                return x
            if not resident:  # FSDP gathers the parameters only after this context is entered
                resident.update(_addresses(module.parameters()))
            return x if x.untyped_storage().data_ptr() in resident else HostCopy(x)

        def unpack(x: Tensor | HostCopy) -> Tensor:
            return x.restore() if isinstance(x, HostCopy) else x

        super().__init__(pack, unpack)


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages of the tensors are, and 0, the address of an empty storage."""
    from torch.distributed.tensor import DTensor  # importing it takes seconds

    gathered = (t for t in tensors if not isinstance(t, DTensor))  # a shard has no address
    return {0, *(t.untyped_storage().data_ptr() for t in gathered)}


def in_backward() -> bool:
    """Whether this thread is inside a backward, so that a forward here is a recomputation."""
    # No public call says so. torch.utils.checkpoint asks in the same way (torch 2.10 to 2.13).
    return torch._C._current_graph_task_id() != -1


class _Kept:
    """The tensors of one operator call, without their autograd graph."""

    def __init__(self, call: Hashable, tensors: Tensors, offload: bool):
        def held(t: Tensor | None) -> Tensor | HostCopy | None:
            return t if t is None else HostCopy(t) if offload and t.numel() else t.detach()

        self.call = call
        self._held = tuple(map(held, tensors))
        self._versions = [t._version for t in self._held if isinstance(t, Tensor)]

    def tensors(self) -> Tensors:
        if [t._version for t in self._held if isinstance(t, Tensor)] != self._versions:
            raise ValueError(
                "under selective_checkpoint the results of an operator must not be changed in "
                f"place, but those of {self.call} were"
            )
        # each time a new tensor, since autograd attaches its graph to it
        return tuple(
            t if t is None else t.restore() if isinstance(t, HostCopy) else t.detach()
            for t in self._held
        )


class _Store:
    """What the operators inside one checkpointed call have kept, in the order of their calls."""

    def __init__(self, offload: bool):
        self.offload = offload
        self.calls: list[_Kept] = []

    def add(self, call: Hashable, tensors: Tensors) -> None:
        self.calls.append(_Kept(call, tensors, self.offload))


class _Run:
    """A run of a checkpointed function that is under way. again: whether it is the second run.
    place: how many calls of the store it has taken."""

    def __init__(self, store: _Store, again: bool):
        self.store, self.again, self.place = store, again, 0

    def take(self, call: Hashable) -> Tensors:
        calls = self.store.calls
        if self.place == len(calls):
            _differ(f"made {len(calls)} calls of operators, and then one more: {call}")
        found = calls[self.place]
        self.place += 1
        if found.call != call:
            _differ(f"made as call {self.place}, instead of {found.call}: {call}")
        return found.tensors()


def _differ(what: str) -> None:
    raise ValueError(
        "a function under selective_checkpoint must make the same calls of operators each time it "
        f"runs, but its recomputation {what}"
    )


class _Runs(threading.local):
    """The runs that are under way in this thread, outermost first. On CUDA the backward has threads
    of its own, and the second run is entered there."""

    def __init__(self) -> None:
        self.stack: list[_Run] = []


_runs = _Runs()


class _FirstRun(AbstractContextManager):
    def __init__(self, store: _Store):
        self._store = store

    def __enter__(self) -> Self:
        _runs.stack.append(_Run(self._store, again=False))
        return self

    def __exit__(self, *_: object) -> None:
        _runs.stack.pop()


class _SecondRun(AbstractContextManager):
    """Entered by each backward, so more than once if the graph is retained."""

    def __init__(self, store: _Store):
        self._store = store

    def __enter__(self) -> Self:
        _runs.stack.append(_Run(self._store, again=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        run = _runs.stack.pop()
        # torch ends a recomputation with an exception as soon as it has what the backward needs
        if kind is None and run.place < len(run.store.calls):
            missing = run.store.calls[run.place].call
            _differ(f"made {run.place} of {len(run.store.calls)} calls, without {missing}")


def active() -> bool:
    """Whether this thread runs a function under `selective_checkpoint`, for the first or the second
    time. Otherwise `keep` and `kept` have nothing to do."""
    return bool(_runs.stack)


def recomputing() -> bool:
    """Whether `kept` would supply the tensors of a call."""
    return any(run.again for run in _runs.stack)


def keep(call: Hashable, tensors: Tensors) -> None:
    """Keeps what an operator call has computed, for the second run of each function that is now in
    its first run. call: says what was called, with which sizes; `kept` compares it."""
    for run in reversed(_runs.stack):
        if run.again:
            return  # runs further out belong to a forward in which this backward runs
        run.store.add(call, tensors)


def kept(call: Hashable) -> Tensors | None:
    """What this call kept in the first run. None if there was no first run, so that the caller has
    to compute it.

    Raises ValueError if the first run made another call here, or if the tensors were changed.
    """
    for run in reversed(_runs.stack):
        if run.again:
            tensors = run.take(call)
            keep(call, tensors)
            return tensors
    return None
