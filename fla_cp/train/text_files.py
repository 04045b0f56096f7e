"""The files of the sources `stdlib` and `text:PATH`, and which of them are held out."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Split = Literal["train", "valid"]
HELD_OUT = 0.03
SNIFFED_BYTES = 8192

# `stdlib` leaves out tests (repetitive), code tables and one file of prose (not code), installed
# packages, and the files of the machine's vendor (they differ between machines with one Python).
STDLIB_SKIP = {
    *("test", "tests", "idle_test", "encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"),
}
STDLIB_SKIP_PREFIXES = ("_sysconfigdata", "config-")

File = tuple[str, Path]  # the relative path with forward slashes, and the full path


def stdlib_files() -> list[File]:
    root = Path(sysconfig.get_path("stdlib"))
    files, _ = _walk(
        root, lambda n: n not in STDLIB_SKIP and not n.startswith(STDLIB_SKIP_PREFIXES)
    )
    files = [file for file in files if file[0].endswith(".py")]
    if not files:
        raise ValueError(f"no .py files in this Python's standard library folder {root}")
    return files


def text_files(path: Path) -> tuple[list[File], tuple[str, ...]]:
    """The files to read, and notes about what is left out of a folder: files that are skipped, and
    links to folders.

    If `path` is a file, it is read whatever it holds.
    """
    if path.is_file():
        return [(path.name, path)], ()
    if path.exists() and not path.is_dir():
        raise ValueError(f"text: {path} must be a file or a folder, not a device, pipe or socket")
    if not path.is_dir():
        raise ValueError(f"text: no file or folder at {path}")
    found, links = _walk(path, lambda name: not name.startswith("."))
    if not found:
        raise ValueError(
            f"text: no files below {path} (hidden ones and links to folders are left out)"
        )
    files = [file for file in found if _is_text(file[1])]
    kept = set(files)
    skipped = [name for name, file in found if (name, file) not in kept]
    if not files:
        raise ValueError(
            f"text: all {len(found)} files below {path} are binary or cannot be read, "
            f"{skipped[0]!r} among them; name a single file to train on its bytes all the same"
        )
    return files, (*_skipped_note(path, skipped), *_links_note(path, links))


def _is_text(path: Path) -> bool:
    """Whether a file can be read and has no NUL in its first bytes, the rule that grep uses."""
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(SNIFFED_BYTES)
    except OSError:
        return False


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Turns what the file system refuses in the block into a ValueError about `path`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"text: cannot read {path}: {error.strerror or error}") from error


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", .." if len(names) > 3 else "")


def _skipped_note(path: Path, skipped: Sequence[str]) -> Iterator[str]:
    if skipped:
        files = f"{len(skipped)} file{'s' * (len(skipped) > 1)}"
        yield (
            f"note: skipped {files} below {path} that are binary or cannot be read: "
            f"{_some(skipped)}"
        )


def _links_note(path: Path, links: Sequence[str]) -> Iterator[str]:
    if links:
        count = f"{len(links)} link{'s' * (len(links) > 1)}"
        yield f"note: did not follow {count} to folders below {path}: {_some(links)}"


def _walk(root: Path, keep: Callable[[str], bool]) -> tuple[list[File], list[str]]:
    """Regular files below `root`, by relative path, and the relative paths of links to folders,
    which are not followed. `keep` decides by name which are entered."""
    files: list[Path] = []
    links: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = filter(keep, folders)
        links += [path for name in folders if (path := Path(folder, name)).is_symlink()]
        files += [Path(folder, name) for name in filter(keep, names)]
    found = sorted((path.relative_to(root).as_posix(), path) for path in files if path.is_file())
    return found, sorted(path.relative_to(root).as_posix() for path in links)


def held_out_split(files: Iterable[File], split: Split) -> list[File]:
    def held_out(name: str) -> bool:
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64

    return [file for file in files if held_out(file[0]) == (split == "valid")]
