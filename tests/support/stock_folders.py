"""Folders of tiny random models of transformers, and training them without the trainer."""

import torch

from tests.support.stock_models import stock_model

FLAGS = [
    *("--device", "cpu", "--seq-len", "150", "--global-batch-size", "2", "--lr", "0.01"),
    *("--warmup-steps", "5", "--max-steps", "20", "--parity.steps", "2", "--eval-every", "0"),
]
TAKEN = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}
"""Sizes of a Qwen3-Next that the trainer's own decoder takes, as published models have them."""


def save_stock(folder, kind, **changes):
    """Writes a tiny model in its published layout; returns the folder as text.

    Its vocabulary has one id for each byte. changes: of the configuration.
    """
    changes = {"vocab_size": 256, **changes}
    stock_model(kind, **changes).save_pretrained(str(folder))
    return str(folder)


def stock_losses(model, packs, steps, config):
    """Losses of `steps` plain steps of transformers and torch's AdamW, one pack and document each.

    packs: {"input_ids", "labels"} with shifted labels. config: its optimiser's options and rates.
    """
    from fla_cp.train.model import parameter_groups
    from fla_cp.train.optim import learning_rate

    optim, losses = config.optim, []
    optimizer = torch.optim.AdamW(
        parameter_groups(model, optim.weight_decay),
        lr=1.0,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    for step in range(1, steps + 1):
        pack = packs[step - 1]
        logits = model(input_ids=pack["input_ids"][None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, pack["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, config.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
