"""Trains a Qwen3.5 of 4B's shape (or --shape) from random weights in a plain PyTorch loop:
torchrun --nproc-per-node 2 examples/transformers_hybrid.py    # 262144 tokens over two GPUs"""

import argparse
import gc
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.integrations.transformers import parallelize, shard_rates
from fla_cp.train.loss import chunked_cross_entropy


class Chunked(Qwen3_5ForCausalLM):  # logits of 131072 tokens and 248320 ids would take 65 GB
    def forward(self, ids, labels, context):
        x = self.model(input_ids=ids, cp_context=context).last_hidden_state
        return chunked_cross_entropy(x[0], self.lm_head.weight, labels[0])


def main(shape, tokens, group, dtype):
    torch.manual_seed(0)  # the same weights and documents on all ranks
    model = Chunked(Qwen3_5TextConfig(**shape))
    parallelize(model.model).activation_checkpointing_enable()
    for module in (*shard_rates(model).model.layers, model):  # decay rates stay float32
        fully_shard(module, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for step in range(1, args.steps + 1):
        t0, (cut, a, b) = perf_counter(), torch.randint(1, tokens, (3,)).tolist()
        ids = torch.cat([torch.arange(a, a + cut), torch.arange(b, b + tokens - cut)])[None]
        ids, offsets = ids % model.config.vocab_size, torch.tensor([0, cut, tokens])
        labels = ids.roll(-1).index_fill(1, offsets[1:] - 1, -100)  # none for a document's last
        ranges = zigzag_token_ranges(tokens, group.size())  # balances attention
        context = build_cp_context(offsets, group, conv1d_kernel_size=4, token_ranges=ranges)
        loss = model(context.shard(ids), context.shard(labels), context) / (labels != -100).sum()
        (loss * group.size()).backward()  # a share; FSDP2 takes the mean of the gradients
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        text = f"step {step}: loss {loss.item():.4f}, {tokens / (perf_counter() - t0):.0f} tokens/s"
        if group.rank() == 0:
            print(f"{text}, {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)


parser = argparse.ArgumentParser(allow_abbrev=False)
for name, default in {"tokens": 262144, "steps": 5, "lr": 1e-4}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--shape", nargs="*", default=[], help="such as num_hidden_layers=8")
args, cuda = parser.parse_args(), torch.cuda.is_available()
shape = {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}
shape |= {name: int(value) for name, value in (text.split("=") for text in args.shape)}
dist.init_process_group("nccl" if cuda else "gloo")
torch.cuda.set_device(dist.get_node_local_rank() if cuda else -1)  # -1 changes nothing
torch.set_default_device("cuda" if cuda else "cpu")
main(shape, args.tokens, dist.group.WORLD, torch.bfloat16 if cuda else torch.float32)
gc.collect()  # frees model and contexts, which hold the group that the next line destroys
dist.destroy_process_group()
