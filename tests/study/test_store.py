"""The folder of a study: its settings, results and samples, damaged or whole, and who may write."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from vitmods.recipes import Recipe
from vitmods.study.arms import Arm
from vitmods.study.cells import Cell, Trial
from vitmods.study.settings import Measure, Settings
from vitmods.study.state import read_trial
from vitmods.study.store import Facts, StudyFolder, slug
from vitmods.util.errors import UserError

TOP1 = Measure("top1")
TRIAL = Trial(Cell(Arm("dpn"), {}, Recipe()), 1)


def test_slugs_are_safe_and_different():
    names = ["dpn", "dpn+rms", "a/b", "a b", "../x", "", "ü" * 300, "CON:"]
    names += ["placement(attn=post)", "placement(attn=pre)"]
    slugs = [slug(name) for name in names]
    assert slugs[:2] == ["dpn", "dpn+rms"]
    assert len(set(slugs)) == len(names)
    assert all(set(s) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-") for s in slugs)
    assert max(map(len, slugs)) < 80


DAMAGED = r"study\.json is damaged"
NO_STUDIES = {text[:20]: (text, DAMAGED) for text in ("{", "{}", "[]", "3", "[" * 100_000, '{"settings": {}}')}
NO_STUDIES |= {
    "models of another kind": ('{"schema": 3, "models": 3}', DAMAGED),
    "another version": (
        '{"schema": 1, "settings": {}}',
        r"of another version of vitmods \(schema 1, this one reads 3\).*another folder",
    ),
}


@pytest.mark.parametrize(("text", "says"), NO_STUDIES.values(), ids=NO_STUDIES)
def test_what_is_no_study_is_named(tmp_path, text, says):
    (tmp_path / "study.json").write_text(text)
    folder = StudyFolder(tmp_path)
    for read in (folder.facts, folder.known_facts, lambda: folder.check_same_study({})):
        with pytest.raises(UserError, match=says):
            read()
    for settings in ({}, {"arms": 3}, {"arms": {"a": 3}}):
        with pytest.raises(UserError, match=DAMAGED):
            Settings.from_dict(settings)


def test_another_study_is_refused_with_the_difference(tmp_path):
    folder = StudyFolder(tmp_path)
    assert folder.facts() is None
    with pytest.raises(UserError, match="is not a study: "):
        folder.known_facts()
    common = {"recipe": json.loads(json.dumps(Recipe().to_dict())), "arms": {}, "seeds": [0], "margin": 0.5}
    facts = Facts("today", "vitmods compare", ("test",), {**common, "base": "Ti/4"}, {}, {}, {}, {})
    (tmp_path / "study.json").write_text(json.dumps(facts.to_dict()))
    assert folder.facts() == facts
    with pytest.raises(UserError, match=r"base: Ti/4 -> S/4.*--out"):
        folder.check_same_study({**common, "base": "S/4"})
    folder.check_same_study({**common, "base": "Ti/4", "seeds": [0, 1]})


def test_a_failed_trial_is_still_to_be_run_and_its_reason_is_kept(tmp_path):
    folder = StudyFolder(tmp_path)
    assert read_trial(folder, TRIAL, ["test"], TOP1).status == "unfinished"
    folder.record_failure(TRIAL, "test", "killed")
    folder.record_failure(TRIAL, "test", "a later word")
    record = read_trial(folder, TRIAL, ["test"], TOP1)
    assert (record.status, record.message, record.ended) == ("failed", "killed", False)


ODD_RESULTS = ['{"status": "odd"}', '{"status": "finished", "split": "test", "metrics": {"top1": "x"}}']


@pytest.mark.parametrize("text", ["{}", "[]", "{", "[" * 100_000, *ODD_RESULTS])
def test_a_damaged_result_is_its_trial_s_alone(tmp_path, text):
    folder = StudyFolder(tmp_path)
    path = folder.trial(TRIAL) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    record = read_trial(folder, TRIAL, ["test"], TOP1)
    assert (record.status, record.ended) == ("damaged", False)
    assert "damaged" in record.message
    folder.record_failure(TRIAL, "test", "later")
    assert path.read_text() == text


def test_samples_of_several_sizes_and_kinds_round_trip(tmp_path):
    samples = [("gray", np.zeros((8, 9), np.uint8)), ("photo", np.full((300, 200, 3), 128, np.uint8))]
    folder = StudyFolder(tmp_path)
    assert folder.samples() == []
    folder.write_samples(samples)
    assert all(a == b and np.array_equal(c, d) for (a, c), (b, d) in zip(folder.samples(), samples, strict=True))


DAMAGES = {
    "empty": lambda whole: b"",
    "no zip": lambda whole: b"no zip at all",
    "cut": lambda whole: whole[: len(whole) // 2],
    "other names": lambda whole: whole.replace(b"names.npy", b"NAMES.npy"),
    "zeros inside": lambda whole: whole[:60] + bytes(20) + whole[80:],
    "an image without pixels": np.zeros((0, 8, 3), np.uint8),
    "a row": np.zeros(8, np.uint8),
    "text": np.full((8, 8), "x"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_samples_are_none_and_warned_of(tmp_path, damage):
    folder, is_image = StudyFolder(tmp_path), isinstance(damage, np.ndarray)
    folder.write_samples([("a", damage if is_image else np.zeros((8, 8, 3), np.uint8))])
    if not is_image:
        folder.samples_file.write_bytes(damage(folder.samples_file.read_bytes()))
    with pytest.warns(UserWarning, match=r"samples\.npz is damaged"):
        assert folder.samples() == []


def test_samples_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = StudyFolder(tmp_path)
    folder.write_samples([("a", np.zeros((8, 8, 3), np.uint8))])
    whole = folder.samples_file.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(UserError, match="the disk is full"):
        folder.write_samples([("b", np.ones((8, 8, 3), np.uint8))])
    assert folder.samples_file.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["samples.npz"]


HOLD = """
import sys, time
from vitmods.study.store import StudyFolder
folder = StudyFolder(sys.argv[1])
with folder.lock() if len(sys.argv) == 2 else folder.worker_lock(0):
    print("held", flush=True)
    time.sleep(600 if len(sys.argv) == 2 else float(sys.argv[2]))
    (folder.path / "ends").touch()
"""


@contextmanager
def held(folder, *seconds):
    """A process that holds the folder, or as a worker for some seconds; it is killed at the end."""
    (folder / "logs").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *seconds], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_runs_at_once_are_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    with (
        held(tmp_path) as holder,
        pytest.raises(UserError, match=f"process {holder.pid}"),
        StudyFolder(tmp_path).lock(),
    ):
        pass
    for _ in range(2):  # the lock is free again afterwards
        with StudyFolder(tmp_path).lock():
            assert int((tmp_path / ".lock").read_text()) == os.getpid()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot write"), StudyFolder(tmp_path / "file" / "study").lock():
        pass


def test_a_new_run_waits_for_the_workers_of_a_killed_one(tmp_path, monkeypatch):
    """... and ends with an error if one does not end."""
    monkeypatch.setattr("vitmods.study.store.ORPHAN_GRACE_S", 0.1)
    with held(tmp_path, "2"):
        with pytest.raises(UserError, match="A worker of an earlier run still writes"), StudyFolder(tmp_path).lock():
            pass
        monkeypatch.setattr("vitmods.study.store.ORPHAN_GRACE_S", 60.0)
        with StudyFolder(tmp_path).lock():
            assert (tmp_path / "ends").exists()
