"""The backward of the channelwise local stage in Gluon, for calls with any gate.

Such a call has two kernels, like its forward. The first one is that of a safe gate, in
intra_channelwise_bwd.py; here it leaves out the chunks and heads that the forward marked as too
steep for it. The second one, in triton/intra_channelwise_bwd.py, serves just those.

With a reference for each quarter (intra_channelwise_bwd_quarters.py) the first kernel serves many
of those, too. Then the backward has marks of its own, for all of its kernels.

Both write parts of dbeta and dA_log, one for each of their key tiles, of which the second kernel
has more. Parts of dbeta share their places. Of dA_log each kernel has its own, and sets to zero
those of the chunks that it leaves out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_cp.kernels.sm90.intra_channelwise import SLAB
from fla_cp.kernels.sm90.intra_channelwise_bwd import safe_bwd_sm90_kernel as safe_bwd_of_chunk
from fla_cp.kernels.sm90.intra_channelwise_bwd import why_not_bwd
from fla_cp.kernels.sm90.intra_channelwise_bwd_quarters import mark_sm90_kernel
from fla_cp.kernels.sm90.programs import chunk_and_head
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.bundles import Grads, RuleOptions, Saved, gate, shape
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables
from fla_cp.kernels.triton.tile_table import Tile


@gluon.jit
def safe_bwd_any_sm90_kernel(x, gate, out, chunks, tokens, scale, S: gl.constexpr, R: gl.constexpr):
    """`safe_bwd_sm90_kernel` for the chunks that are not marked in x.steep."""
    tiles: gl.constexpr = S.K // SLAB
    i_k = gl.program_id(0) % tiles
    i_c, i_hv = chunk_and_head(gl.program_id(0) // tiles, S.HV)
    if gl.load(x.steep + (i_c * S.HV + i_hv)) != 0:
        if out.dA_log is not None:
            gl.store(out.dA_log + ((i_c * tiles + i_k) * S.HV + i_hv), 0.0)
        return
    safe_bwd_of_chunk(x, gate, out, chunks, tokens, scale, S, R)


def marked(read: Saved, c: Chunks, t: Tile) -> Saved:
    """What the kernels read, with the marks of the chunks that the one with tile t leaves out."""
    if t.stages == 1:
        return read
    (NC, HV, K), marks = c.decay.shape, c.steep.new_empty(c.steep.shape)
    launch(mark_sm90_kernel, (NC, HV), c.anchors, marks, HV=HV, K=K, num_warps=4)
    return read._replace(steep=marks)


def safe_bwd(
    table: Tables, x: Inputs, c: Chunks, read: Saved, out: Grads, t: Tile, R: RuleOptions
) -> Grads:
    """Launches the kernel. Its parts of dA_log are the first ones of out.dA_log; the result is what
    the kernel of the other chunks writes. Raises ValueError for chunks that the kernel does not
    support."""
    (NC, HV, K), H, V, rule = c.decay.shape, x.q.shape[1], x.v.shape[2], c.rule
    reason = why_not_bwd(x, c, read.do, R)
    if t.BK != 64:
        reason = f"BK must be 64, got {t.BK}"
    if reason:
        raise ValueError(f"the tile {t} of stage intra_bwd cannot be used: {reason}")
    S = shape(rule, x.q.dtype, H, HV, K, V, t)
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    programs, own, others = NC * (K // t.BK), out.dA_log, out.dA_log
    if own is not None:
        own, others = own[:programs], own[programs:]
    given = read, gate(rule, x), out._replace(dA_log=own), table.chunks, out.shares.shape[1]
    launch(safe_bwd_any_sm90_kernel, (programs * HV,), *given, rule.scale, **compiled)
    return out._replace(dA_log=others)
