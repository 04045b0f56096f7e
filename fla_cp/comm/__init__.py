"""Communication between the ranks of a context-parallel group."""

from .agreement import Agreement
from .exchange import (
    AllGather,
    Exchange,
    Heads,
    Links,
    Local,
    Nearest,
    Ring,
    Scan,
    SlotMaps,
    Symmetric,
    make_exchange,
)
from .halo import Halo
from .meanwhile import Meanwhile, run_meanwhile
from .timing import ExchangeTimer, measure_exchange

__all__ = [
    "Agreement",
    "AllGather",
    "Exchange",
    "ExchangeTimer",
    "Halo",
    "Heads",
    "Links",
    "Local",
    "Meanwhile",
    "Nearest",
    "Ring",
    "Scan",
    "SlotMaps",
    "Symmetric",
    "make_exchange",
    "measure_exchange",
    "run_meanwhile",
]
