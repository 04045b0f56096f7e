"""Communication between the ranks of a context-parallel group."""

from fla_cp.comm.agreement import Agreement
from fla_cp.comm.exchange import (
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
from fla_cp.comm.halo import Halo
from fla_cp.comm.overlap import Meanwhile, run_meanwhile
from fla_cp.comm.timing import ExchangeTimer, measure_exchange

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
