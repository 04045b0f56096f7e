"""The table of addresses of the kernel in step_layers.py, and the words by which its programs hand
results to each other.

A word has 64 bits. The lower half holds two neighbouring numbers in bf16, or one in fp32. The upper
half holds an epoch: the number of the layer, counted through all steps. Memory is written and read
in whole words, so a program that finds the epoch it expects also finds the numbers that belong to
it. It needs no other signal, and nothing has to be cleared before the next step.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_cp.kernels.triton.device.gates import LOG2E

FIELDS = gl.constexpr(16)
"""Addresses of a layer in the table, of which the last one is not used."""

INTO, OUT, UP, DOWN = (gl.constexpr(n) for n in range(4))
"""Fields of the large weights, in the order in which a layer needs them; then come `Places`."""

SEGMENT = gl.constexpr(64)
"""Words of each of the inputs of a head: q, k, decay, gate, v and beta."""

LIMIT = gl.constexpr(1 << 22)
"""How often a program reads words before it ends the kernel with an error: after some seconds. A
correct kernel never gets there; it turns an endless wait into an error that the host sees."""

PAUSE = gl.constexpr(40)
"""Nanoseconds between two reads of words that have not arrived. All programs read at once, and
without a pause they slow down those that still compute."""


class Places(NamedTuple):
    """Where a layer's tensors are, except for the large weights: addresses in units of 16 bytes, so
    that the compiler knows their alignment."""

    decay: gl.tensor
    gate: gl.tensor
    norm: gl.tensor
    ffn_norm: gl.tensor
    window: gl.tensor
    taps: gl.tensor
    state: gl.tensor
    A_log: gl.tensor
    dt_bias: gl.tensor
    o_norm: gl.tensor
    gate_bias: gl.tensor


class Words(NamedTuple):
    """Where the phases leave their results, as words of two numbers.

    projected: [N / 2]. mixed: [H * V / 2], then [H * SPLIT] sums of squares in fp32. middle:
    [C / 2], the residual stream between mixer and SwiGLU. inner: [F / 2]. stream: [C / 2], the
    residual stream behind the layer.
    """

    projected: gl.tensor
    mixed: gl.tensor
    middle: gl.tensor
    inner: gl.tensor
    stream: gl.tensor


@gluon.jit
def at_address(address, dtype: gl.constexpr):
    """A pointer to dtype at an address, which is a multiple of 16 bytes."""
    return gl.multiple_of(address.to(gl.pointer_type(dtype)), 16)


@gluon.jit
def load_places(table, i):
    """Where the tensors of layer i are, all loaded at once."""
    p = table + i * FIELDS + 4
    return Places(
        gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3), gl.load(p + 4), gl.load(p + 5),
        gl.load(p + 6), gl.load(p + 7), gl.load(p + 8), gl.load(p + 9), gl.load(p + 10),
    )  # fmt: skip


@gluon.jit
def place(units, dtype: gl.constexpr):
    """A pointer to dtype at a member of `Places`."""
    return at_address(units * 16, dtype)


@gluon.jit
def share(i_p, UNITS: gl.constexpr, P: gl.constexpr):
    """The first unit of program i_p and the one after its last."""
    return i_p * UNITS // P, (i_p + 1) * UNITS // P


@gluon.jit
def single(bits):
    """The number in fp32 that has these bits."""
    return gl.cast(bits.to(gl.int32), gl.float32, bitcast=True)


@gluon.jit
def halves(words):
    """The two numbers of words in fp32, the lower half first."""
    return single(words << 16), single((words >> 16) << 16)


@gluon.jit
def nth(words, n: gl.constexpr):
    """The n-th of the four numbers of words of 64 bits."""
    return single((words >> (16 * n)) << 16)


@gluon.jit
def bits_of(x):
    """x in bf16, as bits 16 to 31 of int64, with its sign above."""
    return gl.cast(x.to(gl.bfloat16).to(gl.float32), gl.int32, bitcast=True).to(gl.int64)


@gluon.jit
def packed(a, b):
    """a and b in bf16, as a word of 32 bits."""
    a = gl.cast(a.to(gl.bfloat16).to(gl.float32), gl.int32, bitcast=True)
    b = gl.cast(b.to(gl.bfloat16).to(gl.float32), gl.int32, bitcast=True)
    return ((a >> 16) & 0xFFFF) | (b & -65536)


@gluon.jit
def marked(low, epoch):
    """Words of 32 bits and an epoch."""
    return (low.to(gl.int64) & 0xFFFFFFFF) | (epoch.to(gl.int64) << 32)


@gluon.constexpr_function
def polling(n, vectors):
    """PTX that reads n words until all have the epoch, and reads only those again that have not.
    vectors: two words each are next to each other."""
    step = 2 if vectors else 1
    lines = ["{", ".reg .pred again, late, old;", ".reg .b32 low, high, missing, rounds;"]
    lines += ["mov.u32 rounds, 0;", *(f"mov.b64 ${i}, 0;" for i in range(n)), "READ:"]
    for i in range(0, n, step):
        lines += ["mov.u32 missing, 0;", *of_words(range(i, i + step), n)]
        lines += ["setp.ne.u32 old, missing, 0;"]
        found = f"v2.b64 {{${i}, ${i + 1}}}" if vectors else f"b64 ${i}"
        lines += [f"@old ld.relaxed.gpu.global.{found}, [${n + i}];"]
    lines += ["mov.u32 missing, 0;", *of_words(range(n), n)]
    lines += ["add.u32 rounds, rounds, 1;", f"setp.gt.u32 late, rounds, {LIMIT.value};"]
    lines += [
        "@late trap;",
        "setp.ne.u32 again, missing, 0;",
        f"@again nanosleep.u32 {PAUSE.value};",
        "@again bra READ;",
        "}",
    ]
    return "\n".join(lines)


@gluon.constexpr_function
def of_words(words, n):
    """PTX that adds to `missing` what of the words' epochs differs."""
    return [
        line
        for i in words
        for line in (
            f"mov.b64 {{low, high}}, ${i};",
            f"xor.b32 high, high, ${2 * n};",
            "or.b32 missing, missing, high;",
        )
    ]


@gluon.constexpr_function
def polled_operands(n):
    return ",".join(["=&l"] * n + ["l"] * n + ["r"] * n)


@gluon.jit
def arrived(p, epoch, HELD: gl.constexpr, VECTORS: gl.constexpr):
    """The words at p, once each has the epoch; every one of them must be written in it.

    Each thread waits for the words that it holds. Several threads may hold the same word, and may
    have read it at different times, so no thread can wait for another one. HELD: how many words a
    thread holds. VECTORS: whether they are next to each other in pairs and aligned to 16 bytes."""
    return gl.inline_asm_elementwise(
        polling(HELD, VECTORS), polled_operands(HELD), [p, epoch],
        dtype=gl.int64, is_pure=False, pack=HELD,
    )  # fmt: skip


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in two fast instructions; 0 where exp(-x) overflows."""
    root = gl.rsqrt(1.0 + gl.exp2(x * -LOG2E))
    return root * root


@gluon.jit
def pairs(x):
    """The elements with even numbers, and those with odd ones."""
    return gl.split(gl.reshape(x, [x.shape[0] // 2, 2]))
