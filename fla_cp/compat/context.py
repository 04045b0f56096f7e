"""FLA's way to build a context."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fla_cp import context
from fla_cp.arguments import check_choice
from fla_cp.compat.arguments import refuse
from fla_cp.context import FLACPContext
from fla_cp.partition.checks import check_cu_seqlens, check_group, check_host_copy
from fla_cp.partition.token_ranges import zigzag_token_ranges


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    **kwargs: Any,
) -> FLACPContext:
    """`fla_cp.build_cp_context`: cu_seqlens are those of the whole batch, before it is sharded.

    layout: "contiguous", one range for each rank, or "zigzag", pieces r and 2R-1-r of 2R for rank r
    of R, the earlier one first. Unlike in FLA the number of tokens need not be a multiple of R or
    2R. group: None for one rank. kwargs: those of `fla_cp.build_cp_context`.
    """
    states = "states cross ranks in fp32"
    refuse("use_tf32x3_affine_chain", use_tf32x3_affine_chain, True, states)
    check_choice("layout", layout, ("contiguous", "zigzag"))
    if layout == "zigzag":
        if "token_ranges" in kwargs:
            raise ValueError("layout must be 'contiguous' beside token_ranges, got 'zigzag'")
        check_cu_seqlens("cu_seqlens", cu_seqlens)
        if cu_seqlens_cpu is not None:
            check_host_copy(cu_seqlens, cu_seqlens_cpu)
        total = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)[-1]
        kwargs["token_ranges"] = zigzag_token_ranges(int(total), check_group(group))
    return context.build_cp_context(
        cu_seqlens,
        group,
        conv1d_kernel_size=conv1d_kernel_size,
        cu_seqlens_cpu=cu_seqlens_cpu,
        **kwargs,
    )
