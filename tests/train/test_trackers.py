"""--tracker: what trackers get of a run, in one process and through accelerate's own classes."""

import json
import subprocess
import sys
import time
import types

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

import fla_cp.train.main
from fla_cp.train import trackers
from fla_cp.train.config import UserError
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import parse
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "32", "--model.num-heads", "2"),
    *("--model.head-dim", "16", "--device", "cpu", "--seq-len", "64", "--data", "synthetic"),
    *("--global-batch-size", "1", "--eval-every", "2", "--eval-batches", "1"),
    *("--checkpoint-every", "2", "--warmup-steps", "1", "--lr", "0.01"),
]


def train(run, steps, tracker, *flags):
    given = ["--out", str(run), "--max-steps", str(steps), "--tracker", tracker, *flags]
    return fla_cp.train.main.main([*FLAGS, *given])


def logged(run, name):
    """{step: value} of metrics.jsonl."""
    return {row["step"]: row[name] for row in read_metrics(run) if row[name] is not None}


@pytest.fixture
def lines():
    """A tracker `lines`, which writes what it gets into RUN/lines.jsonl, and its broken methods."""

    class Lines(GeneralTracker):
        name = "lines"
        requires_logging_directory = True
        broken = frozenset()

        def __init__(self, project, folder):
            super().__init__()
            self.project, self.path = project, folder / "lines.jsonl"

        @property
        def tracker(self):
            return self.path

        def write(self, method, **row):
            if method in self.broken:
                raise OSError(f"no {method}:\nthe server is away")
            with open(self.path, "a") as file:
                file.write(json.dumps({"method": method, **row}) + "\n")

        def start(self):
            self.write("start", project=self.project)

        def store_init_configuration(self, values):
            self.write("store", values=values)

        def log(self, values, step=None, **kwargs):
            self.write("log", step=step, values=values)

        def finish(self):
            self.write("finish")

    register_tracker_class(Lines)
    yield Lines
    del LOGGER_TYPE_TO_CLASS["lines"]


def written(run, method):
    rows = [json.loads(line) for line in (run / "lines.jsonl").read_text().splitlines()]
    return [row for row in rows if row["method"] == method]


def interrupted(run, tracker):
    """A run of 4 steps of which only the checkpoint of step 2 is left."""
    assert train(run, 4, tracker) == 0
    last = run / "checkpoints" / "step-00000004"
    last.rename(run / "lost")


def test_a_tracker_gets_options_and_metrics_once(lines, tmp_path):
    run = tmp_path / "run"
    interrupted(run, "lines")
    assert train(run, 6, "lines", "--resume", "auto", "--lr", "0.005") == 0
    assert [row["project"] for row in written(run, "start")] == ["fla_cp", "fla_cp"]
    assert len(written(run, "finish")) == 2
    (stored,) = written(run, "store")
    expected = {"model.layers": 1, "optim.lr": 0.01, "run.max_steps": 4, "data.source": "synthetic"}
    assert expected.items() <= stored["values"].items()
    assert "data.column" not in stored["values"]
    rows = {row["step"]: row["values"] for row in written(run, "log")}
    assert [row["step"] for row in written(run, "log")] == list(range(7))
    names = ("eval_loss", "lr", "peak_memory_bytes", "exchange_ms", "skipped", "tokens")
    assert rows[0].keys() == {*names}
    assert {"loss", "grad_norm", "tokens_per_second", "tokens_per_second_per_gpu"} <= set(rows[1])
    for row in read_metrics(run):
        if row["step"] not in (3, 4):  # the tracker has those of before the resume
            assert rows[row["step"]] == {
                k: v for k, v in row.items() if v is not None and k != "step"
            }


def test_a_tracker_that_joins_later_gets_all_later_steps(lines, tmp_path):
    run = tmp_path / "run"
    interrupted(run, "none")
    assert not (run / "trackers.json").exists()
    assert train(run, 5, "lines", "--resume", "auto") == 0
    assert [row["step"] for row in written(run, "log")] == [3, 4, 5]
    assert written(run, "store")[0]["values"]["run.max_steps"] == 5


def scalars(run):
    """{step: loss} of TensorBoard's events, with those that were replaced left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert len(dict(found)) == len(found), "a step stands twice"
    return dict(found)


def test_tensorboard_replaces_steps_after_the_checkpoint(tmp_path):
    run = tmp_path / "run"
    interrupted(run, "tensorboard")
    assert scalars(run) == pytest.approx(logged(run, "loss"), rel=1e-6)
    before = scalars(run)
    assert train(run, 6, "tensorboard", "--resume", "auto", "--lr", "0.005") == 0
    after = scalars(run)
    assert list(after) == [1, 2, 3, 4, 5, 6]
    assert after == pytest.approx(logged(run, "loss"), rel=1e-6)
    assert after[4] != before[4]
    (options,) = (run / "tensorboard").glob("*/hparams.yml")
    assert "model.layers: 1\n" in options.read_text()


@pytest.mark.slow
def test_only_rank_0_has_trackers(tmp_path):
    run = tmp_path / "run"
    flags = [*FLAGS, "--cp", "2", "--max-steps", "2", "--out", str(run)]
    command = [*warm_python(), str(ROOT / "launch" / "train.py"), *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert scalars(run) == pytest.approx(logged(run, "loss"), rel=1e-6)
    assert len(list((run / "tensorboard").glob("events*"))) == 1


def test_a_tracker_that_cannot_start_ends_the_run(lines, tmp_path, capsys):
    run = tmp_path / "run"
    lines.broken = {"start"}
    assert train(run, 2, "tensorboard,lines") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --tracker lines cannot start: no start: the server is away"
    assert read_metrics(run) == []
    lines.broken = set()
    time.sleep(1.1)  # readers order TensorBoard's files by the second of their start
    assert train(run, 2, "tensorboard,lines") == 0  # the folder may be used
    assert list(scalars(run)) == [1, 2]
    lines.broken = {"store"}
    assert train(tmp_path / "other", 2, "lines") == 2
    assert len(written(tmp_path / "other", "finish")) == 1  # what has started is closed


def test_an_error_later_is_one_warning(lines, tmp_path, capsys):
    run = tmp_path / "run"
    lines.broken = {"log", "finish"}
    assert train(run, 3, "lines,tensorboard") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "tracker" in line]
    assert warnings == [
        "warning: --tracker lines failed: no log: the server is away; the training goes on, and "
        "metrics.jsonl has all steps (said once)"
    ]
    assert list(scalars(run)) == list(logged(run, "loss")) == [1, 2, 3]


def test_a_missing_package_leaves_no_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    assert train(tmp_path / "run", 2, "tensorboard,comet_ml") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: --tracker comet_ml needs the package comet-ml, which is not installed: "
        "pip install 'comet-ml'; got --tracker tensorboard,comet_ml"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["", "[]", '{"lines": 3}', "\xff"])
def test_a_damaged_record_starts_anew(damage, lines, tmp_path):
    run = tmp_path / "run"
    assert train(run, 2, "lines") == 0
    assert json.loads((run / "trackers.json").read_text()) == {"lines": None}
    (run / "trackers.json").write_bytes(damage.encode("latin-1"))
    assert train(run, 3, "lines", "--resume", "auto") == 0
    assert len(written(run, "store")) == 2
    assert json.loads((run / "trackers.json").read_text()) == {"lines": None}


class Calls(types.ModuleType):
    """A module whose calls `start` and its attributes' calls are kept."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def keep(self, call, result=None):
        def kept(*args, **kwargs):
            self.calls.append((call, args, kwargs))
            return result

        return kept

    def named(self, call):
        return [kwargs for name, _, kwargs in self.calls if name == call]


def test_weights_and_biases_continues_its_run(tmp_path, monkeypatch):
    wandb = Calls("wandb")
    kept = types.SimpleNamespace(log=wandb.keep("log"), finish=wandb.keep("finish"))
    wandb.init = wandb.keep("init", kept)
    wandb.config = types.SimpleNamespace(update=wandb.keep("update"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb"])
    run = tmp_path / "a run"
    interrupted(run, "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert train(run, 5, "wandb", "--resume", "auto") == 0
    first, second = wandb.named("init")
    assert first.pop("project") == "fla_cp"
    assert second.pop("project") == "mine"
    # no mode, so that WANDB_MODE decides
    assert (
        first == second == {"id": first["id"], "name": "a run", "resume": "allow", "dir": str(run)}
    )
    assert [call["step"] for call in wandb.named("log")] == [0, 1, 2, 3, 4, 5]
    assert len(wandb.named("update")) == 1
    assert len(wandb.named("finish")) == 2
    assert train(tmp_path / "other", 1, "wandb") == 0
    assert wandb.named("init")[-1]["id"] != first["id"]


@pytest.mark.parametrize("told", [False, True])
def test_mlflow_writes_into_the_folder_unless_told_where(told, tmp_path, monkeypatch):
    mlflow = Calls("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="the run"))
    limits = {"MAX_PARAM_VAL_LENGTH": 6000, "MAX_PARAMS_TAGS_PER_BATCH": 100}
    mlflow.utils = types.SimpleNamespace(validation=types.SimpleNamespace(**limits))
    mlflow.is_tracking_uri_set = lambda: told
    mlflow.search_experiments = mlflow.keep("search", [])
    mlflow.start_run = mlflow.keep("start_run", run)
    for name in ("set_tracking_uri", "create_experiment", "log_params", "log_metrics", "end_run"):
        setattr(mlflow, name, mlflow.keep(name))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["mlflow"])
    folder = tmp_path / "run"
    interrupted(folder, "mlflow")
    assert train(folder, 5, "mlflow", "--resume", "auto") == 0
    assert [call["run_id"] for call in mlflow.named("start_run")] == [None, "the run"]
    assert {call["run_name"] for call in mlflow.named("start_run")} == {"run"}
    assert [call["step"] for call in mlflow.named("log_metrics")] == [0, 1, 2, 3, 4, 5]
    places = [call["artifact_location"] for call in mlflow.named("create_experiment")]
    uris = [args for name, args, _ in mlflow.calls if name == "set_tracking_uri"]
    if told:
        assert places == [None, None] and uris == []
    else:
        assert places == 2 * [(folder / "mlflow" / "artifacts").as_uri()]
        assert uris == 2 * [(f"sqlite:///{folder}/mlflow/mlflow.db",)]


@pytest.mark.parametrize(
    "tracker,message",
    [
        (
            "wandbb",
            "--tracker must be none, or names of aim, .*, wandb with commas .* got 'wandbb'",
        ),
        ("wandb,", "--tracker must be none, or names of .*, got 'wandb,'"),
        ("none,wandb", "--tracker must be none, or names of .*, got 'none,wandb'"),
        ("all", "--tracker must be none, or names of .*, got 'all'"),
        ("wandb,wandb", "--tracker must name each tracker once, got 'wandb,wandb'"),
        ("", "--tracker must not be empty, got ''"),
    ],
)
def test_names_that_are_refused(tracker, message):
    with pytest.raises(UserError, match=message):
        parse(["--tracker", tracker])


def test_the_option_of_before_names_the_new_one(tmp_path):
    for flag in ("--run.tensorboard", "--run.no-tensorboard"):
        with pytest.raises(UserError, match=f"{flag} is no longer an option; use --tracker tensor"):
            parse([flag])
    path = tmp_path / "config.toml"
    path.write_text("[run]\ntensorboard = true\n")
    message = r"--config: run.tensorboard in .*config.toml is no longer an option; use --tracker"
    with pytest.raises(UserError, match=message):
        parse(["--config", str(path)])
    path.write_text('[run]\ntracker = "wandb,tensorboard"\n')
    assert parse(["--config", str(path)]).run.trackers == ("wandb", "tensorboard")
