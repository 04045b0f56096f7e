"""What `benchmarks.train` measures: a case, and the two sides that take its steps."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.step_profile import Row
from fla_cp.integrations.stock_folder import read_config_json
from fla_cp.train.build import build_sharded
from fla_cp.train.config import FOLDER, TrainConfig
from fla_cp.train.data import ArraySource, PackedDataset
from fla_cp.train.distributed import Ranks, compute_dtype
from fla_cp.train.flops import needed, step_flops
from fla_cp.train.graphs import graphs_of
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.model import Decoder, Shape, shape_of
from fla_cp.train.optim import build_optimizer, learning_rate
from fla_cp.train.parse import parse
from fla_cp.train.step import Feed, finish, forward_backward

PEER = "fla"

VOCABULARY = {
    "tiny": 256,
    "340M": 32000,
    "1.3B": 32000,
    "kimi-linear-small": 163840,
    "qwen3-next-small": 151936,
    "kimi-linear": 163840,
    "qwen3-next": 151936,
}
"""Tokens of each size that may be measured, besides hf:DIR."""
SHORTEST, LONGEST = 16, 8192
"""Lengths of packed documents, in tokens; they are log-uniform in between."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured. who: "fla_cp", or PEER for the peer's model. model: a size or hf:DIR.
    tokens: of the sequence, which all GPUs share. data: "one" document or "packed" ones. flags: of
    the trainer, as one text."""

    who: str
    model: str
    tokens: int
    data: str
    gpus: int
    flags: str

    def __str__(self) -> str:
        ranks = f"{self.gpus} rank{'s' * (self.gpus > 1)}"
        words = self.who, self.model, f"{self.tokens} tokens ({self.data}),", ranks, self.flags
        return " ".join(words).rstrip()

    def config(self) -> TrainConfig:
        """The trainer's configuration of this case."""
        sizes = ["--model", self.model, "--seq-len", str(self.tokens), "--cp", str(self.gpus)]
        steps = ["--global-batch-size", "1", "--eval-every", "0", "--max-steps", "1000"]
        return parse([*sizes, *steps, *shlex.split(self.flags)])

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        if self.model.startswith(FOLDER):
            return read_config_json(self.model.removeprefix(FOLDER))["vocab_size"]
        return VOCABULARY[self.model]

    def found(self, rows: Iterable[Row]) -> Row | None:
        """This case's row, if it is there."""
        mine = dataclasses.asdict(self).items()
        return next((row for row in rows if mine <= row.items()), None)


class Side(Protocol):
    """A model with its optimiser and data, whose steps are measured.

    parameters: their number. flops: operations that a step needs, over all GPUs; None if they are
    not counted.
    """

    parameters: int
    flops: float | None

    def batch(self) -> Any:
        """The next batch, on the host."""

    def forward_backward(self, batch: Any) -> None:
        """Issues a forward and a backward."""

    def metrics(self) -> float:
        """The loss in nats per token. It waits for the device."""

    def update(self) -> None:
        """Issues the clipping, the optimiser's step and the reset of the gradients."""


class Trainer:
    """fla_cp's trainer, as `fla_cp.train.main` composes a step. Its batches are read and placed
    ahead while a step runs."""

    def __init__(self, case: Case, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        dtype = compute_dtype(config.parallel.dtype, ranks.device)
        free = config.data.max_documents is None  # no compiled graph takes a fixed context
        given = config.model, case.vocabulary, 0, ranks, dtype
        self.model = build_sharded(*given, compiled=free)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.flops = step_operations(case)
        self.feed = Feed(config, dataset(case), ranks, 0, workers=0)
        self.steps = 0
        self.graphs = graphs_of(self.model, config, ranks)

    def batch(self) -> Any:
        batches = self.feed.take()
        return batches, self.feed.agreement(batches).targets

    def forward_backward(self, batch: Any) -> None:
        first, self.steps = self.steps == 0, self.steps + 1
        model, (batches, targets) = self.model, batch
        given = model, batches, targets, self.config, self.ranks, first, self.graphs
        self.share = forward_backward(*given)
        self.feed.read_ahead()

    def metrics(self) -> float:
        """Takes the optimiser's step as well, which the trainer queues before it reads the loss."""
        rate = learning_rate(self.config.optim, self.steps, self.config.run.steps)
        given = self.model, self.optimizer, rate, self.config, self.ranks
        loss, _, _ = finish(self.share, *given)
        return loss

    def update(self) -> None:
        if self.graphs is None:
            self.optimizer.zero_grad()
        else:
            self.graphs.reset_gradients()


class FLAModel:
    """FLA's model class, under the same FSDP2 policy as ours and with the same fused AdamW.

    Its parameters are fp32 and computed with in bf16, as FLA's own trainer does. If our blocks are
    recomputed in the backward (--remat), its blocks are too.
    """

    def __init__(self, case: Case, config: TrainConfig, ranks: Ranks) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.ranks, self.clip = ranks, config.optim.clip_norm
        with ranks.device:
            self.model = fla_model(config, case.vocabulary)
        self.model.train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.flops = step_operations(case)
        if config.model.remat not in (False, "none"):
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        dtype = compute_dtype(config.parallel.dtype, ranks.device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            fully_shard(block, mesh=ranks.fsdp_mesh, mp_policy=policy)
        fully_shard(self.model, mesh=ranks.fsdp_mesh, mp_policy=policy)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.feed = Feed(config, dataset(case), ranks, 0, workers=0)

    def batch(self) -> Any:
        (batch,) = self.feed.take()
        return batch.share

    def forward_backward(self, batch: Any) -> None:
        tokens, offsets = (
            x.to(self.ranks.device, non_blocking=True) for x in (batch.tokens, batch.cu_seqlens)
        )
        packed = {"cu_seqlens": offsets} if len(offsets) > 2 else {}
        # The model shifts the labels itself; targets across documents do not change the time.
        self.loss = self.model(tokens, labels=tokens, use_cache=False, **packed).loss
        self.loss.backward()

    def metrics(self) -> float:
        return self.loss.item()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fla_model(config: TrainConfig, vocabulary: int) -> Any:
    """FLA's KDA model with our sizes. Raises SystemExit without FLA, or for another mixer."""
    if config.model.mixer != "kda":
        raise SystemExit(f"--peer {PEER} has --mixer kda, got {config.model.mixer}")
    try:
        from fla.models import KDAConfig, KDAForCausalLM
    except ImportError as error:
        raise SystemExit(
            f"--peer {PEER} needs flash-linear-attention 0.6.0 and transformers ({error})"
        ) from error
    shape, bound = shape_of(config.model), config.model.gate_lower_bound
    return KDAForCausalLM(KDAConfig(**fla_sizes(shape, bound), vocab_size=vocabulary))


def fla_sizes(shape: Shape, gate_lower_bound: float | None) -> dict[str, Any]:
    """Keywords of FLA's configuration for a shape of ours."""
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "safe_gate": gate_lower_bound is not None,
        "lower_bound": gate_lower_bound,
        "norm_eps": 1e-5,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "fuse_cross_entropy": True,
    }


def meta_model(case: Case) -> LanguageModel:
    """The trainer's model of a case, on the meta device."""
    config = case.config().model
    if config.folder is not None:
        from fla_cp.train.stock import StockModel, opened

        return StockModel(opened(config.folder), config)
    with torch.device("meta"):
        return Decoder(config, case.vocabulary)


def step_operations(case: Case) -> float | None:
    """Operations that a step needs; None for a model that has no formula. Those of softmax
    attention over packed documents are the mean of all packs."""
    model = meta_model(case)
    try:
        parts = step_flops(model, case.tokens)
    except ValueError:
        return None
    found = needed(parts)
    if "attention" not in parts or case.data == "one":
        return found
    packs = [pack["cu_seqlens"].diff().tolist() for pack in dataset(case)]
    packed = [step_flops(model, case.tokens, lengths)["attention"].needed for lengths in packs]
    return found - parts["attention"].needed + statistics.mean(packed)


def dataset(case: Case, packs: int = 32) -> PackedDataset:
    """Random tokens in packs of `case.tokens`, each one document or several; from a fixed seed."""
    generator = np.random.default_rng(0)
    vocabulary, total = case.vocabulary, packs * case.tokens
    # int32 holds any vocabulary; as int64 the tokens would take twice the memory.
    tokens = generator.integers(vocabulary, size=total, dtype=np.int32)
    offsets = np.arange(packs + 1) * case.tokens
    if case.data == "packed":
        longest = min(LONGEST, case.tokens)
        exponents = generator.uniform(np.log(SHORTEST), np.log(longest), total // SHORTEST)
        ends = np.exp(exponents).astype(np.int64).cumsum()
        offsets = np.concatenate([[0], ends[ends < total], [total]])
    return PackedDataset(ArraySource(tokens, offsets, vocabulary), case.tokens)
