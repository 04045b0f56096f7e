"""Calls under contexts of fixed shape, beside the same calls under ordinary ones."""

import torch

from fla_cp import build_cp_context, chunk_kda
from fla_cp.nn import Attention, GatedDeltaNet, KimiDeltaAttention, MultiHeadLatentAttention
from fla_cp.partition.key_tables import KeyTables

T, MOST = 200, 5
PACKINGS = [
    (0, 1, 77, 77, 130, 200),  # the largest number of documents, one of them empty
    (0, 200),
    (0, 66, 133, 200),  # ends at the edges of three ranks
    (0, 1, 2, 99, 101, 200),
    (0, 100, 200),  # ends at the edge of two ranks
    (0, 65, 198, 199, 200),
]


def fixed(offsets, group, most=MOST, **options):
    return build_cp_context(torch.tensor(offsets), group, max_sequences=most, **options)


def tables(context):
    """Address and shape of everything in a context that a kernel reads, by use."""
    found = {"cu_seqlens": context.cu_seqlens}
    owners = [context, context.packing, context.links, context.links.mirrored()]
    keys = context._cache.get(KeyTables)
    if keys is not None:
        owners.append(keys.lengths)
        found |= {("sent", i): t for i, t in enumerate(keys.rows.sent(context.cu_seqlens.device))}
    for name, owner in enumerate(owners):
        for key, table in owner._on_devices.items():
            found |= {(name, key, i): t for i, t in enumerate(table.columns)}
    return {key: (t.data_ptr(), t.shape) for key, t in found.items()}


def draw(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operator(dtype, impl, H=1, HV=2, K=8, V=6):
    """A call of the operator under a context: o, and the sharded gradients of global inputs."""
    shapes = [(H, K), (H, K), (HV, V), (HV, K), (HV,)]
    x = [draw(1, T, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    wide = torch.promote_types(dtype, torch.float32)
    rates = [draw(HV, seed=6, dtype=wide), draw(HV * K, seed=7, dtype=wide)]
    do = draw(1, T, HV, V, seed=8, dtype=dtype)

    def call(context):
        mine = [t.detach().clone().requires_grad_() for t in (*map(context.shard, x), *rates)]
        *tokens, A_log, dt_bias = mine
        o, _ = chunk_kda(
            *tokens,
            A_log=A_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cp_context=context,
            impl=impl,
        )
        return [o.detach(), *torch.autograd.grad(o, mine, context.shard(do))]

    return call


def layer(make, dtype, seed=0, hidden=16):
    torch.manual_seed(seed)
    module = make().to(dtype)
    x, dy = (draw(1, T, hidden, seed=i, dtype=dtype) for i in (1, 2))

    def call(context):
        mine = context.shard(x).requires_grad_()
        y = module(mine, cp_context=context)
        leaves = [mine, *module.parameters()]
        return [y.detach(), *torch.autograd.grad(y, leaves, context.shard(dy))]

    return call


CALLS = {
    # Kernels are interpreted here, and take as long as they have heads.
    "operator": lambda dtype, impl: operator(dtype, impl, HV=2 if impl == "torch" else 1),
    "kda": lambda dtype, impl: layer(lambda: KimiDeltaAttention(16, 1, 8, impl=impl), dtype),
    "gdn": lambda dtype, impl: layer(
        lambda: GatedDeltaNet(16, num_heads=1, head_dim=8, impl=impl), dtype
    ),
    "attention": lambda dtype, impl: layer(
        lambda: Attention(16, 2, 1, 8, qk_norm=True, output_gate=True), dtype
    ),
    "mla": lambda dtype, impl: layer(
        lambda: MultiHeadLatentAttention(
            16, 2, kv_lora_rank=6, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        dtype,
    ),
}


def equal_ordinary(group, rank, name, impl, packings, exchange="auto"):
    """Runs each packing twice under one fixed context, and under an ordinary one."""
    dtype = torch.float64 if impl == "torch" else torch.float32
    call = CALLS[name](dtype, impl)
    width = {} if name == "operator" else {"conv1d_kernel_size": 4}
    context = fixed(packings[0], group, exchange=exchange, **width)
    kept, exact = None, {}
    for offsets in (*packings, packings[0]):
        context.update(torch.tensor(offsets))
        assert context.global_cu_seqlens[: len(offsets)] == offsets
        if offsets not in exact:
            exact[offsets] = call(build_cp_context(torch.tensor(offsets), group, **width))
        for i, (a, b) in enumerate(zip(call(context), exact[offsets], strict=True)):
            limit = 1e-12 if dtype == torch.float64 else 2e-5
            error = (a - b).abs().max()
            assert error <= limit * b.abs().max().clamp(min=1e-3), (offsets, rank, i, error)
        kept = kept or tables(context)
        assert tables(context) == kept, offsets
