"""Context parallelism for linear attention: GPUs that share a sequence exchange states."""

from fla_cp import ops
from fla_cp.context import FLACPContext, build_cp_context
from fla_cp.ops import *  # noqa: F403  # all operators
from fla_cp.partition.token_ranges import contiguous_token_ranges, zigzag_token_ranges

__version__ = "0.1.0"

__all__ = ["FLACPContext", "build_cp_context", "contiguous_token_ranges", "zigzag_token_ranges"]
__all__ += ops.__all__
