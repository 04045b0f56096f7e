"""New environments, in which nothing points at this clone."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path


def outside():
    """An environment in which nothing points at this clone."""
    hidden = ("PYTHONPATH", "RANK", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1"}


def call(*command, folder, timeout=900):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=outside(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fresh_environment(folder):
    """A new environment with the packages of this one, but for fla_cp; the folder of its programs.

    They stand on its path as plain files: what an editable install adds to a path is not followed.
    """
    call(sys.executable, "-m", "venv", "--without-pip", folder / "fresh", folder=folder)
    programs = folder / "fresh/bin"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(call(programs / "python", "-c", code, folder=folder).strip())
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    visible = folder / "packages"
    visible.mkdir()
    for entry in (entry for path in shared for entry in Path(path).iterdir()):
        if not re.match(r"fla_cp|__editable__", entry.name) and entry.suffix != ".pth":
            (visible / entry.name).symlink_to(entry)
    (own / "packages.pth").write_text(f"{visible}\n")
    return programs


def install(programs, what, folder):
    """Runs `pip install` with these words. What they need must be there already: no index is
    asked."""
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet"]
    offline = ["--no-index", "--no-build-isolation", "--no-cache-dir"]
    call(*pip, *offline, *what, folder=folder)
