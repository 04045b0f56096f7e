"""One process of `benchmarks.fla_tests`: FLA's functions replaced, calls counted, a share run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import fla_cp.compat
from benchmarks.fla_tests import classify, failure

CALLS = "FLA_TESTS_CALLS"
"""Names a file that gets a byte for every call of ours, also in processes that a test starts."""


def run_share(args: argparse.Namespace) -> int:
    """Runs every `jobs`-th test from the `worker`-th on, and writes results to `part`."""
    os.environ[CALLS] = str(args.part.with_suffix(".calls"))
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # else grouped heads are skipped
    on_spawn(args.part.parent, args.device)
    replace_fla(args.device)
    options = [str(args.folder), "--rootdir", str(args.folder), "-c", os.devnull, "-q"]
    options += [
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        args.select,
    ]
    if not args.conftest:
        options.append("--noconftest")
    share = Share(args.folder, args.part, args.worker, args.jobs, args.limit)
    return int(pytest.main(options, plugins=[share]))


def on_spawn(folder: Path, device: str) -> None:
    """Lets the processes that tests start replace FLA's functions too, as Python starts them."""
    folder.joinpath("sitecustomize.py").write_text(
        "import multiprocessing.process as process\n"
        "import sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        "    from benchmarks.fla_tests_worker import replace_fla\n"
        f"    replace_fla({device!r})\n"
    )
    paths = [str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def replace_fla(device: str) -> None:
    """Puts our functions where FLA defines its own, and in the packages that pass them on."""
    importlib.import_module("fla.utils")
    for package in ("fla.ops", "fla.modules"):
        for name in submodules(importlib.import_module(package)):
            with contextlib.suppress(Exception):  # a backend of another package
                importlib.import_module(name)
    modules = [m for n, m in sys.modules.items() if n == "fla" or n.startswith("fla.")]
    for name in fla_cp.compat.__all__:
        ours = counted(getattr(fla_cp.compat, name))
        for module in modules:
            theirs = vars(module).get(name)
            defined = getattr(theirs, "__module__", None)
            if not callable(theirs) or not str(defined).startswith("fla."):
                continue
            if defined == module.__name__ or passes_on(module):
                setattr(module, name, ours)
    if device == "cpu":
        for module in modules:
            if isinstance(vars(module).get("device"), str):
                module.__dict__["device"] = "cpu"


def submodules(package: ModuleType) -> Iterator[str]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", lambda _: None):
        yield module.name


def passes_on(module: ModuleType) -> bool:
    """Whether a module of FLA only offers names: a package, or a former place of a module."""
    if hasattr(module, "__path__"):
        return True
    own = (v for v in vars(module).values() if inspect.isfunction(v) or inspect.isclass(v))
    return not any(v.__module__ == module.__name__ for v in own)


def counted(ours: Any) -> Any:
    """`ours`, which notes each call; a class notes each object."""
    if inspect.isclass(ours):
        begin = ours.__init__

        @functools.wraps(begin)
        def initialize(self: object, *args: object, **options: object) -> None:
            note_call()
            begin(self, *args, **options)

        return type(ours.__name__, (ours,), {"__init__": initialize, "__module__": __name__})

    @functools.wraps(ours)
    def call(*args: object, **options: object) -> object:
        note_call()
        return ours(*args, **options)

    return call


def note_call() -> None:
    if path := os.environ.get(CALLS):
        with open(path, "ab") as file:
            file.write(b".")


def calls() -> int:
    path = Path(os.environ[CALLS])
    return path.stat().st_size if path.exists() else 0


class Share:
    """A plugin of pytest that keeps a share of the tests and writes a line for each result."""

    def __init__(self, folder: Path, part: Path, worker: int, jobs: int, limit: float) -> None:
        self.folder, self.part, self.limit = folder, part, limit
        self.share = slice(worker, None, jobs)
        self.before, self.start = 0, 0.0

    def pytest_configure(self, config: pytest.Config) -> None:
        for marker in ("smoke", "cp_distributed", "cp8"):
            config.addinivalue_line("markers", f"{marker}: a mark of FLA")
        self.part.touch()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self.share]
        self.write({"collected": [item.nodeid for item in items]})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            last = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            reason = last[-1][1:].strip() if last else "not imported"
            lacks = "ImportError" in reason or "ModuleNotFound" in reason
            self.write(failure(report.nodeid, "lacks" if lacks else "error", reason))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.before, self.start = calls(), time.monotonic()
        self.write({"begun": item.nodeid})
        try:
            return (yield)
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # other processes share the GPU

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self.stop)
        signal.setitimer(signal.ITIMER_REAL, self.limit)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def stop(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {self.limit:.0f} s")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: Any = yield
        if report.skipped or report.failed or report.when == "call":
            self.write(self.result(item, call, report))
        return report

    def result(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> dict[str, Any]:
        count, reason = calls() - self.before, ""
        if report.passed:
            kind = "right" if count else "not ours"
        elif report.skipped:
            kind, reason = "skipped", str(call.excinfo.value if call.excinfo else "")
        else:
            assert call.excinfo is not None
            error = call.excinfo.value
            kind = classify(error, str(call.excinfo.traceback[-1].path))
            reason = f"{type(error).__name__}: {error}".splitlines()[0].strip()
        seconds = round(time.monotonic() - self.start, 2)
        found = failure(item.nodeid, kind, reason)
        return found | {"calls": count, "seconds": seconds}

    def write(self, line: dict[str, Any]) -> None:
        with open(self.part, "a") as file:
            file.write(json.dumps(line) + "\n")
