"""Finds out from the ranks' latest records who waits for whom, and whether the run is hung.

These are pure functions of records and times; watch.py exchanges the records. Clocks of different
hosts are never compared: a record says how long ago its rank made progress, and the reader adds how
long ago, by its own clock, it first saw that record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

SHOWN = 8
"""Largest number of ranks that a message names one by one."""


@dataclass(frozen=True)
class Record:
    """The state of a rank, written by the rank itself.

    beat: grows with each record. host, pid: of the rank's process. parent: pid of its launcher.
    wait: the collective that it is in, or "". long: whether its phase may take longer than the
    timeout. calls: number of collectives of all ranks that it has entered. exchanges: number of
    exchanges between the ranks of an operator that it has entered. idle: seconds since its main
    thread made progress. at: the source line at which its main thread is, once it has been idle.
    """

    beat: int
    host: str
    pid: int
    parent: int
    step: int = 0
    phase: str = "start"
    wait: str = ""
    long: bool = False
    calls: int = 0
    exchanges: int = 0
    idle: float = 0.0
    at: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Seen:
    """A rank's newest record. at: when the reader first saw it, by the reader's clock."""

    record: Record
    at: float


@dataclass(frozen=True)
class Limits:
    """Times in seconds.

    notice: time without progress until a message. timeout: time without progress until the run
    ends. beat: time between two records. silent: time without a new record after which a process
    counts as stopped.
    """

    notice: float
    timeout: float
    beat: float
    silent: float

    @classmethod
    def of(cls, notice: float, timeout: float) -> Limits:
        beat = min(max(notice / 12, 1.0), 5.0)
        return cls(notice, timeout, beat, max(4 * beat, min(10.0, 2 * notice)))

    @property
    def look(self) -> float:
        """Seconds without progress after which a rank reads the records of the others."""
        return max(min(self.notice, self.timeout / 2) - self.silent, self.beat)


Table = Mapping[int, Seen]


def silent(seen: Seen, now: float, limits: Limits) -> bool:
    """Whether the process has sent no record for a while: it is stopped, ended or unreachable."""
    return now - seen.at > limits.silent


def hung(table: Table, now: float, limits: Limits) -> bool:
    """Whether no rank has made progress for the timeout, and no living rank is in a long phase.

    One hung rank stops all others at the next collective of all ranks, so a run in which some rank
    makes progress is not hung. For a rank in a long phase, every record counts as progress.
    """
    # A stopped rank's idle time before its record was first read is known only up to this error.
    slack = limits.look + 2 * limits.beat

    def standing(seen: Seen) -> float:
        age = now - seen.at
        return age if seen.record.long else seen.record.idle + age

    worst = max(seen.record.idle + now - seen.at for seen in table.values())
    return worst >= limits.timeout and all(
        standing(seen) >= limits.timeout - slack for seen in table.values()
    )


def blamed(table: Table, now: float, limits: Limits) -> list[int]:
    """The ranks that the others wait for; an empty list if that is unknown.

    These are the silent ranks, if there are any. Otherwise they are chosen among the ranks that
    have entered the fewest collectives of all ranks: those that are in no collective, and have
    entered the fewest exchanges.
    """
    if stopped := [rank for rank, seen in table.items() if silent(seen, now, limits)]:
        return stopped
    records = {rank: seen.record for rank, seen in table.items()}
    calls = min(record.calls for record in records.values())
    behind = [rank for rank, record in records.items() if record.calls == calls]
    behind = [rank for rank in behind if not records[rank].wait] or behind
    exchanges = min(records[rank].exchanges for rank in behind)
    behind = [rank for rank in behind if records[rank].exchanges == exchanges]
    return behind if len(behind) < len(records) else []


def explain(table: Table, now: float, limits: Limits) -> str:
    """A sentence like "rank 0 (host a) waits in barrier (step 3, data) for ..."."""
    late = blamed(table, now, limits)
    others: dict[tuple[str, str], list[int]] = {}
    for rank, seen in sorted(table.items()):
        if rank not in late:
            others.setdefault((_place(seen.record), seen.record.wait), []).append(rank)
    parts = []
    for (place, wait), ranks in list(others.items())[:SHOWN]:
        s = "s" * (len(ranks) == 1)
        doing = f"wait{s} in {wait} ({place})" if wait else f"{'is' if s else 'are'} in {place}"
        parts.append(f"{_names(ranks, table)} {doing}")
    text = "; ".join(parts)
    if not late:
        return f"{text}; no rank is known to be behind"
    waited_for = [_last_seen(rank, table, now, limits) for rank in late[:SHOWN]]
    if len(late) > SHOWN:
        waited_for.append(f"{len(late) - SHOWN} more ranks")
    plain = len(others) == 1 and all(wait for _, wait in others)
    return text + (" for " if plain else "; waited for: ") + "; ".join(waited_for)


def _last_seen(rank: int, table: Table, now: float, limits: Limits) -> str:
    seen = table[rank]
    record, age = seen.record, now - seen.at
    detail = f"in {record.wait}" if record.wait else record.at
    place = f"{_place(record)}, {detail}" if detail else _place(record)
    text = f"{_names([rank], table)}, last seen in {place}"
    if silent(seen, now, limits):
        return f"{text}: no sign of life for {age:.0f} s (stopped, or its host cannot be reached)"
    return f"{text} since {record.idle + age:.0f} s" + " (it may take long)" * record.long


def _place(record: Record) -> str:
    return f"step {record.step}, {record.phase}" if record.step else record.phase


def _names(ranks: list[int], table: Table) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} (host {table[ranks[0]].record.host})"
    shown = ", ".join(map(str, ranks[:SHOWN]))
    hosts = sorted({table[rank].record.host for rank in ranks})
    where = f"host{'s' * (len(hosts) > 1)} {', '.join(hosts[:SHOWN])}"
    more = f" and {len(ranks) - SHOWN} more" * (len(ranks) > SHOWN)
    return f"ranks {shown}{more} ({where}{', ...' * (len(hosts) > SHOWN)})"
