"""Other people's folders next to a study, and damaged ones: nothing of theirs is copied, believed or waited for."""

import errno
import json
import os
import shutil
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vitmods.recipes import plain
from vitmods.study import Study
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import open_study
from vitmods.study.reuse import Pool
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder
from vitmods.study.trial import answer_splits
from vitmods.util import lease
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")
OPTIONS = {"workers": 1, "device": "cpu", "cost_seconds": 0}
SECRET = "known to its owner alone"
FILES = ["config.json", "result.json", "metrics.jsonl", "test.npz", "val.npz", "test.json", "warnings.json"]
OTHER = 54321  # a user
is_root = os.geteuid() == 0


@pytest.fixture(autouse=True)
def search_beside(monkeypatch):
    monkeypatch.delenv("VITMODS_REUSE", raising=False)


@pytest.fixture(autouse=True)
def no_hang():
    """A test that waits for a pipe ends with an error."""

    def stop(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def images(tmp_path_factory, draw_images):
    return draw_images(tmp_path_factory.mktemp("images") / "pets", ["train"], count=30)


def study(images, **options):
    recipe = plain(epochs=1).with_(batch_size=16)
    return Study("mu/4", ["dpn"], images, **{"recipe": recipe, "seeds": 2, "metric": "ece", **options})


@pytest.fixture(scope="module")
def neighbor(images, tmp_path_factory):
    """A finished study whose trials have every kind of file."""
    folder = tmp_path_factory.mktemp("runs") / "neighbor"
    study(images).run(folder, **OPTIONS, progress=False)
    for trial in folder.glob("trials/*/*"):
        (trial / "warnings.json").write_text('["odd"]')
    return folder


@pytest.fixture(scope="module")
def prepared(images, neighbor, tmp_path_factory):
    return open_study(StudyFolder(tmp_path_factory.mktemp("mine")), study(images).settings, StudyOptions(**OPTIONS))


@pytest.fixture
def beside(prepared, tmp_path, capsys):
    """Reuse what lies next to a new study; returns its state and what was said."""

    def reuse(root=tmp_path, **settings):
        prepared.runner.folder = folder = StudyFolder(root / "mine")
        before, prepared.runner.settings = prepared.settings, replace(prepared.settings, **settings)
        try:
            capsys.readouterr()
            pool = Pool(prepared)
            state = StudyState(folder, prepared.settings, Evaluated(answer_splits(prepared.settings, prepared.dataset)))
            pool.copy(state)
        finally:
            prepared.runner.settings = before
        return state, capsys.readouterr().err

    return reuse


def rewrite(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def link(path, private):
    """To a private file that would be a whole one here."""
    secret = private / path.name
    shutil.copy(path, secret)
    path.unlink()
    path.symlink_to(secret)


def looping(path, private):
    path.unlink()
    path.symlink_to(path.name)


def pipe(path, private):
    path.unlink()
    os.mkfifo(path)


def folder(path, private):
    path.unlink()
    path.mkdir()


def sparse(path, private):
    with open(path, "ab") as file:
        file.truncate(3 << 30)


def zeros(path, private):
    """As large as is read."""
    path.write_bytes(b"\0" * (1 << 20))


def junk(path, private):
    path.write_bytes(b"[" * 100_000)


def foreign(path, private):
    os.chown(path, OTHER, OTHER)


def of(name, change):
    """A change of a file of JSON."""

    def harm(trial, private):
        values = json.loads((trial / name).read_text())
        change(values)
        (trial / name).write_text(json.dumps(values))

    return harm


def scores(change, split="test", **results):
    """Other scores of images, and other results."""

    def harm(trial, private):
        with np.load(trial / f"{split}.npz") as arrays:
            columns = dict(arrays)
        change(columns)
        np.savez(trial / f"{split}.npz", **columns)
        result = json.loads((trial / "result.json").read_text())
        rewrite(trial / "result.json", metrics={**result["metrics"], **results})

    return harm


def logged(line):
    def harm(trial, private):
        rows = (trial / "metrics.jsonl").read_text().splitlines()
        (trial / "metrics.jsonl").write_text("\n".join([*rows[:-1], line(json.loads(rows[-1]))]) + "\n")

    return harm


def examples(text, linked=False):
    def harm(trial, private):
        (private / "examples").mkdir()
        (private / "examples" / "examples.json").write_text(text)
        if linked:
            (trial / "examples").symlink_to(private / "examples")
        else:
            shutil.copytree(private / "examples", trial / "examples")

    return harm


def moved_behind_a_link(trial, private):
    shutil.move(trial, private / trial.name)
    trial.symlink_to(private / trial.name)


def deep(trial, private):
    place = trial
    for _ in range(60):
        place /= "deeper"
    place.mkdir(parents=True)
    for name in FILES:
        shutil.move(trial / name, place / name)


OF_FILES = {"link": link, "looping link": looping, "pipe": pipe, "folder": folder, "sparse": sparse, "junk": junk}
OF_FILES |= {"zeros": zeros, "another user's": foreign}
CONFIGS = {
    "rate": lambda c: c["recipe"]["optimizer"].update(lr=12345.0),
    "steps": lambda c: c["recipe"].update(epochs=10_000),
    "other images": lambda c: c["data"].update(fingerprint="0" * 64),
    "no images": lambda c: c.pop("data"),
    "model": lambda c: c["model"].update(depth=24),
    "changes": lambda c: c.update(changes="dtn"),
    "seed": lambda c: c.update(seed=77),
    "machine": lambda c: c["environment"].update(torch="0.1"),
    "more": lambda c: c.update(note="\x1b]0;owned\x07"),
    "wrong kinds": lambda c: c.update(recipe=[1], images="x", data=3),
    "no recipe": lambda c: c.pop("recipe"),
}
RESULTS = {
    "score": lambda r: r["metrics"].update(top1=0.99),
    "not a number": lambda r: r["metrics"].update(top1="\x1b[31m"),
    "infinite": lambda r: r["metrics"].update(loss=float("inf")),
    "time": lambda r: r.update(wall_s="soon"),
    "no steps": lambda r: r.pop("steps"),
    "fewer steps": lambda r: r.update(steps=1),
    "status": lambda r: r.update(status="\x1b[31m"),
    "message": lambda r: r.update(message={"a": 1}),
    "seed": lambda r: r.update(seed=5),
}
HARMS = {f"{kind} for {name}": (name, harm) for kind, harm in OF_FILES.items() for name in FILES}
HARMS |= {f"config: {name}": (".", of("config.json", change)) for name, change in CONFIGS.items()}
HARMS |= {f"result: {name}": (".", of("result.json", change)) for name, change in RESULTS.items()}
HARMS |= {
    "all right": (".", scores(lambda s: s.update(top1=np.ones(12, bool)))),
    "all right, and said so": (".", scores(lambda s: s.update(top1=np.ones(12, bool)), top1=1.0)),
    "right on val": (".", scores(lambda s: s.update(top1=np.ones(6, bool)), "val")),
    "calibrated": (".", of("test.json", lambda e: e["protocols"]["calibration"]["metrics"].update(ece=0.0))),
    "no scores": (".", lambda trial, private: (trial / "test.npz").unlink()),
    "text for scores": (".", scores(lambda s: s.update(top1=np.array(["a"] * 12)))),
    "other images": (".", scores(lambda s: s.update(ids=np.array([f"x{i}" for i in range(12)])))),
    "objects": (".", scores(lambda s: s.update(top1=np.array([None] * 12)))),
    "fewer images": (".", scores(lambda s: s.update({name: values[:3] for name, values in s.items()}))),
    "better curve": (".", logged(lambda row: json.dumps({**row, "top1": 0.99}))),
    "text in the curve": (".", logged(lambda row: json.dumps({**row, "top1": "\x1b[31m"}))),
    "no curve": (".", logged(lambda row: "[")),
    "examples elsewhere": (".", examples('{"images": [], "legend": {}}', linked=True)),
    "examples of junk": (".", examples('{"images": [{"panels": 3}]}')),
    "link for a trial": (".", moved_behind_a_link),
    "another user's trial": (".", foreign),
    "deep": (".", deep),
    "only a result": (".", lambda trial, private: (trial / "config.json").unlink()),
}
OF_STUDIES = {
    "pipe for the lock": lambda root: (
        pipe(root / ".lock", root), (root / ".lease").write_text(json.dumps({"machine": lease.machine()}))),
    "pipe for the lease": lambda root: os.mkfifo(root / ".lease"),
    "pipe for study.json": lambda root: pipe(root / "study.json", root),
    "link for study.json": lambda root: link(root / "study.json", root.parent),
    "another user's study": lambda root: foreign(root, root),
    "another user's study.json": lambda root: foreign(root / "study.json", root),
    "another user's trials": lambda root: foreign(root / "trials", root),
    "another user's link": lambda root: (
        shutil.move(root, root.parent.parent / "moved"), root.symlink_to("../moved"),
        os.chown(root, OTHER, OTHER, follow_symlinks=False)),
    "file for trials": lambda root: (shutil.rmtree(root / "trials"), (root / "trials").write_text("")),
}  # fmt: skip
DECORATION = ("test.json", "warnings.json")


def every_byte(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def hostile(neighbor, root, place, harm, trials=("base/seed0", "base/seed1", "dpn/seed0", "dpn/seed1")):
    """Copy the neighbor, and harm its trials in one way."""
    shutil.copytree(neighbor, root / "runs" / "theirs")
    for number, name in enumerate(trials):
        private = root / f"private{number}"
        private.mkdir()
        trial = root / "runs" / "theirs" / "trials" / name
        harm(trial if place == "." else trial / place, private)


@pytest.mark.parametrize("name", HARMS)
def test_a_hostile_trial_is_not_reused_and_one_line_says_why(neighbor, beside, tmp_path, name):
    place, harm = HARMS[name]
    if harm is foreign and not is_root:
        pytest.skip("root alone gives files away")
    hostile(neighbor, tmp_path, place, harm)
    began = time.process_time()
    state, said = beside(tmp_path / "runs")
    assert time.process_time() - began < 2
    assert not [record for record in state.records.values() if record.ended]
    assert not list((tmp_path / "runs" / "mine").rglob("*.json*"))
    if name not in ("deep", "only a result"):  # which do not look like trials
        assert said.count("Not reused") == said.count("\n") == 1
    assert "\x1b" not in said


@pytest.mark.parametrize("name", OF_STUDIES)
def test_a_hostile_study_is_left_alone(neighbor, beside, tmp_path, name):
    if "user" in name and not is_root:
        pytest.skip("root alone gives files away")
    hostile(neighbor, tmp_path, ".", lambda trial, private: None)
    OF_STUDIES[name](tmp_path / "runs" / "theirs")
    state, said = beside(tmp_path / "runs")
    assert not [record for record in state.records.values() if record.ended]
    assert said.count("Not reused") == said.count("\n") == (name != "file for trials")


def test_what_is_copied_is_a_list_of_files_with_the_usual_mode(neighbor, beside, tmp_path):
    def harm(trial, private):
        (private / "secret").write_text(SECRET)
        for number, name in enumerate(("run me", "notes.json", "train.csv", ".hidden", "examples.json")):
            (trial / name).write_text(SECRET)
            (trial / name).chmod(0o4755)
            (trial / f"link{number}").symlink_to(private / "secret")
        os.mkfifo(trial / "pipe")
        (trial / "looping").symlink_to("looping")
        (trial / "reused.json").write_text(json.dumps({"study": "\x1b[31mno"}))
        (trial / "warnings.json").write_text(json.dumps(["\x1b[31mred"]))
        rewrite(trial / "result.json", how={"device": "\x1b[31mred", "note": SECRET[:0]})
        for name in FILES:
            (trial / name).chmod(0o4777)

    hostile(neighbor, tmp_path, ".", harm)
    state, said = beside(tmp_path / "runs")
    mine = tmp_path / "runs" / "mine"
    assert all(record.ended for record in state.records.values())
    assert {record.reused for record in state.records.values()} == {str(tmp_path / "runs" / "theirs")}
    assert f"4 of 4 trials were trained in {tmp_path}/runs/theirs." in said
    names = {path.name for path in mine.glob("trials/*/*/*")}
    assert names == {*FILES, "reused.json"}
    assert SECRET.encode() not in every_byte(mine)
    assert b"\\u001b" not in every_byte(mine)
    mask = os.umask(0)
    os.umask(mask)
    for path in mine.rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask
    whole = neighbor / "trials" / "dpn" / "seed1"
    for name in ("metrics.jsonl", "test.npz", "val.npz", "test.json", "config.json"):
        assert (mine / "trials" / "dpn" / "seed1" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not is_root, reason="root alone gives files away")
def test_another_user_s_study_counts_where_it_is_named(neighbor, beside, tmp_path):
    hostile(neighbor, tmp_path, ".", lambda trial, private: None)
    theirs = tmp_path / "runs" / "theirs"
    for path in (theirs, *theirs.rglob("*")):
        foreign(path, None)
        path.chmod(0o555 if path.is_dir() else 0o444)
    state, said = beside(tmp_path / "runs")
    assert not [record for record in state.records.values() if record.ended]
    assert "1 study of other users; name those that you trust with --reuse" in said
    state, said = beside(tmp_path / "runs", reuse=(str(theirs),), no_reuse=False)
    assert all(record.ended for record in state.records.values())
    shutil.rmtree(tmp_path / "runs" / "mine")
    for path in theirs.glob("trials/*/*/test.json"):  # so that the weights are needed
        path.unlink()
    state, said = beside(tmp_path / "runs", reuse=(str(theirs),))
    for weights in (tmp_path / "runs" / "mine").rglob("*.safetensors"):
        assert (weights.stat().st_uid, weights.stat().st_nlink) == (os.geteuid(), 1)
    assert len([*(tmp_path / "runs" / "mine").rglob("*.safetensors")]) == 4


def test_a_thousand_damaged_twins_cost_little(neighbor, beside, tmp_path):
    hostile(neighbor, tmp_path, "metrics.jsonl", junk)
    twins = tmp_path / "runs" / "theirs" / "trials"
    for number in range(1000):
        shutil.copytree(twins / "base" / "seed0", twins / f"arm{number}" / "seed0")
    began = time.process_time()
    _, said = beside(tmp_path / "runs")
    assert time.process_time() - began < 3
    assert said.count("\n") == 1


def test_a_full_disk_while_trials_are_copied_is_a_clear_error_and_leaves_nothing(
    neighbor, beside, tmp_path, monkeypatch
):
    hostile(neighbor, tmp_path, ".", lambda trial, private: None)
    write, full = Path.write_bytes, []

    def refuse(path, content):
        if path.name == "test.npz" and "seed1.tmp" in path.parent.name:
            full.append(path)
            write(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    mine = tmp_path / "runs" / "mine"
    with pytest.raises(UserError, match="the disk is full; free some space"):
        beside(tmp_path / "runs")
    assert full
    assert not list(mine.rglob("*.tmp"))
    monkeypatch.undo()
    monkeypatch.delenv("VITMODS_REUSE", raising=False)
    (mine / "trials" / "base" / "seed7.tmp").mkdir()
    state, _ = beside(tmp_path / "runs")
    assert all(record.ended for record in state.records.values())
    assert not list(mine.rglob("*.tmp"))
