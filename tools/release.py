"""A release: its version, its note from CHANGELOG.md, and its sdist and wheel.

    python tools/release.py --check        # version and CHANGELOG.md agree
    python tools/release.py --out dist     # then builds, and writes release-note.md beside

The version stands in fla_cp/__init__.py only. To release, set it there, and give CHANGELOG.md a
section `## VERSION - YYYY-MM-DD` with what stood under `## Unreleased`, which stays above it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "Unreleased"
_HEADING = re.compile(r"^## (.*)$", re.M)
_NAME = re.compile(r"(\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})")
_FILE_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)]*)\)")


class Section(NamedTuple):
    """A section of the changelog: its heading without `## `, and what stands below it."""

    heading: str
    body: str


def version(root: Path = ROOT) -> str:
    """`__version__` of the package, read and not imported."""
    text = (root / "fla_cp/__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.*)"$', text, re.M)
    return found


def sections(changelog: str) -> list[Section]:
    """The sections of a changelog in their order, newest first."""
    _, *parts = _HEADING.split(changelog)
    return [Section(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def problems(version: str, changelog: str) -> list[str]:
    """What keeps this version from being released with this changelog."""
    found = sections(changelog)
    if not found or found[0].heading != UNRELEASED:
        return [f"CHANGELOG.md must begin with the section {UNRELEASED}"]
    wrong, before = [], None
    for heading, body in found[1:]:
        if not (name := _NAME.fullmatch(heading)) or not _is_date(name[2]):
            wrong.append(f"a section must be named VERSION - YYYY-MM-DD, got {heading!r}")
            continue
        if not body.strip():
            wrong.append(f"section {heading!r} must not be empty")
        key = ([int(part) for part in name[1].split(".")], name[2])
        if before is not None and not (key[0] < before[0] and key[1] <= before[1]):
            wrong.append(f"sections must stand newest first, got {heading!r} too late")
        before = key
    newest = found[1].heading.partition(" - ")[0] if found[1:] else "none"
    if newest != version:
        wrong.append(
            f"the newest section of CHANGELOG.md must be that of fla_cp.__version__, {version}, "
            f"got {newest}"
        )
    return wrong


def left_out(changelog: str) -> int:
    """How many entries have no version yet."""
    return len(re.findall(r"^- ", sections(changelog)[0].body, re.M))


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def note(version: str, changelog: str) -> str:
    """The release note: the section of a version, as a page of its own.

    Headings rise by one level. A note is read away from the repository, so the target of a link to
    a file stands in parentheses. Raises ValueError if the changelog has no such section.
    """
    for heading, body in sections(changelog):
        if heading.partition(" - ")[0] == version:
            body = re.sub(r"^##(#+ )", r"#\1", body.strip(), flags=re.M)
            body = _FILE_LINK.sub(r"\1 (\2)", body)
            return f"# fla_cp {heading}\n\n{body}\n"
    raise ValueError(f"version must have a section in the changelog, got {version}")


def copy_tracked(root: Path, folder: Path) -> Path:
    """Copies the files of a clone that git does not ignore, so that no old build gets in."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    return folder


def build_sdist(tree: Path, out: Path) -> Path:
    return _build("sdist", tree, out)


def build_wheel(tree: Path, out: Path) -> Path:
    return _build("wheel", tree, out)


def _build(kind: str, tree: Path, out: Path) -> Path:
    """Calls the backend that pyproject.toml names, in a process of its own; the file it made."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    before = set(out.iterdir())
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(out.resolve())],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the {kind} could not be built:\n{done.stdout}{done.stderr}")
    (made,) = set(out.iterdir()) - before
    return made


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks an sdist; the folder of its files."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def release(root: Path, out: Path) -> list[Path]:
    """Writes sdist, wheel (built from the sdist) and release note of a clone into a folder."""
    changelog, number = (root / "CHANGELOG.md").read_text(), version(root)
    for old in (*out.glob("fla_cp-*.whl"), *out.glob("fla_cp-*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        sdist = build_sdist(copy_tracked(root, tree), out)
        wheel = build_wheel(unpack(sdist, Path(folder, "unpacked")), out)
    (out / "release-note.md").write_text(note(number, changelog))
    return [sdist, wheel, out / "release-note.md"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="only compare the versions")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="loses older packages")
    args = parser.parse_args(argv)
    wrong = problems(version(), (ROOT / "CHANGELOG.md").read_text())
    if wrong:
        print("\n".join(f"error: {line}" for line in wrong), file=sys.stderr)
        return 2
    if args.check:
        print(f"version {version()} is the newest of CHANGELOG.md")
        return 0
    if entries := left_out((ROOT / "CHANGELOG.md").read_text()):
        print(
            f"warning: the release note of {version()} lacks the {entries} entries under "
            f"{UNRELEASED}; to release them, give them a version",
            file=sys.stderr,
        )
    for path in release(ROOT, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
