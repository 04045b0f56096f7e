"""Results of the scans in shared memory, and their copies from there to the memory of the GPU.

Copies are started by the warp that copies operands. If a computing warp did it, it would be late by
600 of a chunk's 2600 cycles, and all others would wait for it. Only the scans that gate their
operands have no such warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fla_cp.kernels.sm90.tma import barrier


@gluon.constexpr_function
def result_places(S, operands, o, h, v_new):
    """For the results of how many chunks there is shared memory beside the operands, of `operands`
    bytes a chunk. With two, the copies of one chunk's results need not end before the next one's
    are written. o, h, v_new: whether they are wanted."""
    most = 225 * 1024  # what a program may have, less its barriers
    per_chunk = 2 * S.BV * (S.BT * (o + v_new) + S.K * h)
    return 2 if S.NS * operands + 2 * per_chunk <= most else 1


@gluon.jit
def places_of_results(o, h, v_new, P: gl.constexpr, S: gl.constexpr):
    """P places in shared memory for the results of a chunk, each of which may be None, and two
    barriers for each place: one says that it is written, the other that it is copied from."""
    written = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(P):
        mbarrier.init(written.index(i), count=1)
        mbarrier.init(drained.index(i), count=1)
    s_o, s_h, s_n = written, written, written  # of what is None, in place of nothing
    if o is not None:
        s_o = gl.allocate_shared_memory(o.dtype, [P, S.BT, S.BV], o.layout)
    if h is not None:
        s_h = gl.allocate_shared_memory(h.dtype, [P, S.K, S.BV], h.layout)
    if v_new is not None:
        s_n = gl.allocate_shared_memory(v_new.dtype, [P, S.BT, S.BV], v_new.layout)
    return (s_o, s_h, s_n), (written, drained)


@gluon.jit
def has_results(results):
    """Whether a scan has any, apart from its last state."""
    return (results[0][0] is not None) or (results[0][1] is not None) or (results[0][2] is not None)


@gluon.jit
def wait_until_drained(c, results, copies):
    """Waits until what was in the places of chunk c's results is copied. copies: see
    `scan_chunks`."""
    if copies is None:
        drained = results[2][1]
        P: gl.constexpr = drained.shape[0]
        mbarrier.wait(drained.index(c % P), (c // P + 1) & 1)
    else:
        tma.store_wait(0)
        barrier()


@gluon.jit
def hand_over(c, results, copies, at, REVERSE: gl.constexpr, S: gl.constexpr):
    """Lets the results of a chunk be copied, once all warps have written them."""
    fence_async_shared()
    barrier()
    if copies is None:
        written = results[2][0]
        mbarrier.arrive(written.index(c % written.shape[0]), count=1)
    else:
        store_results(c, results, at, REVERSE, S)


@gluon.jit
def store_results(c, results, at, REVERSE: gl.constexpr, S: gl.constexpr):
    """Starts the copies of the results of the c-th chunk to where they belong."""
    o, h, v_new = results[0]
    s_o, s_h, s_n = results[1]
    p = c % results[2][0].shape[0]
    i_c = c
    if REVERSE:
        i_c = at.n - 1 - c
    t = at.start + i_c * S.BT
    i_ch = (at.first + i_c) * S.HV + at.i_h
    if o is not None:  # noqa: SIM102  # known when compiled
        if t + S.BT <= at.stop:  # rows of another sequence follow otherwise
            tma.async_copy_shared_to_global(o, [t, at.i_h * S.V + at.i_v * S.BV], s_o.index(p))
    if h is not None:
        tma.async_copy_shared_to_global(h, [i_ch * S.K, at.i_v * S.BV], s_h.index(p))
    if v_new is not None:
        tma.async_copy_shared_to_global(v_new, [i_ch * S.BT, at.i_v * S.BV], s_n.index(p))
