"""Wheel and sdist: what is in them, and that they install and work away from this clone."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import fla_cp
from tests.support.fresh import call, fresh_environment, install
from tests.support.processes import ROOT

RELEASE = runpy.run_path(str(ROOT / "tools/release.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INFO = f"fla_cp-{fla_cp.__version__}.dist-info"


def content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, its files, and the wheels of the clone and of the sdist."""
    folder = tmp_path_factory.mktemp("built")
    tree = RELEASE["copy_tracked"](ROOT, folder / "tree")
    wheel = RELEASE["build_wheel"](tree, folder / "wheel")
    shutil.rmtree(tree / "build")
    sdist = RELEASE["build_sdist"](tree, folder / "sdist")
    unpacked = RELEASE["unpack"](sdist, folder / "unpacked")
    again = RELEASE["build_wheel"](unpacked, folder / "again")
    return {"wheel": wheel, "sdist": sdist, "unpacked": unpacked, "from sdist": again}


def sources():
    files = (path for path in (ROOT / "fla_cp").rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_a_wheel_has_the_package_and_nothing_else(built):
    assert built["wheel"].name == f"fla_cp-{fla_cp.__version__}-py3-none-any.whl"
    found = content(built["wheel"])
    package = {name: data for name, data in found.items() if not name.startswith(INFO)}
    assert package == sources()
    assert "fla_cp/py.typed" in package
    assert set(found) - set(package) == {
        f"{INFO}/{name}"
        for name in (
            *("METADATA", "RECORD", "WHEEL", "top_level.txt", "entry_points.txt"),
            "licenses/LICENSE",
        )
    }
    assert found[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert found[f"{INFO}/top_level.txt"].split() == [b"fla_cp"]
    metadata = message_from_string(found[f"{INFO}/METADATA"].decode())
    assert metadata["Version"] == fla_cp.__version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_the_sdist_makes_the_wheel_of_the_tree(built):
    assert built["sdist"].name == f"fla_cp-{fla_cp.__version__}.tar.gz"
    files = (p for p in built["unpacked"].rglob("*") if p.is_file() and "build" not in p.parts)
    names = {path.relative_to(built["unpacked"]).as_posix() for path in files}
    names = {name for name in names if not name.startswith(("fla_cp.egg-info/", "fla_cp/"))}
    assert names == {
        *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
        *("pyproject.toml", "setup.cfg"),
    }
    assert content(built["from sdist"]) == content(built["wheel"])
    assert built["from sdist"].name == built["wheel"].name


LOADED = """
import importlib.metadata as metadata, json
found = metadata.distribution("fla_cp")
loaded = {point.name: callable(point.load()) for point in found.entry_points}
import fla_cp
print(json.dumps([fla_cp.__file__, fla_cp.__version__, found.version, loaded]))
"""


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_clean_and_runs_the_example_of_the_readme(kind, built, tmp_path):
    programs = fresh_environment(tmp_path)
    with pytest.raises(AssertionError, match="No module named 'fla_cp'"):
        call(programs / "python", "-c", "import fla_cp", folder=tmp_path)
    install(programs, [built[kind]], tmp_path)
    file, version, installed, loaded = json.loads(
        call(programs / "python", "-c", LOADED, folder=tmp_path)
    )
    assert Path(file).is_relative_to(tmp_path / "fresh")
    assert version == installed == fla_cp.__version__
    assert loaded == dict.fromkeys(PROJECT["scripts"], True)

    readme = (ROOT / "README.md").read_text()
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", readme, re.S)[1])
    line = re.compile(r"rank (\d): (\d+) of 300 tokens, \|o\| ([\d.]+)")
    ((_, tokens, norm),) = line.findall(call(programs / "python", "example.py", folder=tmp_path))
    assert tokens == "300"
    torchrun = ["-m", "fla_cp.train.torchrun", "--standalone", "--nproc-per-node", "2"]
    both = line.findall(call(programs / "python", *torchrun, "example.py", folder=tmp_path))
    assert sum(int(tokens) for _, tokens, _ in both) == 300
    assert [float(found) for *_, found in both] == [pytest.approx(float(norm), rel=1e-3)] * 2

    tiny = "--cp 2 --max-steps 2 --seq-len 128 --data synthetic --device cpu"
    call(programs / "fla-cp-train", *tiny.split(), "--out", "run", folder=tmp_path)
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 2


def python_of(version):
    """An interpreter of this version, for example 3.13: on the PATH, or one of pyenv's; or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    code = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for python in filter(None, candidates):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(python)
    return None


WITHOUT_TORCH = """
import ast, importlib, importlib.metadata, importlib.util, json, pathlib, sys, warnings
warnings.simplefilter("error")  # such as invalid escapes, which a later Python will refuse
found = importlib.metadata.distribution("fla_cp")
package = pathlib.Path(found.locate_file("fla_cp"))
files = sorted(package.rglob("*.py"))
missing = []
for file in files:
    tree = compile(file.read_text(), str(file), "exec", ast.PyCF_ONLY_AST)
    compile(tree, str(file), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] not in STDLIB:
                continue
            try:
                there = importlib.import_module(module)
                if name is not None and not hasattr(there, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError as error:
                missing.append(error.name)
try:
    import fla_cp
    needs = None
except ImportError as error:
    needs = error.name
print(json.dumps({
    "version": found.version,
    "files": len(files),
    "missing": missing,
    "needs": needs,
    "python": list(sys.version_info[:2]),
    "torch": importlib.util.find_spec("torch") is not None,
}))
"""


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_pythons_install_and_compile_it_without_torch(version, built, tmp_path):
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} with ensurepip on the PATH or in pyenv")
    call(python, "-m", "venv", tmp_path / "other", folder=tmp_path)
    python = tmp_path / "other/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    call(*pip, built["wheel"], folder=tmp_path)
    folder = call(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path
    )
    compiled = ["-W", "error", "-m", "compileall", "-q", "-f", Path(folder.strip(), "fla_cp")]
    call(python, *compiled, folder=tmp_path)
    code = f"STDLIB = {sorted(sys.stdlib_module_names)!r}\n{WITHOUT_TORCH}"
    shown = json.loads(call(python, "-c", code, folder=tmp_path))
    assert shown["python"] == [int(part) for part in version.split(".")]
    assert shown["version"] == fla_cp.__version__
    assert shown["files"] == sum(name.endswith(".py") for name in sources())
    assert shown["missing"] == []
    assert (shown["torch"], shown["needs"]) == (False, "torch")  # nothing else stops it first


@pytest.mark.slow
def test_make_release_writes_packages_and_note(tmp_path):
    release = [sys.executable, str(ROOT / "tools/release.py"), "--out", str(tmp_path / "dist")]
    for _ in range(2):  # the second replaces what the first wrote
        call(*release, folder=tmp_path)
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    stem = f"fla_cp-{fla_cp.__version__}"
    assert names == [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz", "release-note.md"]
    assert (
        (tmp_path / "dist/release-note.md")
        .read_text()
        .startswith(f"# fla_cp {fla_cp.__version__} - ")
    )
