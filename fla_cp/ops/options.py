"""The keyword options of the operators, and the tensors that they take."""

from typing import NamedTuple, TypedDict

from torch import Tensor

from fla_cp.context import FLACPContext


class Tensors(NamedTuple):
    """The inputs of a call, [B, T, ..]. `chunk_kda` gives their shapes, `chunk_comba` that of p. If
    there is b, what p reads is added along b, and not removed along k; see
    `chunk_dplr_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    p: Tensor | None = None
    b: Tensor | None = None


class Names(NamedTuple):
    """The argument name that the operators of a member have for each of `Tensors`. None if they do
    not take it."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    g: str = "g"
    beta: str | None = "beta"
    p: str | None = None
    b: str | None = None


class SharedOptions(TypedDict, total=False):
    """The keywords of all operators, for type checkers. `chunk_kda` and `fused_recurrent_kda` say
    what each means. An operator raises TypeError for those that it does not have."""

    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    use_exp2: bool
    scale: float | None
    lower_bound: float | None
    transpose_state_layout: bool | None
    state_v_first: bool | None
    impl: str


class CPChunkOptions(SharedOptions, total=False):
    """The keywords of an operator over whole sequences whose context is another argument."""

    safe_gate: bool
    disable_recompute: bool
    return_intermediate_states: bool
    precision: str
    chunk_size: int | None


class ChunkOptions(CPChunkOptions, total=False):
    """The keywords of an operator over whole sequences."""

    cp_context: FLACPContext | None


class RecurrentOptions(SharedOptions, total=False):
    """The keywords of an operator that runs token by token."""

    inplace_final_state: bool
    ssm_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None


class Options(NamedTuple):
    """The options of one call: what the caller gave, and the defaults."""

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
    chunk_size: int | None = None
    impl: str = "auto"
    ssm_state_indices: Tensor | None = None
    num_accepted_tokens: Tensor | None = None


TENSORS, FLAGS = slice(0, 5), slice(5, 15)
"""Which fields of `Options` are tensors, and which are True or False."""

_SHARED = SharedOptions.__annotations__.keys()
CHUNK_ONLY = tuple(ChunkOptions.__annotations__.keys() - _SHARED)
RECURRENT_ONLY = tuple(RecurrentOptions.__annotations__.keys() - _SHARED)
"""The keywords that only one of the two forms of an operator has, `chunk_*` or
`fused_recurrent_*`."""
