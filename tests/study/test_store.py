import json
import os
import subprocess
import sys
import threading
import time

import pytest

from vitmods.study.arms import Arm
from vitmods.study.plan import Settings, Trial
from vitmods.study.store import StudyFolder, read_json, slug
from vitmods.util.errors import UserError

TRIAL = Trial(Arm("dpn"), 1)


def test_slugs_are_safe_and_different():
    names = [
        "dpn",
        "dpn+rms",
        "a/b",
        "a b",
        "../x",
        "",
        "ü" * 300,
        "CON:",
        "placement(attn=post)",
        "placement(attn=pre)",
    ]
    slugs = [slug(name) for name in names]
    assert slugs[:2] == ["dpn", "dpn+rms"]
    assert len(set(slugs)) == len(names)
    assert all(set(s) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-") for s in slugs)
    assert max(map(len, slugs)) < 80


def test_a_folder_without_a_study_says_so(tmp_path):
    with pytest.raises(UserError, match="no study in"):
        StudyFolder(tmp_path).facts()


@pytest.mark.parametrize("text", ["{}", "[]", "3", "[" * 100_000, '{"settings": {}}', '{"settings": 3}'])
def test_what_is_no_study_is_named(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    for read in (StudyFolder(tmp_path).facts, lambda: StudyFolder(tmp_path).check_same_study({})):
        with pytest.raises(UserError, match=r"study\.json is damaged"):
            read()


def test_settings_that_are_none_are_damaged():
    for values in ({}, {"arms": 3}, {"arms": {"a": 3}}):
        with pytest.raises(UserError, match=r"study\.json is damaged"):
            Settings.from_dict(values)


@pytest.mark.parametrize("text", ["{}", "[]", "{", "[" * 100_000])
def test_a_damaged_result_is_a_failure_of_its_trial_alone(tmp_path, text):
    folder, trial = StudyFolder(tmp_path), Trial(Arm("dpn"), 0)
    path = folder.trial(trial) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert folder.trial_result(trial) is None
    assert "is damaged" in folder.result(trial)["message"]
    folder.record_failure(trial, "val", "later")
    assert path.read_text() == text


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UserError, match=r"study\.json is damaged"):
        read_json(tmp_path / "study.json")


def test_another_study_is_refused_with_the_difference(tmp_path):
    common = {"recipe": {}, "arms": {}, "seeds": [0], "noise_floor": False, "margin": 0.5}
    (tmp_path / "study.json").write_text(json.dumps({"settings": {**common, "base": "Ti/4"}}))
    with pytest.raises(UserError, match=r"base: Ti/4 -> S/4.*--out"):
        StudyFolder(tmp_path).check_same_study({**common, "base": "S/4"})
    StudyFolder(tmp_path).check_same_study({**common, "base": "Ti/4", "seeds": [0, 1]})


def test_a_failed_trial_is_still_to_be_run_and_its_reason_is_kept(tmp_path):
    folder = StudyFolder(tmp_path)
    folder.record_failure(TRIAL, "test", "killed")
    assert folder.trial_result(TRIAL) is None
    assert read_json(folder.trial(TRIAL) / "result.json")["message"] == "killed"
    folder.record_failure(TRIAL, "test", "a later word")
    assert read_json(folder.trial(TRIAL) / "result.json")["message"] == "killed"


HOLD = """
import os, sys, time
from vitmods.study.store import StudyFolder
with StudyFolder(sys.argv[1]).lock() as descriptor:
    if len(sys.argv) > 2:  # an orphan that inherits the lock and dies a second after us
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], pass_fds=(descriptor,))
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder, *options):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *options], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def test_two_runs_at_once_are_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = hold(tmp_path)
    try:
        with pytest.raises(UserError, match=f"process {holder.pid}"), StudyFolder(tmp_path).lock():
            pass
    finally:
        holder.kill()
        holder.wait()
    with StudyFolder(tmp_path).lock():
        assert int((tmp_path / ".lock").read_text()) == os.getpid()


def test_a_new_run_waits_for_the_workers_of_a_killed_one(tmp_path):
    holder = hold(tmp_path, "with orphan")
    holder.kill()
    holder.wait()
    start = time.monotonic()
    with StudyFolder(tmp_path).lock():
        assert 0.3 < time.monotonic() - start < 9


def test_the_lock_is_free_again_afterwards(tmp_path):
    with StudyFolder(tmp_path).lock():
        pass
    taken = threading.Event()
    with StudyFolder(tmp_path).lock():
        taken.set()
    assert taken.is_set()


def test_a_place_that_cannot_be_a_folder_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot write"), StudyFolder(tmp_path / "file" / "study").lock():
        pass
