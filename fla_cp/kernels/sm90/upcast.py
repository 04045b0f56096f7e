"""The conversion of tiles in half precision to fp32."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def upcast(x):
    """x in fp32. A register holds two numbers in bf16, and the compiler takes three instructions to
    convert them; here it is one each. A thread must have neighbouring elements in pairs."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)
