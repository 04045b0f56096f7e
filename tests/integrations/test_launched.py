"""Scripts under `accelerate launch` and torchrun: the examples, and one written for accelerate."""

import re
import subprocess

import pytest

from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow
TINY = (
    "hidden_size=32 intermediate_size=48 num_hidden_layers=4 num_attention_heads=2 "
    "num_key_value_heads=1 head_dim=16 linear_key_head_dim=8 linear_value_head_dim=8 "
    "linear_num_key_heads=2 linear_num_value_heads=4 vocab_size=64"
)
LAUNCH = [
    *("accelerate.commands.accelerate_cli", "launch", "--use_fsdp", "--fsdp_version", "2"),
    *("--num_processes", "2", "--main_process_port", "0"),  # 0: any free port
]

SCRIPT = """
import torch, transformers
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
shape = dict(text.split("=") for text in "SHAPE".split())
config = transformers.OlmoHybridConfig(**{k: int(v) for k, v in shape.items()}, pad_token_id=0)
model = transformers.OlmoHybridForCausalLM(config)
rows = [{"input_ids": x, "labels": x} for x in torch.randint(1, 64, (13, 57))]
loader = torch.utils.data.DataLoader(rows, batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
for batch in loader:
    buffers = list(batch.values())
    with accelerator.accumulate(model), accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
    ):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss, 'mean').item():.6f} {rates.get_last_lr()}")
accelerator.end_training()
"""
ONE_NAME = (
    "from accelerate import Accelerator",
    "from fla_cp.integrations.accelerate import CPAccelerator as Accelerator",
)


def run(*words):
    """What `python WORDS` prints."""
    done = subprocess.run(
        [*warm_python(), *map(str, words)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text):
    return [float(x) for x in re.findall(r"\d+\.\d+", text)]


def test_script_that_changes_one_name(tmp_path):
    stock, changed = tmp_path / "stock.py", tmp_path / "changed.py"
    stock.write_text(SCRIPT.replace("SHAPE", TINY))
    changed.write_text(stock.read_text().replace(*ONE_NAME))
    sizes = ["--use_parallelism_config", "--parallelism_config_cp_size", "2"]
    found = numbers(run("-m", *LAUNCH, *sizes, changed))
    wanted = numbers(run(stock))
    assert len(wanted) == 14
    assert found == pytest.approx(wanted, rel=1e-5)


def test_example_with_accelerate():
    script = ROOT / "examples/accelerate_hybrid.py"
    arguments = ["--tokens", "203", "--steps", "4", "--lr", "0.01", "--shape", *TINY.split()]
    line = r"step (\d): loss (\d\.\d{4}), (\d+) tokens/s, 0\.00 GiB, norm of gradients (\d\.\d{3})"
    texts = run(script, *arguments), run("-m", *LAUNCH, script, "--cp", "2", *arguments)
    one, two = ([re.fullmatch(line, x).groups() for x in text.splitlines()] for text in texts)
    assert [step for step, *_ in one] == ["1", "2", "3", "4"]
    losses, norms = ([float(x[i]) for x in one] for i in (1, 3))
    assert losses[-1] < losses[0]
    assert [float(x[1]) for x in two] == pytest.approx(losses, abs=2e-4)
    assert [float(x[3]) for x in two] == pytest.approx(norms, abs=2e-3)
    assert all(int(speed) > 0 for _, _, speed, _ in one + two)


def torchrun(ranks, *words):
    """What a script prints under torchrun."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return run("-m", *launch, *words)


def test_example_with_transformers():
    script = ROOT / "examples/transformers_hybrid.py"
    arguments = ["--tokens", "203", "--steps", "4", "--lr", "0.01", "--shape", *TINY.split()]
    one, two = (torchrun(n, script, *arguments).splitlines() for n in (1, 2))
    line = r"step (\d): loss (\d\.\d{4}), (\d+) tokens/s, 0\.00 GiB"
    one, two = ([re.fullmatch(line, text).groups() for text in lines] for lines in (one, two))
    losses = [float(loss) for _, loss, _ in one]
    assert [step for step, *_ in one] == ["1", "2", "3", "4"]
    assert losses[-1] < losses[0] - 0.3
    assert [float(loss) for _, loss, _ in two] == pytest.approx(losses, abs=2e-4)
    assert all(int(speed) > 0 for _, _, speed in one + two)


def test_example_from_scratch():
    script = ROOT / "examples/kda_mla_from_scratch.py"
    arguments = ["--hidden", "32", "--heads", "2", "--tokens", "203", "--steps", "4"]
    one, two = (numbers(torchrun(n, script, *arguments)) for n in (1, 2))
    assert len(one) == 4
    assert one[-1] < one[0]
    assert two == pytest.approx(one, abs=2e-4)  # four digits are printed


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 60
