"""All programs say a mistake in their arguments as the trainer does: in one line, with status 2."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

from fla_cp.train.exit_codes import MISTAKE

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
PROGRAMS = {name: entry.split(":") for name, entry in SCRIPTS["project"]["scripts"].items()}
GIVEN = {
    "fla-cp-train": [],
    "fla-cp-memory": [],
    "fla-cp-export": ["runs/a", "exported"],
    "fla-cp-plot": ["runs/a"],
    "fla-cp-generate": ["runs/a", "--prompt", "x"],
    "fla-cp-evaluate": ["runs/a"],
    "fla-cp-tokenize": ["stdlib", "--tokenizer", "t", "--out", "tokens"],
}
"""Arguments of each program in which nothing is missing."""

WRONG = [
    ("fla-cp-train", ["--seq-len", "x"], "--seq-len must be a whole number, got 'x'"),
    ("fla-cp-memory", ["--memory-gib", "x"], "--memory-gib must be a number, got 'x'"),
    ("fla-cp-memory", ["--memory-gib", "inf"], "--memory-gib must be finite and above 0, got inf"),
    ("fla-cp-memory", ["--memory-gib"], "--memory-gib must have a value"),
    ("fla-cp-export", ["--shard-bytes", "5GB"], "--shard-bytes must be a whole number, got '5GB'"),
    ("fla-cp-export", ["c"], "RUN and DIR must be the only arguments without --, got 'c' as well"),
    ("fla-cp-plot", ["--x", "time"], "--x must be one of step, tokens, got 'time'"),
    ("fla-cp-plot", ["--smoth", "2"], "unknown option --smoth; did you mean --smooth?"),
    ("fla-cp-plot", ["--smooth", "-1"], "--smooth must be at least 1, got -1"),
    ("fla-cp-generate", ["--top-p=all"], "--top-p must be a number, got 'all'"),
    ("fla-cp-evaluate", ["--needle", "3"], "--needle must have lengths from 16, got 3"),
    (
        "fla-cp-evaluate",
        ["b"],
        "RUN_OR_HF_DIR must be the only argument without --, got 'b' as well",
    ),
    ("fla-cp-tokenize", ["--processes", "1.5"], "--processes must be a whole number, got '1.5'"),
    ("fla-cp-train", ["--tok", "t"], "unknown option --tok; did you mean --tokenizer?"),
    ("fla-cp-memory", ["--no-l"], "unknown option --no-l; did you mean --no-longest?"),
    ("fla-cp-export", ["--shard=9"], "unknown option --shard; did you mean --shard-bytes?"),
    ("fla-cp-plot", ["--s", "2"], "unknown option --s; did you mean --smooth?"),
    ("fla-cp-generate", ["--top", "2"], "unknown option --top; did you mean --top-p?"),
    (
        "fla-cp-evaluate",
        ["--needle-", "2"],
        "unknown option --needle-; did you mean --needle-depths or --needle-count?",
    ),
    ("fla-cp-tokenize", ["--proc", "2"], "unknown option --proc; did you mean --processes?"),
]
MISSING = {
    "fla-cp-export": "RUN and DIR",
    "fla-cp-plot": "RUN",
    "fla-cp-generate": "RUN_OR_HF_DIR",
    "fla-cp-evaluate": "RUN_OR_HF_DIR",
    "fla-cp-tokenize": "SOURCE and --tokenizer and --out",
}


def mistake(name, words, monkeypatch, capsys):
    """What a program prints for arguments that it refuses."""
    monkeypatch.setattr("sys.argv", [name, *words])
    module, entry = PROGRAMS[name]
    try:
        code = getattr(importlib.import_module(module), entry)()
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (MISTAKE, ""), printed
    return printed.err


@pytest.mark.parametrize("name, words, rule", WRONG)
def test_a_mistake_is_one_line_with_argument_rule_and_value(name, words, rule, monkeypatch, capsys):
    assert mistake(name, GIVEN[name] + words, monkeypatch, capsys) == f"error: {rule}\n"


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unknown_option_is_one_line_that_says_where_all_are(name, monkeypatch, capsys):
    said = mistake(name, [*GIVEN[name], "--zzz", "1"], monkeypatch, capsys)
    assert said.startswith("error: unknown option --zzz; ") and said.count("\n") == 1
    assert said.endswith(" --help lists all\n")


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_named_in_one_line(name, monkeypatch, capsys):
    said = f"error: {MISSING[name]} must be given; {name} --help says how\n"
    assert mistake(name, [], monkeypatch, capsys) == said


def test_an_abbreviation_of_a_required_option_is_not_called_missing(monkeypatch, capsys):
    words = ["stdlib", "--tok", "t", "--out", "tokens"]
    said = mistake("fla-cp-tokenize", words, monkeypatch, capsys)
    assert said == "error: unknown option --tok; did you mean --tokenizer?\n"


def test_all_programs_of_the_repository_refuse_abbreviations():
    """Also those that are no part of the package, such as benchmarks and examples."""
    root, found = Path(__file__).parents[2], []
    for folder in ("fla_cp", "benchmarks", "examples", "launch", "docs", "tests", "tools"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                    options = {option.arg: option.value for option in node.keywords}
                    refuses = getattr(options.get("allow_abbrev"), "value", True) is False
                    found.append((str(path.relative_to(root)), refuses))
    assert len(found) > 30
    assert [path for path, refuses in found if not refuses] == []


def test_one_rank_alone_prints_a_mistake(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert mistake("fla-cp-evaluate", ["runs/a", "--zzz"], monkeypatch, capsys) == ""
