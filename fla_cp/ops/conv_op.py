"""The convolution under torch.compile (see custom_op.py): an all-gather in the graph brings the
halo, and an op takes it. No shape depends on which rank needs which tokens."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_cp.comm.collectives import all_gather_rows
from fla_cp.context import FLACPContext, context_of
from fla_cp.handle import Handle, Sizes
from fla_cp.kernels import Backend
from fla_cp.kernels.differentiable_op import differentiable_op
from fla_cp.kernels.torch.conv import ConvInputs
from fla_cp.ops.conv_rows import Place


def traced_conv(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str | None,
    cp_context: FLACPContext | None,
    impl: str,
    rows: int,
) -> list[Tensor]:
    """y of each x [B * T, D]. Each x has some of the channels, with a weight and a bias of its own.
    rows: B."""
    handle = Handle.make(-1, Sizes()) if cp_context is None else cp_context.handle
    xs, halos = _compiled_halos(xs, weights[0].shape[1] - 1, cp_context)
    rest = activation is not None, impl, *handle, rows
    return [conv_op(*given, *rest) for given in zip(xs, halos, weights, biases, strict=True)]


def traced_conv_after(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
    impl: str,
) -> Tensor:
    """y [B, T, D] in a compiled graph, of rows that start from `state` [B, D, W]. The tokens of the
    state are put before those of x, and their outputs are dropped."""
    B, T, _ = x.shape
    if state is not None:
        x = torch.cat((state.mT[:, 1:], x), 1)
    (y,) = traced_conv([x.flatten(0, 1)], [weight], [bias], activation, None, impl, B)
    return y.view(x.shape)[:, -T:]


def _compiled_halos(
    xs: Sequence[Tensor], width: int, context: FLACPContext | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Each x [B * T, D], and its halo [ranges * width, D], as `Halo.gather` returns it.
    Differentiable, if the convolution takes the xs that are returned here."""
    if width == 0 or context is None or context.halo is None:
        return xs, [x.new_empty(0, x.shape[1]) for x in xs]
    sizes = Handle.read(context.handle.sizes)
    if not context.halo.needed:
        return xs, [x.new_zeros(sizes.ranges * width, x.shape[1]) for x in xs]
    channels = [x.shape[1] for x in xs]
    rows, take = halo_tables(xs[0], *context.handle, width, sum(channels))
    xs, parts = zip(*(_WithRows.apply(x, rows) for x in xs), strict=True)
    sent = torch.cat(parts, 1)
    wires = F.pad(sent, (0, 0, 0, sizes.padded - sizes.sent))
    if context.world_size > 1:
        wires = all_gather_rows(wires, context.world_size, context.group_name)
    halo: Tensor = received_halo(F.pad(wires, (0, 0, 0, 1)).index_select(0, take))
    return xs, [part.contiguous() for part in halo.split(channels, 1)]


class _WithRows(torch.autograd.Function):
    """x [N, D] and rows [n] -> x, and its rows [n, D]. The backward adds the gradients of the few
    rows in place. Autograd itself would form a gradient of x's size for them and add it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, d: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return with_rows_added(dx, rows, d), None


def with_rows_added(x: Tensor, rows: Tensor, d: Tensor) -> Tensor:
    """x [N, D] with d [n, D] added to its rows [n]. In a compiled graph the result has x's memory,
    if nothing else reads x."""
    x = x.view_as(x)
    add_rows(x, rows, d)
    return x


@torch.library.custom_op("fla_cp::add_rows", mutates_args=("x",))
def add_rows(x: Tensor, rows: Tensor, d: Tensor) -> None:
    x.index_add_(0, rows, d)


@torch.library.custom_op("fla_cp::received_halo", mutates_args=())
def received_halo(halo: Tensor) -> Tensor:
    """A copy of the halo. It is an op, so that `remat.selective_checkpoint` can keep its result in
    a compiled graph."""
    return halo.clone()


received_halo.register_fake(torch.empty_like)
received_halo.register_autograd(lambda ctx, grad: grad)


def _halo_tables(
    x: Tensor, context: Tensor, sizes: Tensor, width: int, channels: int
) -> tuple[Tensor, Tensor]:
    found = context_of(context)
    assert found is not None and found.halo is not None
    found.check_alive()
    found.before("causal_conv1d", D=channels, W=width + 1, dtype=x.dtype)
    rows, take = found.halo.gather_tables(x.device)
    return rows.clone(), take.clone()


halo_tables = torch.library.custom_op(
    "fla_cp::halo_tables",
    _halo_tables,
    mutates_args=(),
    schema="(Tensor x, Tensor context, Tensor sizes, int width, int channels) -> (Tensor, Tensor)",
)


@halo_tables.register_fake
def _halo_tables_fake(
    x: Tensor, context: Tensor, sizes: Tensor, width: int, channels: int
) -> tuple[Tensor, Tensor]:
    size = Handle.read(sizes)
    return (
        x.new_empty(size.sent, dtype=torch.int64),
        x.new_empty(size.ranges * width, dtype=torch.int64),
    )


def _inputs(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    impl: str,
    context: Tensor,
    sizes: Tensor,
    rows: int,
) -> tuple[Backend, ConvInputs]:
    """The backend and the inputs, from the arguments that both ops share."""
    place = Place.of(impl, x, weight, context_of(context), rows)
    return place.backend, ConvInputs(x, halo, place.where, weight, bias, silu)


def _conv_run(*args: Any) -> Tensor:
    backend, inputs = _inputs(*args)
    return backend.conv(inputs)


def _conv_backward_run(dy: Tensor, *args: Any) -> list[Tensor]:
    backend, c = _inputs(*args)
    given = zip(backend.conv_bwd(c, dy), (c.x, c.halo, c.weight, c.bias), strict=True)
    return [c.x.new_empty(0) if t is None or d is None else _fresh(d, t) for d, t in given]


def _fresh(d: Tensor, like: Tensor) -> Tensor:
    """d in the dtype of `like`, and never `like` itself, which an op may not return."""
    return d.clone() if d is like else d.to(like.dtype)


conv_op = differentiable_op(
    "causal_conv1d",
    "Tensor x, Tensor halo, Tensor weight, Tensor? bias, bool silu, str impl, Tensor context, "
    "Tensor sizes, SymInt rows",
    _conv_run,
    _conv_backward_run,
    tensors=4,
)
