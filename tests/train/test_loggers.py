"""Rows of metrics, TensorBoard and the bar; services that collect runs, whose failures stop no trial."""

import io
import json
import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from vitmods.tasks import Classification
from vitmods.train import RunOptions, loggers, trial
from vitmods.train.loggers import (
    LOGGERS,
    Diverged,
    LoggedRun,
    LoggerKind,
    MetricsFile,
    ProgressBar,
    TensorBoard,
    check_loggers,
)
from vitmods.util.errors import UserError

ASKED = {"checkpoint_every_steps": 4, "log": ("notebook",)}


@contextmanager
def registered(name, logger, **options):
    LOGGERS.add(name, LoggerKind(logger, **options))
    try:
        yield
    finally:
        LOGGERS.remove(name)


@pytest.fixture
def service():
    """A logger that keeps runs by their key: what was written to each, and how it ended."""
    runs: dict[str, list] = {}

    class Notebook:
        def __init__(self, run):
            self.rows = runs.setdefault(run.key, [run])

        def write(self, scalars, step):
            self.rows.append((step, dict(scalars)))

        def close(self, status, scalars):
            self.rows.append((status, dict(scalars)))

    with registered("notebook", Notebook):
        yield runs


def logged(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], loggers.scalars_of(row)) for row in rows]


def test_a_resumed_trial_goes_on_in_its_run(bench, tmp_path, service, monkeypatch):
    bench.stop(monkeypatch, tmp_path, 3, checkpoint_every_steps=2)
    assert not service, "a logger that joins later gets the rows from then on"
    bench.stop(monkeypatch, tmp_path, 7, **ASKED)
    (rows,) = service.values()
    assert rows[-1] == ("stopped", {})
    result = bench.train(tmp_path, **ASKED)
    (run, *told) = rows
    assert (run.name, run.fields["arm"], run.config["seed"], run.folder) == ("base seed 0", "base", 0, tmp_path)
    steps = [row for row in told if isinstance(row[0], int)]
    assert [(step, sorted(row)) for step, row in steps] == [(s, sorted(row)) for s, row in logged(tmp_path)]
    assert told[-1] == ("finished", {f"test/{name}": value for name, value in result["metrics"].items()})


@pytest.mark.parametrize(("error", "status"), [(Diverged("not finite"), "diverged"), (UserError("full"), "failed")])
def test_loggers_are_told_the_status_of_the_result(bench, tmp_path, service, monkeypatch, error, status):
    """After the last step and the last evaluation weights may turn out not to be finite, or the disk to be full."""

    def fails(*arguments):
        raise error

    monkeypatch.setattr(trial, "_save_weights", fails)
    with nullcontext() if status == "diverged" else pytest.raises(UserError, match="full"):
        bench.train(tmp_path, log=("notebook",))
    ((*_, told),) = service.values()
    assert told[0] == json.loads((tmp_path / "result.json").read_text())["status"] == status


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_logger_that_fails_is_warned_of_once_and_the_trial_goes_on(bench, tmp_path, where):
    class Broken:
        def __init__(self, run):
            self.call("open")

        def write(self, scalars, step):
            self.call("write")

        def close(self, status, scalars):
            self.call("close")

        def call(self, name):
            if name == where:
                raise ConnectionError("the network is down")

    with registered("broken", Broken), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert bench.train(tmp_path, log=("broken",))["status"] == "finished"
    (warning,) = [str(warning.message) for warning in caught if "logger" in str(warning.message)]
    assert "broken failed" in warning
    assert "the network is down" in warning


def test_a_service_that_never_answers_is_left_alone(monkeypatch):
    class Silent:
        def __init__(self, run):
            self.wait = threading.Event()

        def close(self, status, scalars):
            self.wait.wait(30)

    monkeypatch.setattr(loggers, "CLOSING_S", 0.01)
    with registered("silent", Silent), pytest.warns(UserWarning, match="did not take the last rows"):
        loggers.Logs(("silent",), LoggedRun("s", "n", "k")).close("finished", {})


def test_unknown_and_missing_loggers_are_refused_before_any_work():
    with pytest.raises(UserError, match=r"Unknown logger 'wandbb'\. Did you mean 'wandb'"):
        RunOptions(log="wandbb").check_here()
    missing = pytest.raises(UserError, match=r"lost needs no_such_library: pip install 'vitmods\[lost\]'")
    with registered("lost", object, needs="no_such_library"), missing:
        RunOptions(log=("lost", "lost")).check_here()


RUN = LoggedRun("digits study", "dpn, seed 0", "abc123", {"study": "digits study", "arm": "dpn", "seed": 0})
ROWS = ((5, {"train/loss": 1.0}), (5, {"val/top1": 0.5}))


def written(name, tmp_path, status="finished", rows=ROWS, **changed):
    config = {"recipe": {"lr": 1e-3, "mean": (0.5,)}}
    logger = LOGGERS[name].open(replace(RUN, **{"folder": tmp_path, "config": config, **changed}))
    for step, scalars in rows:
        logger.write(scalars, step)
    logger.close(status, {"test/top1": 0.75})


def test_mlflow_has_a_run_a_trial_with_its_fields_and_takes_it_up_again(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", tmp_path.as_uri())
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UserError, match=r"cannot open .* Set MLFLOW_TRACKING_URI .*MLFLOW_ALLOW_FILE_STORE=true"):
        check_loggers(["mlflow"])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_loggers(["mlflow"])
    written("mlflow", tmp_path, status="stopped")
    written("mlflow", tmp_path, rows=[(9, {"train/loss": 0.5})])
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits study")
    (run,) = client.search_runs([experiment.experiment_id], "tags.arm = 'dpn'")
    assert (run.info.run_name, run.info.status) == ("dpn, seed 0", "FINISHED")
    assert run.data.metrics == {"train/loss": 0.5, "val/top1": 0.5, "test/top1": 0.75}
    assert run.data.params["recipe.lr"] == "0.001"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [5, 9]
    assert run.data.tags["status"] == "finished"
    written("mlflow", tmp_path, study="of a verdict", config={})
    assert client.get_experiment_by_name("of a verdict") is not None


def test_wandb_writes_offline_into_the_trials_folder_and_needs_an_account_otherwise(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    check_loggers(["wandb"])
    written("wandb", tmp_path)
    wandb.teardown()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abc123")
    content = (folder / "run-abc123.wandb").read_bytes()
    for field in ("digits study", RUN.name, "trial", '"lr":0.001', "train/loss", "val/top1", "test/top1"):
        assert field.encode() in content, field
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="wandb login"):
        check_loggers(["wandb"])
    wandb.teardown()


ROW = {"step": 5, "epoch": 1.0, "split": "train", "loss": 0.25, "top1": 0.5, "images_per_s": 1234.5, "data_wait": 0.251}


def test_rows_after_the_checkpoint_are_cut_and_the_length_is_right_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0, None)
    metrics.write({"step": 1})
    length = metrics.sync()
    metrics.write({"step": 2})
    metrics.close()
    metrics = MetricsFile(path, length, None)
    assert metrics.sync() == length == path.stat().st_size
    metrics.write({"step": 3})
    with pytest.raises(ValueError, match="Out of range"):
        metrics.write({"loss": float("nan")})
    assert metrics.sync() == path.stat().st_size
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    metrics.close()
    with pytest.raises(UserError, match="shorter than its checkpoint"):
        MetricsFile(path, 100, None)


def test_tensorboard_has_the_rows_as_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    board = TensorBoard(tmp_path / "tb", [ROW])
    board.write({**ROW, "step": 10, "split": "val"})
    board.close()
    (path,) = (tmp_path / "tb").iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    scalars = {(event.step, v.tag): v.tensor.float_val[0] for event in events for v in event.summary.value}
    assert scalars == {
        (step, f"{split}/{name}"): pytest.approx(ROW[name])
        for step, split in ((5, "train"), (10, "val"))
        for name in ("loss", "top1", "images_per_s", "data_wait")
    }


def stderr_of(monkeypatch, terminal, **variables):
    """A new sys.stderr that is a terminal or is not, under these environment variables."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return stream


@pytest.mark.parametrize(
    ("shown", "terminal", "ci", "visible"),
    [(True, True, "", True), (True, False, "", False), (True, True, "true", False), (False, True, "", False)],
)
def test_the_bar_shows_on_a_terminal_alone(monkeypatch, shown, terminal, ci, visible):
    stream = stderr_of(monkeypatch, terminal, CI=ci, TERM="xterm", COLUMNS="120")
    with ProgressBar(shown, "arm [red] seed 0", total=20, done=5, metrics=Classification.metrics) as bar:
        bar.show(ROW)
        bar.advance(10)
    shows = ("arm [red] seed 0", "10/20", "loss 0.250  top-1 50.00 %  1234 images/s  25 % waiting for images")
    assert all(text in stream.getvalue() for text in shows) == bool(stream.getvalue()) == visible


def test_at_80_columns_the_bar_keeps_its_steps_and_time(monkeypatch):
    stderr_of(monkeypatch, True, CI="", TERM="dumb", COLUMNS="80")
    with ProgressBar(True, "dpn(before=whiten)+rms, seed 12", 15000, 5000, Classification.metrics) as bar:
        bar.show(ROW)
        bar.advance(6000)
        line = "".join(part.text for part in bar._bar.console.render(bar._bar.get_renderable())).splitlines()[0]
    assert len(line) <= 80
    assert line.startswith("dpn(before=whiten)+rms")
    assert all(shown in line for shown in ("━━━", " 6000/15000 ", ":", "loss 0.250")), line


def test_without_a_terminal_a_long_training_prints_the_time_left_once(monkeypatch):
    stream, clock = stderr_of(monkeypatch, False, CI=""), [0.0]
    monkeypatch.setattr("vitmods.train.loggers.time.monotonic", lambda: clock[0])
    with ProgressBar(True, "dpn seed 0", total=1000, done=400) as bar:
        for step in range(410, 470, 10):
            clock[0] += 10.0
            bar.show({**ROW, "step": step})
    assert stream.getvalue() == "dpn seed 0: step 420 of 1,000, about 10 min left\n"
