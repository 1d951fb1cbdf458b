"""No kind of file that a study writes may be written, one after the other: each is one clear error, and it goes on."""

import builtins
import errno
import gc
import io
import itertools
import json
import warnings
from pathlib import Path

import pytest

from vitmods.recipes import plain
from vitmods.study import Study
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=32)
TRIAL = Path("trials/dpn/seed0")
FILES = [
    ".lock",
    ".lease",
    "images.npz",
    "split.csv",
    "samples.npz",
    "study.json",
    "dpn/seed0/config.json",
    "dpn/seed0/tb/events.out",
    "dpn/seed0/metrics.jsonl",
    "dpn/seed0/checkpoint.pt",
    "dpn/seed0/model.safetensors",
    "dpn/seed0/val.npz",
    "dpn/seed0/test.npz",
    "dpn/seed0/result.json",
    "dpn/seed0/test.json",
    "dpn/seed0/warnings.json",
    "costs.json",
    "results.json",
    "results.csv",
    "report.html",
]
ERRORS = {errno.ENOSPC: "the disk is full; free some space", errno.EROFS: "read-only", errno.EIO: "input/output error"}


class Refusing(io.FileIO):
    """A file on a disk that takes nothing more."""

    code = errno.ENOSPC

    def write(self, content):
        raise OSError(self.code, "refused")


@pytest.fixture
def disk(monkeypatch):
    """Call it with the end of a path: writing to such files fails from then on."""
    real, refused = builtins.open, []

    def opened(file, mode="r", *args, **options):
        name = str(file) if isinstance(file, str | Path) else ""
        if not (refused and f"/{refused[0][0]}" in name and set(mode) & set("wax+")):
            return real(file, mode, *args, **options)
        raw = Refusing(file, mode.replace("b", "").replace("t", ""))
        raw.code = refused[0][1]
        refused.append(name)
        return io.BufferedWriter(raw) if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")

    def refuse(name=None, code=errno.ENOSPC):
        refused[:] = [(name, code)] if name else []
        return refused

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(io, "open", opened)
    return refuse


def run(out):
    # The expected calibration error is measured after training, and written by itself.
    study = Study("mu/4", ["dpn"], recipe=RECIPE, limit_train=64, data="digits", seeds=1, metric="ece")
    how = {"workers": 1, "device": "cpu", "cost_seconds": 0.01, "progress": False, "checkpoint_minutes": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        answer = study.run(out, **how)
    return answer


@pytest.fixture
def left_open():
    """What was not closed: Python's warnings of it come before the message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)

        def unclosed():
            gc.collect()
            return [str(one.message) for one in caught if "unclosed" in str(one.message)]

        yield unclosed
    gc.unfreeze()


@pytest.mark.slow
def test_a_full_disk_at_any_kind_of_file_is_one_clear_error_and_the_study_goes_on(tmp_path, disk, left_open):
    whole, out = run(tmp_path / "whole"), tmp_path / "broken"
    whole.report()
    gc.freeze()  # what is there by now is not looked at again and again
    kinds = {Path(name).name for name in FILES}
    found = [path.name for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert {name for name in found if not name.startswith(tuple(kinds))} == set(), "a new kind of file: add it"
    for name, (code, words) in zip(FILES, itertools.cycle(ERRORS.items())):
        if name == "dpn/seed0/warnings.json":  # something to warn of
            config = json.loads((out / TRIAL / "config.json").read_text())
            config["environment"]["threads"] = 77
            (out / TRIAL / "config.json").write_text(json.dumps(config))
            (out / TRIAL / "result.json").unlink()
        if name == "costs.json":
            (out / name).unlink()
        refused = disk(name, code)
        try:
            answer = run(out)
            told = " ".join(answer.failed)
            if name == "report.html":
                answer.report()
        except UserError as error:
            told = str(error)
        assert len(refused) > 1, f"{name} was not written"
        assert words in told, f"{name}: {told}"
        assert name.removesuffix("/events.out") in told
        disk()
        assert left_open() == []
        assert not list(out.rglob("*.tmp")), "a rest of what was not written"
    answer = run(out)
    assert answer.complete
    assert answer.base.scores == whole.base.scores
    assert answer.arms[0].scores == whole.arms[0].scores
