"""Entry point of `fla-cp-evaluate`: a model's held-out loss by position and length, the perplexity
of a text, and the recall of needles.

fla-cp-evaluate runs/a                                    # held-out loss of the run's data
fla-cp-evaluate HF_DIR --data text:books/ --text page.txt
torchrun --nproc-per-node 4 launch/evaluate.py runs/a --cp 4 --needle 1024,4096

All ranks share each sequence, and each holds a shard of the weights. The figures are sums over
tokens, so they do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fla_cp import build_cp_context
from fla_cp.integrations.stock_folder import has_tokenizer
from fla_cp.train import checkpoint
from fla_cp.train.arguments import Parser
from fla_cp.train.config import ParallelConfig, UserError
from fla_cp.train.data import IGNORE, Batch, collate
from fla_cp.train.distributed import Ranks, check_ranks, compute_dtype, joined
from fla_cp.train.ending import ended, say
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.export import own_record, recorded_decoder, whole_checkpoint
from fla_cp.train.integrity import Damaged
from fla_cp.train.loader import token_ranges
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.model import Decoder
from fla_cp.train.needle import SHORTEST, VOCAB_SIZE, needle_document
from fla_cp.train.plot import check_picture
from fla_cp.train.progress import mark
from fla_cp.train.published import is_published, load_published_shards
from fla_cp.train.sources import Reading, build_dataset
from fla_cp.train.streaming import check_bytes
from fla_cp.train.tokenizer import Tokenizer
from fla_cp.train.untrusted import CheckedReader, reading
from fla_cp.train.waiting_bars import shown
from fla_cp.train.weights import allocate

BUCKETS = 32
"""Bucket i has the values from 2^(i-1) to 2^i - 1; bucket 0 has the value 0."""


@dataclass
class Results:
    """What was measured; None or empty where it was not asked for.

    loss: mean held-out loss in nats per target, of `targets`. by_position, by_length: [first value
    of the bucket, mean loss, targets] for each bucket that has a target. perplexity: of the text;
    bits_per_byte: likewise. needle: {length: {depth: share of right answers}}.
    """

    loss: float | None = None
    targets: int = 0
    by_position: list[tuple[int, float, int]] = field(default_factory=list)
    by_length: list[tuple[int, float, int]] = field(default_factory=list)
    perplexity: float | None = None
    bits_per_byte: float | None = None
    needle: dict[int, dict[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, of which each rank has a shard.

    data: the options of the data that the run was trained on; {} for a folder. tokenizer: None
    where bytes are tokens.
    """

    model: Decoder
    data: dict[str, Any]
    tokenizer: str | None


def load(path: Path, ranks: Ranks, dtype: torch.dtype, *, trust: bool = False) -> Subject:
    """The model of a run's newest whole checkpoint, or of a folder of a published model.

    Raises UserError as `generate.load` does. Collective.
    """
    if is_published(path):
        model = load_published_shards(path, ranks, dtype)
        return Subject(model, {}, str(path) if has_tokenizer(path) else None)
    path = whole_checkpoint(path, trust, ranks)
    record, files = own_record(path)
    model = recorded_decoder(record)
    allocate(model, ranks, dtype)
    with shown("loading weights"):
        dcp.load(
            {"model": model.state_dict()},
            storage_reader=CheckedReader(path, checkpoint.read_metadata(path, files, trust)),
            planner=reading(trust)[1](),
            process_group=ranks.host_group,
        )
    model.eval()
    return Subject(model, record["data"], record["data"].get("tokenizer"))


@torch.no_grad()
def scores(model: Decoder, batch: Batch, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Results for this rank's tokens of a collated batch: losses and hits [2, T_local] fp32, labels
    [T_local], and the tokens' places in the batch [T_local]. Collective."""
    mark("evaluation")
    total = batch["tokens"].shape[1]
    cuts = token_ranges(total, ranks.cp, "contiguous")
    own = cuts[ranks.rank % ranks.cp]
    context = build_cp_context(
        batch["cu_seqlens"].to(ranks.device),
        ranks.cp_group,
        conv1d_kernel_size=CONV_SIZE,
        cu_seqlens_cpu=batch["cu_seqlens"],
        token_ranges=cuts,
    )
    places = torch.cat([torch.arange(lo, hi, dtype=torch.int64, device="cpu") for lo, hi in own])
    tokens, labels = (batch[name][:, places].to(ranks.device) for name in ("tokens", "labels"))
    found = model(tokens, context, labels, each=True)
    return found.cpu(), labels[0].cpu(), places


def held_out(model: Decoder, packs: Sequence[Batch], ranks: Ranks) -> Results:
    """The losses of packs by position in the document and by the document's length, both counted
    from where the document begins or ends in the pack. Collective."""
    sums = torch.zeros(2, 2, BUCKETS, dtype=torch.float64, device="cpu")
    with shown("measuring the held-out loss", len(packs), "packs") as update:
        for pack in packs:
            batch = collate([pack])
            found, labels, places = scores(model, batch, ranks)
            counts = labels != IGNORE
            offsets = batch["cu_seqlens"].to(torch.int64)
            document = torch.searchsorted(offsets, places, right=True) - 1
            values = places - offsets[document], offsets.diff()[document]
            for row, value in zip(sums, values, strict=True):
                bucket = _bucket(value[counts])
                row[0].index_add_(0, bucket, found[0, counts].double())
                row[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
            update()
    sums = ranks.sum(sums.to(ranks.device)).cpu()
    loss, targets = sums[0].sum(1).tolist()
    tables = [
        [
            (_first(i), total / count, int(count))
            for i, (total, count) in enumerate(row.T.tolist())
            if count
        ]
        for row in sums
    ]
    return Results(loss / max(targets, 1.0), int(targets), tables[0], tables[1])


def _bucket(values: Tensor) -> Tensor:
    """The number of the bucket of each value: how many binary digits it has."""
    edges = 2 ** torch.arange(BUCKETS - 1, dtype=torch.int64, device="cpu")
    return torch.searchsorted(edges, values, right=True)


def _first(bucket: int) -> int:
    return 0 if bucket == 0 else 2 ** (bucket - 1)


def text_loss(model: Decoder, ids: Sequence[int], window: int, ranks: Ranks) -> float:
    """The summed loss of all tokens of a text but the first, in nats. Collective.

    window: tokens that the model reads at once; each window begins without those before it.
    """
    tokens = torch.tensor([list(ids)], dtype=torch.int64, device="cpu")
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    total = torch.zeros(1, dtype=torch.float64, device="cpu")
    parts = tokens.split(window, 1)
    with shown("reading the text", len(parts), "windows") as update:
        for part, wanted in zip(parts, labels.split(window, 1), strict=True):
            ends = torch.tensor([0, part.shape[1]], dtype=torch.int32, device="cpu")
            batch = {"tokens": part, "labels": wanted, "cu_seqlens": ends}
            total += scores(model, batch, ranks)[0][0].double().sum()
            update()
    return float(ranks.sum(total.to(ranks.device)).item())


def needle_recall(
    model: Decoder,
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    ranks: Ranks,
    seed: int = 0,
) -> dict[int, dict[float, float]]:
    """The share of `count` needles that the model recalls, by length of the document and depth of
    the needle in it. Collective."""
    found: dict[int, dict[float, float]] = {}
    needles = len(lengths) * len(depths) * count
    with shown("recalling needles", needles, "needles") as update:
        for length in lengths:
            found[length] = {}
            for depth in depths:
                rng = np.random.default_rng([seed, length, round(1000 * depth)])
                hits = torch.zeros(1, dtype=torch.float64, device="cpu")
                for _ in range(count):
                    batch = _needle_batch(rng, length, depth)
                    hits += scores(model, batch, ranks)[0][1].double().sum()
                    update()
                found[length][depth] = ranks.sum(hits.to(ranks.device)).item() / count
    return found


def _needle_batch(rng: np.random.Generator, length: int, depth: float) -> Batch:
    document = torch.from_numpy(needle_document(rng, length, depth).astype(np.int64))[None]
    labels = torch.full_like(document, IGNORE)
    labels[:, -2] = document[:, -1]
    ends = torch.tensor([0, length], dtype=torch.int32, device="cpu")
    return {"tokens": document, "labels": labels, "cu_seqlens": ends}


def draw(results: Results, out: Path) -> None:
    """Writes a picture of what was measured. Raises UserError for a file that it cannot write."""
    from matplotlib.figure import Figure

    curves = (("position in the document", results.by_position), ("length", results.by_length))
    drawn = [(label, rows) for label, rows in curves if rows]
    count = max(1, len(drawn) + bool(results.needle))
    figure = Figure(figsize=(5 * count, 4), layout="constrained")
    places = np.atleast_1d(figure.subplots(1, count))
    for axes, (label, rows) in zip(places, drawn, strict=False):
        _curve(axes, label, rows)
    if results.needle:
        _map(places[-1], results.needle)
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--out must be a picture that can be written, got {out}: {error}"
        ) from None


def _curve(axes: Any, label: str, rows: Sequence[tuple[int, float, int]]) -> None:
    axes.plot([max(first, 0.5) for first, *_ in rows], [loss for _, loss, _ in rows], "o-")
    axes.set_xscale("log", base=2)
    axes.set(xlabel=f"{label} (from, in tokens)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)


def _map(axes: Any, needle: dict[int, dict[float, float]]) -> None:
    lengths, depths = list(needle), list(next(iter(needle.values())))
    grid = [[needle[length][depth] for length in lengths] for depth in depths]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the needle", title="recall")
    axes.figure.colorbar(image, ax=axes)


def report(results: Results) -> str:
    """What was measured, in lines."""
    lines = []
    if results.loss is not None:
        lines.append(f"held-out loss: {results.loss:.4f} over {results.targets} targets")
        for name, rows in (("position", results.by_position), ("length", results.by_length)):
            lines.append(f"{name + ' from':>14}  {'loss':>8}  targets")
            lines += [f"{first:>14}  {loss:>8.4f}  {count}" for first, loss, count in rows]
    if results.perplexity is not None:
        bits = f"{results.bits_per_byte:.4f} bits per byte"
        lines.append(f"perplexity of the text: {results.perplexity:.4f} ({bits})")
    for length, shares in results.needle.items():
        cells = "  ".join(f"{depth:.2f}: {share:.2f}" for depth, share in shares.items())
        lines.append(f"needle in {length} tokens, recall by depth: {cells}")
    return "\n".join(lines)


def _packs(source: str, length: int, given: Any, subject: Subject, ranks: Ranks) -> Sequence[Batch]:
    """The first held-out packs. Rank 0 reads them first and fills the cache. Collective."""
    tokenizer, column = subject.tokenizer, given.column or subject.data.get("column")
    found: list[Batch] = []
    for turn in (True, False):
        problem = ""
        if (ranks.rank == 0) == turn:
            try:
                flags = "--column", "--cache"
                options = Reading(tokenizer, column, given.cache, None, *flags)
                data = build_dataset(source, length, "valid", _data_seed(given, subject), options)
                head = data.head(given.packs)
                found = [head[i] for i in range(len(head))]
                _check_tokens("--data", data.vocab_size, subject)
            except (ValueError, OSError) as error:
                flag = "" if str(error).startswith("--") else "--data: "  # or that of --tokenizer
                problem = f"{flag}{error}"
        problem = ranks.first_problem(problem)
        if problem:
            raise UserError(problem)
    return found


def _data_seed(given: Any, subject: Subject) -> int:
    """The seed of the held-out data: by default the run's for its own data, so that they are those
    of its evaluations, and otherwise 0."""
    own = subject.data.get("seed", 0) if given.data is None else 0
    return own if given.seed is None else given.seed


def _check_tokens(what: str, tokens: int, subject: Subject) -> None:
    rows = subject.model.embedding.num_embeddings
    if tokens > rows:
        raise UserError(f"{what} must have at most the {rows} tokens of the model, got {tokens}")


def evaluate(given: Any, ranks: Ranks) -> Results:
    """Measures what the arguments ask for. Collective."""
    dtype = compute_dtype(given.dtype, ranks.device)
    subject = load(given.run, ranks, dtype, trust=given.trust_checkpoint)
    if given.tokenizer is not None:
        subject = dataclasses.replace(subject, tokenizer=given.tokenizer)
    source = given.data or subject.data.get("source")
    length = given.seq_len or subject.data.get("seq_len") or 4096
    if source is None and given.text is None and not given.needle:
        raise UserError("--data, --text or --needle must be given for a Hugging Face folder")
    results = Results()
    if source is not None and given.packs:
        packs = _packs(source, length, given, subject, ranks)
        results = held_out(subject.model, packs, ranks)
    if given.text is not None:
        try:
            text = given.text.read_bytes()
        except OSError as error:
            raise UserError(f"--text: cannot read {given.text}: {error.strerror}") from None
        ids = list(text)
        if subject.tokenizer is not None:
            try:
                (ids,) = Tokenizer(subject.tokenizer).ids([text.decode(errors="replace")])
            except ValueError as error:
                raise UserError(str(error)) from None
        else:
            check_bytes("--text", ids, subject.model.embedding.num_embeddings)
        if len(ids) < 2:
            raise UserError(f"--text must have at least two tokens, got {len(ids)}")
        _check_tokens("--text", 1 + max(ids), subject)
        nats = text_loss(subject.model, ids, length, ranks)
        results.perplexity = math.exp(nats / (len(ids) - 1))
        results.bits_per_byte = nats / math.log(2) / len(text)
    if given.needle:
        _check_tokens("--needle", VOCAB_SIZE, subject)
        depths = [i / max(1, given.needle_depths - 1) for i in range(given.needle_depths)]
        results.needle = needle_recall(
            subject.model, given.needle, depths, given.needle_count, ranks, given.seed or 0
        )
    return results


def _lengths(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        rule = "must be lengths with commas between them, such as 512,2048"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None
    if min(found) < SHORTEST:
        raise argparse.ArgumentTypeError(f"must have lengths from {SHORTEST}, got {min(found)}")
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "fla-cp-evaluate",
        description="Measures held-out loss, perplexity and recall of a model, and draws them.",
    )
    about = "run folder, a checkpoint in it, or a Hugging Face folder of Kimi Linear or Qwen3-Next"
    parser.add_argument("run", type=Path, metavar="RUN_OR_HF_DIR", help=about)
    parser.add_argument("--data", help="held-out data, as in fla-cp-train; default: the run's")
    packs = "number of held-out packs (default: %(default)s); 0 leaves out the held-out loss"
    parser.add_argument("--packs", type=int, default=16, help=packs)
    parser.add_argument("--seq-len", type=int, help="tokens of a pack; default: the run's, or 4096")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; default: the model's")
    parser.add_argument("--column", help="column of hf:PATH; default: the run's")
    parser.add_argument("--cache", help="as --data.cache of fla-cp-train")
    parser.add_argument("--text", type=Path, help="text file whose perplexity is measured")
    needle = "recall of needles in documents of these lengths, such as 512,2048"
    parser.add_argument("--needle", type=_lengths, default=[], metavar="LENGTHS", help=needle)
    depths = "number of depths in a document, from its beginning to its end (default: %(default)s)"
    parser.add_argument("--needle-depths", type=int, default=5, help=depths)
    count = "needles for each length and depth (default: %(default)s)"
    parser.add_argument("--needle-count", type=int, default=8, help=count)
    seed = (
        "seed of the held-out data and of the needles; default: the run's for its own data, else 0"
    )
    parser.add_argument("--seed", type=int, help=seed)
    cp = "ranks that share each sequence, as many as torchrun starts (default: %(default)s)"
    parser.add_argument("--cp", type=int, default=1, help=cp)
    device = "auto, the default, takes GPUs if there are any"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    dtype = "compute dtype; auto, the default: bfloat16 on GPUs, float32 on the CPU"
    dtypes = ("auto", "float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help=dtype)
    out = "picture to write, beside which the figures go as JSON (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("evaluation.png"), help=out)
    trust = "load a checkpoint whose pickles may run any code; otherwise it is refused"
    parser.add_argument("--trust-checkpoint", action="store_true", help=trust)
    return parser.parse_args(argv)


def _check(given: argparse.Namespace, argv: Sequence[str]) -> None:
    least = {"packs": 0, "needle_depths": 1, "needle_count": 1, "seed": 0, "cp": 1}
    least["seq_len"] = 2  # one token has no context
    for name, value in least.items():
        if getattr(given, name) is not None and getattr(given, name) < value:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} must be at least {value}, got {getattr(given, name)}")
    if not given.packs and given.text is None and not given.needle:
        raise UserError("--packs must be at least 1 without --text and --needle, got 0")
    check_ranks(given.cp, "fla-cp-evaluate", argv)
    check_picture(given.out)


def _publish(results: Results, out: Path) -> None:
    """Writes the figures and the picture, and then prints the figures, which nobody may read.

    Raises UserError, after the figures are printed, for a file that cannot be written.
    """
    lines = [report(results)]
    try:
        _write(results, path := out.with_suffix(".json"))
        lines.append(f"figures: {path}")
        if results.by_position or results.needle:  # the perplexity of a text is no curve
            draw(results, out)
            lines.append(f"picture: {out}")
    finally:
        say("\n".join(lines))


def _write(results: Results, path: Path) -> None:
    """Writes the figures as JSON. Raises UserError for a file that cannot be written."""
    figures = json.dumps(dataclasses.asdict(results), indent=2) + "\n"
    try:
        path.write_text(figures, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {path}: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates as the arguments say and returns the exit code, see fla_cp/train/exit_codes.py."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = _arguments(words)
    first = os.environ.get("RANK", "0") == "0"
    try:
        _check(given, words)
        with joined(ParallelConfig(cp=given.cp, device=given.device)) as ranks:
            results = evaluate(given, ranks)
        if first:
            _publish(results, given.out)
    except (UserError, Damaged) as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(ended(main()))
