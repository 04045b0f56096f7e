"""Plans of calls with packed sequences.

In training almost every batch has a packing that was never seen before. Between two calls, other
code displaces this code from the processor's caches. The time for a new packing therefore depends
on how many functions and objects it touches. To keep it short, similar packings share everything
except their offsets and tables, and the code below has few, long functions.
"""

from functools import lru_cache
from operator import sub
from typing import NamedTuple

from torch import Tensor

from fla_cp.custom_op import ALONE, ONE_SLOT, key_alone, make_plan, packing_of
from fla_cp.kernels import Backend
from fla_cp.kernels.torch.intra import Spec
from fla_cp.ops.known import Known, Packed
from fla_cp.partition.checks import read_offsets
from fla_cp.partition.packing import Frame
from fla_cp.partition.whole import Former, WholeSequences
from fla_cp.pipeline import Plan, PlanKey
from fla_cp.rule import CHUNK

MOST_PLANS = 64
"""The most plans that are kept for later calls with the same offsets. When there are as many, all
are forgotten, which takes less time than forgetting them one by one."""

plans: dict[tuple[Known, tuple[int, ...], bool], Plan] = {}
"""Plans by `Known`, offsets, and whether a frame is impossible because launches are watched."""


def packed_plan(
    known: Known,
    packed: Packed,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    initial_state: Tensor | None,
) -> Plan | None:
    """The plan of a packed call, after checks of the values of its offsets. None if there are
    initial states, but not one for each sequence."""
    offsets = read_offsets(cu_seqlens, cu_seqlens_cpu, packed.tokens)
    if initial_state is not None and len(initial_state) != len(offsets) - 1:
        return None
    stream = None if packed.states else known.backend.replay_stream(packed.device)
    key = known, offsets, stream is None
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plan = plans[key] = _new_plan(known, packed, offsets, cu_seqlens, stream)
    elif isinstance(plan.spec.packing, WholeSequences):
        plan.spec.packing.read_from(cu_seqlens, stream)
    return plan


class Alike(NamedTuple):
    """What packings with equally many chunks and sequences with tokens have in common, for one
    `Known`. key: of their plans. longest: how many chunks a sequence may have, so that the backend
    certainly cuts none of these packings. former: see `Backend.table_former`."""

    frame: Frame
    key: PlanKey
    longest: int
    former: Former | None


@lru_cache(maxsize=256)
def _alike(known: Known, parts: int, chunks: int, chunk: int) -> Alike:
    run, packed = known.backend, known.packed
    assert packed is not None
    (HV, _, V, device), offsets = packed.shape, packed.offsets
    frame = Frame.around(parts, chunks, chunk)
    key, longest = key_alone(packed.tokens, frame), run.longest_whole(chunks, HV, V, device)
    former = None if offsets is None else run.table_former(frame, offsets, device)
    return Alike(frame, key, longest, former)


def _stays_whole(packed: Packed, offsets: tuple[int, ...], chunk: int, backend: Backend) -> bool:
    """Whether the backend cuts no sequence. It lists all segments, so it takes long."""
    whole = packing_of(offsets, chunk)
    return all(backend.segment(whole, *packed.shape, both) is whole for both in (True, False))


def _new_plan(
    known: Known, packed: Packed, offsets: tuple[int, ...], cu_seqlens: Tensor, stream: int | None
) -> Plan:
    """The plan of a packing that was not seen before. stream: the address of the current stream if
    the packing may have a frame, so that similar packings share its programs; None if not. A single
    sequence, and sequences that the backend cuts, get no frame."""
    rule, backend = known.rule, known.backend
    lengths = [*map(sub, offsets[1:], offsets)]
    longest = max(lengths)
    chunk = rule.chunk_size
    if chunk is None:
        chunk = CHUNK if longest > CHUNK else backend.chunk_for(longest, packed.dtype)
    if stream is not None and len(lengths) > 1:
        counts = [(n + chunk - 1) // chunk for n in lengths]
        alike = _alike(known, len(counts) - counts.count(0), sum(counts), chunk)
        if longest <= alike.longest * chunk or _stays_whole(packed, offsets, chunk, backend):
            source = cu_seqlens, stream
            packing = WholeSequences(offsets, alike.frame, alike.former, source)
            return Plan(Spec(rule, packing), ONE_SLOT, ALONE, backend, packing, alike.key)
    return make_plan(rule, packing_of(offsets, chunk), None, backend, packed.shape)
