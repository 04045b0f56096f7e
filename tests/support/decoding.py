"""Decoding in a CUDA graph and without one on a GPU, compared.

    python -m tests.support.decoding [NAME ..]

Each kind of model, or those that are named, decodes prompts of unequal lengths, greedily and by
drawing, in fp32 and bf16.
"""

import sys
from unittest import mock

import torch

from fla_cp.kernels.triton import early
from fla_cp.train import decoding, generate
from fla_cp.train.decoding import DecodeStep, Replayed, why_eager
from fla_cp.train.generate import Sampling, _joined, make_caches, next_logits
from fla_cp.train.model import build_model
from fla_cp.train.parse import parse
from tests.support.exported import randomised

VOCAB, NEW = 500, 16
SIZES = "--model.layers 4 --model.hidden-size 256 --model.num-heads 4 --model.head-dim 64 "
EXPERTS = "--model.experts 16 --model.experts-per-token 4 --model.shared-experts 1 "
MODELS = {
    **{name: f"--mixer {name}" for name in ("kda", "gdn", "comba", "gdp", "gla", "simple_gla")},
    "kimi": "--model.pattern kda,mla",
    "qwen": "--model.pattern gdn,attention",
    "yarn": "--mixer attention --model.rope-scaling yarn:4:16",
    "mla-rope": "--mixer mla --model.mla-rope",
    "experts": "--model.pattern kda,attention " + EXPERTS,
}
LAST = torch.tensor([7, 300, 12])
"""Tokens of the call of the model behind the steps."""

PROMPTS = [[5, 17, 80, 3, 41], [2], [int(i * 31 % VOCAB) for i in range(150)]]


def made(flags: str, dtype: torch.dtype) -> generate.Decoder:
    config = parse((SIZES + flags).split()).model
    model = randomised(build_model(config, VOCAB, 0)).cuda().eval()
    return decoding.in_dtype(model, dtype)


def steps(model: generate.Decoder, prompts: list[list[int]], captured: bool) -> torch.Tensor:
    """The logits [steps + 1, B, vocabulary] behind fixed tokens, the last ones by a call of the
    model with the caches that the steps have left. The graph must serve most of the steps."""
    caches = []
    for prompt in prompts:
        caches.append(make_caches(model, 1, max(map(len, prompts)) + NEW + 3))
        next_logits(model, torch.tensor([prompt], device="cuda"), caches[-1])
    step = DecodeStep(model, _joined(caches), len(prompts))
    replayed, found = Replayed(step, torch.device("cuda"), captured), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(NEW):
        step.tokens.copy_(torch.randint(VOCAB, (len(prompts),), generator=generator))
        found.append(replayed().float().clone())
    assert (replayed.graph is not None) == captured
    found.append(next_logits(model, LAST.expand(len(prompts), -1).cuda(), step.caches).float())
    return torch.stack(found)


def close(a: torch.Tensor, b: torch.Tensor, limit: float) -> None:
    error = (a - b).norm() / b.norm()
    assert error <= limit, f"relative difference {error:.2e}, at most {limit:.0e}"


def called(model: generate.Decoder, prompts: list[list[int]]) -> torch.Tensor:
    """The same logits by calls of the model for each prompt alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack(
        [torch.randint(VOCAB, (len(prompts),), generator=generator) for _ in range(NEW)]
    ).cuda()
    rows = []
    for n, prompt in enumerate(prompts):
        caches = make_caches(model, 1, len(prompt) + NEW + 3)
        next_logits(model, torch.tensor([prompt], device="cuda"), caches)
        each = [*(t[n : n + 1, None] for t in tokens), LAST[None].cuda()]
        rows.append([next_logits(model, t, caches).float()[0] for t in each])
    return torch.stack([torch.stack(row) for row in rows], 1)


def without_graph(model: generate.Decoder, *given: object, **named: object) -> list[list[int]]:
    with mock.patch.object(generate, "why_eager", return_value="compared with the graph"):
        return generate.generate(model, *given, **named)[0]  # type: ignore[arg-type]


def compare_texts(model: generate.Decoder) -> None:
    """Texts with and without the graph, and where rows stop at a token."""
    for sampling in (Sampling(), Sampling(0.8, 0.9)):
        asked = {"sampling": sampling, "seed": 3}
        found, _ = generate.generate(model, PROMPTS, NEW, **asked)
        assert found == without_graph(model, PROMPTS, NEW, **asked), sampling
        end = found[0][5]
        cut, _ = generate.generate(model, PROMPTS, NEW, **asked, end=end)
        for before, now in zip(found, cut, strict=True):
            assert now == before[: before.index(end) + 1 if end in before else NEW]


def main(names: list[str]) -> None:
    for name in names or MODELS:
        flags = MODELS[name]
        for dtype in (torch.float32, torch.bfloat16):
            model = made(flags, dtype)
            captured = why_eager(model) is None
            assert captured or name == "experts", why_eager(model)
            limit = 1e-4
            if dtype == torch.bfloat16:  # where a router's scores are close, it takes others
                limit = 0.3 if name == "experts" else 5e-2
            many = [*PROMPTS, *PROMPTS[:2]]  # more than the products that are one kernel
            for prompts in (PROMPTS[:1], PROMPTS, many):
                plain = steps(model, prompts, False)
                close(plain, called(model, prompts), limit)
                if captured:
                    close(steps(model, prompts, True), plain, limit)
                    with mock.patch.object(early, "EARLY", False):
                        close(steps(model, prompts, True), plain, limit)
            if dtype == torch.float32:
                compare_texts(model)
            print(f"{name} {dtype}: {'graph' if captured else why_eager(model)}", flush=True)
    print("equal steps")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
