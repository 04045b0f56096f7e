"""The documentation site builds strictly, and says what the package and the results say."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib.util import find_spec

import pytest

import fla_cp
import fla_cp.compat
import fla_cp.nn
from fla_cp.train.config import TrainConfig
from tests.support.processes import ROOT, environment

DOCS = ROOT / "docs"
PERFORMANCE = (DOCS / "performance.md").read_text()


def rows(page):
    return [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]


def test_pictures_are_those_of_the_program():
    drawn = runpy.run_path(str(DOCS / "tools/pictures.py"))["pictures"]()
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert kept == drawn, "run python docs/tools/pictures.py"
    concepts = (DOCS / "concepts.md").read_text()
    assert all(f"](pictures/{name})" in concepts for name in drawn)


def test_a_picture_shows_the_edges_that_a_document_crosses():
    """Ranks 0 to 1 and 2 to 3 in both directions: at 500 a document ends."""
    found = runpy.run_path(str(DOCS / "tools/pictures.py"))
    shown = list(found["crossings"](0, fla_cp.contiguous_token_ranges(1000, 4), False))
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)"', "".join(shown))]
    assert places == [found["at"](250), found["at"](750)]


def test_measured_rows_are_those_of_the_performance_page():
    # Rows that begin with flags are predicted: tests/train/test_memory.py compares them.
    found = [row for row in rows("long-context.md") if re.search(r"\d", row)]
    measured = [row for row in found if not row.startswith("| `--")]
    assert len(measured) >= 13 and len(measured) < len(found)
    assert [row for row in measured if row not in PERFORMANCE.splitlines()] == []


def texts():
    """The strings of the package, with \0 where a value is put in."""
    for path in (ROOT / "fla_cp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = node.values
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def shown_in(message, texts):
    """Whether one of the texts is this message of the page, where two dots stand for a value."""
    parts = message.split("..")
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.S)
    # The pattern alone would take half a minute.
    return any(all(part in text for part in parts) and pattern.search(text) for text in texts)


def test_messages_of_troubleshooting_are_the_packages():
    package = list(texts())
    messages = [
        found[1] for row in rows("troubleshooting.md") if (found := re.match(r"\| `(.*?)` \|", row))
    ]
    assert len(messages) > 30
    assert [m for m in messages if not shown_in(m, package)] == []
    assert not shown_in("group must be there, got ..", package)


def mkdocs():
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]', or make test")
    return [sys.executable, "-m", "mkdocs"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built strictly: any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(ROOT / "mkdocs.yml", folder)
    return folder


def build(config, folder):
    command = [
        *mkdocs(),
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(folder),
    ]
    # A note of the theme about the next version of mkdocs, which pyproject.toml excludes.
    quiet = environment(NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
def test_the_site_has_every_page_and_loads_nothing_from_the_web(site):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    sources = {p.relative_to(DOCS).with_suffix(".html").as_posix() for p in DOCS.rglob("*.md")}
    assert pages == sources
    assert not (site / "tools").exists()
    for path in pages:
        text = (site / path).read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', text)
        loaded += re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect|icon)"[^>]*>', text)
        assert loaded
        assert [what for what in loaded if "//" in what] == [], path


@pytest.mark.wide
def test_the_reference_has_every_public_name(site):
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    shown = {name.split(".")[-1] for name in re.findall(r'id="(fla_cp\.[\w.]+)"', text)}
    assert {*fla_cp.__all__, *fla_cp.nn.__all__} <= shown
    # Some names are others' for the same function, and FLACPContext has a page of its own.
    others = {"chunk_gdn", "fused_recurrent_gdn", "l2_norm", "FLACPContext"}
    compat = set(re.findall(r'id="fla_cp\.compat\.\w+\.(\w+)"', text))
    assert {*fla_cp.compat.__all__} - others <= compat
    assert 'id="fla_cp.train.generate.generate"' in text
    assert {"parallelize", "CPAccelerator", "selective_checkpoint", "ParallelConfig"} <= shown


@pytest.mark.wide
def test_the_reference_has_only_what_callers_need(site):
    """And not what layers and operators share with each other."""
    text = (site / "reference" / "operators.html").read_text()
    shown = set(re.findall(r'id="fla_cp\.ops\.\w+\.(\w+)"', text))
    assert shown == {*fla_cp.ops.__all__}
    text = (site / "reference" / "context.html").read_text()
    shown = set(re.findall(r'id="fla_cp\.context\.([\w.]+)"', text))
    public = {"FLACPContext", "build_cp_context"}
    assert shown == public | {f"FLACPContext.{name}" for name in ("shard", "unshard", "update")}
    text = (site / "reference/layers.html").read_text()
    for layer in ("linear_attention.LinearAttention", "attention.Attention"):
        assert f'id="fla_cp.nn.{layer}.make_cache"' in text
    assert set(re.findall(r'id="fla_cp\.nn\.cache\.\w+\.(\w+)"', text)) == {"joined"}
    assert "num_householder: int = 2" in re.sub("<[^>]+>", "", text), "how layers are made"
    text = (site / "reference" / "trainer.html").read_text()
    shown = set(re.findall(r'id="fla_cp\.train\.config\.(\w+)\.(\w+)"', text))
    sections = [x for x in vars(TrainConfig()).values() if is_dataclass(x)]
    options = {(type(x).__name__, field.name) for x in sections for field in fields(x)}
    assert shown == options | {("TrainConfig", "config")}


MISTAKES = "no-such-page.md", "index.md#no-such-heading", "../no/such/file.py"


@pytest.mark.wide
def test_links_that_lead_nowhere_fail_the_build(site, tmp_path):
    """`site` is the build without them."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", "mkdocs.yml"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    page = tmp_path / "docs" / "concepts.md"
    page.write_text("\n".join([page.read_text(), *(f"[x]({link})" for link in MISTAKES), ""]))
    with pytest.raises(AssertionError) as failed:
        build(tmp_path / "mkdocs.yml", tmp_path / "after")
    for link in MISTAKES:
        assert re.search(rf"WARNING .*{re.escape(link.split('#')[-1])}", str(failed.value)), link


def test_docstrings_keep_their_entries_apart():
    pytest.importorskip("griffe")
    markdown = runpy.run_path(str(DOCS / "tools/docstrings.py"))["markdown"]
    text = "One line.\n\nq, k: [B, T], a < b.\ng=None: HV*K\n    and more.\nReturns `a*b`."
    text += "\n\n    x = y * z"
    assert markdown(text).splitlines() == [
        "One line.",
        "",
        "q, k: [B, T], a &lt; b.  ",
        r"g=None: HV\*K",
        "and more.  ",
        "Returns `a*b`.",
        "",
        "    x = y * z",
    ]
