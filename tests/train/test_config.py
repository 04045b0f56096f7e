"""Command line, TOML and the rules for a configuration."""

import dataclasses
from typing import get_type_hints

import pytest

import fla_cp.train.main
import fla_cp.train.memory
import fla_cp.train.parse
from fla_cp.train.config import RECIPES, ModelConfig, OptimConfig, TrainConfig, UserError
from fla_cp.train.model import SHAPES, shape_of
from fla_cp.train.optim import learning_rate
from fla_cp.train.parse import load_toml, parse, to_toml

SHORT = {
    "--cp 4": "--parallel.cp 4",
    "--dp-shard 2": "--parallel.dp-shard 2",
    "--dp-replicate 2": "--parallel.dp-replicate 2",
    "--max-steps 7": "--run.max-steps 7",
    "--seq-len 128": "--data.seq-len 128",
    "--model 340M": "--model.size 340M",
    "--data synthetic": "--data.source synthetic",
    "--resume auto": "--run.resume auto",
    "--eval-every 3": "--run.eval-every 3",
    "--checkpoint-every 3": "--run.checkpoint-every 3",
    "--out x": "--run.out x",
    "--device cpu": "--parallel.device cpu",
    "--impl torch": "--model.impl torch",
    "--seed 3": "--run.seed 3",
    "--check-parity": "--parity.check",
    "--remat": "--model.remat",
    "--optimizer muon": "--optim.name muon",
    "--schedule wsd": "--optim.schedule wsd",
    "--workers 3": "--data.workers 3",
}

OTHER = [
    *("--model", "340M", "--model.mixer", "kda", "--model.layers", "3", "--remat"),
    *("--data", 'text:/a "quoted" path', "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--cp", "2", "--dp-shard", "2", "--dtype", "bfloat16", "--lr", "0.001", "--out", "runs/x"),
    *("--parity.loss-budget", "1e-7", "--tracker", "none"),
]


@pytest.mark.parametrize("short", SHORT)
def test_short_names_are_the_long_ones(short):
    config = parse(short.split())
    assert config == parse(SHORT[short].split())
    assert config != parse([])


def test_toml_round_trip(tmp_path):
    for argv in ([], OTHER):
        config = parse(argv)
        path = tmp_path / "config.toml"
        path.write_text(to_toml(config))
        assert load_toml(path) == config
        assert parse(["--config", str(path)]) == config


def test_flags_win_over_toml_and_toml_over_defaults(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[parallel]\ncp = 4\n[run]\nseed = 5\n[optim]\nlr = 1\n")
    config = parse(["--cp", "2", "--config", str(path)])
    assert (config.parallel.cp, config.run.seed, config.optim.lr) == (2, 5, 1.0)
    assert type(config.optim.lr) is float


@pytest.mark.parametrize(
    "text,message",
    [
        ("[data]\nseqlen = 3\n", r"unknown key data.seqlen in .*; did you mean data.seq_len\?"),
        ("[datas]\n", r"unknown key datas in .*; did you mean data\?"),
        ("zzz = 1\n", "unknown key zzz in .*; known: model, data"),
        ("[data]\nseq_len = '3'\n", "data.seq_len in .* must be int, got '3'"),
        ("[data]\nseq_len = true\n", "data.seq_len in .* must be int, got True"),
        ("[model]\nsize = '7B'\n", "--model must be one of 'tiny', .*, or hf:DIR, got '7B'"),
        ("data = 3\n", "data in .* must be a table, got 3"),
        ("[data\n", "is not valid TOML"),
        ("[parallel]\ncp = 0\n", "--cp must be at least 1, got 0"),
    ],
)
def test_bad_toml_names_the_key(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        parse(["--config", str(path)])


def test_missing_toml():
    with pytest.raises(UserError, match=r"--config: cannot read /no/such\.toml: No such file"):
        parse(["--config", "/no/such.toml"])


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--cp 0", "--cp must be at least 1, got 0"),
        ("--seq-len 1", "--seq-len must be at least 2, got 1"),
        ("--max-steps 0", "--max-steps must be at least 1, got 0"),
        ("--eval-every -1", "--eval-every must be at least 0, got -1"),
        ("--run.keep-checkpoints 0", "--run.keep-checkpoints must be at least 1, got 0"),
        ("--lr 0", "--lr must be positive, got 0.0"),
        ("--lr nan", "--lr must be finite, got nan"),
        ("--optim.beta2 1", r"--optim.beta2 must be in \[0, 1\), got 1.0"),
        ("--optim.momentum 1", r"--optim.momentum must be in \[0, 1\), got 1.0"),
        ("--optim.decay-ratio 1.5", r"--optim.decay-ratio must be in \[0, 1\], got 1.5"),
        ("--workers -1", "--workers must be at least 0, got -1"),
        (
            "--parallel.layout uneven",
            "--parallel.layout must be auto, contiguous or zigzag without --check-parity, got "
            "uneven",
        ),
        ("--optim.min-lr-ratio 2", r"--optim.min-lr-ratio must be in \[0, 1\], got 2.0"),
        ("--model.head-dim 512", "--model.head-dim must be at most 256 with kda, got 512"),
        ("--mixer gla --model.head-dim 513", "must be at most 512 with gla, got 513"),
        ("--model.pattern gla,kda,gdn --model.head-dim 512", "at most 256 with gdn and kda, got"),
        ("--model.gate-lower-bound -6", r"--model.gate-lower-bound must be in \[-5, 0\), got -6"),
        (
            "--global-batch-size 3 --dp-shard 2",
            r"--global-batch-size must be a multiple of dp-shard \* dp-replicate = 2 \* 1, got 3",
        ),
        (
            "--global-batch-size 8 --dp-shard 2 --micro-batch-size 3",
            "--micro-batch-size must be a divisor of the 4 packs of a data-parallel rank, got 3",
        ),
        ("--seed 4294967296", r"--seed must be at least 0 and below 2\^32, got 4294967296"),
        ("--seed -1", r"--seed must be at least 0 and below 2\^32, got -1"),
        ("--cp 64 --seq-len 16", "--cp must be at most the 32 tokens of a micro-batch"),
    ],
)
def test_broken_rules_name_flag_rule_and_value(flags, message):
    with pytest.raises(UserError, match=message):
        parse(flags.split())


@pytest.mark.parametrize("mixers", ["gla", "simple_gla", "gla,simple_gla"])
def test_heads_of_512_channels_where_the_operators_take_them(mixers):
    config = parse(["--model.pattern", mixers, "--model.head-dim", "512"])
    assert config.model.head_dim == 512


@pytest.mark.parametrize(
    "flag,text,message",
    [
        ("--out", "", "--out must not be empty, got ''"),
        ("--out", "a\nb", r"--out must not hold control characters, got 'a\\nb'"),
        ("--out", "a\x00b", r"--out must not hold control characters, got 'a\\x00b'"),
        ("--out", "a\udcff", r"--out must be valid UTF-8, got 'a\\udcff'"),
        ("--out", "FILE", "--out must be a folder, not a file, got .*file$"),
        ("--out", "FILE/run", r"--out must be a folder, not a file, got .*run: .*file is one"),
        ("--data", "text:a\tb", "--data must not hold control characters"),
        ("--resume", "", "--resume must not be empty"),
    ],
)
def test_paths_that_no_run_can_have(tmp_path, flag, text, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=message):
        parse([flag, text.replace("FILE", str(tmp_path / "file"))])


def test_odd_paths_survive_toml(tmp_path):
    for name in ('a "b" c', "back\\slash", "ümlaut", "tail ", "#no comment"):
        config = parse(["--out", str(tmp_path / name), "--data", f"text:{name}"])
        (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
        assert load_toml(tmp_path / "config.toml") == config


def test_rates_and_steps_follow_the_model_size(tmp_path):
    for size, recipe in RECIPES.items():
        config = parse(["--model", size])
        found = (config.optim.lr, config.optim.warmup_steps, config.run.max_steps)
        assert found == dataclasses.astuple(recipe)
    assert len({recipe.lr for recipe in RECIPES.values()}) == len(RECIPES)
    # a flag or a file wins, and a short run has a short warm-up
    config = parse(["--model", "340M", "--max-steps", "24", "--lr", "0.5"])
    assert (config.optim.lr, config.optim.warmup_steps, config.run.max_steps) == (0.5, 4, 24)
    assert parse(["--max-steps", "3", "--warmup-steps", "9"]).optim.warmup_steps == 9
    path = tmp_path / "config.toml"
    path.write_text("[model]\nsize = '1.3B'\n[optim]\nlr = 0.25\n")
    config = parse(["--config", str(path)])
    assert (config.optim.lr, config.run.max_steps) == (0.25, RECIPES["1.3B"].max_steps)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--cpp 4", "unknown option --cpp; did you mean --cp?"),
        ("--gate-bias True", "unknown option --gate-bias; did you mean --model.gate-bias?"),
        ("--dp 2", "unknown option --dp; did you mean --dp-shard or --dp-replicate?"),
        ("--no-ofload", "unknown option --no-ofload; did you mean --offload?"),
        ("--zzz", "unknown option --zzz; fla-cp-train --help lists all"),
        ("-x", "unknown option -x; fla-cp-train --help lists all"),
        ("train", "options must begin with --, got 'train'"),
        (
            "--check-parity 3",
            "options must begin with --, got '3' after --check-parity, which takes no value",
        ),
        ("--offload=True", "--offload must be given without a value, got 'True'"),
        ("--impl 7B", "--impl must be one of auto, torch, triton, got '7B'"),
        ("--model.gate-bias yes", "--model.gate-bias must be one of True, False, got 'yes'"),
        ("--cp x", "--cp must be a whole number, got 'x'"),
        ("--seed None", "--seed must be a whole number, got 'None'"),
        ("--max-steps=1.5", "--max-steps must be a whole number, got '1.5'"),
        ("--optim.lr 1e", "--optim.lr must be a number, got '1e'"),
        ("--config", "--config must have a value"),
        ("--lr --cp 4", "--lr must have a value: a number"),
        ("--schedule", "--schedule must have a value: one of cosine, wsd"),
    ],
)
def test_bad_flags_end_in_one_line_on_one_rank(flags, message, monkeypatch, capfd):
    for main in (fla_cp.train.main.main, fla_cp.train.memory.main):
        assert main(flags.split()) == 2
        assert capfd.readouterr() == ("", f"error: {message}\n")
    monkeypatch.setenv("RANK", "1")
    assert fla_cp.train.main.main(flags.split()) == 2
    assert capfd.readouterr() == ("", "")


def test_advice_names_options_of_the_program_itself(capfd):
    assert fla_cp.train.memory.main(["--memory-gb", "80"]) == 2
    assert (
        capfd.readouterr().err == "error: unknown option --memory-gb; did you mean --memory-gib?\n"
    )


def test_what_only_tyro_refuses_is_one_line_too(monkeypatch):
    monkeypatch.setattr(fla_cp.train.parse, "check_flags", lambda *given: None)
    with pytest.raises(UserError, match=r"^the flags are refused: Unrecognized options .*--cpp.*$"):
        parse(["--cpp", "4"])


def test_values_that_tyro_takes_are_not_refused():
    flags = "--seed=1_0 --lr 1e-3 --cp +2 --model.no-offload --model.layers None --dp_shard -1"
    config = parse([*flags.split(), "--model.gate_bias=False", "--out=--odd"])
    assert (config.run.seed, config.parallel.cp, config.parallel.dp_shard) == (10, 2, 1)
    assert (config.model.layers, config.model.gate_bias, config.run.out) == (None, False, "--odd")


def test_help_says_what_each_field_is(capsys):
    with pytest.raises(SystemExit) as success:
        parse(["--help"])
    assert success.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for section in dataclasses.fields(TrainConfig):
        hint = get_type_hints(TrainConfig)[section.name]
        if dataclasses.is_dataclass(hint):
            for item in dataclasses.fields(hint):
                flag = f"--{section.name}.{item.name.replace('_', '-')}"
                # an option's text follows its names, up to "(default: ...)"
                described = text.split(flag, 1)[1].split("(default:")[0]
                assert len(described.split()) > 3, flag


def test_sizes_and_overrides():
    assert tuple(SHAPES) == tuple(RECIPES)
    shape = shape_of(ModelConfig(size="340M", layers=2, tie_embeddings=True))
    assert shape == dataclasses.replace(SHAPES["340M"], layers=2, tie_embeddings=True)


def test_a_ratio_gives_the_inner_width_that_it_was_made_of():
    """Rounding made 1920 of 1856 with a hidden size of 224, as of many others."""
    tiny = SHAPES["tiny"]
    for hidden in range(32, 4097, 96):
        for width in range(64, 16385, 64):
            shape = dataclasses.replace(tiny, hidden_size=hidden, ffn_ratio=width / hidden)
            assert shape.ffn_size == width
    assert dataclasses.replace(tiny, hidden_size=224, ffn_ratio=1857 / 224).ffn_size == 1920


def test_inner_widths_of_named_sizes_stay():
    """Checkpoints have matrices of these widths."""
    found = {name: shape.ffn_size for name, shape in SHAPES.items()}
    assert found == {
        "tiny": 384,
        "340M": 2752,
        "1.3B": 5504,
        "kimi-linear-small": 3072,
        "qwen3-next-small": 2560,
        "kimi-linear": 9216,
        "qwen3-next": 5120,
    }
    for hidden in range(1, 3000):  # 8/3 of it
        shape = dataclasses.replace(SHAPES["tiny"], hidden_size=hidden)
        assert shape.ffn_size == -(-hidden * 8 // (3 * 64)) * 64


def test_learning_rate_warms_up_and_decays_to_its_minimum():
    config = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 10) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0), 1, 1) == pytest.approx(0.1)
