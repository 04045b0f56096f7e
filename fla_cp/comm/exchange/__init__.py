"""Exchange of states between ranks: one affine map for each token range, never tokens.

Terms. A slot is a token range of the global batch. Slots are numbered in the order of their tokens,
and each belongs to one rank. The state that leaves slot s and enters slot s+1 is

    out[s] = offset[s] + transition[s] @ in[s]        in[s+1] = out[s] if slot s+1 continues

where the transition is needed only if one sequence passes through the whole slot. Every scheme
below takes the maps of this rank's slots and returns the states that enter these slots. A backward
uses the same schemes with `Links.mirrored()`. In each layer and direction a rank receives, in units
of S = HV*K*V*4 bytes and M = HV*K*K*4 bytes:

    Local       nothing                                   one rank
    AllGather   (R-1) (S + M)                1 step       default up to 8 ranks
    Ring        S                            R-1 steps    fewest bytes, longest chain
    PrefixScan  ceil(log2(R-1)) (S + M) + S  log2 steps   default beyond 128 ranks
    ByHeads     (R-1)/R (2 S + M)            2 steps      default from 9 to 128 ranks
    Symmetric   S, or (R-1) S + (R-2) M      R-1 or 1     ranks of one host, GPUs that share memory;
                                                          default for them from 8192 tokens a rank

Symmetric passes the state from rank to rank, in one kernel, if each rank has one slot and the
backend has that kernel. Otherwise each rank reads its peers' maps. With fewer heads than ranks, a
rank receives (R-1)/HV (S + M) + (R-1)/R S under ByHeads. M is not sent if no sequence passes
through a whole slot, as with two ranks or with documents shorter than a range.
"""

import torch.distributed as dist

from fla_cp.comm import peer_memory
from fla_cp.comm.exchange.all_gather import AllGather
from fla_cp.comm.exchange.base import Exchange, GroupExchange, Local
from fla_cp.comm.exchange.by_heads import ByHeads
from fla_cp.comm.exchange.prefix_scan import PrefixScan
from fla_cp.comm.exchange.ring import Ring
from fla_cp.comm.exchange.symmetric import Symmetric, SymmetricOrGather

__all__ = ["SCHEMES", "make_exchange", "scheme_of"]

SCHEMES: dict[str, type[GroupExchange]] = {
    "all_gather": AllGather,
    "ring": Ring,
    "scan": PrefixScan,
    "heads": ByHeads,
    "symmetric": Symmetric,
}

ALL_GATHER_RANKS, HEADS_RANKS = 8, 128
"""The largest world sizes for which "auto" takes all_gather, and for which it takes heads. For more
ranks it takes scan. They follow from the model of one exchange in docs/design.md, with 32 heads."""

SYMMETRIC_TOKENS = 8192
"""If the largest rank has at least this many tokens, "auto" takes symmetric where the group can.
When scans fill the GPU, the small kernels of that exchange still find room, whereas a collective
waits for the scans to end. With fewer tokens it was not measured."""


def scheme_of(exchange: Exchange) -> str:
    """The name of an exchange in `SCHEMES`, or its class's name if only "auto" takes it."""
    names: dict[type, str] = {kind: name for name, kind in SCHEMES.items()}
    return names.get(type(exchange), type(exchange).__name__.lower())


def make_exchange(
    scheme: str,
    group: dist.ProcessGroup | None,
    world_size: int,
    *,
    fixed: bool = False,
    tokens: int = 0,
) -> Exchange:
    """The exchange for `scheme` ("auto", or a key of `SCHEMES`).

    fixed: the context has a fixed shape. "auto" then gathers maps, whatever the world size. tokens:
    how many the largest rank has. For "symmetric", the first call for a group is a collective.
    Raises ValueError for an unknown scheme, and on all ranks if the group cannot have symmetric
    memory.
    """
    if scheme != "auto" and scheme not in SCHEMES:
        raise ValueError(f"exchange must be one of {['auto', *SCHEMES]}, got {scheme!r}")
    if group is None or world_size == 1:
        return Local()
    if scheme == "auto":
        if world_size <= ALL_GATHER_RANKS or fixed:
            return SymmetricOrGather(group) if tokens >= SYMMETRIC_TOKENS else AllGather(group)
        scheme = "heads" if world_size <= HEADS_RANKS else "scan"
    elif scheme == "symmetric" and (reason := peer_memory.why_not(group)):
        raise ValueError(f"exchange='symmetric' cannot be used here: {reason}; pass 'auto'")
    return SCHEMES[scheme](group)
