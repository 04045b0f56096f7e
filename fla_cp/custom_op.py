"""The operator as two torch.library ops, `fla_cp::delta_rule` and its backward, for torch.compile.
Eager calls use `DeltaRuleFunction`, which runs the same pipeline.

These ops and those for several ranks (custom_op_cp.py) share most of their arguments; `Call` holds
them, and says what the outputs look like. An empty tensor stands for an output that is not wanted.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from fla_cp.comm import Links, Local
from fla_cp.context import FLACPContext, context_of
from fla_cp.handle import Handle, Sizes, chunk_counts
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.partition.packing import Frame, Packing
from fla_cp.pipeline import Plan, PlanKey, Result, Saved, announcement, backward, forward
from fla_cp.recent import Recent
from fla_cp.replay import Replayed, layout
from fla_cp.rule import CHUNK, DeltaRule, accumulator

RULE = (
    "float scale, str gate, float? lower_bound, bool safe_gate, bool qk_l2norm, "
    "float? beta_factor, bool use_exp2, bool state_v_first, bool keep_intermediates, "
    "bool per_head, str removal, bool precise, int? chunk_size"
)
"""The fields of `DeltaRule` as arguments of an op."""
_SHARED = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
    f"Tensor? p, Tensor? initial, {RULE}, str impl, Tensor context, Tensor sizes, SymInt rows"
)
GRADS = "Tensor do, Tensor? dfinal, "
"""The first arguments of a backward op."""

TENSORS = len(Inputs._fields) + 1
"""How many of the shared arguments are tensors of the call: the fields of `Inputs`, and the initial
states."""

_RULE = slice(TENSORS, TENSORS + len(DeltaRule._fields))
"""Which of the shared arguments are the fields of `DeltaRule`."""

ONE_SLOT = Links(owner=(0,), row=(0,), continues=(False,), through=(False,), slots_per_rank=1)
ALONE = Local()
"""The links and the exchange of a call without a context."""


MAX_REPLAYED = 1024
"""The most kinds of calls that are remembered."""

_replayed: Recent[tuple, Replayed] = Recent(MAX_REPLAYED)


@lru_cache(maxsize=16)
def packing_of(offsets: tuple[int, ...], chunk: int = CHUNK) -> Packing:
    return Packing.build(offsets, chunk=chunk)


@lru_cache(maxsize=1024)
def key_alone(tokens: int, frame: Frame) -> PlanKey:
    """The plan's key of a call without a context. All packings with this frame share one object,
    because a dict finds the same object faster than an equal one."""
    return PlanKey.framed(tokens, 1, frame, ONE_SLOT, ALONE)


def make_plan(
    rule: DeltaRule,
    packing: Packing,
    context: FLACPContext | None,
    backend: Backend,
    shape: tuple[int, int, int, torch.device] | None = None,
    extra: int | None = None,
) -> Plan:
    """The plan of a call. shape: (HV, K, V, device). If it is given, the backend may cut sequences
    into segments, except in a packing with a frame. extra: see `Backend.segment`."""
    links, ahead = context.links if context else ONE_SLOT, packing
    if shape is not None:
        whole, packing = packing, backend.segment(packing, *shape, True, extra)
        ahead = packing
        if packing is whole and not links.any:
            ahead = backend.segment(packing, *shape, False)
    exchange = context.exchange if context else ALONE
    key = PlanKey.of(packing, links, exchange)
    return Plan(Spec(rule, packing), links, exchange, backend, ahead, key)


def kept_plan(
    packing: Packing, context: FLACPContext | None, key: Hashable, build: Callable[[], Plan]
) -> Plan:
    """The plan that `build` returns. It is built once for each key. The context keeps it, or the
    packing if there is no context."""
    keeper = packing if context is None else context.plans
    return keeper.cached(key, build)


def constants(rule_fields: tuple, impl: str, context: FLACPContext | None, B: int, T: int) -> tuple:
    """The shared arguments after the tensors, for a batch of B rows of T tokens. rule_fields: those
    of `DeltaRule`, in order."""
    if context is not None:
        return (*rule_fields, impl, *context.handle, 1)
    sizes = Sizes(**chunk_counts([T], B), sequences=B)
    return (*rule_fields, impl, *Handle.make(-1, sizes), B)


@dataclass(frozen=True)
class Call:
    """The arguments that all ops share.

    x: the inputs. initial: the initial states of the sequences, or None. rule: what is computed.
    impl: the name of the backend. handle: of the context. rows: how many rows a batch without a
    context has.

    A compiler asks each op for outputs without values, which must have the shapes of the real ones.
    `fake_results` and `fake_kept` are such outputs for `results` and `kept`, and `reserved` for
    `padded`. The shapes follow from `sizes`, which describe the uncut packing. The plan, however,
    may cut it into more segments. Tensors of segments' states therefore have spare rows.

    Example: states enter 3 segments of the uncut packing, and a cut may add 8. `padded` then has 11
    rows. If a plan adds 4 segments, rows 0 to 6 are states, and rows 7 to 10 are zero.
    """

    x: Inputs
    initial: Tensor | None
    rule: DeltaRule
    impl: str
    handle: Handle
    rows: int

    @classmethod
    def parse(cls, args: tuple) -> tuple[Self, list[Any]]:
        """The shared arguments, and those of the op that come after them. In a schema they are a
        flat list: the tensors, the fields of `rule`, impl, those of `handle`, and rows."""
        *x, initial = args[:TENSORS]
        impl, number, sizes, rows, *own = args[_RULE.stop :]
        rule = DeltaRule(*args[_RULE])
        return cls(Inputs(*x), initial, rule, impl, Handle(number, sizes), rows), own

    @property
    def shape(self) -> tuple[int, int, int]:
        """HV, K, V."""
        _, HV, V = self.x.v.shape
        return HV, self.x.q.shape[-1], V

    @cached_property
    def sizes(self) -> Sizes:
        return Handle.read(self.handle.sizes)

    @property
    def chunks(self) -> int:
        return self.sizes.chunks(self.rule.chunk)

    @property
    def backend(self) -> Backend:
        q = self.x.q
        return resolve(self.impl, q.device, q.dtype)

    @cached_property
    def context(self) -> FLACPContext | None:
        return context_of(self.handle.number)

    @cached_property
    def plan(self) -> Plan:
        context, q = self.context, self.x.q
        tokens, shape = len(q), (*self.shape, q.device)
        if context is None:
            offsets = tuple(range(0, tokens + 1, tokens // self.rows))
            packing = packing_of(offsets, self.rule.chunk)
        else:
            packing = context.in_chunks(self.rule.chunk)
            context.check_local_tokens(tokens)
        backend = self.backend

        def build() -> Plan:
            return make_plan(self.rule, packing, context, backend, shape, self.extra)

        key = "plan of an op", self.rule, backend, *shape
        return kept_plan(packing, context, key, build)

    def replayed(
        self, op: str, run: Callable[[], list[Tensor]], own: tuple[Tensor | None, ...], *flags: bool
    ) -> list[Tensor]:
        """What `run` returns. The second equal call of the op is recorded, and later ones replay it
        (replay.py). own: the op's tensors besides the shared ones. flags: the other arguments that
        decide what the op does."""
        tensors = (*self.x, self.initial, *own)
        layouts = tuple(None if t is None else layout(t) for t in tensors)
        key = op, self.rule, self.plan.backend, flags, layouts
        calls = _replayed.use(key)
        if calls is None:
            _replayed.keep(key, calls := Replayed())
        found: Any = calls(self.plan, None, tensors, lambda: tuple(run()))
        return list(found)

    @cached_property
    def extra(self) -> int:
        """The most segments that a cut may add."""
        HV, _, V = self.shape
        return self.backend.extra_segments(HV, V, self.x.q.device)

    @property
    def spare(self) -> int:
        """How many rows are reserved besides those of the uncut packing. There are at least two,
        because torch.compile compiles again for tensors with no row or one."""
        return max(self.extra, 2)

    def new_states(self, n: int, *shape: int) -> Tensor:
        """[n, HV, *shape] in the accumulator's dtype, without values."""
        q = self.x.q
        return q.new_empty(n, self.shape[0], *shape, dtype=accumulator(q.dtype))

    def reserved(self, rows: int, columns: int) -> Tensor:
        """[rows + spare, HV, K, columns], without values. rows: of the uncut packing."""
        return self.new_states(rows + self.spare, self.shape[1], columns)

    def padded(self, x: Tensor | None, rows: int, columns: int) -> Tensor:
        """States x [n, HV, K, columns] in a tensor as `reserved` returns it. The remaining rows are
        zero, so that equal calls return equal tensors; `saved_from` and `first` drop them."""
        out = self.reserved(rows, columns)
        if x is None:
            return out.zero_()
        if len(x) == len(out):
            return x
        out[: len(x)] = x
        out[len(x) :].zero_()
        return out

    def or_empty(self, x: Tensor | None) -> Tensor:
        """x, or, if x is None, a tensor without elements."""
        return self.x.q.new_empty(0) if x is None else x

    def results(self, found: Result) -> list[Tensor]:
        """[o, final, h, carried]."""
        h = None if found.h is None else found.h.clone()  # h may be one of `kept`
        carried = self.padded(found.saved.carried, self.sizes.carried, self.shape[2])
        return [found.o, self.or_empty(found.final), self.or_empty(h), carried]

    def fake_results(self, want_final: bool, want_h: bool) -> list[Tensor]:
        """Tensors as `results` returns them, without values."""
        (_, K, V), v, sizes = self.shape, self.x.v, self.sizes
        outside = (V, K) if self.rule.state_v_first else (K, V)
        return [
            v.new_empty(v.shape),
            self.new_states(sizes.sequences, *outside) if want_final else v.new_empty(0),
            self.new_states(self.chunks, *outside).to(v.dtype) if want_h else v.new_empty(0),
            self.reserved(sizes.carried, V),
        ]

    def kept(self, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
        """What the backend keeps, made contiguous, because `fake_kept` promises that."""
        return [self.or_empty(t).contiguous() for t in tensors]

    def fake_kept(self, rule: DeltaRule) -> list[Tensor]:
        """Tensors as the backend keeps them of a call with this rule, without values."""
        q = self.x.q
        shapes = self.backend.kept_shapes(rule, q.dtype, self.chunks, *self.shape)
        return [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def first(x: Tensor, segments: tuple[int, ...]) -> Tensor | None:
    """The rows of a tensor of `Call.padded` that belong to segments; None if there are none."""
    return x[: len(segments)] if segments else None


def saved_from(plan: Plan, tensors: list[Tensor]) -> Saved:
    """`Saved` from the tensors in which an op returned it: carried, transition, *kept."""
    carried, transition, *kept = tensors
    packing = plan.packing
    rows = carried[: len(packing.carried)]
    return Saved(tuple(kept), rows, first(transition, packing.middle))


def fake_gradients(do: Tensor, dfinal: Tensor | None, *args: Any) -> list[Tensor]:
    """Tensors like the gradients of the inputs and of `initial`, without values. The op's last
    argument says whether the gradient of `initial` is wanted."""
    call, (*_, want_dinitial) = Call.parse(args)
    like = (*call.x, call.initial if want_dinitial else None)
    return [do.new_empty(0) if t is None else t.new_empty(t.shape) for t in like]


def op(name: str, *, before: str = "", after: str = "") -> Callable[[Callable], Any]:
    """Makes a function the op `fla_cp::name`. before, after: the schema of the op's own arguments,
    before and after the shared ones."""
    schema = f"({before}{_SHARED}{after}) -> Tensor[]"
    return torch.library.custom_op(f"fla_cp::{name}", mutates_args=(), schema=schema)


@op("delta_rule", after=", bool want_final, bool want_h")
def delta_rule(*args: Any) -> list[Tensor]:
    """[o, final, h, carried, transition, *kept]."""
    call, (want_final, want_h) = Call.parse(args)

    def run() -> list[Tensor]:
        given = call.plan, call.x, call.initial
        wanted = {"want_final": want_final, "want_h": want_h}
        with announcement(*given, **wanted, with_backward=False):
            found = forward(*given, **wanted)
        K, saved = call.shape[1], found.saved
        transition = call.padded(saved.transition, call.sizes.middle, K)
        return [*call.results(found), transition, *call.kept(saved.kept)]

    return call.replayed("forward", run, (), want_final, want_h)


@delta_rule.register_fake
def _fake(*args: Any) -> list[Tensor]:
    call, wanted = Call.parse(args)
    transition = call.reserved(call.sizes.middle, call.shape[1])
    return [*call.fake_results(*wanted), transition, *call.fake_kept(call.rule)]


@op("delta_rule_backward", before=GRADS, after=", Tensor o, Tensor[] saved, bool want_dinitial")
def delta_rule_backward(do: Tensor, dfinal: Tensor | None, *args: Any) -> list[Tensor]:
    """Gradients of the inputs and of `initial`."""
    call, (o, saved, want) = Call.parse(args)

    def run() -> list[Tensor]:
        given = call.x, call.initial, saved_from(call.plan, saved), o, do, dfinal
        with announcement(call.plan, *given[:2], with_backward=True, want_dinitial=want):
            grads, dinitial = backward(call.plan, *given, want_dinitial=want)
        return [call.or_empty(t) for t in (*grads, dinitial)]

    return call.replayed("backward", run, (do, dfinal, o, *saved), want)


delta_rule_backward.register_fake(fake_gradients)


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.constants = inputs[TENSORS:-2]
    ctx.save_for_backward(*inputs[:TENSORS], output[0], *output[3:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    tensors, (o, *saved) = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    do, dfinal = grads[:2]
    do = torch.zeros_like(o) if do is None else do
    want = tensors[-1] is not None and ctx.needs_input_grad[TENSORS - 1]
    found = delta_rule_backward(do, dfinal, *tensors, *ctx.constants, o, saved, want)
    given = (*tensors[:-1], tensors[-1] if want else None)
    grads_in = (None if t is None else d for t, d in zip(given, found, strict=True))
    return (*grads_in, *[None] * (len(ctx.constants) + 2))


torch.library.register_autograd("fla_cp::delta_rule", _backward, setup_context=_setup)
