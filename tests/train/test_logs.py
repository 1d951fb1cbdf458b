import io
import json
import sys

import pytest

from vitmods.tasks import Classification
from vitmods.train.loggers import MetricsFile, ProgressBar, TensorBoard
from vitmods.util.errors import UserError

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
    assert metrics.sync() == path.stat().st_size
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    metrics.close()


def test_a_file_shorter_than_its_checkpoint_says_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="shorter than its checkpoint"):
        MetricsFile(tmp_path / "metrics.jsonl", 100, None)


def test_rows_are_strict_json(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0, None)
    with pytest.raises(ValueError, match="Out of range"):
        metrics.write({"loss": float("nan")})
    metrics.close()


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
    text = stream.getvalue()
    assert bool(text) is visible
    if visible:
        assert "arm [red] seed 0" in text
        assert "10/20" in text
        assert "loss 0.250  top-1 50.00 %  1234 images/s  25 % waiting for images" in text


def test_at_80_columns_the_bar_keeps_its_steps_and_time(monkeypatch):
    stderr_of(monkeypatch, True, CI="", TERM="dumb", COLUMNS="80")
    with ProgressBar(True, "dpn(before=whiten)+rms, seed 12", 15000, 5000, Classification.metrics) as bar:
        bar.show(ROW)
        bar.advance(6000)
        line = "".join(part.text for part in bar._bar.console.render(bar._bar.get_renderable())).splitlines()[0]
    assert len(line) <= 80
    assert line.startswith("dpn(before=whiten)+rms")
    for shown in ("━━━", " 6000/15000 ", ":", "loss 0.250"):
        assert shown in line


def test_without_a_terminal_a_long_training_prints_the_time_left_once(monkeypatch):
    stream, clock = stderr_of(monkeypatch, False, CI=""), [0.0]
    monkeypatch.setattr("vitmods.train.loggers.time.monotonic", lambda: clock[0])
    with ProgressBar(True, "dpn seed 0", total=1000, done=400) as bar:
        for step in range(410, 470, 10):
            clock[0] += 10.0
            bar.show({**ROW, "step": step})
    assert stream.getvalue() == "dpn seed 0: step 420 of 1,000, about 10 min left\n"
