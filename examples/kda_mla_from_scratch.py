"""Trains KDA and multi-head latent attention, 3:1, from scratch on the bytes of Python's library:
torchrun --nproc-per-node 4 examples/kda_mla_from_scratch.py    # each batch over four ranks
"""

import argparse
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fla_cp import build_cp_context
from fla_cp.nn import KimiDeltaAttention, MultiHeadLatentAttention, RMSNorm, SwiGLU


class Block(nn.Module):
    def __init__(self, hidden, heads, latent):
        super().__init__()
        size = hidden // heads
        mla = {"qk_nope_head_dim": size, "v_head_dim": size, "kv_lora_rank": 4 * size}
        kinds = (KimiDeltaAttention, {"head_dim": size}), (MultiHeadLatentAttention, mla)
        self.mixer = kinds[latent][0](hidden, heads, **kinds[latent][1])
        self.ffn, self.norm1, self.norm2 = SwiGLU(hidden, hidden), RMSNorm(hidden), RMSNorm(hidden)

    def forward(self, x, context):
        x = x + self.mixer(self.norm1(x), cp_context=context)
        return x + self.ffn(self.norm2(x))


parser = argparse.ArgumentParser(allow_abbrev=False)
for name, default in {"layers": 4, "hidden": 128, "heads": 4, "tokens": 8192, "steps": 50}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, cuda = parser.parse_args(), torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
torch.cuda.set_device(dist.get_node_local_rank() if cuda else -1)  # -1 changes nothing
torch.set_default_device("cuda" if cuda else "cpu")
torch.manual_seed(0)  # the same weights on all ranks
blocks = nn.ModuleList(Block(args.hidden, args.heads, i % 4 == 3) for i in range(args.layers))
model = nn.ModuleList((nn.Embedding(256, args.hidden), blocks, nn.Linear(args.hidden, 256)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
files = [p.read_bytes() for p in sorted(Path(argparse.__file__).parent.glob("*.py"))]
for step in range(args.steps):
    documents = [torch.tensor([*f[: args.tokens // 4]]) for f in files[4 * step % 100 :][:4] if f]
    ids, offsets = torch.cat(documents)[None], torch.tensor([0, *accumulate(map(len, documents))])
    labels = ids.roll(-1).index_fill(1, offsets[1:] - 1, -100)  # none for a document's last
    context = build_cp_context(offsets, dist.group.WORLD, conv1d_kernel_size=4)
    x = model[0](context.shard(ids))
    for block in blocks:
        x = block(x, context)
    logits, mine = model[2](x)[0], context.shard(labels)[0]
    loss = nn.functional.cross_entropy(logits, mine, reduction="sum") / (labels != -100).sum()
    optimizer.zero_grad()
    loss.backward()  # a share: loss and gradients of all ranks add up to those of the batch
    for share in (loss.detach(), *(p.grad for p in model.parameters())):
        dist.all_reduce(share)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss:.4f}")
dist.destroy_process_group()
