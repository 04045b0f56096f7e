"""Rules for a run's device and for the folder of --model hf:DIR.

These rules need the device or the data, unlike those of rules.py. They are checked before the run
folder is made.
"""

from __future__ import annotations

import torch

from fla_cp.kernels import resolve
from fla_cp.kernels.torch.flash import activate_flash_attention_3
from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.distributed import Ranks, compute_dtype
from fla_cp.train.model import shape_of
from fla_cp.train.pattern import SOFTMAX, mixers_of
from fla_cp.train.progress import announced


def check_graphs(config: TrainConfig, ranks: Ranks) -> None:
    """Raises UserError if --cuda-graphs on cannot run on this device."""
    graphs = config.parallel.cuda_graphs == "on"  # refused with hf:DIR
    if graphs and ranks.device.type == "cpu":
        raise UserError("--cuda-graphs needs --device cuda, got cpu; leave it out")
    bfloat16 = compute_dtype(config.parallel.dtype, ranks.device) == torch.bfloat16
    if graphs and shape_of(config.model).experts and not bfloat16:
        raise UserError(
            "--cuda-graphs with --model.experts needs --dtype bfloat16: in float32 the products of "
            f"experts make the host wait, got {config.parallel.dtype}"
        )
    softmax = [name for name in SOFTMAX if name in mixers_of(config.model)]
    if graphs and config.data.max_documents and softmax and not bfloat16:
        raise UserError(
            f"--data.max-documents with {' and '.join(softmax)} needs --dtype bfloat16, since "
            f"PyTorch's flash attention takes no float32, got {config.parallel.dtype}"
        )


def check_impl(config: TrainConfig, ranks: Ranks) -> None:
    """Raises UserError if this device cannot run --impl, or has no use for --offload. Activates the
    kernel of softmax attention that was asked for."""
    check_graphs(config, ranks)
    if config.model.offload and ranks.device.type == "cpu":
        raise UserError(
            "--offload needs --device cuda: on the CPU all activations are in the host's memory "
            "already; leave it out or say --no-offload"
        )
    try:
        resolve(config.model.impl, ranks.device, compute_dtype(config.parallel.dtype, ranks.device))
    except ValueError as error:
        raise UserError(f"--impl with --device {ranks.device.type}: {error}") from error
    try:
        activate_flash_attention_3(config.parallel.flash_attention_3, ranks.device)
    except ValueError as error:
        raise UserError(f"--parallel.flash-attention-3 on: {error}") from error


@announced("model of transformers")
def check_folder(
    config: TrainConfig, vocab_size: int, device: torch.device, *, weights: bool
) -> None:
    """Raises UserError if --model hf:DIR cannot be trained on these tokens and this device. To be
    called before the run folder is made. weights: whether those of DIR will be loaded."""
    if config.model.folder is not None:
        from fla_cp.train.stock import check_stock

        check_stock(config, vocab_size, device, weights=weights)
