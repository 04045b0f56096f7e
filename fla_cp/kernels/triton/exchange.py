"""The exchange of states between neighbouring ranks, as one kernel a direction.

Each rank has one slot, and a state passes from the first rank to the last. A program takes one head
and a tile of value columns, which depend on no other head or tile:

1. It waits until the state's tile has arrived from the rank before, if a state enters.
2. If a state leaves, it forms transition @ state + offset, puts it into the memory of the next
   rank and sets a flag there.
3. It copies what arrived to the result, and tells the rank before that it has read it.

States and flags are written into the memory of the rank that waits for them, so nothing is read
over the link. `Mailbox` (comm/peer_memory.py) names these places.

*Numbers.* A flag holds the number of an exchange. Programs count their exchanges in device memory,
for each direction, so a replayed CUDA graph goes on counting. All ranks run the same exchanges in
the same order, so they count alike.

*Reuse.* A state lies in one of two places, chosen by the last bit of its number. Exchange n writes
where n - 2 did. A program therefore waits first until the next rank has finished n - 2, which it
says at the end of every exchange, even if no state entered. So a rank runs ahead of the next one by
at most two exchanges, whatever it reads itself.

*No deadlock.* A program waits only for the same head and tile of another rank: of the rank before,
in the same exchange, or of the next rank, in an earlier exchange. Order the programs of all ranks
by exchange, then by rank in the direction of the states: each waits only for some that come before
it. A GPU runs the exchanges of a group one after the other (`Mailboxes`), and programs of one
exchange never wait for others on their GPU, so it does not matter which of them find room first.
There are fewer programs than SMs, so that other kernels find room while programs wait.

*Visibility.* All threads write a tile. After a barrier, one thread sets the flag with a release of
system scope. One thread reads the flag with an acquire of system scope. After a barrier, all
threads read the tile, past the L1 cache.

*A rank that never comes.* A wait ends after WAIT_SECONDS in a trap, which CUDA reports as a failed
launch. The limit is long, because a rank may be writing a checkpoint. The trainer ends a hung run
much sooner (train/watch.py).
"""

import os
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from fla_cp.comm.affine import PeerFold
from fla_cp.comm.peer_memory import Mailbox
from fla_cp.kernels.triton import fold as folds
from fla_cp.kernels.triton.device.blocks import dot
from fla_cp.kernels.triton.device.bundles import constants, state
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import power_of_two, sm_count

ENABLED = os.environ.get("FLA_CP_EXCHANGE_KERNEL", "1") != "0"
"""Whether the Triton backend passes states on with this kernel. FLA_CP_EXCHANGE_KERNEL=0 in the
environment turns it off; ranks then read their peers' maps."""

WAIT_SECONDS = 7200
"""The longest wait of a program."""

LIMIT_NS = tl.constexpr(WAIT_SECONDS * 10**9)


@triton.jit
def trap():
    """Ends the kernel with an error."""
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def seen(flag):
    """The number in a flag that another GPU sets."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def wait_for(flag, number):
    """Waits until `flag` has reached `number`. What was written before is then visible."""
    behind = seen(flag) - number < 0  # also after an overflow of the numbers
    if behind:
        start = globaltimer()
        while behind:
            if globaltimer() - start > LIMIT_NS:
                trap()
            behind = seen(flag) - number < 0
    tl.debug_barrier()


@triton.jit
def tell(flag, number):
    """Sets a flag of another rank, once all threads have written and read what belongs to it."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def load_map(x, i_h, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    """A tile of the matrix [R, C] of head i_h of State x, zero beyond its edges."""
    p = x.ptr + i_h * x.h + o_r[:, None] * x.k + o_c[None, :] * x.v
    return tl.load(p, mask=(o_r < R)[:, None] & (o_c < C)[None, :], other=0.0)


@triton.jit
def load_arrived(p):
    """What another GPU has written. The L1 cache may hold what was there before."""
    return tl.load(p, volatile=True)


@constants
class ExchangeShape(NamedTuple):
    """HV, K, V: value heads and dims. BR: rows of a block of states. BK: columns of a block of
    transitions. BV: columns of a tile."""

    HV: int
    K: int
    V: int
    BR: int
    BK: int
    BV: int


@triton.jit
def exchange_kernel(M, B, out, crossing, mail, S: tl.constexpr):
    """M, B: State [1, HV, K, K] and [1, HV, K, V]; M.ptr is None if no state passes through.
    out [HV, K, V]. crossing int32 [3]: whether a state enters this rank, leaves it, and passes
    through it. mail: a Mailbox, whose states are tiles [blocks * BR, BV]."""
    tiles: tl.constexpr = (S.V + S.BV - 1) // S.BV
    blocks: tl.constexpr = (S.K + S.BR - 1) // S.BR
    steps: tl.constexpr = (S.K + S.BK - 1) // S.BK
    o_b, o_k, o_t = tl.arange(0, S.BR), tl.arange(0, S.BK), tl.arange(0, S.BV)
    # of the first and the last rank, only what can be is compiled
    BEFORE: tl.constexpr = mail.inbox is not None
    NEXT: tl.constexpr = mail.next_inbox is not None
    MAPS: tl.constexpr = BEFORE and NEXT and M.ptr is not None
    enters, leaves = tl.load(crossing) != 0, tl.load(crossing + 1) != 0
    through = tl.load(crossing + 2) != 0
    first, apart = tl.program_id(0), tl.num_programs(0)
    for n in range(tl.cdiv(S.HV * tiles - first, apart)):
        i = first + n * apart
        i_h, o_v = (i // tiles).to(tl.int64), i % tiles * S.BV + o_t
        number = tl.load(mail.number + i) + 1
        place = ((number & 1) * (S.HV * tiles) + i).to(tl.int64) * (blocks * S.BR * S.BV)
        o_p = place + o_b[:, None] * S.BV + o_t[None, :]
        if NEXT and leaves:
            wait_for(mail.read + i, number - 2)
            if MAPS and through:
                o_s = place + o_k[:, None] * S.BV + o_t[None, :]
                for r in tl.range(blocks, disable_licm=True):
                    o_r = r * S.BR + o_b
                    acc = load_map(B, i_h, o_r, o_v, S.K, S.V)
                    maps = ()
                    for c in tl.static_range(steps):
                        maps += (load_map(M, i_h, o_r, c * S.BK + o_k, S.K, S.K),)
                    if r == 0:  # the first transition is loaded while the state is on its way
                        wait_for(mail.arrived + i, number)
                    for c in tl.static_range(steps):
                        if c % 2 == 0:  # two loads at a time; more would need too many registers
                            states = (load_arrived(mail.inbox + o_s + c * (S.BK * S.BV)),)
                            if c + 1 < steps:
                                p = mail.inbox + o_s + (c + 1) * (S.BK * S.BV)
                                states += (load_arrived(p),)
                        acc = dot(maps[c], states[c % 2], "tf32x3", acc=acc)
                    tl.store(mail.next_inbox + o_p + r * (S.BR * S.BV), acc)
            else:
                for r in range(blocks):
                    b_B = load_map(B, i_h, r * S.BR + o_b, o_v, S.K, S.V)
                    tl.store(mail.next_inbox + o_p + r * (S.BR * S.BV), b_B)
            tell(mail.next_arrived + i, number)
        if BEFORE and enters:
            wait_for(mail.arrived + i, number)
        for r in range(blocks):
            o_r = r * S.BR + o_b
            b_S = tl.zeros([S.BR, S.BV], tl.float32)
            if BEFORE and enters:
                b_S = load_arrived(mail.inbox + o_p + r * (S.BR * S.BV))
            p = out + i_h * (S.K * S.V) + o_r[:, None] * S.V + o_v[None, :]
            tl.store(p, b_S, mask=(o_r < S.K)[:, None] & (o_v < S.V)[None, :])
        if BEFORE:
            tell(mail.previous_read + i, number)
        tl.debug_barrier()  # all threads have loaded the number
        tl.store(mail.number + i, number)


ROWS, COLUMNS, WARPS, APART = 64, 32, 4, 2
"""Rows of a block of states, columns of a tile, warps of a program, and how many SMs there are for
each program. A program that waits holds its registers, so it should be small. One that takes
several tiles sends the first while the next rank works on none yet, so few programs lose little."""


def _tile(K: int, V: int) -> tuple[int, int, int]:
    """BR, BK and BV. Products are formed in the order of fold.py, so that results are equal."""
    k = power_of_two(K)
    columns = COLUMNS if k <= 128 else 16  # a wider tile would spill registers
    return min(ROWS, k), min(64, k), min(columns, power_of_two(V))


def room(HV: int, K: int, V: int) -> tuple[int, int]:
    """The elements of one state in a mailbox, and its tiles."""
    BR, _, BV = _tile(K, V)
    tiles = HV * cdiv(V, BV)
    return tiles * cdiv(K, BR) * BR * BV, tiles


def pass_on(
    transition: Tensor | None, offset: Tensor, crossing: Tensor, mail: Mailbox, out: Tensor
) -> None:
    """Runs this rank's part of an exchange: writes out [1, HV, K, V] fp32, the state that enters.

    transition [1, HV, K, K], offset [1, HV, K, V]: this rank's map, fp32, with any strides.
    crossing int32 [3]: see `exchange_kernel`. mail: for as many tiles as `room` says.
    """
    _, HV, K, V = offset.shape
    BR, BK, BV = _tile(K, V)
    tiles = HV * cdiv(V, BV)
    grid = (min(tiles, sm_count(out.device) // APART or tiles),)
    S = ExchangeShape(HV, K, V, BR, BK, BV)
    compiled = {"num_warps": WARPS if BR == ROWS else 4, "num_stages": 1}
    launch(
        exchange_kernel, grid, state(transition), state(offset), out, crossing, mail, S, **compiled
    )


fold = PeerFold(folds.fold, room, pass_on)
"""The backend's fold."""
