"""Checks that the ranks know the same batch and make the same call, before states are exchanged.

If ranks had different tables, they would fold each other's states at the wrong places without any
error. If their shapes differed, the transport would abort or wait forever. Therefore the first call
under a context, and each of the first WATCHED calls over a group, starts with one all-gather of
SENT int64 from each rank. All ranks then find the same difference and raise the same error:

    all ranks of a context-parallel group must agree, but ranks [1] differ from rank 0 in
    HV (2 on ranks [0], 4 on ranks [1])

If the group's transport sends from the host (gloo), the host waits for every comparison. Over NCCL
it waits only in the first WATCHED calls. The results of later comparisons are read by a later call
over the group, when they have arrived, and that call raises their error.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives

WATCHED = 64
"""How many calls over a group are compared. If the ranks of a program differ at all, they do so in
one of the first calls. Every compared call counts, so that all ranks stop after the same one."""

SENT = 16
"""How many numbers each rank sends. Unused ones are zero."""

_PLAIN = (
    *map(str, (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    *("all_gather", "ring", "scan", "heads", "symmetric", "symmetricorgather", "local"),
    *("gathered", "by_heads", "causal_attention", "latent_attention", "keys_of"),
    *("build_cp_context", "update", "unshard", "causal_conv1d", "chunk_kda", "chunk_comba"),
    *("chunk_gated_delta_rule", "chunk_gla", "chunk_simple_gla", "chunk_dplr_delta_rule"),
)
"""Texts that an error can show although a rank receives only their hashes: dtypes, the names that
`scheme_of` returns, the schemes of keys and values, and the calls that are compared."""

Facts = Mapping[str, Any]


class _Late(NamedTuple):
    """A comparison whose result is on its way. rows: host memory, pinned, to which it is copied.
    arrived: the event after the copy. facts: those of this rank."""

    rows: Tensor
    arrived: torch.cuda.Event
    facts: Facts


@dataclass
class _Group:
    """What is known of a group. calls: how many of its calls were compared. late: comparisons whose
    results were not read yet."""

    calls: int = 0
    late: deque[_Late] = field(default_factory=deque)


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, _Group] = WeakKeyDictionary()


class Agreement:
    """The comparisons of one context: its table, once, and the first calls of its group."""

    def __init__(self, group: dist.ProcessGroup, table: Facts) -> None:
        self._group = group
        self._state = _GROUPS.setdefault(group, _Group())
        self._table = table
        self._known = False
        """Whether the table was compared. It stays False if the ranks differed, so that a caller
        who goes on after the error gets it again."""

    @staticmethod
    def of_initial(initial_state: Tensor | None) -> dict[str, bool]:
        """Facts of an initial state. The backward adds up its gradient over all ranks, so either
        all of them want it or none does."""
        given, wanted = initial_state is not None, False
        if initial_state is not None and torch.is_grad_enabled():
            wanted = initial_state.requires_grad
        return {"initial_state": given, "initial_state.requires_grad": wanted}

    @property
    def due(self) -> bool:
        """Whether `before` has anything to do."""
        return not self._known or self._state.calls < WATCHED or bool(self._state.late)

    def before(self, call: str, **facts: Any) -> None:
        """Compares the ranks at the start of a call, if that is due. All ranks run this. facts:
        numbers, dtypes or flags of the call.

        Raises ValueError on all ranks if they differ.
        """
        state = self._state
        if not self.due:
            return
        if self._device().type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # a graph would repeat the comparison; its calls have run eagerly before
        self._read()
        watched = state.calls < WATCHED
        if watched or not self._known:
            self._compare({"call": call, **facts}, self._table, wait=watched)
            state.calls += 1

    def built(self) -> None:
        """Compares only the table of a new context, and waits for the result."""
        self._compare({"call": "build_cp_context"}, self._table, wait=True)

    def changed(self, table: Facts) -> None:
        """Compares the table of another packing. Over NCCL the host does not wait."""
        self._read()
        self._compare({"call": "update"}, table, wait=False)
        self._table = table

    def _device(self) -> torch.device:
        return collectives.wire_device(self._group, torch.device("cpu"))

    def _compare(self, call: Facts, table: Facts, *, wait: bool) -> None:
        """Sends this rank's facts and compares those of all ranks: now with `wait` or if they are
        sent from the host, and otherwise in a later call, in `_read`."""
        facts = {**table, **call}
        sent = [_number(value) for value in facts.values()]
        assert len(sent) <= SENT, facts
        mine = torch.tensor(sent + [0] * (SENT - len(sent)), dtype=torch.int64, device="cpu")
        device = self._device()
        if device.type == "cuda":
            mine = mine.pin_memory().to(device, non_blocking=True)
        rows, work = collectives.gather_numbers(mine, self._group)
        work.wait()  # on a GPU only the stream waits
        if device.type != "cuda" or wait:
            _check(rows, facts)
            self._known = True
            return
        self._known = True
        late = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        late.copy_(rows, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._state.late.append(_Late(late, arrived, facts))

    def _read(self) -> None:
        """Checks the results that have arrived."""
        late = self._state.late
        while late and late[0].arrived.query():
            one = late.popleft()
            _check(one.rows, one.facts)


def _number(value: Any) -> int:
    """The number that stands for a value: an int itself, otherwise 56 bits of a hash."""
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
    names = list(facts)
    call = names.index("call")
    if any(row[call] != rows[0][call] for row in rows):
        names = names[: call + 1]  # in another call, the numbers after the name mean other things
    found, odd = [], set()
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        differing = {rank for rank, number in enumerate(column) if number != column[0]}
        if differing:
            odd |= differing
            found.append(f"{name} ({_shown(facts[name], column)})")
    hint = ""
    if found[0].startswith("cu_seqlens "):
        hint = ". If this is the cu_seqlens of each rank's own tokens, pass that of the whole batch"
    raise ValueError(
        f"all ranks of a context-parallel group must agree, but ranks {sorted(odd)} differ from "
        f"rank 0 in {', '.join(found)}{hint}"
    )


def _shown(value: Any, column: tuple[int, ...]) -> str:
    """What the ranks sent for one fact, as far as this rank can decode it. value: its own."""
    if not isinstance(value, int) and not all(number in _READABLE for number in column):
        text = str(value)
        short = text if len(text) <= 80 else f"{text[:60]}.. of {len(text)} characters"
        return f"on this rank {short}"
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(column):
        ranks.setdefault(number, []).append(rank)
    return ", ".join(
        f"{type(value)(n) if isinstance(value, int) else _READABLE[n]} on ranks {which}"
        for n, which in ranks.items()
    )
