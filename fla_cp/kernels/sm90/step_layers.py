"""A decoding step of one sequence through a run of layers as one kernel, for sm_90, in Gluon.

With one sequence, a step takes as long as its weights take to be read, if memory is never idle. A
step of several kernels leaves it idle whenever one ends and the next one starts. Here one program
on each SM runs all layers. A layer has five phases:

1. `project`: norm, all projections, and the convolution of q, k and v,
2. `mix`: the recurrence of each head (step_mix.py),
3. `add`: the gated norm, the output projection, and the sum with the residual stream,
4. `expand`: norm, gate and up, and SwiGLU,
5. `add`: the last product, and the sum with the residual stream.

Each program has its share of the rows of every weight, in order, and of the heads.

*Weights.* All tiles of weights that a program reads, of all layers, are one sequence. It copies
them into a ring of buffers in shared memory, and starts a copy as soon as a buffer is free,
whatever the phase. So memory stays busy while programs wait for each other. A thread gives the
tensor cores the words that it copied itself (step_products.py); sums over threads are formed once a
row.

*Words instead of barriers.* A phase leaves its results in memory as words with an epoch
(step_words.py). A program that needs them reads them until all have the epoch of this layer.
Numbers and epoch arrive together, so there are no fences and no barriers of the grid, and a program
waits only for what it reads. The epoch counts layers of all steps. It is kept in memory, so that a
replayed CUDA graph goes on counting.

*Why it ends.* A program waits only for results of the phase before, and each program finishes a
phase without waiting for anything else. So some program can always go on, if all of them run at the
same time. A cooperative launch ensures that: there are at most as many programs as SMs, one fits on
each, and the launch fails or waits where the GPU has no room for all of them at once.

*Why words can be overwritten.* All layers share the words of a phase. The results of the last three
phases are needed by all programs, and each program forms some of them. A program that has all
results of one of these phases therefore knows that all programs have finished the phase before, and
have read all that they read there. Between two writes of the same words lies at least one such
phase.

*Phases apart.* `span` names the layers and phases of a launch. With one phase a launch no program
waits for another one, as tests need it where programs run one after the other.

step_run.py says which layers are run so; all others run as kernels/triton/decoding.py has it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from fla_cp.kernels.sm90.step_layouts import (
    VECTOR,
    flat,
    held,
    held_matrix,
    lanes,
    matrix,
    max_of,
    over,
    padded,
    power,
    rows_layout,
    sums_layout,
    tile_layout,
)
from fla_cp.kernels.sm90.step_mix import mix
from fla_cp.kernels.sm90.step_products import pairs_of_rows, products, wanted
from fla_cp.kernels.sm90.step_words import (
    DOWN,
    FIELDS,
    INTO,
    OUT,
    SEGMENT,
    UP,
    Words,
    arrived,
    at_address,
    bits_of,
    halves,
    load_places,
    marked,
    nth,
    packed,
    pairs,
    place,
    share,
    sigmoid,
    single,
)


class Tile(NamedTuple):
    """The tile that a program copies next: its layer i, weight and chunk of columns; how many
    results are left from its first row to the last one of the program; and the address of its first
    row, in units of 16 bytes."""

    i: gl.tensor
    kind: gl.tensor
    chunk: gl.tensor
    left: gl.tensor
    at: gl.tensor


class Copies(NamedTuple):
    """What a program copies: the layer after the last one, the first weight of a layer and the one
    after the last, the slot that gets the next tile, and that tile."""

    stop: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    slot: gl.tensor
    tile: Tile


# Copies of weights


@gluon.jit
def width(kind, S: gl.constexpr):
    """Columns of a weight, in units of 16 bytes."""
    inner = gl.where(kind == DOWN, S.F // 8, S.C // 8)
    return gl.where(kind == OUT, S.H * S.V // 8, inner)


@gluon.jit
def first_tile(i, kind, table, i_p, S: gl.constexpr):
    """The first tile of this program's share of a weight."""
    units = gl.where(kind == INTO, S.N // 2, gl.where(kind == UP, S.F // 2, S.C // 2))
    lo, hi = share(i_p, units, S.P)
    at = gl.load(table + i * FIELDS + kind) + (2 * lo).to(gl.int64) * width(kind, S)
    return Tile(i, kind, i * 0, 2 * (hi - lo), at)


@gluon.jit
def start_copy(ring, table, copies, i_p, S: gl.constexpr):
    """The copies that are left once that of the next tile has been started, if there is one. In its
    slot, rows of gate and up alternate."""
    L: gl.constexpr = tile_layout(S)
    tile = copies.tile
    i, kind, chunk, left, at = tile.i, tile.kind, tile.chunk, tile.left, tile.at
    if i < copies.stop:
        size, gated = width(kind, S), (kind == UP).to(gl.int32)
        r = gl.arange(0, S.ROWS, gl.SliceLayout(1, L))
        c = chunk * (S.COLUMNS // 2) + gl.arange(0, S.COLUMNS // 2, gl.SliceLayout(0, L))
        row = r >> gated
        p_r = at_address(at * 16, gl.int32) + (row * size * 4 + (r & gated) * (S.F * S.C // 2))
        mask = (row < left)[:, None] & (c < size * 4)[None, :]
        slot = ring.index(copies.slot)
        async_copy.async_copy_global_to_shared(slot, p_r[:, None] + c[None, :], mask=mask)
        chunk = chunk + 1
        if chunk * S.COLUMNS >= size * 8:
            chunk = chunk * 0
            rows = S.ROWS >> gated
            at = at + (rows * size).to(gl.int64)
            left = left - rows
            if left <= 0:
                kind = kind + 1
                if kind == copies.end:
                    kind, i = copies.begin, i + 1
                behind = first_tile(gl.minimum(i, copies.stop - 1), kind, table, i_p, S)
                left, at = behind.left, behind.at
    async_copy.commit_group()
    return following(copies, Tile(i, kind, chunk, left, at), S)


@gluon.jit
def following(copies, tile, S: gl.constexpr):
    """The copies that continue with `tile`, in the slot behind."""
    slot = gl.where(copies.slot == S.SLOTS - 1, 0, copies.slot + 1)
    return Copies(copies.stop, copies.begin, copies.end, slot, tile)


@gluon.jit
def tiles_of(i_p, ROWS: gl.constexpr, C: gl.constexpr, PER: gl.constexpr, S: gl.constexpr):
    """How many tiles a program reads of a weight. PER: results of a tile."""
    lo, hi = share(i_p, ROWS // 2, S.P)
    return (2 * (hi - lo) + PER - 1) // PER * over(C, S.COLUMNS)


# Inputs of the phases


@gluon.jit
def leave(xs, words):
    """Leaves words of two numbers in shared memory."""
    xs.slice(0, words.shape[0]).store(words.to(gl.int32))


@gluon.jit
def load_norm(at, S: gl.constexpr):
    """The weight of a norm, [C / 2] words of two numbers, and zeros behind."""
    i_w = gl.arange(0, padded(S.C, S) // 2, flat(2, S.WARPS))
    return gl.load(place(at, gl.int32) + i_w, mask=i_w < S.C // 2, other=0)


@gluon.jit
def normed(stream, norm, epoch, xs, squares, S: gl.constexpr):
    """Waits for the residual stream. Leaves its product with the weight of a norm in xs, and the
    sums of its squares over the columns of each warp in squares."""
    SIZE: gl.constexpr = padded(S.C, S) // 2
    i_w = gl.arange(0, SIZE, flat(2, S.WARPS))
    m_w = i_w < S.C // 2
    n_0, n_1 = halves(norm)
    p = stream + within(i_w, S.C // 2)
    x_0, x_1 = halves(gl.where(m_w, arrived(p, epoch, held(SIZE, S.WARPS), True), 0))
    leave(xs, packed(x_0 * n_0, x_1 * n_1))
    squares.store(sums_of_warps(x_0 * x_0 + x_1 * x_1, S))


@gluon.jit
def sums_of_warps(x, S: gl.constexpr):
    """Sums of x, in the layout flat(2, ..), over what each warp holds."""
    LAST: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 1, 32], [1, S.WARPS, 1], [2, 1, 0])
    n: gl.constexpr = max_of(x.shape[0] // (64 * S.WARPS), 1)
    HELD: gl.constexpr = x.shape[0] // (n * S.WARPS)
    rows = gl.convert_layout(gl.reshape(x, [n, S.WARPS, HELD]), LAST)
    return gl.sum(gl.sum(rows, 2), 0)


@gluon.jit
def factor_of(squares, eps, S: gl.constexpr):
    """1 / rms of the residual stream, from the sums that `normed` has left."""
    return gl.rsqrt(gl.sum(squares.load(flat(1, S.WARPS)), 0) / S.C + eps)


@gluon.jit
def within(i, SIZE: gl.constexpr):
    """i, or a smaller number below an even SIZE that is odd if i is."""
    return gl.where(i < SIZE, i, i & 1)


@gluon.jit
def normed_heads(mixed, epoch, eps, xs, S: gl.constexpr):
    """Waits for the output of all heads, and leaves it in xs, divided by the rms of each head."""
    L: gl.constexpr = matrix(S.V // 2, 2, S.WARPS)
    HELD: gl.constexpr = held_matrix(S.H, S.V // 2, 2, S.WARPS)
    i_h, i_w = gl.arange(0, S.H, gl.SliceLayout(1, L)), gl.arange(0, S.V // 2, gl.SliceLayout(0, L))
    p = (mixed + i_h * (S.V // 2))[:, None] + i_w[None, :]
    p_s = (mixed + S.H * S.V // 2 + i_h * S.SPLIT)[:, None] + (i_w % S.SPLIT)[None, :]
    found, squares = gl.split(arrived(gl.join(p, p_s), epoch, 2 * HELD, False))
    mean = gl.sum(single(squares), 1) / (S.V * S.V // 2 // S.SPLIT)
    factor = gl.rsqrt(mean + eps)[:, None]
    x_0, x_1 = halves(found)
    SIZE: gl.constexpr = S.H * S.V // 2
    leave(xs, gl.reshape(packed(x_0 * factor, x_1 * factor), [SIZE]))


@gluon.jit
def unnormed(inner, epoch, ys, S: gl.constexpr):
    """Waits for the inner activations, and leaves them in ys."""
    SIZE: gl.constexpr = padded(S.F, S) // 2
    i_w = gl.arange(0, SIZE, flat(2, S.WARPS))
    p = inner + within(i_w, S.F // 2)
    leave(ys, gl.where(i_w < S.F // 2, arrived(p, epoch, held(SIZE, S.WARPS), True), 0))


# Phases


@gluon.jit
def add_tile(acc, ring, xs, c, slot, S: gl.constexpr):
    """acc plus the products of the tile in a slot with chunk c of xs, once the tile has arrived."""
    L: gl.constexpr = tile_layout(S)
    SIZE: gl.constexpr = S.COLUMNS // 2
    n: gl.constexpr = 4 * lanes(S.COLUMNS)
    async_copy.wait_group(S.SLOTS - 1)
    tile = ring.index(slot)
    chunk = xs._reinterpret(gl.int32, [xs.shape[0] // SIZE, SIZE], VECTOR).index(c)
    # Each product waits for the last one of its sum.
    acc_1, acc_2, acc_3 = no_sums(S), no_sums(S), no_sums(S)
    for k in gl.static_range(SIZE // n):
        w_0, w_1 = pairs_of_rows(tile.slice(k * n, n, 1).load(L))
        x_0, x_1 = pairs(chunk.slice(k * n, n).load(gl.SliceLayout(0, L)))
        if k % 2 == 0:
            acc = products(acc, w_0, x_0, sums_layout(S))
            acc_1 = products(acc_1, w_1, x_1, sums_layout(S))
        else:
            acc_2 = products(acc_2, w_0, x_0, sums_layout(S))
            acc_3 = products(acc_3, w_1, x_1, sums_layout(S))
    return (acc + acc_1) + (acc_2 + acc_3)


@gluon.jit
def row_sums(acc, n: gl.constexpr, S: gl.constexpr):
    """The results of a tile's rows, with n neighbours in a thread: acc summed over threads."""
    return gl.convert_layout(gl.sum(wanted(acc, sums_layout(S)), 1), rows_layout(n, S))


@gluon.jit
def no_sums(S: gl.constexpr):
    """Sums of no products."""
    return gl.full([S.ROWS, 2 * lanes(S.COLUMNS)], 0.0, gl.float32, sums_layout(S))


@gluon.jit
def first_rows(i_p, S: gl.constexpr):
    """The first rows of the projections that program i_p forms."""
    lo, _ = share(i_p, S.N // 2, S.P)
    return 2 * lo + gl.arange(0, S.ROWS, rows_layout(2, S))


@gluon.jit
def load_conv(at, row, i_p, S: gl.constexpr):
    """The windows and taps of rows, as words of four numbers."""
    hi = share(i_p, S.N // 2, S.P)[1]
    m_r = row < gl.minimum(2 * hi, S.D)
    window = gl.load(place(at.window, gl.int64) + row, mask=m_r, other=0)
    return window, gl.load(place(at.taps, gl.int64) + row, mask=m_r, other=0)


@gluon.jit
def convolved(y, window, taps, p, m_r):
    """SiLU of the convolution at y, which enters the windows at p."""
    y = y.to(gl.bfloat16).to(gl.float32)
    newest = (bits_of(y) >> 16) << 48
    gl.store(p, ((window >> 16) & 0xFFFFFFFFFFFF) | newest, mask=m_r)
    y = nth(taps, 3) * y + nth(taps, 2) * nth(window, 3)
    y += nth(taps, 1) * nth(window, 2) + nth(taps, 0) * nth(window, 1)
    return y * sigmoid(y)


@gluon.jit
def project(
    ring, xs, squares, norm, window, taps, at, epoch, words, table, copies, i_p, eps,
    S: gl.constexpr,
):  # fmt: skip
    """The projections of the layer at `at`; those of q, k and v pass through their convolution.
    norm, window, taps: what `load_norm` and `load_conv` have loaded for the first rows."""
    chunks: gl.constexpr = over(S.C, S.COLUMNS)
    hi = share(i_p, S.N // 2, S.P)[1]
    row = first_rows(i_p, S)
    windows = place(at.window, gl.int64)
    normed(words.stream, norm, epoch - 1, xs, squares, S)
    factor = factor_of(squares, eps, S)
    acc = no_sums(S)
    for t in range(tiles_of(i_p, S.N, S.C, S.ROWS, S)):
        acc = add_tile(acc, ring, xs, t % chunks, copies.slot, S)
        if t % chunks == chunks - 1:
            y = row_sums(acc, 2, S) * factor
            m_r = row < gl.minimum(2 * hi, S.D)
            y = gl.where(row < S.D, convolved(y, window, taps, windows + row, m_r), y)
            y_0, y_1 = pairs(y)
            first, _ = pairs(row)
            to = words.projected + first // 2
            gl.store(to, marked(packed(y_0, y_1), epoch), mask=first < 2 * hi)
            row += S.ROWS
            window, taps = load_conv(at, row, i_p, S)
            acc = no_sums(S)
        copies = start_copy(ring, table, copies, i_p, S)
    return copies


@gluon.jit
def add(
    tiles, ring, xs, old_words, old, epoch, new, x, last, table, copies, i_p,
    CHUNKS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The residual stream `new`, which is that of old_words plus the product of a weight with xs;
    `old` are the first words. If it is the last one, x gets it as well."""
    lo, hi = share(i_p, S.C // 2, S.P)
    first, _ = pairs(2 * lo + gl.arange(0, S.ROWS, rows_layout(2, S)))
    acc = no_sums(S)
    for t in range(tiles):
        acc = add_tile(acc, ring, xs, t % CHUNKS, copies.slot, S)
        if t % CHUNKS == CHUNKS - 1:
            y_0, y_1 = pairs(row_sums(acc, 2, S))
            x_0, x_1 = halves(old)
            low = packed(x_0 + y_0, x_1 + y_1)
            gl.store(new + first // 2, marked(low, epoch), mask=first < 2 * hi)
            if last:
                gl.store(x + first // 2, low, mask=first < 2 * hi)
            first += S.ROWS
            old = gl.load(old_words + first // 2, mask=first < 2 * hi, other=0, volatile=True)
            acc = no_sums(S)
        copies = start_copy(ring, table, copies, i_p, S)
    return copies


@gluon.jit
def first_words(stream, i_p, S: gl.constexpr):
    """The first words of the residual stream that this program adds to."""
    lo, hi = share(i_p, S.C // 2, S.P)
    first, _ = pairs(2 * lo + gl.arange(0, S.ROWS, rows_layout(2, S)))
    return gl.load(stream + first // 2, mask=first < 2 * hi, other=0, volatile=True)


@gluon.jit
def expand(ring, xs, squares, norm, epoch, words, table, copies, i_p, eps, S: gl.constexpr):
    """silu(gate) * up of layer i."""
    chunks: gl.constexpr = over(S.C, S.COLUMNS)
    lo, hi = share(i_p, S.F // 2, S.P)
    even, _ = pairs(gl.arange(0, S.ROWS, rows_layout(4, S)))
    first, _ = pairs(even)
    first = 2 * lo + first // 2
    normed(words.middle, norm, epoch, xs, squares, S)
    factor = factor_of(squares, eps, S)
    acc = no_sums(S)
    for t in range(tiles_of(i_p, S.F, S.C, S.ROWS // 2, S)):
        acc = add_tile(acc, ring, xs, t % chunks, copies.slot, S)
        if t % chunks == chunks - 1:
            gate, up = pairs(row_sums(acc, 4, S) * factor)
            y_0, y_1 = pairs(gate * sigmoid(gate) * up)
            to = words.inner + first // 2
            gl.store(to, marked(packed(y_0, y_1), epoch), mask=first < 2 * hi)
            first += S.ROWS // 2
            acc = no_sums(S)
        copies = start_copy(ring, table, copies, i_p, S)
    return copies


@gluon.jit
def step_layers_kernel(
    x, table, memory, count, span, eps, ffn_eps, o_eps, scale, bound, factor, S: gl.constexpr
):
    """Replaces the residual stream x by that behind the layers; updates their windows and states.

    x: [C / 2] int32, pairs of numbers in bf16. table: [layers, FIELDS] int64, addresses in units of
    16 bytes. memory: `Words`, one after the other, int64. count: int32, the epoch before this step;
    a launch of all phases of all layers moves it on. span: int32 [4], the first layer and the one
    after the last, and the same of phases; phase 0 takes x in. eps, ffn_eps, o_eps: of the norms.
    scale: of q. bound: lower bound of the decay's logarithm. factor: of beta."""
    i_p = gl.program_id(0)
    begin = gl.load(count) + 1
    first, stop, phase, end = (
        gl.load(span), gl.load(span + 1), gl.load(span + 2), gl.load(span + 3),
    )  # fmt: skip
    mixed = memory + over(S.N, 4) * 2
    middle = mixed + over(S.H * S.V // 2 + S.H * S.SPLIT, 2) * 2
    inner = middle + S.C // 2
    words = Words(memory, mixed, middle, inner, inner + S.F // 2)
    ring = gl.allocate_shared_memory(
        gl.int32, [S.SLOTS, S.ROWS, S.COLUMNS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    wide: gl.constexpr = max_of(padded(S.C, S), padded(S.H * S.V, S))
    xs = gl.allocate_shared_memory(gl.int32, [wide // 2], VECTOR)
    ys = gl.allocate_shared_memory(gl.int32, [padded(S.F, S) // 2], VECTOR)
    squares = gl.allocate_shared_memory(gl.float32, [S.WARPS], VECTOR)
    values = gl.allocate_shared_memory(gl.float32, [16 * SEGMENT], VECTOR)
    inputs = gl.allocate_shared_memory(gl.int32, [8 * SEGMENT], VECTOR)
    # A launch of one phase has the copies of one weight, or of none.
    kind = (phase > 1).to(gl.int32) + (phase > 3).to(gl.int32) + (phase > 4).to(gl.int32)
    behind = (end > 1).to(gl.int32) + (end > 3).to(gl.int32)
    behind += (end > 4).to(gl.int32) + (end > 5).to(gl.int32)
    stop_copies = gl.where(behind > kind, stop, first)
    tile = first_tile(first, gl.minimum(kind, DOWN), table, i_p, S)
    copies = Copies(stop_copies, kind, behind, kind * 0, tile)
    for _ in range(S.SLOTS):
        copies = start_copy(ring, table, copies, i_p, S)

    if (phase == 0) & (first == 0):
        lo, hi = share(i_p, S.C // 2, S.P)
        i_w = lo + gl.arange(0, power(over(S.C // 2, S.P)), flat(1, S.WARPS))
        taken = gl.load(x + i_w, mask=i_w < hi, other=0)
        gl.store(words.stream + i_w, marked(taken, begin), mask=i_w < hi)
    # Norms, windows and taps are loaded a phase or more before they are needed, because these loads
    # wait behind all copies that have been started. What only `mix` reads is loaded there: if it
    # is loaded before `project`, layers take 3% longer.
    at = load_places(table, first)
    norm = load_norm(at.norm, S)
    window, taps = load_conv(at, first_rows(i_p, S), i_p, S)
    for i in range(first, stop):
        epoch = begin + i + 1
        ffn_norm = load_norm(at.ffn_norm, S)
        if (phase <= 1) & (end > 1):
            copies = project(
                ring, xs, squares, norm, window, taps, at, epoch, words, table, copies, i_p, eps, S,
            )  # fmt: skip
        if (phase <= 2) & (end > 2) & (i_p < S.H * S.SPLIT):
            mix(at, epoch, words, i_p, values, inputs, scale, bound, factor, S)
        at = load_places(table, gl.minimum(i + 1, stop - 1))
        if (phase <= 3) & (end > 3):
            old = first_words(words.stream, i_p, S)
            normed_heads(words.mixed, epoch, o_eps, xs, S)
            chunks: gl.constexpr = over(S.H * S.V, S.COLUMNS)
            copies = add(
                tiles_of(i_p, S.C, S.H * S.V, S.ROWS, S), ring, xs, words.stream, old, epoch,
                words.middle, x, False, table, copies, i_p, chunks, S,
            )  # fmt: skip
        if (phase <= 4) & (end > 4):
            copies = expand(
                ring, xs, squares, ffn_norm, epoch, words, table, copies, i_p, ffn_eps, S
            )
        if (phase <= 5) & (end > 5):
            norm = load_norm(at.norm, S)
            window, taps = load_conv(at, first_rows(i_p, S), i_p, S)
            old = first_words(words.middle, i_p, S)
            unnormed(words.inner, epoch, ys, S)
            inner_chunks: gl.constexpr = over(S.F, S.COLUMNS)
            copies = add(
                tiles_of(i_p, S.C, S.F, S.ROWS, S), ring, ys, words.middle, old, epoch,
                words.stream, x, i + 1 == stop, table, copies, i_p, inner_chunks, S,
            )  # fmt: skip
    async_copy.wait_group(0)
    # All programs have read the count before this one could finish the last phase.
    if (phase == 0) & (end == 6) & (first == 0) & (i_p == 0):
        gl.store(count, begin + stop)
