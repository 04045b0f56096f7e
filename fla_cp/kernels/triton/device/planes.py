"""Planes of `Chunks.rows` and of the row gradients: one number for each row of a chunk.

`Chunks.rows` is [NC, HV, planes, C], fp32. With one decay a channel it has the first three planes,
with one decay a head all nine. r is what reads the state: k, or Comba's p. gc is the sum of log
decays from the start of the chunk up to a row, with it.
"""

import triton.language as tl

CHANNELWISE_PLANES = tl.constexpr(3)
HEADWISE_PLANES = tl.constexpr(9)

BETA = tl.constexpr(0)
"""Beta after its sigmoid; 1 where the operator has none."""
Q_SCALE = tl.constexpr(1)
"""What q is multiplied by: the scale, and 1 / |q| where the operator normalises."""
K_SCALE = tl.constexpr(2)
"""What k is multiplied by."""
R_SCALE = tl.constexpr(3)
"""What r is multiplied by."""
Q_FACTOR = tl.constexpr(4)
"""Q_SCALE times the decay from the start of the chunk."""
R_FACTOR = tl.constexpr(5)
"""R_SCALE times the decay from the start of the chunk; with p up to the row before."""
K_FACTOR = tl.constexpr(6)
"""K_SCALE times the decay to the end of the chunk."""
GC = tl.constexpr(7)
"""gc of the row."""
GC_BEFORE = tl.constexpr(8)
"""gc of the row before; without p that of the row."""

GRAD_PLANES = tl.constexpr(3)
DIAGONAL = tl.constexpr(0)
"""The diagonal of dAqk; with one decay a head it is multiplied by the scales of q and k."""
Q_DQ = tl.constexpr(1)
"""q dq, summed over channels."""
K_DK = tl.constexpr(2)
"""k dk, summed over channels."""
