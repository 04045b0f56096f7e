"""Trackers of a run: TensorBoard, Weights & Biases, MLflow and the others that accelerate has.

accelerate.tracking has a class for each. This module decides how they are used: trackers that write
files write them into the run folder; a run folder is a single run of each tracker, even if it is
resumed; and only rank 0 has trackers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.metrics import read_metrics
from fla_cp.train.progress import announced

PROJECT = "fla_cp"
"""The project, or the experiment, of all runs."""

RECORD = "trackers.json"
"""A file of the run folder: {name of a tracker: its own name of this run, or null}."""

_PACKAGES = {"comet_ml": "comet-ml", "aim": "aim<4"}
"""The names for pip of packages that are not called like the tracker."""

_HINTS = {
    "wandb": "wandb login, or WANDB_MODE=offline in the environment",
    "comet_ml": "comet login, or COMET_START_ONLINE=0 in the environment",
    "clearml": "clearml-init, or CLEARML_OFFLINE_MODE=1 in the environment",
    "swanlab": "swanlab login, or SWANLAB_MODE=offline in the environment",
}
"""What is most likely missing if a tracker cannot start."""


def check_installed(names: Sequence[str], ranks: Ranks) -> None:
    """Raises UserError, on all ranks, if rank 0 lacks a tracker's package. Collective.

    To be called before the run folder is made.
    """

    def check() -> None:
        builtin, installed = {str(kind) for kind in LoggerType}, get_available_trackers()
        for name in names:
            if name in builtin and name not in map(str, installed):
                package = _PACKAGES.get(name, name)
                raise UserError(
                    f"--tracker {name} needs the package {package}, which is not installed: "
                    f"pip install '{package}'; got --tracker {','.join(names)}"
                )

    ranks.decide(check)


@announced("trackers")
def start_trackers(config: TrainConfig, run: Path, ranks: Ranks, start_step: int) -> Trackers:
    """The run's trackers, which have started; on ranks other than 0 there are none. Collective.

    start_step: the step that the run goes on from, 0 for a new one. To be called before the lines
    of later steps are deleted from metrics.jsonl. Raises UserError, on all ranks, if one of them
    cannot start.
    """
    trackers = Trackers()

    def start() -> None:
        PartialState(cpu=ranks.device.type == "cpu")  # accelerate's trackers ask it for the rank
        before = max((row["step"] for row in read_metrics(run)), default=-1)
        trackers.start(config, run, start_step, before)

    ranks.decide(start)
    return trackers


class Trackers:
    """Started trackers of accelerate by name; sends them metrics and closes them.

    After the start, an error of a tracker is a warning, once for each tracker, and the training
    goes on.
    """

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}
        self.after: dict[str, int] = {}  # the last step that a tracker has, by its name
        self.warned: set[str] = set()

    def start(self, config: TrainConfig, run: Path, start_step: int, before: int) -> None:
        """Starts the trackers of --tracker. before: the last step that the folder's run logged.

        Raises UserError, with all of them closed, if one cannot start.
        """
        known = _read(run)
        record = dict(known)
        first = start_step + 1 if start_step else 0
        for name in config.run.trackers:
            continued = name in known
            try:
                tracker = _built(name, run, known.get(name), first, continued)
                tracker.start()
                self.running[name] = tracker
                record[name] = _identity(name, tracker)
                if not continued:
                    tracker.store_init_configuration(_hyperparameters(config))
                _write(run, record)
            except Exception as error:
                self.close()
                text = " ".join(str(error).split()) or type(error).__name__
                hint = f" ({_HINTS[name]})" if name in _HINTS else ""
                raise UserError(f"--tracker {name} cannot start: {text}{hint}") from error
            # TensorBoard replaces the steps after a checkpoint; the others would have them twice
            self.after[name] = before if continued and name != "tensorboard" else -1

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends the values of a step, except to trackers that have the step from an earlier run."""
        for name, tracker in self.running.items():
            if step > self.after[name]:
                self._guarded(name, partial(tracker.log, dict(values), step=step))

    def close(self) -> None:
        """Ends all trackers."""
        for name, tracker in self.running.items():
            self._guarded(name, tracker.finish)
        self.running = {}

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if name not in self.warned:
                self.warned.add(name)
                text = " ".join(str(error).split()) or type(error).__name__
                with suppress(OSError):  # a full disk, which may be why the tracker failed
                    print(
                        f"warning: --tracker {name} failed: {text}; the training goes on, and "
                        "metrics.jsonl has all steps (said once)",
                        file=sys.stderr,
                        flush=True,
                    )


def _hyperparameters(config: TrainConfig) -> dict[str, str | float]:
    """The options that are set, by their names in flags: trackers take no nested values."""
    return {
        f"{section.name}.{name}": value
        for section in dataclasses.fields(config)
        if dataclasses.is_dataclass(part := getattr(config, section.name))
        for name, value in dataclasses.asdict(part).items()  # type: ignore[arg-type]
        if value is not None
    }


def _built(name: str, run: Path, key: str | None, first: int, continued: bool) -> Any:
    """A tracker that has not started.

    key: its own name of this run, if it has one. first: the step after the checkpoint. continued:
    whether it has started in this folder before.
    """
    kind, folder = LOGGER_TYPE_TO_CLASS[name], str(run / name)
    match name:
        case "tensorboard":
            # hides what an earlier run wrote of the steps from `first` on
            return kind(name, run, purge_step=first)
        case "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            return kind(project, id=key or _key(), name=run.name, resume="allow", dir=str(run))
        case "comet_ml":
            from comet_ml import ExperimentConfig

            # A name of its own for each start: Comet draws an archive's name from Python's random
            # numbers, which a seed repeats, so a resumed run would replace the archive.
            place = Path(folder, _key()[:8])
            place.mkdir(parents=True)
            options = ExperimentConfig(name=run.name, offline_directory=str(place))
            return kind(PROJECT, experiment_key=key or _key(), experiment_config=options)
        case "swanlab":
            key = key or _key()[:21]
            return kind(PROJECT, id=key, experiment_name=run.name, resume="allow", logdir=folder)
        case "trackio":
            # it knows runs by their names, and folders of one name may stand in several places
            label = key or f"{run.name}-{_key()[:8]}"
            return kind(PROJECT, name=label, resume="allow", embed=False)
        case "mlflow":
            return kind(PROJECT, _local_mlflow(run), run_id=key, run_name=run.name)
        case "aim":
            return kind(run.name, run, experiment=PROJECT, **({"run_hash": key} if key else {}))
        case "clearml":
            # 0: continues the task, and adds nothing to the steps; False: another task
            again = {"reuse_last_task_id": key or False, "continue_last_task": 0 if key else False}
            alone = {"auto_connect_frameworks": False, "auto_connect_arg_parser": False}
            return kind(PROJECT, task_name=run.name, **again, **alone)
        case "dvclive":
            return kind(None, dir=folder, resume=continued, save_dvc_exp=False, dvcyaml=None)
    return kind(PROJECT, run) if kind.requires_logging_directory else kind(PROJECT)


def _key() -> str:
    """A name for a run that no other run has: 32 letters and digits."""
    return uuid.uuid4().hex


def _local_mlflow(run: Path) -> str | None:
    """Lets MLflow write into the run folder, if nothing such as MLFLOW_TRACKING_URI says where.

    Returns the place for artifacts, None where the server decides.
    """
    import mlflow

    if mlflow.is_tracking_uri_set():
        return None
    folder = run.absolute() / "mlflow"
    folder.mkdir(exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    return (folder / "artifacts").as_uri()


def _identity(name: str, tracker: Any) -> str | None:
    """A started tracker's own name of its run, for trackers that need it to continue the run."""
    match name:
        case "wandb" | "swanlab":
            return tracker.init_kwargs["id"]
        case "comet_ml":
            return tracker.init_kwargs["experiment_key"]
        case "trackio":
            return tracker.init_kwargs["name"]
        case "mlflow":
            return tracker.tracker.info.run_id
        case "aim":
            return tracker.tracker.hash
        case "clearml":
            return tracker.tracker.id
    return None


def _read(run: Path) -> dict[str, str | None]:
    """The record of the run folder; {} if there is none or it is damaged."""
    try:
        record = json.loads((run / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {k: v for k, v in record.items() if v is None or isinstance(v, str)}


def _write(run: Path, record: Mapping[str, str | None]) -> None:
    partial = run / f"{RECORD}.tmp"
    partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(partial, run / RECORD)
