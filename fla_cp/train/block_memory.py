"""The bytes that a block of a model takes in a training step, counted without a GPU.

The block runs forward and backward on the device "meta", whose tensors have shapes but no memory.
It runs with the stages of the Triton backend, whose launches are skipped. A watcher (`Live`) adds
the bytes of each storage when it is made and subtracts them when it is freed. The count therefore
contains what autograd saves and every buffer of the operators, at the sizes of the real step. Ranks
are pretended, too: there is a process group of that size, whose collectives send nothing.

What a compiled block keeps depends on how its graph is partitioned. The graph is therefore made
and partitioned as torch.compile does it, and the tensors that it saves are counted.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fla_cp import FLACPContext
from fla_cp.kernels import Impl, using
from fla_cp.kernels.torch import attention
from fla_cp.train.config import UserError

SMS = 132
"""The streaming multiprocessors of an H100 or H200. They decide how sequences are cut."""

ROUNDED = 512
"""CUDA's allocator rounds every size up to a multiple of this."""


@dataclass(frozen=True)
class BlockMemory:
    """The bytes of a block on one rank.

    kept: those that the forward leaves for the backward, with the block's result, which is the next
    block's input. forward: the most at any time of the forward. backward: the most at any time of
    the backward, in addition to what was kept; it contains the gradients of the block's result,
    input and parameters. offloaded: the most at any time of the backward if each tensor comes back
    from the host's memory when it is read; None if all of them come back at once.
    """

    kept: int
    forward: int
    backward: int
    offloaded: int | None = None


class Live(TorchDispatchMode):
    """Counts the bytes of tensors on the device "meta" that are made in the `with` block and are
    still held.

    known: tensors from before; neither they nor their views count. now: bytes at present. peak: the
    most so far.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = [x.untyped_storage() for x in known]  # held, so that no other gets their keys
        self.keys = {storage._cdata for storage in self.known}
        self.held: dict[int, tuple[int, weakref.ref]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.device.type == "meta":
                self._add(x)
        return found

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.held or key in self.keys:
            return
        size = rounded(storage.nbytes())

        def gone(_: object) -> None:
            self.now -= self.held.pop(key)[0]

        self.held[key] = size, weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def rounded(size: int) -> int:
    """How many bytes the allocator takes for `size` bytes."""
    return -(-size // ROUNDED) * ROUNDED


class _Norm(torch.autograd.Function):
    """RMSNorm that saves the same as CUDA's fused kernel: its input and one number a row. On
    "meta", torch would decompose it and keep copies in float32 (2.13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _fused_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    found: Tensor = _Norm.apply(x, weight)
    return found


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """In the block, `module.name` is `value`."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def kernels_without_launches(impl: Impl) -> Iterator[Impl]:
    """In the block, kernels are not launched, and layers can run on "meta" with the value of `impl`
    that is given. "torch" stays "torch".

    Raises UserError if Triton is needed and missing.
    """
    if impl == "torch":
        yield impl
        return
    try:
        from fla_cp.kernels.triton.backend import TRITON
        from fla_cp.kernels.triton.launch import redirected
    except ImportError as error:
        raise UserError(
            f"--impl {impl} needs Triton >= 3.6 to know its buffers ({error}): "
            "pip install 'fla_cp[triton]', or give --impl torch"
        ) from error
    backend = replace(TRITON, tuning=replace(TRITON.tuning, sms=SMS), one_stream=True)
    with ExitStack() as stack:
        stack.enter_context(using(backend))
        stack.enter_context(redirected(lambda *given, **named: None))
        # On a GPU flash attention runs. Its substitute on other devices would hold scores.
        stack.enter_context(_replaced(attention, "flash_runs", _flash_would_run))
        yield "triton"


def _flash_would_run(q: Tensor, v: Tensor) -> bool:
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and len(q) > 0 and max(q.shape[-1], v.shape[-1]) <= attention.MAX_CHANNELS


@contextmanager
def pretended_ranks(count: int) -> Iterator[dist.ProcessGroup | None]:
    """Makes this process the last of `count` ranks, in a group whose collectives send nothing. None
    for one rank.

    It is the last rank because that one has the most keys to attend to. Raises RuntimeError in a
    process that already has a process group.
    """
    if count == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("ranks can be pretended only in a process without a process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=count - 1, world_size=count, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


Run = Callable[[Tensor, FLACPContext], Tensor]
"""A block's forward, with the checkpoint around it if there is one."""


class _InHostMemory(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors, except `known` and views of them, are released, and made again when they are
    read: the memory that `fla_cp.remat.Offloaded` takes on a GPU."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        resident = {x.untyped_storage()._cdata for x in known}

        def pack(x: Tensor) -> Tensor | tuple[torch.Size, torch.dtype]:
            return x if x.untyped_storage()._cdata in resident else (x.shape, x.dtype)

        def unpack(saved: Tensor | tuple[torch.Size, torch.dtype]) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            return torch.empty(saved[0], dtype=saved[1], device="meta")

        super().__init__(pack, unpack)


def eager(
    block: nn.Module, run: Run, x: Tensor, context: FLACPContext, offload: bool = False
) -> BlockMemory:
    """The bytes of a block that is not compiled. run: its forward. x: [1, T_local, hidden] on
    "meta". offload: whether `kept` and `forward` leave out what waits in the host's memory."""
    x = x.detach().requires_grad_()
    own = [*block.parameters(), *block.buffers()]
    hooks = _InHostMemory(own) if offload else nullcontext()
    with _replaced(F, "rms_norm", _fused_norm), Live([x, *own]) as live:
        with hooks:
            y = run(x, context)
        kept, most = live.now, live.peak
        grad = torch.empty_like(y)
        before = live.now - rounded(grad.untyped_storage().nbytes())
        live.peak = live.now
        y.backward(grad)
        backward = live.peak - before
        del y, grad
    return BlockMemory(kept, most, backward)


def kept_compiled(block: nn.Module, x: Tensor, context: FLACPContext) -> int:
    """The bytes that a compiled block keeps: what its graph saves, and its result."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def unchanged(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=unchanged,
        bw_compiler=unchanged,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()  # each length is compiled by itself, with constant shapes
    x = x.detach().requires_grad_()
    given = {x.untyped_storage()._cdata}
    given |= {p.untyped_storage()._cdata for p in block.parameters()}
    found: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.device.type == "meta":
            storage = saved.untyped_storage()
            found[storage._cdata] = rounded(storage.nbytes())
        return saved

    run = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
    y = first_tensor(run(x, context))  # compiles without the hooks
    del y
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = first_tensor(run(x, context))
    result = y.untyped_storage()
    found[result._cdata] = rounded(result.nbytes())
    torch._dynamo.reset()
    return sum(size for key, size in found.items() if key not in given)


def first_tensor(found: Any) -> Tensor:
    """A block's result without the statistics of its experts."""
    y: Tensor = found[0] if isinstance(found, tuple) else found
    return y
