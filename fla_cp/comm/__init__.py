"""Communication between the ranks of a context-parallel group."""

from fla_cp.comm.agreement import Agreement
from fla_cp.comm.exchange import make_exchange, scheme_of
from fla_cp.comm.exchange.all_gather import AllGather
from fla_cp.comm.exchange.base import Exchange, Local, SlotMaps
from fla_cp.comm.exchange.by_heads import ByHeads
from fla_cp.comm.exchange.prefix_scan import PrefixScan
from fla_cp.comm.exchange.ring import Ring
from fla_cp.comm.exchange.symmetric import Symmetric, SymmetricOrGather
from fla_cp.comm.halo import Halo
from fla_cp.comm.overlap import Overlap, run_overlap
from fla_cp.comm.timing import (
    ExchangeTimer,
    GraphClock,
    GraphWaits,
    captured_exchange,
    measure_exchange,
)
from fla_cp.partition.slots import Links

__all__ = [
    "Agreement",
    "AllGather",
    "ByHeads",
    "Exchange",
    "ExchangeTimer",
    "GraphClock",
    "GraphWaits",
    "Halo",
    "Links",
    "Local",
    "Overlap",
    "PrefixScan",
    "Ring",
    "SlotMaps",
    "Symmetric",
    "SymmetricOrGather",
    "captured_exchange",
    "make_exchange",
    "measure_exchange",
    "run_overlap",
    "scheme_of",
]
