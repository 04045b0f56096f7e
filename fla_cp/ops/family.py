"""The common code of the operators of the family. A few properties describe a member (`Member`),
and every call goes the same way: options -> checks -> plan -> run.

S_t = Diag(a_t) S_{t-1} + b_t k_t (v_t - r_t)^T          o_t = scale * S_t^T q_t

member                     a_t             r_t
KDA                        a key channel   S^T k_t, after the decay
gated delta rule           a head          S^T k_t, after the decay
Comba                      a head          S_{t-1}^T p_t, before the decay
DPLR, RWKV-7               a key channel   as Comba, along another key than v: two rows a token
GLA, simple GLA            channel, head   0, and b_t = 1
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_cp import custom_op, custom_op_cp
from fla_cp.arguments import (
    check_choice,
    check_flags,
    check_lower_bound,
    check_scale,
    check_state_layout,
    check_tensors,
)
from fla_cp.autograd import DeltaRuleFunction, Kind, token_rows
from fla_cp.context import FLACPContext, compare_ranks
from fla_cp.handle import Handle
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.ops.checks import (
    SAFE_GATE_BOUND,
    check_chunk_size,
    check_fixed_call,
    check_inputs,
    check_ndims,
    check_sequences,
)
from fla_cp.ops.known import Known, Packed, Shape, key_of, known_calls, remember
from fla_cp.ops.options import FLAGS, RECURRENT_ONLY, TENSORS, Names, Options, Tensors
from fla_cp.ops.packed import packed_plan
from fla_cp.ops.wide_heads import in_narrow_heads, width_of_chunks
from fla_cp.partition.checks import read_offsets
from fla_cp.partition.packing import Packing
from fla_cp.pipeline import Plan
from fla_cp.rule import DeltaRule, accumulator


class Member(NamedTuple):
    """A member of the family.

    name: its operators are chunk_<name> and fused_recurrent_<name>. per_head: whether there is one
    decay a head, g [B, T, HV]. removal: "k", "p" or "none", see `DeltaRule`. without: keywords that
    its operators do not have. names: which tensors they take, and how they call them.
    """

    name: str
    per_head: bool
    removal: str
    without: tuple[str, ...] = ()
    names: Names = Names()


_BOUND = ("safe_gate", "lower_bound")
_OF_BETA = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")
_OF_ROWS = (*_OF_BETA, "use_qk_l2norm_in_kernel", "return_intermediate_states")

KDA = Member("kda", False, "k")
GATED_DELTA_RULE = Member("gated_delta_rule", True, "k", _BOUND)
GATED_DELTA_PRODUCT = Member(
    "gated_delta_product", True, "k", (*_BOUND, "return_intermediate_states")
)
COMBA = Member("comba", True, "p", _BOUND, Names(p="p"))
DPLR = Member("dplr_delta_rule", False, "p", _OF_ROWS, Names(g="gk", beta=None, p="a", b="b"))
RWKV7 = Member("rwkv7", False, "p", _OF_ROWS, Names("r", "k", "v", "w", None, "a", "b"))
GLA = Member("gla", False, "none", _OF_BETA, Names(beta=None))
SIMPLE_GLA = Member("simple_gla", True, "none", (*_OF_BETA, *_BOUND), Names(beta=None))

OF_OPTIONS = tuple(Options._fields)[TENSORS]
"""The names of the options that are tensors."""
_FLAGS = tuple(Options._fields)[FLAGS]


def options_of(operator: str, without: tuple[str, ...], options: Mapping[str, Any]) -> Options:
    """The options of a call, with defaults. Raises TypeError for keywords that the operator does
    not have."""
    for name in options:
        if name in without or name not in Options._fields:
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")
    return Options(**options)


def chunk(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int = 1
) -> tuple[Tensor, ...]:
    """One call over whole sequences, in chunks; see `chunk_kda`. rows: how many rows of k, v and
    beta each token has, see gated_delta_product.py and dplr.py.

    Checks and plans are made once for all calls with one key (known.py); later calls only look them
    up. What depends on the values of tensors is checked in every call.
    """
    width = None
    if rows == 1:
        width = width_of_chunks(member.removal, member.per_head, x, options)
    if width is not None:
        return _wide(member, x, options, width)
    if torch.compiler.is_compiling():
        return _traced(member, x, options, rows)
    key = key_of(member, x, options, rows)
    known = None if key is None else known_calls.use(key)
    plan = None if known is None else _plan_at_hand(known, x, options)
    if known is not None and plan is not None:
        return _known_call(known.kind, plan, x, options)
    found = _called_again(known, x, options, rows) or _first_call(member, x, options, rows, key)
    return _planned_call(*found, x, rows, key)


def _plan_at_hand(known: Known, x: Tensors, options: Mapping[str, Any]) -> Plan | None:
    """The plan of a known call. None under a context, with several rows a token, and where the
    initial states do not fit the offsets."""
    packed, option = known.packed, options.get
    if packed is None:
        return known.plan
    offsets = options["cu_seqlens"], option("cu_seqlens_cpu")
    return packed_plan(known, packed, *offsets, option("initial_state"))


def _called_again(
    known: Known | None, x: Tensors, options: Mapping[str, Any], rows: int
) -> tuple[Options, Known, Packing] | None:
    """The options and the packing of a known call under a context or with several rows a token. Its
    packing may be new, so the number of initial states is compared with it. None if the call is not
    known, and if it fails this check; `_first_call` then says what is wrong."""
    if known is None or known.packed is not None:
        return None
    o, context = Options(**options), options.get("cp_context")
    packing = _packing(x, o, rows, known.rule, known.backend)
    if context is not None:
        context.check_alive()
    if o.initial_state is not None and len(o.initial_state) != packing.sequences:
        return None
    return o, known, packing


def _first_call(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int, key: tuple | None
) -> tuple[Options, Known, Packing]:
    """The options and the packing of a call, after all checks, and what is known from now on of
    calls with this key."""
    o, rule, packing = _checked_call(member, x, options, rows)
    backend = resolve(o.impl, x.q.device, x.q.dtype)
    wanted = {"want_final": o.output_final_state, "want_h": o.return_intermediate_states}
    return o, remember(key, rule, backend, **wanted), packing


def _planned_call(
    o: Options, known: Known, packing: Packing, x: Tensors, rows: int, key: tuple | None
) -> tuple[Tensor, ...]:
    """`chunk` of a call that has no plan yet. The next call with this key finds the plan, unless
    there is a context, whose ranks compare each call first, or there are several rows a token."""
    context = o.cp_context
    rule, backend = known.rule, known.backend
    if context is not None:
        shape = x.v.shape[2], x.q.shape[-1], x.v.shape[3]
        compare_ranks(context, rule, shape, x.q.dtype, o.initial_state, o.output_final_state)
    rates = o.A_log, o.dt_bias
    if rows > 1:
        if context is not None:
            context = context.repeated(rows)
            packing = context.in_chunks(rule.chunk)
        x = spread(backend, rule, x, rates, rows)
        rule, rates = rule._replace(gate="given"), (None, None)
    inputs = Inputs(x.q, x.k, x.v, x.g, x.beta, *rates, x.p)
    if context is not None and rows == 1:
        packing = _shared_packing(context, packing, inputs, o, backend)

    def build() -> Plan:
        return custom_op.make_plan(rule, packing, context, backend, _shape(x))

    alone, plan = context is None and rows == 1, None
    if alone and o.cu_seqlens is not None and key is not None:
        known.packed = packed = _packed(x, o, o.cu_seqlens)
        plan = packed_plan(known, packed, o.cu_seqlens, o.cu_seqlens_cpu, o.initial_state)
        assert plan is not None, "a state for each sequence was checked"
    elif key is None:
        plan = build()
    else:
        plan = custom_op.kept_plan(packing, context, known.number, build)
    if alone and known.packed is None:
        known.plan = plan
    out, final, h = DeltaRuleFunction.apply(
        known.kind, plan, *inputs, accumulated(o.initial_state, x.q)
    )
    if rows > 1:
        out = out[:, rows - 1 :: rows]
    if not o.return_intermediate_states:
        return out, final
    return out, final, h.unflatten(0, (out.shape[0], -1))


def _known_call(
    kind: Kind, plan: Plan, x: Tensors, options: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """`chunk` of a call for which a plan was found, without any checks."""
    option = options.get
    inputs = x.q, x.k, x.v, x.g, x.beta, option("A_log"), option("dt_bias"), x.p
    initial = accumulated(option("initial_state"), x.q)
    out, final, h = DeltaRuleFunction.apply(kind, plan, *inputs, initial)
    if not option("return_intermediate_states"):
        return out, final
    return out, final, h.unflatten(0, (out.shape[0], -1))


def _wide(member: Member, x: Tensors, options: Mapping[str, Any], width: int) -> tuple[Tensor, ...]:
    """`chunk` of wide heads, which are split into heads of at most `width` channels. A token has
    one row, because the members with several rows are not split."""
    o, rule = _checked_options(member, x, options)
    sequences = len(x.q)
    if o.cp_context is not None:
        sequences = Handle.read(o.cp_context.handle.sizes).sequences
    elif o.cu_seqlens is not None:
        sequences = len(o.cu_seqlens) - 1
    check_inputs(x, member.names, o, rule, sequences=sequences)
    return in_narrow_heads(x, options, o, rule.state_v_first, lambda *y: chunk(member, *y), width)


def _checked_call(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int
) -> tuple[Options, DeltaRule, Packing]:
    """The options, the rule and the packing of a call, after all checks."""
    o, rule = _checked_options(member, x, options)
    context, sequences = o.cp_context, len(x.q)
    if context is not None:
        sequences = context.packing.sequences
    elif o.cu_seqlens is not None:
        sequences = len(o.cu_seqlens) - 1
    check_inputs(x, member.names, o, rule, sequences=sequences, rows=rows)
    return o, rule, _packing(x, o, rows, rule, resolve(o.impl, x.q.device, x.q.dtype))


def _checked_options(
    member: Member, x: Tensors, options: Mapping[str, Any]
) -> tuple[Options, DeltaRule]:
    """The options and the rule of a call, after all checks except those of `check_inputs`."""
    o = options_of(f"chunk_{member.name}", (*member.without, *RECURRENT_ONLY), options)
    rule = checked_rule(member, x, o)
    check_choice("precision", o.precision, ("default", "high"))
    check_sequences(x.q.shape[1], x.q.shape[0], o.cu_seqlens, o.cp_context, o.cu_seqlens_cpu)
    check_fixed_call(
        o.cp_context,
        initial_state=o.initial_state,
        output_final_state=o.output_final_state,
        return_intermediate_states=o.return_intermediate_states,
    )
    return o, rule


def _traced(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int
) -> tuple[Tensor, ...]:
    """`chunk` under torch.compile, as ops of torch.library (custom_op.py). They look up the packing
    when they run."""
    o, rule = _checked_options(member, x, options)
    context, sequences = o.cp_context, x.q.shape[0]
    if context is not None:
        sequences = Handle.read(context.handle.sizes).sequences
    check_inputs(x, member.names, o, rule, sequences=sequences, rows=rows)
    (B, T), rates = x.q.shape[:2], (o.A_log, o.dt_bias)
    if rows > 1:
        if context is not None:
            context = context.repeated(rows)
        backend = resolve(o.impl, x.q.device, x.q.dtype)
        x = spread(backend, rule, x, rates, rows)
        rule, rates, T = rule._replace(gate="given"), (None, None), T * rows
    inputs = token_rows(Inputs(x.q, x.k, x.v, x.g, x.beta, *rates, x.p))
    given = (*inputs, accumulated(o.initial_state, x.q))
    outputs = o.output_final_state, o.return_intermediate_states
    final: Any
    if context is not None and context.world_size > 1:
        out, final, h = custom_op_cp.sharded_delta_rule(context, rule, o.impl, given, *outputs)
    else:
        fixed = custom_op.constants(rule, o.impl, context, B, T)
        out, final, h, *_ = custom_op.delta_rule(*given, *fixed, *outputs)
    out = out.view(B, T, *x.v.shape[2:])
    if rows > 1:
        out = out[:, rows - 1 :: rows]
    final = final if o.output_final_state else None
    if not o.return_intermediate_states:
        return out, final
    return out, final, h.detach().unflatten(0, (B, -1))  # no gradient comes from it


def checked_rule(member: Member, x: Tensors, o: Options) -> DeltaRule:
    """The rule of a call, after checks of each argument's type and of the tensors' numbers of
    dimensions."""
    values: tuple[Any, ...] = o
    given = [(name, t) for name, t in zip(member.names, x, strict=True) if name is not None]
    names = (*(name for name, _ in given), *OF_OPTIONS)
    check_tensors(names, (*(t for _, t in given), *values[TENSORS]), len(given))
    check_flags(_FLAGS, values[FLAGS])
    v_first = check_state_layout(o.transpose_state_layout, o.state_v_first)
    scale, lower_bound = check_scale(o.scale), check_lower_bound(o.lower_bound)
    if o.safe_gate and lower_bound is None and not o.use_gate_in_kernel:
        lower_bound = SAFE_GATE_BOUND
    check_ndims(x, member.names, per_head=member.per_head)
    return DeltaRule(
        scale=max(1, x.q.shape[-1]) ** -0.5 if scale is None else scale,
        gate=gate_of(o.use_gate_in_kernel, lower_bound),
        lower_bound=lower_bound,
        safe_gate=o.safe_gate,
        qk_l2norm=o.use_qk_l2norm_in_kernel,
        beta_factor=(1.0 + o.allow_neg_eigval) if o.use_beta_sigmoid_in_kernel else None,
        use_exp2=o.use_exp2,
        state_v_first=v_first,
        keep_intermediates=o.disable_recompute,
        per_head=member.per_head,
        removal=member.removal,
        precise=o.precision == "high",
        chunk_size=check_chunk_size(o.chunk_size),
    )


def gate_of(in_kernel: bool, lower_bound: float | None) -> str:
    """The field `gate` of a `DeltaRule`."""
    if not in_kernel:
        return "given"
    return "softplus" if lower_bound is None else "sigmoid"


def log_decay(
    backend: Backend, rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> Tensor:
    """The log decay of raw projections g [.., HV, K], or [.., HV] with one decay a head, in fp32
    (fp64)."""
    rates = one_dim(A_log), one_dim(dt_bias)
    if rule.per_head:
        return backend.gate(rule, g[..., None], *rates)[..., 0]
    return backend.gate(rule, g, *rates)


def spread(
    backend: Backend,
    rule: DeltaRule,
    x: Tensors,
    rates: tuple[Tensor | None, Tensor | None],
    rows: int,
) -> Tensors:
    """x with `rows` rows of every tensor for each token. The first row has the token's g and the
    last its q; the other rows of g and q are zero. k, v and beta already have that many rows,
    except with b: then the first row adds along b what a reads, and the second adds v along k.
    rates: A_log and dt_bias. A raw g is turned into the log decay here, because no raw projection
    could stand for a row without decay."""
    q, g = x.q, x.g
    if rule.gate != "given":
        g = log_decay(backend, rule, g, *rates)
    zeros = g.new_zeros(*g.shape[:2], rows - 1, *g.shape[2:])
    g = torch.cat((g[:, :, None], zeros), 2).flatten(1, 2)
    zeros = q.new_zeros(*q.shape[:2], rows - 1, *q.shape[2:])
    x = x._replace(q=torch.cat((zeros, q[:, :, None]), 2).flatten(1, 2), g=g)
    if x.b is None or x.p is None:
        return x
    k, v, p = (
        torch.stack(pair, 2).flatten(1, 2)
        for pair in ((x.b, x.k), (torch.zeros_like(x.v), x.v), (-x.p, torch.zeros_like(x.p)))
    )
    return x._replace(k=k, v=v, p=p, b=None)


def accumulated(state: Tensor | None, q: Tensor) -> Tensor | None:
    """The state in the dtype in which the operator computes states."""
    dtype = accumulator(q.dtype)
    return state if state is None or state.dtype == dtype else state.to(dtype)


def one_dim(x: Tensor | None) -> Tensor | None:
    """A_log or dt_bias with one dim, as the stages read them."""
    return x if x is None or x.ndim == 1 else x.flatten()


def _shape(x: Tensors) -> Shape:
    return x.v.shape[2], x.q.shape[3], x.v.shape[3], x.q.device


def _states(o: Options) -> bool:
    """Whether states are given or wanted. A packing with a frame supports neither."""
    return o.initial_state is not None or o.output_final_state or o.return_intermediate_states


def _packed(x: Tensors, o: Options, cu_seqlens: Tensor) -> Packed:
    device = x.q.device
    readable = cu_seqlens.device == device and cu_seqlens.is_contiguous()
    offsets = cu_seqlens.dtype if readable else None
    return Packed(_states(o), x.q.shape[1], _shape(x), device, x.q.dtype, offsets)


def _shared_packing(
    context: FLACPContext, packing: Packing, x: Inputs, o: Options, backend: Backend
) -> Packing:
    """The packing of a call under a context. If possible this is the packing with a frame, whose
    programs similar packings share. It is possible if the call has no states and no rank's segments
    are cut. All ranks decide alike, because each of them knows the lengths of all."""
    if _states(o) or backend.replay_stream(x.q.device) is None:
        return packing
    (HV, V), K = x.v.shape[2:], x.q.shape[-1]

    def uncut() -> bool:
        shape = HV, K, V, x.q.device
        return all(backend.segment(packing, *shape, both) is packing for both in (True, False))

    framed = context.framed(packing)
    if framed is None or not packing.cached(("uncut", backend.name, HV, K, V, x.q.device), uncut):
        return packing
    return framed


def _packing(x: Tensors, o: Options, rows: int, rule: DeltaRule, backend: Backend) -> Packing:
    """The packing of a call. It counts tokens under a context, and otherwise rows."""
    if o.cp_context is not None:
        return o.cp_context.in_chunks(rule.chunk)
    B, T = x.q.shape[:2]
    if o.cu_seqlens is None:
        offsets = tuple(range(0, B * T * rows + 1, T * rows))
    else:
        offsets = read_offsets(o.cu_seqlens, o.cu_seqlens_cpu, T)
        offsets = tuple(rows * i for i in offsets) if rows > 1 else offsets
    longest = max(b - a for a, b in pairwise(offsets))
    chunk = rule.chunk_size or backend.chunk_for(longest, x.q.dtype)
    return custom_op.packing_of(offsets, chunk)
