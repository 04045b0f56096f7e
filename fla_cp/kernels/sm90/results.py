"""Results of the scans in shared memory, and their copies from there to the memory of the GPU.

Copies are started by the warp that copies operands. If a computing warp did it, it would be late by
600 of a chunk's 2600 cycles, and all others would wait for it. Only the scans that gate their
operands have no such warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fla_cp.kernels.sm90.tma import barrier


@gluon.jit
def places_of_results(o, h, v_new, nothing, S: gl.constexpr):
    """Places in shared memory for the results of a chunk; `nothing`, any other place, for those
    that are None."""
    s_o, s_h, s_n = nothing, nothing, nothing
    if o is not None:
        s_o = gl.allocate_shared_memory(o.dtype, [S.BT, S.BV], o.layout)
    if h is not None:
        s_h = gl.allocate_shared_memory(h.dtype, [S.K, S.BV], h.layout)
    if v_new is not None:
        s_n = gl.allocate_shared_memory(v_new.dtype, [S.BT, S.BV], v_new.layout)
    return s_o, s_h, s_n


@gluon.jit
def flags_of_results():
    """Two barriers: one says that the places are written, the other that they are copied from.

    Only kernels that wait for them may have them. The memory of a barrier that nobody uses is given
    to other data, which change if the GPU turns to another process in the meantime."""
    written = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(written.index(0), count=1)
    mbarrier.init(drained.index(0), count=1)
    return written, drained


@gluon.jit
def has_results(results):
    """Whether a scan has any, apart from its last state."""
    return (results[0][0] is not None) or (results[0][1] is not None) or (results[0][2] is not None)


@gluon.jit
def wait_until_drained(c, results, copies):
    """Waits until the results of the chunk before are copied. copies: see `scan_chunks`."""
    if copies is None:
        mbarrier.wait(results[2][1].index(0), (c + 1) & 1)
    else:
        tma.store_wait(0)
        barrier()


@gluon.jit
def hand_over(c, results, copies, at, REVERSE: gl.constexpr, S: gl.constexpr):
    """Lets the results of a chunk be copied, once all warps have written them."""
    fence_async_shared()
    barrier()
    if copies is None:
        mbarrier.arrive(results[2][0].index(0), count=1)
    else:
        store_results(c, results, at, REVERSE, S)


@gluon.jit
def store_results(c, results, at, REVERSE: gl.constexpr, S: gl.constexpr):
    """Starts the copies of the results of the c-th chunk to where they belong."""
    o, h, v_new = results[0]
    s_o, s_h, s_n = results[1]
    i_c = c
    if REVERSE:
        i_c = at.n - 1 - c
    t = at.start + i_c * S.BT
    i_ch = (at.first + i_c) * S.HV + at.i_h
    if o is not None:  # noqa: SIM102  # known when compiled
        if t + S.BT <= at.stop:  # rows of another sequence follow otherwise
            tma.async_copy_shared_to_global(o, [t, at.i_h * S.V + at.i_v * S.BV], s_o)
    if h is not None:
        tma.async_copy_shared_to_global(h, [i_ch * S.K, at.i_v * S.BV], s_h)
    if v_new is not None:
        tma.async_copy_shared_to_global(v_new, [i_ch * S.BT, at.i_v * S.BV], s_n)
