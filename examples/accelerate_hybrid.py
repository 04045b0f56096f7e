"""Trains a Qwen3.5 of 4B's shape (or --shape num_hidden_layers=8 ..) from random weights:
accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 --mixed_precision bf16 \
    examples/accelerate_hybrid.py --cp 2"""

import argparse
from random import Random
from time import perf_counter

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from fla_cp.integrations.accelerate import CPAccelerator
from fla_cp.integrations.transformers import parallelize
from fla_cp.train.loss import chunked_cross_entropy


class Chunked(Qwen3_5ForCausalLM):  # logits of 131072 tokens and 248320 ids would take 65 GB
    def forward(self, input_ids, shift_labels, num_items_in_batch, cp_context):
        x = self.model(input_ids=input_ids, cp_context=cp_context).last_hidden_state
        loss = chunked_cross_entropy(x[0], self.lm_head.weight, shift_labels[0])
        return loss / num_items_in_batch


def row(index, tokens, vocab_size):  # two documents that count on from a random number
    a, b, n = Random(index).sample(range(1, min(tokens, vocab_size)), 3)
    ids = torch.cat([torch.arange(a, a + n), torch.arange(b, b + tokens - n)]) % vocab_size
    return {"input_ids": ids, "labels": ids, "seq_lens": [n, tokens - n]}


parser = argparse.ArgumentParser(allow_abbrev=False)
for name, default in {"cp": 1, "dp": 1, "tokens": 262144, "steps": 20, "lr": 1e-4}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--shape", nargs="*", default=[], type=lambda text: text.split("="))
args = parser.parse_args()
sizes = ParallelismConfig(cp_size=args.cp, dp_shard_size=args.dp)
plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap")
plugin.activation_checkpointing = True
accelerator = CPAccelerator(parallelism_config=sizes, fsdp_plugin=plugin, layout="zigzag")
torch.manual_seed(0)
shape = {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}
config = Qwen3_5TextConfig(**shape | {name: int(n) for name, n in args.shape})
with accelerator.device:  # 4.2B weights in float32 are drawn on the GPU
    model = Chunked(config)
parallelize(model.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
data = [row(i, args.tokens, config.vocab_size) for i in range(args.steps)]
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data))
for step, batch in enumerate(loader, 1):
    t0 = perf_counter()
    accelerator.backward(loss := model(**batch))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss, seconds = accelerator.reduce(loss, "mean").item(), perf_counter() - t0
    text = f"step {step}: loss {loss:.4f}, {args.tokens * args.dp / seconds:.0f} tokens/s"
    gib = torch.cuda.max_memory_allocated() / 2**30
    accelerator.print(f"{text}, {gib:.2f} GiB, norm of gradients {norm:.3f}", flush=True)
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
accelerator.end_training()  # last, because these three hold process groups
