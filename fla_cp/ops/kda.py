"""Kimi Delta Attention: the delta rule with one decay per key channel.

    S_t = Diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - k_t^T Diag(exp(g_t)) S_{t-1})
    o_t = scale * S_t^T q_t

Source: Kimi Linear report, arXiv 2510.26692.
"""

from typing import Unpack

from torch import Tensor

from fla_cp.arguments import check_lower_bound, check_tensors
from fla_cp.context import FLACPContext
from fla_cp.kernels import resolve
from fla_cp.ops.checks import check_context, check_gate_only
from fla_cp.ops.family import KDA, chunk, gate_of, one_dim
from fla_cp.ops.options import ChunkOptions, CPChunkOptions, RecurrentOptions, Tensors
from fla_cp.ops.recurrent import recurrent
from fla_cp.rule import DeltaRule


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[ChunkOptions]
) -> tuple[Tensor, ...]:
    """KDA over whole sequences, in chunks, differentiable in every floating input.

    q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H; bf16, fp16, fp32, or fp64 (torch). K
        and V are at most 256.
    g: [B, T, HV, K], the natural-log decay, <= 0, in q's dtype or fp32. Its values are not checked:
        above 0 the state grows instead of decaying, and results are undefined, often not finite.
        A value of -100 already forgets everything. Decays are summed over a chunk, so a much lower
        value makes the later tokens of its chunk less accurate (-1e4: errors of 5e-4 in fp32), and
        -inf gives NaN. To forget everything before a token, clamp its g to about -100, or start a
        new sequence there with cu_seqlens.
    beta: [B, T, HV], in q's dtype or fp32.

    Keywords and their defaults:
    use_gate_in_kernel=False: with True g is the raw projection, and the decay is
        -exp(A_log) softplus(g + dt_bias), or with a lower_bound
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
    A_log=None: [HV]. dt_bias=None: [HV*K] or [HV, K]. Both are fp32, and may have more dims of size
        1, as in [1, 1, HV, 1]. Gradients have the shape that was given.
    lower_bound=None: the smallest log decay of a step, below 0.
    safe_gate=False: with True the caller promises that the log decay of each step is at least
        lower_bound, which must be in [-5, 0). Without use_gate_in_kernel, lower_bound may be left
        out and is then -5.
    use_beta_sigmoid_in_kernel=False: with True beta is given before its sigmoid.
        allow_neg_eigval=False: with True the sigmoid is multiplied by two.
    use_qk_l2norm_in_kernel=False: with True q and k are divided by sqrt(sum of squares + 1e-6).
    scale=None: factor on o, K**-0.5 by default. A tensor without dims is read on the host, which
        waits for its device. One that requires a gradient is refused.
    initial_state=None: [N, HV, K, V], fp32 (fp64 for fp64) or a narrower dtype. N is B, or the
        number of sequences of cu_seqlens, or of the context's global batch.
    output_final_state=False, return_intermediate_states=False: see what is returned.
    transpose_state_layout=None, or its synonym state_v_first=None: with True states are
        [N, HV, V, K]. Both at once are refused.
    disable_recompute=False: with True the forward keeps intermediates, so that the backward is
        faster, which takes more memory.
    use_exp2=True: decays are formed with exp2, otherwise with exp. Results are equal within
        rounding.
    cu_seqlens=None: int32 or int64 [N+1], the offsets of packed sequences; B = 1.
        cu_seqlens_cpu=None: the same on the host, which saves a synchronisation.
    cp_context=None: with a context the tensors are this rank's tokens [1, T_local, ..]; see
        build_cp_context.
    precision="default": with "high", kernels in bf16 and fp16 hold the tensors that round most as
        two terms (docs/design.md, "Two terms"). If o is a small difference of large terms, as with
        nearly parallel keys, the errors of o, dv and dbeta are several times smaller, for more time
        and memory. In fp32, fp64 and with impl="torch" there is no difference.
    chunk_size=None: 16, 32 or 64, how many tokens a chunk has. The default is 64. Eager calls
        without a context take 16 instead if no sequence of the call has more tokens (impl="torch":
        16 or 32; Triton's kernels in fp32: always 64). Results are equal within rounding. Ask for
        16 or 32 if you need a state for every 16 or 32 tokens, or for 64 to have the same chunks in
        every call. Long sequences take several times as long in chunks of 16 or 32.
    impl="auto": the device decides. "torch" and "triton" name a backend.

    Returns (o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] in fp32 (fp64) or None), and
    with return_intermediate_states also the state at the start of each chunk, [B, NC, HV, K, V], in
    v's dtype, without gradient. Under a context, chunks begin at the first of a rank's own tokens
    of a sequence.
    Under a context initial_state, final_state and their gradients are equal on all ranks. The
    gradients of A_log and dt_bias are this rank's share, to be summed like those of any weight.
    Raises ValueError for arguments that do not fit, before anything is computed or exchanged. The
    rules are in fla_cp/arguments.py and fla_cp/ops/checks.py.
    """
    return chunk(KDA, Tensors(q, k, v, g, beta), options)


def cp_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_kda` of this rank's tokens under a context, with the same keywords."""
    check_context(cp_context)
    return chunk_kda(q, k, v, g, beta, cp_context=cp_context, **options)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[RecurrentOptions]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` computed one token after another, for decoding and for inputs of up to 64 tokens.

    Arguments and keywords are those of `chunk_kda`, without safe_gate, disable_recompute,
    return_intermediate_states, cp_context, precision and chunk_size, and with:
    inplace_final_state=False: with True the final states are written to the memory of
        initial_state, and that tensor is returned. It must be fp32 (fp64 for fp64) and dense in its
        last two dims, and its matrices must not overlap.
    ssm_state_indices=None: int32 or int64 [N], for serving. initial_state [P, HV, K, V] is then a
        pool of states, in which sequence n has the state ssm_state_indices[n]; the pool is
        returned. It needs inplace_final_state=True, and no two sequences may have the same state. A
        negative index means no state: the sequence starts from zeros, and its final state is
        dropped. [N, S] is for draft tokens: the state after token t is written to
        ssm_state_indices[n, t], so that decoding can go on after any of them. S must be at least
        the number of a sequence's tokens.
    num_accepted_tokens=None: int32 or int64 [N], from 1 to S: a sequence starts from the state in
        this column of ssm_state_indices [N, S], counted from 1. Without it, from column 1.
    With impl="triton" the values of these two tensors are not checked: an index beyond the pool
    counts as none, and num_accepted_tokens is clamped to its range. impl="torch" reads and checks
    them.
    If cu_seqlens is on the device, impl="triton" does not read it on the host and waits for
    nothing. Without cu_seqlens_cpu its values are then not checked, and tokens that belong to no
    sequence have undefined outputs. impl="torch" reads and checks them.
    Differentiable: the forward is the recurrence, and the backward runs the same call in chunks.
    A compiled graph that needs gradients runs both in chunks.
    The final state of a sequence without tokens is its initial state. With impl="triton" a call may
    be captured in a CUDA graph, once the same call has compiled its kernel.

    Returns (o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] in fp32 (fp64) or None).
    Raises ValueError as `chunk_kda` does, and if an input requires a gradient with
    inplace_final_state.
    """
    return recurrent(KDA, Tensors(q, k, v, g, beta), options)


def kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """The gate alone: the log decay of a raw projection g [.., HV, K], natural log, fp32 (fp64).

    It is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
    lower_bound * sigmoid(exp(A_log) (g + dt_bias)). g: bf16, fp16, fp32 or fp64. A_log, dt_bias and
    impl: as in `chunk_kda`. Differentiable.
    """
    check_tensors(("g", "A_log", "dt_bias"), (g, A_log, dt_bias), 1)
    lower_bound = check_lower_bound(lower_bound)
    check_gate_only(g, A_log, dt_bias, lower_bound)
    backend = resolve(impl, g.device, g.dtype)
    rule = DeltaRule(scale=1.0, gate=gate_of(True, lower_bound), lower_bound=lower_bound)
    return backend.gate(rule, g, one_dim(A_log), one_dim(dt_bias))
