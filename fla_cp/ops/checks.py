"""Checks of how the caller's arguments fit each other, before any kernel or collective runs.
arguments.py has checked before that each argument is of the right kind.

Each failure is a ValueError that names the argument, the rule and the value.
"""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from fla_cp.arguments import check_choice, described
from fla_cp.context import FLACPContext
from fla_cp.ops.options import Names, Options, Tensors
from fla_cp.partition.checks import check_cu_seqlens, check_host_copy
from fla_cp.rule import CHUNK_SIZES, DeltaRule

MAX_DIM = 256
"""The largest K and V that the stages take."""

MAX_WIDE_DIM = 512
"""The largest K and V of members that remove nothing from the state, see wide_heads.py."""

SAFE_GATE_BOUND = -5.0
"""The smallest lower_bound of a safe gate. bf16 can represent the decay of 16 such steps
(docs/design.md)."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_shape(name: str, x: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if x.shape != expected:
        raise ValueError(f"{name} must have shape {letters} = {expected}, got {_shape(x)}")


def check_fixed_call(context: FLACPContext | None, **unsupported: object) -> None:
    """Checks a call under a context that may be of fixed shape. unsupported: arguments that must be
    left out if it is."""
    if context is None or context.max_sequences is None:
        return
    if torch.compiler.is_compiling():
        raise ValueError(
            "a context with max_sequences cannot be used under torch.compile, where an ordinary "
            "one may change from call to call"
        )
    for name, value in unsupported.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} must be left out under a context with max_sequences="
                f"{context.max_sequences}: pass a context without it"
            )


def check_context(context: object) -> None:
    """Checks that this is a context, and not, for example, the group from which one is built."""
    if not isinstance(context, FLACPContext):
        raise ValueError(
            f"cp_context must be a FLACPContext (build_cp_context), got {type(context).__name__}"
        )


def check_sequences(
    tokens: int,
    batch: int,
    cu_seqlens: Tensor | None,
    context: FLACPContext | None,
    cu_seqlens_cpu: Tensor | None = None,
) -> None:
    """Checks how the tokens are divided into sequences: by rows, cu_seqlens, or a context."""
    if context is not None:
        check_context(context)
        for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
            if x is not None:
                raise ValueError(
                    f"{name} must not be passed beside cp_context, which holds the global one"
                )
        if batch != 1:
            raise ValueError(
                f"under cp_context B must be 1 (context.shard folds rows), got {batch}"
            )
        if not torch.compiler.is_compiling():  # else the op checks when it runs
            context.check_alive()
            context.check_local_tokens(tokens)
    elif cu_seqlens is not None:
        check_no_offsets_compiled(cu_seqlens)
        if batch != 1:
            raise ValueError(f"with cu_seqlens B must be 1, got B={batch}")
        check_cu_seqlens("cu_seqlens", cu_seqlens, tokens)
        if cu_seqlens_cpu is not None:
            check_host_copy(cu_seqlens, cu_seqlens_cpu, tokens)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is the host's copy of cu_seqlens, which is missing")
    elif tokens < 1 or batch < 1:
        raise ValueError(f"there must be at least one row and one token, got B={batch}, T={tokens}")


def check_no_offsets_compiled(cu_seqlens: Tensor | None) -> None:
    """Raises ValueError for offsets under torch.compile, because a graph cannot read them.

    If `check_sequences` has raised this error, torch.compile runs that function and its callers
    eagerly, but still compiles the functions that these call. Each function that leaves offsets
    out of its graph has to call this itself.
    """
    if cu_seqlens is not None and torch.compiler.is_compiling():
        raise ValueError(
            "cu_seqlens cannot be read under torch.compile: build a context of one rank outside, "
            "build_cp_context(cu_seqlens, None), and pass cp_context"
        )


def check_chunk_size(size: object) -> int | None:
    """The number of tokens in a chunk as an int, or None, after a check of it."""
    if size is None:
        return None
    for possible in CHUNK_SIZES if isinstance(size, Integral) else ():
        if size == possible:
            return possible
    listed = ", ".join(map(str, CHUNK_SIZES))
    raise ValueError(f"chunk_size must be {listed} or None, got {described(size)}")


def check_ndims(x: Tensors, names: Names, *, per_head: bool) -> None:
    """Checks the numbers of dimensions, before the size of any dimension is read."""
    for name, t, ndim in zip(names, x, (4, 4, 4, 3 if per_head else 4, 3, 4, 4), strict=True):
        if t is not None and t.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {_shape(t)}")


def check_inputs(
    x: Tensors, names: Names, options: Options, rule: DeltaRule, *, sequences: int, rows: int = 1
) -> None:
    """Checks shapes, dtypes, devices and options of an operator's call, after `check_ndims`.
    sequences: how many initial states there must be. rows: how many rows of k, v and beta there are
    for each token of q and g (num_householder). With b, the caller gives one row of each, and
    `spread` makes the others."""
    q, k, v, g, beta, p, b = x
    rows = rows if b is None else 1
    A_log, dt_bias, initial_state = options.A_log, options.dt_bias, options.initial_state
    per_head = rule.per_head
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if rows > 1:
        _check_rows(rows, q, k=k, v=v, beta=beta)
    like_q = f"[B, T, H, K] like {names.q}"
    of_k = like_q if rows == 1 else f"[B, {rows}*T, H, K]"
    _check_shape("k", k, (B, T * rows, H, K), of_k)
    _check_shape("v", v, (B, T * rows, HV, V), "[B, T, HV, V]")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"value heads must be a multiple of q heads, got HV={HV}, H={H}")
    most = MAX_WIDE_DIM if rule.removal == "none" else MAX_DIM
    for letter, size in (("K", K), ("V", V)):
        if not 1 <= size <= most:
            raise ValueError(f"{letter} must be from 1 to {most}, got {letter}={size}")
    if per_head:
        _check_shape(names.g, g, (B, T, HV), "[B, T, HV]")
    else:
        _check_shape(names.g, g, (B, T, HV, K), "[B, T, HV, K]")
    if beta is not None:
        _check_shape("beta", beta, (B, T * rows, HV), "[B, T, HV]")
    for name, t in ((names.p, p), (names.b, b)):
        if t is not None:
            _check_shape(str(name), t, (B, T, H, K), like_q)
    _check_dtypes(x, names)

    channels = 1 if per_head else K
    in_kernel = options.use_gate_in_kernel
    _check_gate(in_kernel, A_log, dt_bias, rule.safe_gate, rule.lower_bound, HV, channels)
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel=True, got False")
    if initial_state is not None:
        check_state("initial_state", initial_state, (sequences, HV, K, V), rule.state_v_first)
        widest = FLOATS if q.dtype == torch.float64 else FLOATS[:-1]
        if initial_state.dtype not in widest:
            raise ValueError(
                f"initial_state must be bf16, fp16 or fp32 (fp64 with {names.q} of fp64), got "
                f"{initial_state.dtype} with {names.q} of {q.dtype}"
            )
    others, device = (*x, A_log, dt_bias, initial_state), q.device
    for i, t in enumerate(others):
        if t is not None and t.device != device:
            name = (*names, "A_log", "dt_bias", "initial_state")[i]
            raise ValueError(f"{name} must be on {names.q}'s device {device}, got {t.device}")


def _check_dtypes(x: Tensors, names: Names) -> None:
    dtype, like = x.q.dtype, f"{names.q}'s dtype {x.q.dtype}"
    if dtype not in FLOATS:
        raise ValueError(f"{names.q} must be bf16, fp16, fp32 or fp64, got {dtype}")
    for name, t in ((names.k, x.k), (names.v, x.v), (names.p, x.p), (names.b, x.b)):
        if t is not None and t.dtype != dtype:
            raise ValueError(f"{name} must have {like}, got {t.dtype}")
    for name, t in ((names.g, x.g), (names.beta, x.beta)):
        if t is not None and t.dtype not in (dtype, torch.float32):
            raise ValueError(f"{name} must have {like} or fp32, got {t.dtype}")


def _check_gate(
    in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    safe_gate: bool,
    lower_bound: float | None,
    HV: int,
    K: int,
) -> None:
    """Checks the options of a gate. K: how many decays a head has, 1 for one decay a head."""
    if safe_gate and (lower_bound is None or not lower_bound >= SAFE_GATE_BOUND):
        raise ValueError(
            f"safe_gate needs lower_bound in [{SAFE_GATE_BOUND:g}, 0), got {lower_bound}"
        )
    if in_kernel and A_log is None and lower_bound is None:
        raise ValueError("use_gate_in_kernel needs A_log, or a lower_bound, got neither")
    shapes = ((HV,),) if K == 1 else ((HV * K,), (HV, K))
    letters = "[HV]" if K == 1 else "[HV*K] or [HV, K]"
    for name, x, allowed, as_named in (
        ("A_log", A_log, ((HV,),), "[HV]"),
        ("dt_bias", dt_bias, shapes, letters),
    ):
        if x is None:
            continue
        if not in_kernel:
            raise ValueError(f"{name} is read only with use_gate_in_kernel=True, got False")
        if x.shape != allowed[0] and _without_ones(x.shape) not in map(_without_ones, allowed):
            listed = " or ".join(map(str, allowed))
            raise ValueError(
                f"{name} must have shape {as_named} = {listed}, apart from dims of size 1, "
                f"got {_shape(x)}"
            )
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} must be fp32 (or fp64), got {x.dtype}")


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def check_state(name: str, x: Tensor, kv_shape: tuple[int, ...], state_v_first: bool) -> None:
    """Checks the shape of states: [N, HV, K, V], or [N, HV, V, K] with state_v_first."""
    N, HV, K, V = kv_shape
    kv, vk = (N, HV, K, V), (N, HV, V, K)
    expected, other = (vk, kv) if state_v_first else (kv, vk)
    if x.shape == expected:
        return
    letters = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
    hint = ""
    if x.shape == other:
        hint = f"; this is the other layout: pass state_v_first={not state_v_first}"
    raise ValueError(f"{name} must have shape {letters} = {expected}, got {_shape(x)}{hint}")


def check_forward_only(
    operator: str, instead: str, names: tuple[str, ...], inputs: tuple[Tensor | None, ...]
) -> None:
    """Checks that no input requires a gradient, because the operator is forward only."""
    if not torch.is_grad_enabled():
        return
    for name, x in zip(names, inputs, strict=True):
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{operator} is forward only, got {name} with requires_grad=True: use {instead}, "
                "or call it under torch.no_grad()"
            )


def check_no_gradient(
    where: str, names: tuple[str | None, ...], inputs: tuple[Tensor | None, ...]
) -> None:
    """Checks that no input requires a gradient, because the recurrence gives none with this
    option."""
    if not torch.is_grad_enabled():
        return
    for name, x in zip(names, inputs, strict=True):
        if x is not None and x.requires_grad:
            raise ValueError(
                f"the recurrence has no gradients with {where}, got {name} with "
                "requires_grad=True: use the operator in chunks, or torch.no_grad()"
            )


def check_in_place(name: str, x: Tensor | None, dtype: torch.dtype) -> None:
    """Checks that kernels can overwrite a state [N, HV, ., .]: it has the dtype in which states are
    computed, each matrix is dense, and matrices do not overlap."""
    if x is None:
        raise ValueError(f"inplace_final_state needs {name}, got None")
    if x.dtype != dtype:
        raise ValueError(f"inplace_final_state needs {name} of {dtype}, got {x.dtype}")
    (outer, inner), (rows, columns), size = x.stride()[:2], x.shape[:2], x.shape[2] * x.shape[3]
    if outer < inner:  # no sort, which torch.compile does not trace with sizes that vary
        (outer, rows), (inner, columns) = (inner, columns), (outer, rows)
    apart = columns <= 1 or inner >= size
    apart = apart and (rows <= 1 or outer >= (inner * columns if columns > 1 else size))
    if not (x[0, 0].is_contiguous() and apart):
        raise ValueError(
            f"inplace_final_state needs {name} dense in its last two dims and without overlap, "
            f"got strides {x.stride()} for shape {_shape(x)}"
        )


def check_pool(options: Options, N: int, tokens: int, device: torch.device) -> None:
    """Checks ssm_state_indices and num_accepted_tokens for N sequences. tokens: how many tokens a
    sequence has, 0 if lengths differ."""
    places, accepted = options.ssm_state_indices, options.num_accepted_tokens
    if places is None:
        if accepted is not None:
            raise ValueError("num_accepted_tokens needs ssm_state_indices, got None")
        return
    for name, x in (("ssm_state_indices", places), ("num_accepted_tokens", accepted)):
        if x is None:
            continue
        kind = getattr(x, "dtype", type(x).__name__)
        if kind not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be an int32 or int64 tensor, got {kind}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
    if places.ndim not in (1, 2) or len(places) != N or places.numel() < N:
        raise ValueError(
            f"ssm_state_indices must be [N] or [N, S] for N={N} sequences, got {_shape(places)}"
        )
    if not options.inplace_final_state:
        raise ValueError("ssm_state_indices needs inplace_final_state=True, got False")
    if places.ndim == 2 and places.shape[1] < tokens:
        raise ValueError(
            f"ssm_state_indices must have a column for each of {tokens} tokens, got "
            f"{_shape(places)}"
        )
    if accepted is not None and (places.ndim == 1 or accepted.shape != (N,)):
        raise ValueError(
            f"num_accepted_tokens must be [N={N}] beside ssm_state_indices [N, S], got "
            f"{_shape(accepted)} beside {_shape(places)}"
        )


def check_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    """Checks x, weight, bias and activation of `causal_conv1d`."""
    if x.ndim != 3:
        raise ValueError(f"x must be [B, T, D], got shape {_shape(x)}")
    check_conv1d_parameters(x, weight, bias, activation)


def check_conv1d_parameters(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> None:
    """Checks weight, bias and activation of a convolution of x [.., D]."""
    D = x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"weight must be [D, W] with D={D}, got {_shape(weight)}")
    if bias is not None:
        _check_shape("bias", bias, (D,), "[D]")
    if activation is not None:
        check_choice("activation", activation, ("silu", "swish"), or_none=True)
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be bf16, fp16, fp32 or fp64, got {x.dtype}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {t.device}")
        if t is not None and t.dtype != x.dtype:
            raise ValueError(f"{name} must have x's dtype {x.dtype}, got {t.dtype}")


def check_residual(residual: Tensor, x: Tensor) -> None:
    """Checks the tensor that is added to the output of a convolution of x."""
    if residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {_shape(x)}, got {_shape(residual)}")
    if residual.device != x.device:
        raise ValueError(f"residual must be on x's device {x.device}, got {residual.device}")
    if residual.dtype != x.dtype:
        raise ValueError(f"residual must have x's dtype {x.dtype}, got {residual.dtype}")


def check_conv1d_state(name: str, state: Tensor, shape: tuple[int, int, int], x: Tensor) -> None:
    """Checks a state of a convolution of x: the last tokens before each sequence, [N, D, W]."""
    _check_shape(name, state, shape, "[N, D, W]")
    if state.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {state.device}")
    if state.dtype not in (FLOATS if x.dtype == torch.float64 else FLOATS[:-1]):
        raise ValueError(
            f"{name} must be bf16, fp16 or fp32 (fp64 with x of fp64), got {state.dtype} with x of "
            f"{x.dtype}"
        )


def check_conv1d_context(width: int, context: FLACPContext) -> None:
    """Checks that the context was built for convolutions of this width."""
    if width > 1 and (context.halo is None or context.halo.width != width - 1):
        raise ValueError(
            f"cp_context was built with conv1d_kernel_size={context.conv1d_kernel_size}, but "
            f"weight has W={width}: pass conv1d_kernel_size={width} to build_cp_context"
        )


def check_gate_only(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> None:
    """Checks the arguments of `kda_gate`."""
    if g.ndim < 2:
        raise ValueError(f"g must be [.., HV, K], got shape {_shape(g)}")
    if A_log is None and lower_bound is None:
        raise ValueError("kda_gate needs A_log, or a lower_bound, got neither")
    _check_gate(True, A_log, dt_bias, False, lower_bound, g.shape[-2], g.shape[-1])
    _check_raw_gate(g, A_log, dt_bias)


def check_head_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> None:
    """Checks the arguments of `gdn_gate`."""
    if g.ndim < 1:
        raise ValueError(f"g must be [.., HV], got shape {_shape(g)}")
    _check_gate(True, A_log, dt_bias, False, None, g.shape[-1], 1)
    _check_raw_gate(g, A_log, dt_bias)


def _check_raw_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> None:
    if g.dtype not in FLOATS:
        raise ValueError(f"g must be bf16, fp16, fp32 or fp64, got {g.dtype}")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and x.device != g.device:
            raise ValueError(f"{name} must be on g's device {g.device}, got {x.device}")


def _check_rows(rows: int, q: Tensor, **inputs: Tensor | None) -> None:
    """Checks that these inputs have `rows` rows for each token of q, as
    `chunk_gated_delta_product` needs."""
    of_all = (q.shape[0], q.shape[1] * rows)
    for name, x in inputs.items():
        if x is not None and x.shape[:2] != of_all:
            raise ValueError(
                f"{name} must have {rows} rows for each of q's {q.shape[1]} tokens, "
                f"[{of_all[0]}, {of_all[1]}, ..], got {_shape(x)}"
            )
