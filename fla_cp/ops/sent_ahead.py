"""Exchanges that a compiled graph starts before the attention reads what they bring.

Each packing brings another number of rows, so a graph cannot hold the exchange itself. Instead, an
op starts the exchange and returns a ticket. The op of the attention takes the exchange under way
with this ticket. Work that the graph has between the two ops overlaps with the exchange.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.comm.keys_values import KeysValues
from fla_cp.comm.overlap import Arriving

MOST = 4
"""How many exchanges may wait to be taken. If there are more, the oldest are waited for and
dropped, because their graphs must have failed: layers follow each other, so a graph has only one or
two exchanges under way."""


class Sent(NamedTuple):
    """The scheme of a call, and its first exchange, which is under way; None if no rank needs
    any."""

    scheme: KeysValues
    first: Arriving | None


_numbers = count()
_sent: OrderedDict[int, Sent] = OrderedDict()


def ticket_for(sent: Sent) -> Tensor:
    """A ticket, [1] int64 on the host, with which `taken` finds `sent` once."""
    number = next(_numbers)
    _sent[number] = sent
    while len(_sent) > MOST:
        _, forgotten = _sent.popitem(last=False)
        if forgotten.first is not None:
            forgotten.first.wait()
    return torch.full((1,), number, dtype=torch.int64, device="cpu")


def fake_ticket(like: Tensor) -> Tensor:
    """What `ticket_for` returns, for a tracer."""
    return like.new_empty(1, dtype=torch.int64, device="cpu")


def taken(ticket: Tensor | None) -> Sent | None:
    """What was sent under this ticket. None without a ticket, or if it was taken before."""
    return None if ticket is None else _sent.pop(int(ticket), None)
