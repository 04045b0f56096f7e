"""The run's configuration: frozen dataclasses.

Each field has a full name on the command line (`--parallel.cp`), and the common ones have a short
one (`--cp`). The text below a field is its help text there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from fla_cp.integrations.stock_folder import has_tokenizer
from fla_cp.train.pattern import PATTERNS, Mixer, parse_pattern, parse_stretch


class UserError(ValueError):
    """A mistake in what the user asked for: shown as one message, without a traceback."""


def _short(*flags: str) -> Any:
    return tyro.conf.arg(aliases=flags)


@dataclass(frozen=True)
class Recipe:
    """Defaults of a named size for the length of the training and the learning rate.

    The rates of 340M and larger sizes assume AdamW and steps of about 0.5 million tokens. The rate
    of tiny is meant for the bytes of `stdlib` on a CPU.
    """

    lr: float
    warmup_steps: int
    max_steps: int


RECIPES = {
    "tiny": Recipe(lr=4e-3, warmup_steps=20, max_steps=150),
    "340M": Recipe(lr=1e-3, warmup_steps=1024, max_steps=20480),
    "1.3B": Recipe(lr=4e-4, warmup_steps=2000, max_steps=100_000),
    "kimi-linear-small": Recipe(lr=8e-4, warmup_steps=2000, max_steps=20480),
    "qwen3-next-small": Recipe(lr=6e-4, warmup_steps=2000, max_steps=20480),
    "kimi-linear": Recipe(lr=3e-4, warmup_steps=2000, max_steps=100_000),
    "qwen3-next": Recipe(lr=2e-4, warmup_steps=2000, max_steps=100_000),
}

FOLDER_RECIPE = Recipe(lr=1e-5, warmup_steps=100, max_steps=1000)
"""Defaults for hf:DIR, whose weights are already trained."""

FOLDER = "hf:"
"""The prefix of --model that is followed by a folder."""

SEEDS = 2**32
"""Seeds must be below this, because NumPy's global generator, which accelerate seeds, takes no
larger ones."""


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. A named size sets every dimension, and each other option overrides one of
    them."""

    size: Annotated[str, _short("--model")] = "tiny"
    """Named size: tiny (which trains on a CPU), 340M, 1.3B, kimi-linear-small, qwen3-next-small,
    kimi-linear or qwen3-next. The last two are Kimi Linear 48B-A3B and Qwen3-Next 80B-A3B, experts
    included; the small ones have the same layers and fit one GPU. Or hf:DIR, a folder with a model
    of transformers; of the options below, it takes only init, impl and remat."""
    init: Literal["weights", "random"] = "weights"
    """With hf:DIR: the folder's weights, or random ones, as transformers draws them."""
    mixer: Annotated[Mixer | None, _short("--mixer")] = None
    """Token mixer of every block: Kimi Delta Attention, Gated DeltaNet, Comba, Gated DeltaProduct,
    GLA, simple GLA, or one of two kinds of softmax attention: attention (gated, with grouped
    queries) or mla (multi-head latent attention). None: kda or a pattern, by model size."""
    pattern: str | None = None
    """Mixers of a hybrid, instead of --mixer: kda*3,mla is three blocks of kda and then one of mla.
    This is repeated over all blocks, and the last repetition may be incomplete."""
    layers: int | None = None
    """Number of blocks."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    num_heads: int | None = None
    """Heads of the mixer."""
    head_dim: int | None = None
    """Key and value channels of a head: at most 256, or 512 if all mixers are gla or simple_gla."""
    tie_embeddings: bool | None = None
    """Use the embedding as the output head."""
    vocab_size: int | None = None
    """Rows of the embedding and of the head, such as those of a model for --init-from. None: as
    many as the data have tokens; fewer are refused."""
    norm_eps: float | None = None
    """Added to the mean square in the norms, except in the norm of mla's latents, which has 1e-6.
    None: by model size, 1e-5 or 1e-6 (qwen3-next)."""
    experts: int | None = None
    """How many experts a block has instead of SwiGLU. 0: no mixture of experts. None: by model
    size; sizes that are not hybrids have no experts."""
    experts_per_token: int | None = None
    """Experts that a token takes, besides the shared ones. None: by model size, else 2."""
    shared_experts: int | None = None
    """Experts that every token takes; with softmax their output has a gate, as in Qwen3-Next. None:
    by model size, else 0."""
    expert_size: int | None = None
    """Inner width of an expert. None: by model size, else such that a token's experts together are
    as wide as SwiGLU."""
    routing_scale: float | None = None
    """Factor on the weights of a token's experts. None: by model size, else 1."""
    routing: Literal["softmax", "sigmoid"] | None = None
    """How experts are scored: by softmax as in Qwen3, or by sigmoid as in Kimi Linear, with a bias
    that is added only to choose the experts. None: by model size, else softmax."""
    aux_loss: float | None = None
    """Factor of the load-balancing loss. Its gradient is added, but the displayed loss leaves it
    out. None: 0.001 with softmax, 0 with sigmoid."""
    bias_rate: float | None = None
    """With sigmoid: how far a step moves the bias of each expert towards equal loads. None:
    0.001."""
    dense_layers: int | None = None
    """How many of the first blocks keep SwiGLU. None: by model size, else 0."""
    rope_theta: float | None = None
    """Base of the rotary positions of attention and mla. None: by model size, 10000 or 1e7."""
    rope_scaling: str | None = None
    """yarn:FACTOR[:ORIGINAL]: rotary positions for sequences FACTOR times longer than the ORIGINAL
    tokens that the model was trained with; without ORIGINAL, --seq-len / FACTOR."""
    mla_rope: bool = False
    """Rotary positions in mla, as in DeepSeek-V3. Without this option mla has no positions, as in
    Kimi Linear."""
    gate_lower_bound: float | None = None
    """Lowest log decay per token of kda, in [-5, 0); None leaves the gate unbounded."""
    gate_bias: bool | None = None
    """Whether the output gate of kda has a bias. None: yes, but not if the model also has mla,
    because the published Kimi Linear has no such bias."""
    impl: Annotated[Literal["auto", "torch", "triton"], _short("--impl")] = "auto"
    """Backend of the operators; auto chooses by device."""
    compile: Annotated[Literal["auto", "on", "off"], _short("--compile")] = "auto"
    """Compile each block with torch.compile, which fuses the operations between matrix products.
    Steps then take less time, except the first one, which takes longer. auto: on cuda, but not with
    --remat selective or data.max_documents. --compile alone means on."""
    remat: Annotated[Literal["none", "selective", "full"], _short("--remat")] = "none"
    """What the backward recomputes of each block. none: nothing. selective: projections, norms,
    gates and SwiGLU, but no operator and no exchange between ranks. full: everything, exchanges
    too; --remat alone means full. docs/training.md has the bytes that each one keeps."""
    offload: Annotated[bool, _short("--offload")] = False
    """Keep what each block saves for its backward in the host's memory; only on GPUs. The saved
    tensors cross PCIe twice a step, so combine this with --remat full or selective, which save
    least."""

    @property
    def folder(self) -> str | None:
        """The folder of hf:DIR, or None for a named size."""
        return self.size.removeprefix(FOLDER) if self.size.startswith(FOLDER) else None

    @property
    def name(self) -> str:
        """The size's name, or for hf:DIR the folder's own name and a hash of its path, in letters
        that a path and a pattern of paths may hold."""
        if self.folder is None:
            return self.size
        path = os.path.abspath(self.folder)
        digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return f"hf-{re.sub(r'[^A-Za-z0-9._-]', '-', os.path.basename(path))}-{digest}"


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how much of it a step takes."""

    source: Annotated[str, _short("--data")] = "stdlib"
    """stdlib, synthetic, needle:LENGTH, text:PATH, memmap:PATH, hf:PATH (a data set that `datasets`
    has saved, or parquet or jsonl files), or a mixture by shares of tokens:
    text:A:0.7,hf:B:0.3."""
    tokenizer: Annotated[str | None, _short("--tokenizer")] = None
    """Folder of a tokenizer that transformers has saved, for stdlib, text and hf; memmap must have
    its vocabulary. None: with --model hf:DIR, that of DIR if it has one; otherwise the
    bytes of stdlib and text are the tokens."""
    column: str | None = None
    """Column of hf:PATH that holds texts or conversations. None: text, messages, or prompt and
    completion."""
    cache: str | None = None
    """Folder for tokenised documents, which may be deleted at any time. None: fla_cp in
    $XDG_CACHE_HOME or ~/.cache."""
    cache_gib: float = 64.0
    """Most GiB that the cache may take for the tokenised documents of all data sets together. If
    there are more, the least recently used ones are deleted."""
    seq_len: Annotated[int, _short("--seq-len")] = 4096
    """Tokens of a pack: a row that is filled with documents, none of which attends to another."""
    global_batch_size: Annotated[int, _short("--global-batch-size")] = 2
    """Packs of a step, over all data-parallel ranks."""
    micro_batch_size: Annotated[int | None, _short("--micro-batch-size")] = None
    """Packs that one forward and backward takes on a data-parallel rank; None: all of its packs."""
    max_documents: int | None = None
    """With --cuda-graphs: the most documents that a micro-batch may have, so that one graph serves
    all packings. For each document, the GPU computes up to one more chunk of 64 tokens. A
    micro-batch with more documents runs without the graph. Blocks are not compiled."""
    eval_batches: Annotated[int, _short("--eval-batches")] = 4
    """Held-out batches (of global_batch_size packs) that an evaluation reads, always the same."""
    workers: Annotated[int | None, _short("--workers")] = None
    """Processes of each rank that read and prepare batches ahead. None: 2 on cuda and 0 on the CPU,
    where the rank reads by itself."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is split: cp * dp_shard * dp_replicate ranks."""

    cp: Annotated[int, _short("--cp")] = 1
    """Ranks that share one sequence (context parallelism)."""
    dp_shard: Annotated[int, _short("--dp-shard")] = 1
    """Data-parallel ranks that shard the parameters (FSDP, together with the cp ranks). -1: the
    started ranks divided by cp * dp_replicate, or 1 if a single process was started."""
    dp_replicate: Annotated[int, _short("--dp-replicate")] = 1
    """Data-parallel replicas of the sharded parameters (HSDP)."""
    layout: Literal["auto", "contiguous", "zigzag", "uneven"] = "auto"
    """Which tokens of a sequence a cp rank owns. contiguous: one range. zigzag: two ranges, which
    mirror each other about the middle, so that ranks have about equal work in softmax attention.
    auto: zigzag if the model has softmax attention and packs are cut between ranks, except with
    data.max_documents, and contiguous otherwise. uneven, for --check-parity only: one range, with
    lengths in the ratio 1 : 2 : 3 and so on over the ranks."""
    exchange: Annotated[
        Literal["auto", "all_gather", "ring", "scan", "heads", "symmetric"], _short("--exchange")
    ] = "auto"
    """How states travel between cp ranks; docs/choosing.md says when to take which."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _short("--device")] = "auto"
    """auto: cuda where every local rank has a GPU, else cpu."""
    cuda_graphs: Annotated[Literal["auto", "on", "off"], _short("--cuda-graphs")] = "auto"
    """Capture a micro-batch's forward and backward in a CUDA graph, so that the GPU does not wait
    for the host. auto: on cuda, while packs are divided alike in every step (for example, if each
    holds one document) and the graph fits into memory. The run may have at most four ranks, two if
    blocks are compiled, and one with softmax attention or experts. on: a graph for each of up to
    four packings that come a third time, or with data.max_documents one for all packings. Graphs
    then hold the memory of a micro-batch's activations until the run ends. --cuda-graphs alone
    means on."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _short("--dtype")] = "auto"
    """Compute dtype; parameters and optimiser stay float32. auto: bfloat16 on cuda."""
    flash_attention_3: Literal["off", "auto", "on"] = "off"
    """Whether softmax attention in bfloat16 runs FlashAttention-3 instead of PyTorch's own kernels.
    auto: if the package flash-attn-3 is installed, on GPUs of compute capability 9.0."""
    reduce: Literal["step", "micro_batch"] = "step"
    """How often gradients are reduced over the ranks, if a step has several micro-batches. step:
    once, which sends the fewest bytes, but until then each rank holds the gradients of all
    parameters, 4 bytes each. micro_batch: after each micro-batch, so that a rank holds only the
    gradients of its own shard."""
    reshard: Literal["auto", "always", "never"] = "auto"
    """Whether the gathered parameters of a block are freed after its forward. always: they are, and
    the backward gathers them again. never: they stay until the backward, which saves one gather but
    keeps a copy of all parameters in the compute dtype. auto: never if one rank has all parameters
    or the copy takes at most 1 GiB, else always."""
    notice_seconds: float = 60.0
    """After so many seconds without progress, the lowest rank that still runs says which ranks wait
    for which."""
    timeout_seconds: float = 600.0
    """After so many seconds without progress on any rank, the run ends with exit code 4. A rank
    makes progress with each micro-batch and each exchange of states, so raise this if the
    forward or backward of a micro-batch takes longer. The first step, checkpoints and
    --check-parity may take longer as long as the process lives."""
    rendezvous_seconds: float = 120.0
    """How many seconds ranks wait for each other at the start."""
    max_restarts: Annotated[int, _short("--max-restarts")] = 0
    """How often ranks that this process launched are started again after a failure, from the newest
    checkpoint; not after a mistake (exit code 2) or a diverged run (3). torchrun has an option of
    its own for this."""

    @property
    def world_size(self) -> int:
        return self.cp * self.dp_shard * self.dp_replicate

    @property
    def dp(self) -> int:
        return self.dp_shard * self.dp_replicate

    def resolved(self, ranks: int) -> ParallelConfig:
        """This configuration with a number for dp_shard -1. ranks: how many were started.

        A single process launches cp * dp_shard * dp_replicate ranks by itself, so there dp_shard is
        1. Raises UserError if the ranks cannot be divided.
        """
        others = self.cp * self.dp_replicate
        if self.dp_shard != -1 or others < 1:
            return self
        if ranks > 1 and ranks % others:
            raise UserError(
                "--dp-shard -1 needs a multiple of cp * dp-replicate = "
                f"{self.cp} * {self.dp_replicate} ranks, but {ranks} were started"
            )
        return dataclasses.replace(self, dp_shard=max(1, ranks // others))


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, and its learning rate over run.max_steps: a linear warm-up, then the
    schedule."""

    name: Annotated[Literal["adamw", "muon"], _short("--optimizer")] = "adamw"
    """adamw, or muon: Muon for the matrices of the blocks' linear layers, AdamW for all other
    parameters. Muon's steps are scaled to the size of AdamW's, so both take the same lr."""
    schedule: Annotated[Literal["cosine", "wsd"], _short("--schedule")] = "cosine"
    """cosine: decays from the warm-up to the last step. wsd (warm-up, stable, decay): stays at its
    peak until the last decay_ratio of the steps and then decays linearly."""
    decay_ratio: float = 0.2
    """Share of run.max_steps in which wsd decays."""
    lr: Annotated[float | None, _short("--lr")] = None
    """Peak learning rate. None: by model size, 4e-3 to 2e-4; with hf:DIR, 1e-5."""
    min_lr_ratio: float = 0.1
    """Last learning rate, as a share of the peak."""
    warmup_steps: Annotated[int | None, _short("--warmup-steps")] = None
    """Steps of linear warm-up. None: by model size, 20 to 2000, but at most a fifth of
    run.max_steps."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms, biases, A_log and dt_bias have none."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    momentum: float = 0.95
    """Muon's momentum, which is Nesterov's."""
    clip_norm: Annotated[float, _short("--clip-norm")] = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(frozen=True)
class RunConfig:
    """How long to train, and what is written where."""

    max_steps: Annotated[int | None, _short("--max-steps")] = None
    """Optimiser steps of the whole run, those before a resume included. None: by model size, 150
    to 100000; with hf:DIR, 1000."""
    seed: Annotated[int, _short("--seed")] = 0
    """Seed of the weights and of the order of the data, below 2^32."""
    eval_every: Annotated[int, _short("--eval-every")] = 25
    """Steps between held-out losses, which are also measured before the first step and after the
    last. 0: never."""
    checkpoint_every: Annotated[int, _short("--checkpoint-every")] = 0
    """Steps between checkpoints. The end of a run and SIGTERM or SIGINT write one in any case."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept: the newest ones."""
    resume: Annotated[str, _short("--resume")] = "none"
    """none, auto, or the path of a run or a checkpoint. auto: the newest whole checkpoint of --out,
    if there is one; without --out, that of the newest runs/ folder of this model that has a
    checkpoint. A resumed run continues in its own folder, or in --out if that is given."""
    init_from: Annotated[str | None, _short("--init-from")] = None
    """Folder of a model of transformers (Kimi Linear or Qwen3-Next) whose weights a new run starts
    from; the sizes are those of this configuration and must be the same. A resumed run does not
    read it."""
    trust_checkpoint: bool = False
    """Load a checkpoint even if its pickles could run code. Otherwise it is refused."""
    out: Annotated[str | None, _short("--out")] = None
    """Run folder, on a file system that all hosts share. None: that of the resumed run, or for a
    new run runs/<date>-<time>-<model>."""
    log_every: Annotated[int, _short("--log-every")] = 10
    """Steps between printed lines where there is no terminal for a progress bar."""
    max_skips: Annotated[int, _short("--max-skips")] = 10
    """A step whose loss or gradient is not finite is skipped. After so many skipped steps in a row
    the run ends."""
    tracker: Annotated[str, _short("--tracker")] = "tensorboard"
    """Where metrics go besides metrics.jsonl: one or more of tensorboard, wandb, mlflow, comet_ml,
    aim, swanlab, clearml, dvclive and trackio, with commas between them; or none."""

    profile: Annotated[str | None, _short("--profile")] = None
    """A:B profiles the steps A to B - 1 on every rank: traces and tables go to profile/ in the run
    folder. These steps are slower, but their results are the same."""

    @property
    def profiled(self) -> range | None:
        """The steps of `profile`, which `validate` has checked."""
        if self.profile is None:
            return None
        first, end = map(int, self.profile.split(":"))
        return range(first, end)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `tracker`."""
        return () if self.tracker == "none" else tuple(self.tracker.split(","))

    @property
    def steps(self) -> int:
        """max_steps, once `with_recipe` has set it."""
        assert self.max_steps is not None
        return self.max_steps


@dataclass(frozen=True)
class ParityConfig:
    """--check-parity: the same steps on one rank and on the given split, compared."""

    check: Annotated[bool, _short("--check-parity")] = False
    """Compare instead of training. The exit code is 1 if a difference is above its budget."""
    steps: int = 3
    """Steps that are compared."""
    loss_budget: float | None = None
    """Largest relative difference of a loss; None: 1e-5 in float32, 5e-3 in bfloat16."""
    grad_budget: float | None = None
    """Largest relative L2 difference of a gradient; None: from the gradient's own error against
    float64."""


@dataclass(frozen=True)
class TrainConfig:
    """Trains a language model of linear attention, or a hybrid with softmax attention, on one or
    several ranks. With --cp, ranks share each sequence."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    config: str | None = None
    """TOML file whose values replace the defaults; flags win over it."""


def with_recipe(config: TrainConfig) -> TrainConfig:
    """The configuration with the values of `RECIPES` where the user has set none."""
    optim, run, data = config.optim, config.run, config.data
    if config.model.folder is None:
        recipe = RECIPES.get(config.model.size, RECIPES["tiny"])  # `validate` refuses other names
        model = _with_mixers(config.model, data.seq_len)
    else:
        recipe, model = FOLDER_RECIPE, _absolute(config.model)
        data = _with_tokenizer(data, model)
    steps = recipe.max_steps if run.max_steps is None else run.max_steps
    lr = recipe.lr if optim.lr is None else optim.lr
    warmup = optim.warmup_steps
    if warmup is None:
        warmup = min(recipe.warmup_steps, max(steps, 0) // 5)
    return dataclasses.replace(
        config,
        model=model,
        data=data,
        optim=dataclasses.replace(optim, lr=lr, warmup_steps=warmup),
        run=dataclasses.replace(run, max_steps=steps),
    )


def _absolute(model: ModelConfig) -> ModelConfig:
    """The model with the folder's absolute path, which a resumed run finds from anywhere."""
    return dataclasses.replace(model, size=FOLDER + os.path.abspath(model.folder or ""))


def _with_tokenizer(data: DataConfig, model: ModelConfig) -> DataConfig:
    """The data with the tokenizer of hf:DIR, if it has one and documents are to be tokenised."""
    documents = re.search(r"(^|,)(stdlib|text:|hf:)", data.source) is not None
    if data.tokenizer is not None or not documents or not has_tokenizer(model.folder or ""):
        return data
    return dataclasses.replace(data, tokenizer=model.folder)


def _with_mixers(model: ModelConfig, seq_len: int) -> ModelConfig:
    """The model with the mixers of its size if none are named, and with YaRN's original length. A
    wrong text stays as it is, because `validate` refuses it later."""
    changes: dict[str, Any] = {}
    if model.mixer is None and model.pattern is None:
        pattern = PATTERNS.get(model.size)
        changes = {"mixer": "kda"} if pattern is None else {"pattern": pattern}
    if model.gate_bias is None:
        words = changes.get("pattern", model.pattern) or ""
        with contextlib.suppress(ValueError):
            if words and {"kda", "mla"} <= set(parse_pattern(words)):
                changes["gate_bias"] = False
    if model.rope_scaling is not None:
        with contextlib.suppress(ValueError):
            stretch = parse_stretch(model.rope_scaling)
            if stretch.original is None:
                original = max(1, round(seq_len / stretch.factor))
                changes["rope_scaling"] = str(stretch._replace(original=original))
    return dataclasses.replace(model, **changes)
