"""Arguments that kernels take together: a tensor with its strides, tables, and constants.

A bundle is a NamedTuple. Triton passes its members one by one and compiles for None and for strides
of 1 as it does for single arguments. Bundles of constants, such as `Shape` and `RuleOptions`, are
known when a kernel is compiled: it takes them as `S: tl.constexpr` and `R: tl.constexpr`.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.tile_table import Tile
from fla_cp.rule import CHUNK, DeltaRule

CONSTANTS: set[type] = set()
"""Types of bundles of constants."""

BY_VALUE: set[type] = {int, str, bool, type(None)}
"""Types of arguments that a launch compares by value: plain ones, and bundles of constants."""

B = TypeVar("B", bound=type)


def constants(bundle: B) -> B:
    """Declares a bundle of constants."""
    CONSTANTS.add(bundle)
    BY_VALUE.add(bundle)
    return bundle


class Rows(NamedTuple):
    """A tensor [T, H, D] with unit stride in D (ptr None: there is none), and the strides of tokens
    and heads."""

    ptr: Any
    row: int
    head: int


class State(NamedTuple):
    """States [E, HV, K, V] of either layout (ptr None: there are none), and their strides."""

    ptr: Any
    n: int
    h: int
    k: int
    v: int


class Gate(NamedTuple):
    """Raw projections or log decays g [T, HV, K] or [T, HV] with their strides of tokens and heads,
    A_log [HV] or None, dt_bias [HV * K] or [HV] or None, and the gate's lower bound."""

    g: Any
    row: int
    head: int
    A_log: Any
    dt_bias: Any
    bound: float


class Beta(NamedTuple):
    """beta [T, HV] (ptr None: 1 everywhere), its stride of tokens, the factor on its sigmoid."""

    ptr: Any
    row: int
    factor: float


class ChunkTable(NamedTuple):
    """For each chunk its first token and its number of rows, int32 [NC]."""

    start: Any
    rows: Any


class Segments(NamedTuple):
    """The segments that a scan runs (order, int64). For each segment of the packing its first
    token, the token after its last, its first chunk (int32), and its row in the states that enter
    it, or in reverse leave it (state, int64): -1 if it has none, None if there are no states."""

    order: Any
    start: Any
    stop: Any
    chunk: Any
    state: Any


class Operands(NamedTuple):
    """What the scans read of `fla_cp.kernels.triton.operands.Chunks`. With one decay a head qg,
    k_decayed and kg are the inputs: q, the rows that read the state, and k."""

    qg: Rows
    k_decayed: Rows
    kg: Rows
    rows: Any
    T: Any
    Aqk: Any
    decay: Any


class Formed(NamedTuple):
    """What the local stage writes: the first fields of `Chunks`. steep: None if one path serves all
    chunks."""

    T: Any
    Aqk: Any
    decay: Any
    rows: Any
    anchors: Any
    steep: Any
    qg: Any
    k_decayed: Any
    kg: Any


class Saved(NamedTuple):
    """What the kernels of a backward read beside the gate: the inputs, what the scans left, and
    four fields of `Formed`."""

    q: Rows
    k: Rows
    p: Rows
    v: Rows
    do: Rows
    o: Any
    h: Any
    dh: Any
    v_new: Any
    y: Any
    rows: Any
    decay: Any
    anchors: Any
    steep: Any


class Grads(NamedTuple):
    """What the kernels of a backward write, and read of each other; None where it does not occur.

    dq, dk, dp [T, H, K] (per value head [T, HV, K] with one decay a channel), dv [T, HV, V], dg,
    dbeta [T, HV]; per program dA_log and ddt_bias.
    shares [1 + key tiles, T, HV]: parts of dbeta before the sigmoid's slope; plane 0 is that of v.
    scores [NC, HV, 2, C, C]: gradients of Aqk and Akk; with one decay a head, weights of k in dq
    and dr.
    row_grads [NC, HV, 3, C]: see planes.py.
    dgc [tiles, NC, HV, C]: parts of the gradient of gc; the last row also has that of the chunk's
    end.
    shift: like dgc, with p: the gradient of the sums up to the token before."""

    dq: Any
    dk: Any
    dp: Any
    dv: Any
    dg: Any
    dbeta: Any
    dA_log: Any
    ddt_bias: Any
    shares: Any
    scores: Any
    row_grads: Any
    dgc: Any
    shift: Any


@constants
class Shape(NamedTuple):
    """HV: value heads. G: value heads for each head of q and k. K, V: dims. BT: tokens of a chunk.
    BK, BV, NS: tile and stages of the pipeline. HEAD: one decay a head. REMOVAL: the rule's. TERMS:
    how many tiles add up to T and Aqk. PRECISION: of fp32 products."""

    HV: int
    G: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int
    NS: int
    HEAD: bool
    REMOVAL: str
    TERMS: int
    PRECISION: str


@constants
class RuleOptions(NamedTuple):
    """What the kernels of the local stages are compiled for besides. SAFE: the path of a safe gate.
    BY_CHUNK: the path of any gate serves only chunks and heads whose decays the other path cannot.
    BETA_SIGMOID: beta is given before its sigmoid."""

    GATE: str
    NORM: bool
    BETA_SIGMOID: bool
    SAFE: bool
    BY_CHUNK: bool
    EXP2: bool


def rows(x: Tensor | None) -> Rows:
    """x [T, H, D] with unit stride in D, or [T, H].

    In three dims no stride is 1: where a bundle is a member of another, Triton 3.6 takes a member
    that is 1 for None in loops and branches.
    """
    if x is None:
        return Rows(None, 0, 0)
    if x.dim() == 2:
        return Rows(x, x.stride(0), x.stride(1))
    row, head = x.stride(0), 0 if x.shape[1] == 1 else x.stride(1)
    if row == 1 or head == 1:
        return rows(torch.nn.functional.pad(x, (0, 1)))
    return Rows(x, row, head)


def state(x: Tensor | None) -> State:
    """x [E, HV, K, V]."""
    return State(None, 0, 0, 0, 0) if x is None else State(x, *x.stride())


def gate(rule: DeltaRule, x: Inputs) -> Gate:
    g = rows(x.g)
    return Gate(g.ptr, g.row, g.head, x.A_log, x.dt_bias, rule.lower_bound or 0.0)


def beta(rule: DeltaRule, x: Inputs) -> Beta:
    row = 0 if x.beta is None else x.beta.stride(0)
    return Beta(x.beta, row, rule.beta_factor or 1.0)


SAFE_DTYPES = (torch.bfloat16,)
"""Dtypes that take the path of a safe gate. fp16 cannot hold 2^116; fp32 would show its
rounding."""


def anchored(rule: DeltaRule, dtype: torch.dtype) -> bool:
    """Whether any chunk may take the path of a safe gate, which needs anchors."""
    return not rule.per_head and dtype in SAFE_DTYPES


def safe(rule: DeltaRule, dtype: torch.dtype) -> bool:
    """Whether all chunks take the path of a safe gate."""
    return rule.safe_gate and anchored(rule, dtype)


def by_chunk(rule: DeltaRule, dtype: torch.dtype) -> bool:
    """Whether each chunk takes the path that its decays allow."""
    return not rule.safe_gate and anchored(rule, dtype)


TWO_TERMS_BYTES = 2
"""Inputs of at most so many bytes have two terms. For fp32, whose T and Aqk are fp32, one is
enough."""


def terms(rule: DeltaRule, dtype: torch.dtype) -> int:
    """How many terms T and Aqk are kept in."""
    return 2 if rule.precise and dtype.itemsize <= TWO_TERMS_BYTES else 1


@functools.lru_cache(maxsize=1024)
def shape(
    rule: DeltaRule,
    dtype: torch.dtype,
    H: int,
    HV: int,
    K: int,
    V: int,
    t: Tile,
    chunk: int = CHUNK,
) -> Shape:
    """The shape of a call on operands in dtype, with tile t and that many tokens in a chunk."""
    # Three TF32 products are as good as fp32 here. Half-precision operands ignore this.
    precision = "tf32x3" if dtype == torch.float32 else "tf32"
    how = rule.per_head, rule.removal, terms(rule, dtype), precision
    return Shape(HV, HV // H, K, V, chunk, t.BK, t.BV, t.stages, *how)


@functools.lru_cache(maxsize=1024)
def rule_options(rule: DeltaRule, dtype: torch.dtype) -> RuleOptions:
    """The options of a call on inputs in dtype; with BY_CHUNK those of the path of any gate."""
    sigmoid, paths = rule.beta_factor is not None, (safe(rule, dtype), by_chunk(rule, dtype))
    return RuleOptions(rule.gate, rule.qk_l2norm, sigmoid, *paths, rule.use_exp2)


@functools.lru_cache(maxsize=1024)
def local_paths(rule: DeltaRule, dtype: torch.dtype) -> tuple[tuple[str, RuleOptions], ...]:
    """The paths that the local kernels with one decay a channel are launched for, in their order:
    the end of the stage's name in the table of tiles, and the options."""
    R = rule_options(rule, dtype)
    own = "" if R.SAFE else "_any", R
    return (("", R._replace(SAFE=True, BY_CHUNK=False)), own) if R.BY_CHUNK else (own,)
