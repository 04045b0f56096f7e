"""Keys, values or latents of a compiled graph, on their way before the attention reads them.

What arrives has another length in each packing, so a graph cannot hold the exchange itself. An op
therefore starts the exchange and returns a ticket, and the op of the attention takes by this ticket
what is under way. The work that the graph has between the two runs meanwhile.
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
"""Exchanges that nothing has taken. Above it, the oldest are forgotten, with their memory: their
graphs failed. Layers follow each other, so a graph itself has one or two under way."""


class Sent(NamedTuple):
    """How the rows of a call come, and those that are under way; None if this rank needs none."""

    scheme: KeysValues
    first: Arriving | None


_numbers = count()
_sent: OrderedDict[int, Sent] = OrderedDict()


def ticket_for(sent: Sent) -> Tensor:
    """[1] int64 on the host, with which `taken` finds it once."""
    number = next(_numbers)
    _sent[number] = sent
    while len(_sent) > MOST:
        _, forgotten = _sent.popitem(last=False)
        if forgotten.first is not None:
            forgotten.first.wait()
    return torch.full((1,), number, dtype=torch.int64, device="cpu")


def fake_ticket(like: Tensor) -> Tensor:
    """The same for a tracer."""
    return like.new_empty(1, dtype=torch.int64, device="cpu")


def taken(ticket: Tensor | None) -> Sent | None:
    """What was sent; None without a ticket, or if it was taken before."""
    return None if ticket is None else _sent.pop(int(ticket), None)
