"""Whether ranks agree on a batch and on what they call: a few numbers, gathered before states are.

Ranks that hold other tables would fold each other's states at the wrong places, which nothing
shows; with other shapes they would end in an abort of the transport, or wait without end. So the
first call under a context, and each of the first WATCHED calls over a group, starts with one
all-gather of SENT int64 a rank, in which all ranks find the same difference:

    all ranks of a context-parallel group must agree, but ranks [1] differ from rank 0 in
    HV (2 on ranks [0], 4 on ranks [1])

Where the group's transport sends from the host (gloo), each is waited for. Over NCCL the host waits
for those of the first WATCHED calls only: later ones are read once they have arrived, by a later
call over the group, which raises what they say.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives

WATCHED = 64
"""Calls over a group that are compared each: ranks of one program differ in one of the first, if at
all. It is a number of calls, not of different ones, so that all ranks stop at the same call."""

SENT = 16
"""Numbers that each rank sends; unused ones are zero."""

_PLAIN = (
    *map(str, (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    *("allgather", "ring", "scan", "heads", "symmetric", "nearest", "local"),
    *("build_cp_context", "update", "unshard", "causal_conv1d", "chunk_kda", "chunk_comba"),
    *("chunk_gated_delta_rule", "chunk_gla", "chunk_simple_gla"),
)
"""Texts that an error can name by their numbers."""

Facts = Mapping[str, Any]


class _Late(NamedTuple):
    """An all-gather whose result is on its way to `rows`, pinned, complete after `arrived`."""

    rows: Tensor
    arrived: torch.cuda.Event
    facts: Facts


class _Group:
    """calls: compared so far over a group. late: what has not been read yet."""

    def __init__(self) -> None:
        self.calls = 0
        self.late: deque[_Late] = deque()


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, _Group] = WeakKeyDictionary()


class Agreement:
    """What the ranks of one context compare. table: what they must agree on beside the calls under
    it. known: whether it was compared."""

    def __init__(self, group: dist.ProcessGroup, table: Facts) -> None:
        self._group = group
        self._state = _GROUPS.setdefault(group, _Group())
        self._table, self._known = table, False

    @property
    def due(self) -> bool:
        """Whether `before` has anything to do."""
        return not self._known or self._state.calls < WATCHED or bool(self._state.late)

    def before(self, call: str, **facts: Any) -> None:
        """To be run by all ranks at the start of a call: its name, and numbers, dtypes or flags.

        Raises ValueError if ranks differ, on all of them.
        """
        state = self._state
        if not self.due:
            return
        over_cuda = self._device().type == "cuda"
        if over_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph would repeat it; what is captured has run before
        self._read()
        if not self._known or state.calls < WATCHED:
            wait = state.calls < WATCHED
            self._compare({"call": call, **facts}, self._table, wait=wait)
            state.calls += 1

    def built(self) -> None:
        """Compares the table alone, and waits for the result."""
        self._compare({"call": "build_cp_context"}, self._table, wait=True)

    def changed(self, table: Facts) -> None:
        """Compares another table; over NCCL the host waits for nothing."""
        self._read()
        self._compare({"call": "update"}, table, wait=False)
        self._table = table

    def _device(self) -> torch.device:
        return collectives.wire_device(self._group, torch.device("cpu"))

    def _compare(self, call: Facts, table: Facts, *, wait: bool) -> None:
        facts = {**table, **call}
        sent = [_number(value) for value in facts.values()]
        assert len(sent) <= SENT, facts
        mine = torch.tensor(sent + [0] * (SENT - len(sent)), dtype=torch.int64, device="cpu")
        device = self._device()
        if device.type == "cuda":
            mine = mine.pin_memory().to(device, non_blocking=True)
        rows, work = collectives.gather_numbers(mine, self._group)
        work.wait()  # on a GPU its stream does
        self._known = True
        if device.type != "cuda" or wait:
            _check(rows, facts)
            return
        late = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        late.copy_(rows, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._state.late.append(_Late(late, arrived, facts))

    def _read(self) -> None:
        """What has arrived."""
        late = self._state.late
        while late and late[0].arrived.query():
            one = late.popleft()
            _check(one.rows, one.facts)


def _number(value: Any) -> int:
    """Itself, or 56 bits that depend on all of it."""
    if isinstance(value, int):
        return int(value)
    data = array("q", value).tobytes() if isinstance(value, tuple) else str(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


_READABLE = {_number(text): text for text in _PLAIN}


def _check(gathered: Tensor, facts: Facts) -> None:
    """Raises ValueError if the ranks sent different numbers. facts: those of this rank."""
    rows = gathered.tolist()
    if all(row == rows[0] for row in rows):
        return
    found, odd = [], set()
    # ranks that call something else mean something else by the rest
    names = list(facts)
    call = names.index("call")
    same_call = all(row[call] == rows[0][call] for row in rows)
    for i, name in enumerate(names[: None if same_call else call + 1]):
        column = [row[i] for row in rows]
        differing = [rank for rank, number in enumerate(column) if number != column[0]]
        if not differing:
            continue
        odd |= set(differing)
        value = facts[name]
        numbers = isinstance(value, int) or all(number in _READABLE for number in column)
        if numbers:
            ranks: dict[int, list[int]] = {}
            for rank, number in enumerate(column):
                ranks.setdefault(number, []).append(rank)
            said = ", ".join(
                f"{n if isinstance(value, int) else _READABLE[n]} on ranks {which}"
                for n, which in ranks.items()
            )
        else:
            said = f"on this rank {_short(value)}"
        found.append(f"{name} ({said})")
    raise ValueError(
        f"all ranks of a context-parallel group must agree, but ranks {sorted(odd)} differ from "
        f"rank 0 in {', '.join(found)}"
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}.. of {len(text)} characters"
