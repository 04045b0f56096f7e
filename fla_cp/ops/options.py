"""The keyword options of the operators, once for all of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fla_cp.context import FLACPContext


class Options(NamedTuple):
    """Keywords of a call, as the caller gave them; `chunk_kda` and `fused_recurrent_kda` say what
    each means. An operator refuses those that it does not have."""

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    output_final_state: bool = False
    inplace_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    use_exp2: bool = True
    scale: float | None = None
    lower_bound: float | None = None
    transpose_state_layout: bool | None = None
    state_v_first: bool | None = None
    cp_context: FLACPContext | None = None
    precision: str = "default"
    impl: str = "auto"


TENSORS, FLAGS = slice(0, 5), slice(5, 15)
"""Where in `Options` the tensors stand, and the options that are True or False."""
