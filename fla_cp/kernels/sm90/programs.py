"""Which chunk and head a program of a local stage works on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def chunk_and_head(i, HEADS: gl.constexpr):
    """The chunk and the head of program i. Heads of a chunk are neighbours, like their rows in
    memory: programs that run at the same time read whole rows of q, k and g, not pieces of one
    head that lie far apart. One H200 is 3% faster by that in KDA's forward, 2% in both directions.
    """
    return (i // HEADS).to(gl.int64), (i % HEADS).to(gl.int64)
