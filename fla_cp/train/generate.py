"""Entry point of `fla-cp-generate`: continues prompts with the weights of a run, or of a folder.

fla-cp-generate runs/20260101-000000-tiny --prompt "Once upon a time" --max-new-tokens 64
fla-cp-generate HF_DIR --prompt "Once upon a time"
torchrun --nproc-per-node 4 launch/generate.py runs/a --cp 4 --prompt-file long.txt

The prompt goes through the model in chunks, which fill a cache in each layer. Each further token is
one step that updates the caches in place, on a GPU as a CUDA graph (decoding.py). Prompts are read
one by one, and then decoded together. Several ranks share the tokens of each chunk of a prompt, and
then all decode the same tokens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fla_cp import build_cp_context
from fla_cp.integrations.stock_folder import has_tokenizer
from fla_cp.nn.cache import AttentionCache, LayerCache, RecurrentCache
from fla_cp.nn.decoding import likeliest
from fla_cp.nn.experts import Experts
from fla_cp.train import checkpoint
from fla_cp.train.arguments import Parser, by_flags, check_seed
from fla_cp.train.config import ParallelConfig, UserError
from fla_cp.train.decoding import DecodeStep, Decoding, in_dtype, unsteady_steps, why_eager
from fla_cp.train.distributed import Ranks, check_ranks, joined
from fla_cp.train.ending import say
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.export import own_record, recorded_decoder, whole_checkpoint
from fla_cp.train.integrity import Damaged
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.model import Decoder
from fla_cp.train.published import end_tokens, is_published, load_published
from fla_cp.train.streaming import TextStream, check_bytes
from fla_cp.train.tokenizer import Tokenizer
from fla_cp.train.untrusted import CheckedReader, reading
from fla_cp.train.waiting_bars import shown
from fla_cp.train.weights import give_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PREFILL_CHUNK = 2048
"""How many tokens of a prompt go through the model at once."""

COLDEST = torch.finfo(torch.float32).tiny
"""The smallest temperature above 0; the reciprocal of a smaller one may be inf in fp32."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature: divides the logits; 0 takes the likeliest token. top_p: a
    token is drawn only from the fewest tokens whose probabilities sum to at least this.

    Raises ValueError for a temperature below 0 and for top_p outside of (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and from 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[B] token ids from logits [B, vocabulary]."""
        if self.temperature == 0:
            return likeliest(logits)
        # The largest becomes 0, so that quotients overflow to -inf at most, whose chance is 0.
        below = logits.float() - logits.amax(-1, keepdim=True)
        chances = (below / max(self.temperature, COLDEST)).softmax(-1)
        chances, ids = chances.sort(-1, descending=True)
        before = chances.cumsum(-1) - chances
        chances = chances.masked_fill(before >= self.top_p, 0.0)
        # The index of the largest quotient is a draw from these probabilities. Unlike
        # torch.multinomial, which checks them, it does not make the host wait.
        waits = torch.empty_like(chances).exponential_(generator=generator)
        return ids.gather(-1, (chances / waits).argmax(-1, keepdim=True))[:, 0]


@dataclass
class Statistics:
    """How long a generation took.

    first_token: seconds from the call to the first token of all prompts. left_out: how many steps
    after it were not timed, because they compile kernels and capture the graph, see
    `unsteady_steps`. decoding: seconds of the steps after those. steps: how many these were.
    tokens: how many tokens they gave.
    """

    first_token: float = 0.0
    left_out: int = 0
    decoding: float = 0.0
    steps: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        first = f"first token after {self.first_token:.3f} s"
        if not self.steps:
            return f"{first}, too few tokens for tokens/s"
        rate = self.tokens / self.decoding if self.decoding else 0.0
        without = f", not counting {self.left_out} steps that compile and capture"
        return f"{first}, then {rate:.1f} tokens/s{without if self.left_out else ''}"


def make_caches(model: Decoder, rows: int, capacity: int) -> list[LayerCache]:
    """An empty cache for each block of the model."""
    return [_mixer(block).make_cache(rows, capacity) for block in model.blocks]


def _mixer(block: torch.nn.Module) -> Any:
    return block.get_submodule("mixer")


@torch.no_grad()
def next_logits(
    model: Decoder,
    tokens: Tensor,
    caches: Sequence[LayerCache],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The logits [B, vocabulary] after the last of tokens [B, T], which follow those in the caches.

    group: the ranks that share the tokens, if there is one row and each rank gets a token. The
    caches of each rank then hold all tokens, and each rank returns the logits. Collective.
    """
    T, context = tokens.shape[1], None
    if group is not None and dist.get_world_size(group) <= T and len(tokens) == 1:
        ends = torch.tensor([0, T], dtype=torch.int32, device="cpu")
        context = build_cp_context(
            ends.to(tokens.device), group, conv1d_kernel_size=CONV_SIZE, cu_seqlens_cpu=ends
        )
        tokens = context.shard(tokens)
    x = model.embedding(tokens)
    for block, cache in zip(model.blocks, caches, strict=True):
        part: Any = block
        x = x + part.mixer(part.mixer_norm(x), cp_context=context, cache=cache)
        y = part.ffn(part.ffn_norm(x))
        x = x + (y[0] if isinstance(part.ffn, Experts) else y)
    last = x[:, -1]
    if context is not None:  # the last rank has the last token
        last = last.contiguous()
        dist.broadcast(last, group_src=context.world_size - 1, group=group)
    logits: Tensor = model.head(model.norm(last))
    return logits


def _joined(caches: Sequence[Sequence[LayerCache]]) -> list[LayerCache]:
    """The caches of all layers for all prompts together, from those of single prompts."""
    found: list[LayerCache] = []
    for layer in zip(*caches, strict=True):
        attention = isinstance(layer[0], AttentionCache)
        found.append((AttentionCache if attention else RecurrentCache).joined(layer))
    return found


def _read(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    chunk: int,
    group: dist.ProcessGroup | None,
) -> tuple[list[list[LayerCache]], list[Tensor]]:
    """The caches and the next logits of each prompt. chunk: tokens of a call, of all ranks."""
    device = model.embedding.weight.device
    filled, rows = [], []
    before: torch.cuda.Event | None = None
    chunks = sum(-(-len(prompt) // chunk) for prompt in prompts)
    with shown("reading the prompts", chunks, "chunks") as update:
        for prompt in prompts:
            caches = make_caches(model, 1, capacity)
            tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
            for part in tokens.split(chunk, 1):
                logits = next_logits(model, part, caches, group)
                # The host, and with it the progress bar, is at most one chunk ahead.
                if device.type == "cuda":
                    if before is not None:
                        before.synchronize()
                    before = torch.cuda.Event()
                    before.record(torch.cuda.current_stream(device))
                update()
            filled.append(caches)
            rows.append(logits)
    return filled, rows


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    end: int | Collection[int] | None = None,
    seed: int = 0,
    chunk: int = PREFILL_CHUNK,
    group: dist.ProcessGroup | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> tuple[list[list[int]], Statistics]:
    """The tokens that follow each prompt, without the prompt, and how long it took.

    prompts: token ids of the model, at least one each; their lengths may differ. sampling: by
    default the likeliest token is taken.
    end: a token, or several, after which a row stops; it is part of the result. chunk: how many
    tokens of a prompt go through the model of each rank at once. group: the ranks that share each
    chunk of a prompt. All of them call this with the same arguments, have the same weights and
    return the same. on_tokens: is called with the next token of each row, and None for rows that
    have stopped.
    Raises ValueError for a prompt without tokens, for tokens that the model does not have, for
    counts below 1, and for a seed that generators of PyTorch do not take.
    """
    check_seed("seed", seed)
    _check(prompts, len(model.embedding.weight))
    for name, count in (("max_new_tokens", max_new_tokens), ("chunk", chunk)):
        if count < 1:
            raise ValueError(f"{name} must be from 1, got {count}")
    sampling, device = sampling or Sampling(), model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    clock = _Clock(unsteady_steps(device))
    ranks = 1 if group is None else dist.get_world_size(group)
    capacity = max(map(len, prompts)) + max_new_tokens
    caches, logits = _read(model, prompts, capacity, chunk * ranks, group)
    decoding = Decoding(
        DecodeStep(model, _joined(caches), len(prompts)),
        lambda logits: sampling.choose(logits, generator),
        in_graph=sampling.temperature == 0,
        captured=why_eager(model) is None,
        # All ranks take the tokens of rank 0, so that their caches stay equal.
        shared=None if group is None else partial(dist.broadcast, group_src=0, group=group),
    )
    decoding.take(torch.cat(logits))
    ends = end if isinstance(end, Collection) else (end,)
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = [True] * len(prompts)
    for newest in _newest(decoding, max_new_tokens, on_gpu=device.type == "cuda"):
        clock.read(sum(open_rows))
        given = [t if is_open else None for t, is_open in zip(newest, open_rows, strict=True)]
        for row, token in enumerate(given):
            if token is not None:
                found[row].append(token)
                open_rows[row] = token not in ends
        if on_tokens is not None:
            on_tokens(given)
        if not any(open_rows):
            break
    return found, clock.stop()


def _check(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Raises ValueError for a prompt without tokens, and for tokens that the model does not have.
    vocabulary: how many it has."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or 0 in lengths:
        got = f"none in prompt {1 + lengths.index(0)}" if lengths else "no prompts"
        raise ValueError(f"prompts must each have at least one token, got {got}")
    least, most = min(map(min, prompts)), max(map(max, prompts))
    if most >= vocabulary or least < 0:
        raise ValueError(
            f"prompts must have tokens from 0 to {vocabulary - 1}, those of the model, got "
            f"{least} to {most}"
        )


def _newest(decoding: Decoding, count: int, *, on_gpu: bool) -> Iterator[list[int]]:
    """The newest token of each row, `count` times, with a step between two of them. A caller that
    has enough stops the iteration."""
    for i in range(count):
        wait = decoding.read()
        last = i + 1 == count
        # A GPU computes the next tokens while the host reads these. The first step begins only when
        # the first tokens are read: it compiles kernels, which would delay them.
        ahead = on_gpu and i > 0 and not last
        if ahead:
            decoding.advance()
        yield wait()
        if not ahead and not last:
            decoding.advance()


class _Clock:
    """Measures the `Statistics` of a generation that begins now. unsteady: how many steps are left
    out of the rate."""

    def __init__(self, unsteady: int) -> None:
        self.unsteady, self.statistics = unsteady, Statistics()
        self.reads, self.begin = 0, time.perf_counter()

    def read(self, tokens: int) -> None:
        """Call it when the host has read so many tokens of a step."""
        statistics, now = self.statistics, time.perf_counter()
        if self.reads == 0:
            statistics.first_token = now - self.begin
            self.begin = now
        elif self.reads <= self.unsteady:
            statistics.left_out += 1
            self.begin = now
        else:
            statistics.steps += 1
            statistics.tokens += tokens
        self.reads += 1

    def stop(self) -> Statistics:
        """Ends the measurement."""
        self.statistics.decoding = time.perf_counter() - self.begin
        return self.statistics


def load_decoder(
    run: Path, device: torch.device, *, trust: bool = False, ranks: Ranks | None = None
) -> tuple[Decoder, dict[str, Any]]:
    """The model of a run's newest undamaged checkpoint in float32, and the checkpoint's record.
    trust: allow its pickles to run code. ranks: the ranks that all load it, if there are several.

    Raises UserError for a run without a whole checkpoint, and for one of a model of transformers.
    """
    # DCP warns without a process group.
    alone = joined(ParallelConfig(device="cpu")) if ranks is None else nullcontext(ranks)
    with alone as ranks:
        path = whole_checkpoint(run, trust, ranks)
        record, files = own_record(path)
        metadata = checkpoint.read_metadata(path, files, trust)
        model = recorded_decoder(record)
        give_memory(model, torch.device("cpu"))
        with shown("loading weights"):
            dcp.load(
                {"model": model.state_dict()},
                storage_reader=CheckedReader(path, metadata),
                planner=reading(trust)[1](),
                process_group=ranks.host_group,
            )
    return model.to(device).eval(), record


def load(
    path: Path,
    device: torch.device,
    *,
    trust: bool = False,
    ranks: Ranks | None = None,
    tokenizer_folder: Path | None = None,
) -> tuple[Decoder, Tokenizer | None, list[int]]:
    """The model of a run or of a folder of a published model, its tokenizer, and its end tokens.

    tokenizer_folder: by default the one that the run was trained with, or the published folder.
    Without a tokenizer, bytes are tokens. Raises UserError as `load_decoder` and `load_published`,
    and for a given tokenizer of more tokens than the model has; ValueError as `Tokenizer`.
    """
    given = None if tokenizer_folder is None else Tokenizer(tokenizer_folder)
    if is_published(path):
        model = load_published(path, device)
        _check_vocabulary(given, model)
        tokenizer = given or (Tokenizer(path) if has_tokenizer(path) else None)
        own = [] if tokenizer is None else tokenizer.end
        return model, tokenizer, sorted({*end_tokens(path), *own})
    model, record = load_decoder(path, device, trust=trust, ranks=ranks)
    _check_vocabulary(given, model)
    source = record["data"].get("tokenizer")
    tokenizer = given or (None if source is None else Tokenizer(source))
    return model, tokenizer, [] if tokenizer is None else tokenizer.end


def _check_vocabulary(given: Tokenizer | None, model: Decoder) -> None:
    """Raises UserError for a tokenizer that cannot be the model's."""
    rows = model.embedding.num_embeddings
    if given is not None and given.vocab_size > rows:
        raise UserError(
            f"--tokenizer must have at most the {rows} tokens of the model, got {given.vocab_size}"
        )


def _text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    text: str = tokenizer.hf.decode(tokens, skip_special_tokens=True)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Generates as the arguments say and returns the exit code, see fla_cp/train/exit_codes.py."""
    parser = Parser(
        "fla-cp-generate", description="Continues prompts with the model of a run or a folder."
    )
    about = "run folder, a checkpoint in it, or a Hugging Face folder of Kimi Linear or Qwen3-Next"
    parser.add_argument("run", type=Path, metavar="RUN_OR_HF_DIR", help=about)
    text = "text to continue; may be repeated"
    parser.add_argument("--prompt", action="append", default=[], help=text)
    file = "file with a prompt; may be repeated"
    parser.add_argument("--prompt-file", action="append", type=Path, default=[], help=file)
    most = "most tokens to generate for each prompt; default: 64"
    parser.add_argument("--max-new-tokens", type=int, default=64, help=most)
    greedy = "divides the logits before sampling; 0, the default, takes the likeliest token"
    parser.add_argument("--temperature", type=float, default=0.0, help=greedy)
    share = "sample from the likeliest tokens of this total probability; default: 1, all"
    parser.add_argument("--top-p", type=float, default=1.0, help=share)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling; default: 0")
    sharing = "ranks that share each prompt, as many as torchrun starts; default: 1"
    parser.add_argument("--cp", type=int, default=1, help=sharing)
    weights = "dtype of the weights; default: float32"
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help=weights)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    where = "cpu, cuda or cuda:NUMBER; default: cuda if there is a GPU, else cpu"
    parser.add_argument("--device", default=usual, help=where)
    trust = "load a checkpoint whose pickles may run any code; otherwise it is refused"
    parser.add_argument("--trust-checkpoint", action="store_true", help=trust)
    own = "folder of a tokenizer; default: the one that the model was trained with"
    parser.add_argument("--tokenizer", type=Path, help=own)
    words = list(sys.argv[1:] if argv is None else argv)
    given = parser.parse_args(words)
    first = os.environ.get("RANK", "0") == "0"
    try:
        check_ranks(given.cp, "fla-cp-generate", words)
        device = _device(given.device)
        if given.cp == 1:
            statistics = _continue(given, device)
        else:
            kind: Any = device.type
            with joined(ParallelConfig(cp=given.cp, device=kind)) as ranks:
                statistics = _continue(given, ranks.device, ranks)
    except (ValueError, OSError, Damaged) as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    if first:
        print(statistics, file=sys.stderr)
    return 0


def _device(name: str) -> torch.device:
    """The device of --device. Raises UserError for one that this host does not have."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"--device must be cpu, cuda or cuda:NUMBER, got {name}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= gpus:
        count = f"{gpus} GPU{'s' * (gpus != 1)}"
        raise UserError(f"--device must be one of this host, which has {count}, got {name}")
    return torch.device(name)


def _contents(path: Path) -> str:
    """The text of a --prompt-file. Raises UserError for a file that cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompt-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file must be UTF-8, got {path}: {error}") from None


def _continue(given: Any, device: torch.device, ranks: Ranks | None = None) -> Statistics:
    """Generates and prints as the arguments say."""
    texts = [*given.prompt, *map(_contents, given.prompt_file)]
    if not texts:
        raise UserError("--prompt or --prompt-file must be given")
    if given.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens must be at least 1, got {given.max_new_tokens}")
    check_seed("--seed", given.seed)
    sampling = by_flags(Sampling, temperature=given.temperature, top_p=given.top_p)
    options = {"trust": given.trust_checkpoint, "tokenizer_folder": given.tokenizer}
    model, tokenizer, ends = load(given.run, device, ranks=ranks, **options)
    model = in_dtype(model, DTYPES[given.dtype])
    prompts = [list(text.encode()) for text in texts]
    if tokenizer is not None:
        prompts = tokenizer.ids(texts)
    else:
        check_bytes("--prompt", b"".join(map(bytes, prompts)), len(model.embedding.weight))
    first, one = ranks is None or ranks.rank == 0, len(prompts) == 1
    stream = TextStream(tokenizer)

    def show(tokens: list[int | None]) -> None:
        if tokens[0] is not None:
            say(stream.add(tokens[0]), end="")

    found, statistics = generate(
        model,
        prompts,
        given.max_new_tokens,
        sampling=sampling,
        end=ends,
        seed=given.seed,
        group=None if ranks is None else ranks.cp_group,
        on_tokens=show if one and first else None,
    )
    if first:
        say(stream.end() if one else "\n".join(_text(tokens, tokenizer) for tokens in found))
    return statistics
