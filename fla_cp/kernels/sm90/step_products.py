"""Products of rows with one vector on tensor cores.

Row g of the first operand of an instruction is what the four threads 4 g to 4 g + 3 hold of a row,
and column g of the second one is what they hold of the vector. So of the products of all pairs of
fours, those of a four with itself are wanted. Threads can keep any columns, and need not exchange
any. Each thread gives words of two rows at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pairs_of_rows(x):
    """In each row, the elements with even numbers, and those with odd ones."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def products(acc, w, x, L: gl.constexpr):
    """acc and the products of words w [R, n] with words x [n] of two numbers in bf16. L: the layout
    of acc [R, n], two neighbours in a row and an even number of rows in a thread. What belongs to
    the sum of a row is `wanted`."""
    w = gl.convert_layout(w, L, assert_trivial=True)
    x = gl.convert_layout(x, gl.SliceLayout(0, L), assert_trivial=True)[None, :]
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$8, $10, $9, $11}, "
        "{$12, $13}, {$4, $5, $6, $7};",
        "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r,r,r", [acc, w, x],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def wanted(acc, L: gl.constexpr):
    """The products in acc of what the same four threads hold, and zeros."""
    lane = gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r,f", [acc], dtype=gl.int32, is_pure=True, pack=1
    )
    odd = gl.arange(0, acc.shape[1], gl.SliceLayout(0, L)) % 2
    return gl.where(lane // 4 == lane % 4 * 2 + odd[None, :], acc, 0.0)
