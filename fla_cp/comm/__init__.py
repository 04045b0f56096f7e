"""Communication between the ranks of a context-parallel group."""

from fla_cp.comm.agreement import Agreement
from fla_cp.comm.exchange import (
    AllGather,
    ByHeads,
    Exchange,
    Links,
    Local,
    Nearest,
    PrefixScan,
    Ring,
    SlotMaps,
    Symmetric,
    make_exchange,
    scheme_of,
)
from fla_cp.comm.halo import Halo
from fla_cp.comm.overlap import Overlap, run_overlap
from fla_cp.comm.timing import ExchangeTimer, measure_exchange

__all__ = [
    "Agreement",
    "AllGather",
    "ByHeads",
    "Exchange",
    "ExchangeTimer",
    "Halo",
    "Links",
    "Local",
    "Nearest",
    "Overlap",
    "PrefixScan",
    "Ring",
    "SlotMaps",
    "Symmetric",
    "make_exchange",
    "measure_exchange",
    "run_overlap",
    "scheme_of",
]
