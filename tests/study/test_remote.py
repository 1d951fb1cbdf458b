"""Studies and trials at an address: what is there, in which order it comes and goes, and a network that fails."""

import csv
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import vitmods as vm
from vitmods import cli
from vitmods.study import Answer
from vitmods.study.executors import ClusterOptions
from vitmods.study.retrain import export_line
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner
from vitmods.train import Interrupted, TrialRun
from vitmods.util import address, lease, remote
from vitmods.util.address import Unreachable, address_of, named, place
from vitmods.util.errors import UserError
from vitmods.util.remote import LocalCopy, copy_of, download

pytestmark = pytest.mark.usefixtures("short_clocks")
QUIET = {"cost_seconds": 0, "progress": False, "device": "cpu", "workers": 1}
RECIPE = vm.recipes.digits().with_(epochs=1)


def study(seeds=1):
    return vm.Study(base="mu2/2", arms=["dpn"], data="digits", recipe=RECIPE, limit_train=200, seeds=seeds)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "SEND_EVERY_S", 0.05)
    monkeypatch.setattr(lease, "SETTLE_S", 0.05)
    monkeypatch.setattr(address, "_PAUSES_S", (0.01, 0.01))


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Go on as another machine, or come back: with local copies of its own."""

    def machine(name):
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / name))
        monkeypatch.setattr(lease, "machine", lambda: name)

    machine("one")
    return machine


@pytest.fixture(scope="session")
def run_once(tmp_path_factory):
    """The folder that an address names, after a study of two trials, and the copies of the machine that ran it."""
    root = tmp_path_factory.mktemp("remote")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(root / "one"))
        patch.setattr(remote, "SEND_EVERY_S", 0.05)
        patch.setattr(lease, "SETTLE_S", 0.05)
        study().run(f"file://{root}/there/x", **QUIET).report()
    return root


@pytest.fixture
def there(run_once, tmp_path, on):
    """A copy of it to alter, as an address; no machine knows it."""
    shutil.copytree(run_once / "there", tmp_path / "there")
    return f"file://{tmp_path}/there/x"


def folder_of(there):
    return Path(there.removeprefix("file://"))


def files(folder):
    names = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    return {name for name in names if not name.endswith((".sent.json", ".lock", ".lease", ".copy"))}


def contents(folder):
    return {name: (Path(folder) / name).read_bytes() for name in files(folder)}


def test_addresses_and_folders_are_told_apart(on, tmp_path, monkeypatch):
    for folder in ("runs/x", "C:/x", "timm:vit_small_patch16_224", "hf-hub:timm/vit", "a:b"):
        assert place(folder) == Path(folder)
    for text in ("s3://bucket/runs/x", Path("s3://bucket/runs/x"), "s3://bucket/runs/x/"):
        assert address_of(place(text)) == "s3://bucket/runs/x"
    for text in ("file:///data/x", "sftp://user@host/x", "abfs://container@account.dfs.core.windows.net/x"):
        assert address_of(place(text)) == text
    assert named(tmp_path) == str(tmp_path)
    with pytest.raises(UserError, match=rf"file://{tmp_path}/nostudy is not a study: "):
        Answer.load(f"file://{tmp_path}/nostudy")
    with pytest.raises(UserError, match="does not exist or is empty"):
        download(f"file://{tmp_path}/none")
    for name in ("CACHE", "DATA"):  # the local copy is not in a cache, which may be emptied
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    assert place("s3://bucket/x") == tmp_path / "DATA/vitmods/addresses/s3/bucket/x"
    monkeypatch.setenv("VITMODS_COPIES", str(tmp_path / "chosen"))
    assert place("s3://bucket/x") == tmp_path / "chosen/s3/bucket/x"


UNKNOWN = ["S3://bucket/x", "S3:bucket/x", "zip://a::s3://b", "dir::file:///x", "dbfs:/x", "https://x", "nowhere://x/y"]
UNKNOWN += ["github://user:KEY@main/x", "S3://KEY:VALUE@bucket/x", "nowhere://KEY:VALUE@x", "x/y::s3://KEY:VALUE@b/x"]
UNKNOWN += ["simplecache::s3://KEY:VALUE@b/x", "zip://x", "tar://x", "gist://x", "generic://x", "reference://x"]
WITH_KEYS = ["s3://KEY:VALUE@bucket/x", "s3://KEY@bucket/x", "sftp://user:VALUE@host/x", "abfs://x/y?sig=VALUE"]
WRONG_ADDRESSES = {
    "is not an address of a folder": ["s3://", "s3://bucket/../x", "s3:bucket/x"],
    "cannot hold a study": UNKNOWN,
    "contains keys or options": WITH_KEYS,
}


@pytest.mark.parametrize("reason", WRONG_ADDRESSES)
def test_addresses_that_are_not_known_are_refused_and_keys_are_not_shown(on, reason):
    for kind, path in itertools.product((str, Path), WRONG_ADDRESSES[reason]):
        with pytest.raises(UserError, match=reason) as error:
            StudyFolder(kind(path))
        assert "VALUE" not in str(error.value)
        assert "KEY@" not in str(error.value)


def test_a_study_is_at_its_address_as_it_would_be_in_a_folder(run_once):
    there, here = run_once / "there/x", run_once / f"one/vitmods/addresses/file{run_once}/there/x"
    assert files(there) == files(here)
    assert all((there / name).read_bytes() == (here / name).read_bytes() for name in files(here))
    assert {"study.json", "results.json", "report.html", "trials/dpn/seed0/model.safetensors"} <= files(there)
    assert not (there / ".lease").exists()


def test_another_machine_reads_it_and_adds_to_it_without_training_again(there, on, monkeypatch, capsys):
    on("two")
    trained = []
    step = TrialRun._train_step
    monkeypatch.setattr(TrialRun, "_train_step", lambda run, batch: (trained.append(run.seed), step(run, batch)))
    before = Answer.load(there)
    assert before.complete
    assert not list(place(there).rglob("*.safetensors"))  # an answer needs none
    after = study(seeds=2).run(there, **QUIET)
    assert set(trained) == {1}
    assert len(after.base.scores) == 2
    assert (folder_of(there) / "trials/dpn/seed1/result.json").exists()
    assert len(list(place(there).rglob("*.safetensors"))) == 4
    assert len(list(folder_of(there).rglob("*.safetensors"))) == 4
    on("three")
    assert cli.main(["report", there]) == 0
    assert f"Report: {there}/report.html" in capsys.readouterr().out
    trial = f"{there}/trials/dpn/seed1"
    assert cli.main(["evaluate", trial, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == "test"
    assert export_line(place(trial)) == f"vitmods export {trial} --to onnx"
    on("four")
    image = folder_of(there) / "image.png"
    from PIL import Image

    Image.new("L", (8, 8)).save(image)
    assert cli.main(["predict", trial, str(image), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("image,rank,class")
    assert not (place(there) / "study.json").exists()  # of the study, the trial alone is brought


def test_a_trial_that_was_stopped_goes_on_on_another_machine(tmp_path, on, monkeypatch):
    options = ["train", "--base", "mu2/2", "--epochs", "2", "--limit-train", "200", "--device", "cpu", "--quiet"]
    assert cli.main([*options, "--out", str(tmp_path / "whole")]) == 0
    step, out, folder = TrialRun._train_step, f"file://{tmp_path}/there/trial", tmp_path / "there/trial"
    checkpoints = {"checkpoint.pt", "checkpoint.previous.pt"}

    def stop(run, batch):
        if run.step == 5:
            raise Interrupted("stopped", 2)
        step(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrialRun, "_train_step", stop)
        assert cli.main([*options, "--out", out]) == 130
    assert "checkpoint.pt" in files(folder)
    for machine in ("two", "one"):  # whose checkpoint is old by now
        on(machine)
        assert cli.main([*options, "--out", out]) == 0
        assert not (files(folder) | files(place(out))) & checkpoints
        assert (tmp_path / "whole/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_trial_at_an_address_is_exported_with_the_results_of_its_study(there, on, tmp_path):
    on("two")
    for number, options in enumerate(([], ["--study", there])):
        out = tmp_path / f"hub{number}"
        assert cli.main(["export", f"{there}/trials/dpn/seed0", "--to", "hub", "--out", str(out), *options]) == 0
        card = (out / "README.md").read_text()
        assert "## Results of the study" in card
        assert str(tmp_path) not in card
    assert not (place(there) / "trials/base/seed0/model.safetensors").exists()


def write(mirror, **contents):
    for name, text in contents.items():
        path = mirror.folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def mirror(tmp_path, on):
    return copy_of(place(f"file://{tmp_path}/there"))


def test_what_tells_of_others_is_sent_after_them(mirror, monkeypatch):
    sent = []
    send = LocalCopy.send_file
    monkeypatch.setattr(LocalCopy, "send_file", lambda self, *what: (sent.append(what[1]), send(self, *what))[1])
    write(mirror, trial__metrics_jsonl="{}", trial__config_json="{}", logs__worker0_txt="w")
    mirror.send(final=False)
    assert sent == []  # rows alone are no reason to send them
    write(mirror, trial__result_json="{}", trial__checkpoint_pt="1", trial__examples__a_png="1")
    mirror.send(final=False)
    assert sent == ["metrics.jsonl", "config.json", "examples/a.png", "checkpoint.pt", "result.json"]
    write(mirror, trial__metrics_jsonl="{}{}")
    mirror.send(final=False)
    assert len(sent) == 5
    mirror.send()
    assert sent[5:] == ["logs/worker0.txt", "metrics.jsonl"]


@pytest.mark.parametrize("when", ["while files are listed", "while files are sent"])
def test_a_result_is_never_at_the_address_before_the_files_it_describes(mirror, monkeypatch, when):
    write(mirror, trial__config_json="{}", trial__metrics_jsonl="1")
    list_files, send_file = remote._list_here, LocalCopy.send_file

    def finish():
        write(mirror, trial__model_safetensors="late", trial__result_json="{}")

    def list_here(root):
        listed = list_files(root)
        if when == "while files are listed" and not (mirror.folder / "trial/result.json").exists():
            finish()
            listed["trial/result.json"] = list_files(root)["trial/result.json"]
        return listed

    def send(copy, trial, name, file):
        if when == "while files are sent" and name == "config.json":
            finish()
        return send_file(copy, trial, name, file)

    monkeypatch.setattr(remote, "_list_here", list_here)
    monkeypatch.setattr(LocalCopy, "send_file", send)
    mirror.send()
    assert mirror.has("trial/model.safetensors") or not mirror.has("trial/result.json")
    mirror.send()
    assert mirror.has("trial/model.safetensors")
    assert mirror.has("trial/result.json")


def test_the_program_names_what_is_deleted_at_the_address(tmp_path, on):
    """The checkpoints of a finished trial, and weights that are not kept; nothing else, whatever goes here."""
    folder, there = StudyFolder(f"file://{tmp_path}/there"), tmp_path / "there"
    trial = {f"trial/{name}" for name in ("config.json", "checkpoint.pt", "model.safetensors")}
    with folder.lock():
        write(folder._copy, trial__config_json="{}", trial__checkpoint_pt="1", trial__model_safetensors="1")
        folder._copy.send(final=False)
        shutil.rmtree(folder.path / "trial")
        folder._copy.send(final=False)
    assert files(there) == trial
    with folder.lock():
        assert contents(folder.path) == contents(there)
        write(folder._copy, trial__result_json=json.dumps({"status": "finished"}))
        folder.delete(folder.path / "trial/model.safetensors")
    assert files(there) == {"trial/config.json", "trial/result.json"}
    with folder.lock():
        assert contents(folder.path) == contents(there)  # the checkpoint went here too


@pytest.mark.parametrize("result_there", [None, "failed"])
def test_a_checkpoint_stays_at_the_address_until_the_result_is_there(tmp_path, on, result_there):
    """A trial that finished without a network, whose copy is removed before its result is sent, can continue."""
    folder, there = StudyFolder(f"file://{tmp_path}/there"), tmp_path / "there/trial"
    with folder.lock():
        write(folder._copy, trial__config_json="{}", trial__checkpoint_pt="half")
        if result_there:
            write(folder._copy, trial__result_json=json.dumps({"status": result_there}))
    finished = {"trial__result_json": json.dumps({"status": "finished"}), "trial__model_safetensors": "1"}
    write(copy_of(folder.path), **finished)
    (folder.path / "trial/checkpoint.pt").unlink()
    with pytest.raises(UserError, match="was removed while the run worked in it"), folder.lock():
        shutil.rmtree(folder.path)
    assert (there / "checkpoint.pt").read_text() == "half"
    with folder.lock():
        assert (folder.path / "trial/checkpoint.pt").read_text() == "half"
        write(folder._copy, **finished)
    assert files(there) == {"config.json", "result.json", "model.safetensors"}


def test_a_result_does_not_arrive_without_its_files_when_the_copy_is_being_removed(tmp_path, on, monkeypatch):
    folder, there = StudyFolder(f"file://{tmp_path}/there"), tmp_path / "there/trial"
    send_file = LocalCopy.send_file

    def removed_meanwhile(copy, trial, name, file):
        (folder.path / "trial/test.npz").unlink(missing_ok=True)
        send_file(copy, trial, name, file)

    monkeypatch.setattr(LocalCopy, "send_file", removed_meanwhile)
    finished = {"trial__result_json": json.dumps({"status": "finished"}), "trial__config_json": "{}"}
    with pytest.raises(UserError, match=r"test.npz was removed while the run worked in"), folder.lock():
        write(folder._copy, **finished, trial__test_npz="1")
    assert not (there / "result.json").exists()


def wait_until_interrupted():
    """A signal that another thread sets is seen between two calls, and wakes no sleep."""
    for _ in range(1200):
        time.sleep(0.05)


@pytest.mark.parametrize("part", ["", "trials/dpn/seed0", "trials/dpn"])
def test_a_copy_that_vanishes_ends_the_run_and_nothing_at_the_address(there, on, part, capsys):
    folder, address_folder = StudyFolder(there), folder_of(there)
    before = contents(address_folder)

    def work():
        with folder.lock():
            shutil.rmtree(folder.path / part)
            if part == "trials/dpn/seed0":  # as a run that cannot evaluate what is gone
                (folder.path / part).mkdir()
                (folder.path / part / "result.json").write_text(json.dumps({"status": "failed"}))
            wait_until_interrupted()

    with pytest.raises(UserError, match=r"was (removed|damaged) while the run worked.*run the same command again"):
        work()
    assert contents(address_folder) == before
    with folder.lock():
        assert {name: text for name, text in contents(folder.path).items() if name in before} == before
    assert contents(address_folder) == before


def test_names_above_a_copy_do_not_matter_and_links_and_growing_logs_wait(tmp_path, on):
    on("cache.damaged")
    mirror = copy_of(place(f"file://{tmp_path}/.aside/runs.damaged"))
    write(mirror, trials__seed0__config_json="{}", trials__seed0__checkpoint_pt="1", logs__worker0_txt="1")
    write(mirror, x_damaged__a_txt="kept", _aside__a_txt="kept")
    (mirror.folder / "latest").symlink_to(mirror.folder / "trials")
    (mirror.folder / "latest.log").symlink_to(mirror.folder / "trials/seed0/config.json")
    mirror.send(final=False)
    there, sent = tmp_path / ".aside/runs.damaged", {"trials/seed0/config.json", "trials/seed0/checkpoint.pt"}
    assert files(there) == sent
    mirror.send()
    assert files(there) == sent | {"logs/worker0.txt"}


def test_without_a_network_nothing_is_lost_and_the_next_run_sends_it(there, on, monkeypatch, capsys):
    folder, failing = StudyFolder(there), {"left": 0}
    real = type(copy_of(folder.path)._fs).open

    def unsure(self, path, mode="rb", **options):
        if "w" in mode and failing["left"] and ".lease" not in path:
            failing["left"] -= 1
            raise OSError("the line is dead")
        return real(self, path, mode, **options)

    monkeypatch.setattr(type(copy_of(folder.path)._fs), "open", unsure)
    with folder.lock():
        failing["left"] = 2
        (folder.path / "note.txt").write_text("a")
    assert (folder_of(there) / "note.txt").read_text() == "a"  # the third attempt

    def work_without_a_network():
        with folder.lock():
            failing["left"] = 10**6
            (folder.path / "note.txt").write_text("b")
            printed, end = "", time.monotonic() + 60
            while "The run continues." not in printed:
                assert time.monotonic() < end
                time.sleep(0.01)
                printed += capsys.readouterr().err

    with pytest.raises(Unreachable, match=rf"{there} cannot be reached: the line is dead\. What was done is in"):
        work_without_a_network()
    assert (folder.path / "note.txt").read_text() == "b"
    with pytest.raises(ZeroDivisionError), folder.lock():  # an error of the work itself stays the one that is raised
        raise ZeroDivisionError
    failing["left"] = 0
    with folder.lock():
        assert (folder.path / "note.txt").read_text() == "b"
    assert (folder_of(there) / "note.txt").read_text() == "b"


def test_a_trial_that_two_machines_have_changed_is_kept_by_both(mirror, tmp_path, on, capsys):
    folder = StudyFolder(mirror.address)
    with folder.lock():
        write(mirror, trial__config_json="{}", trial__metrics_jsonl="1", other__config_json="{}", logs__worker0_txt="w")
    held = {".lock": "7", "trial/config.json.1.tmp": "half", "logs/worker0.lock": ""}
    on("two")
    with StudyFolder(mirror.address).lock():
        write(copy_of(place(mirror.address)), trial__metrics_jsonl="12", other__a_txt="b")
    on("one")
    for name, text in held.items():
        (mirror.folder / name).write_text(text)
    write(mirror, trial__metrics_jsonl="1x", trial__checkpoint_pt="1x", third__a_txt="c")
    mirror.fetch()  # who only reads moves nothing
    assert (mirror.folder / "trial/metrics.jsonl").read_text() == "1x"
    with folder.lock():
        assert "/trial was changed by another machine too" in capsys.readouterr().err
        assert (mirror.folder / "trial/metrics.jsonl").read_text() == "12"
        assert (mirror.folder / "other/a.txt").read_text() == "b"
        assert {name for name in held if (mirror.folder / name).exists()} == held.keys()
    (aside,) = mirror.folder.glob(".aside/*")
    assert contents(aside) == {"trial/config.json": b"{}", "trial/metrics.jsonl": b"1x", "trial/checkpoint.pt": b"1x"}
    assert files(tmp_path / "there") == {name for name in files(mirror.folder) if not name.startswith(".aside")} - {
        "trial/config.json.1.tmp"
    }
    assert (tmp_path / "there/third/a.txt").read_text() == "c"


@pytest.mark.parametrize("noted", [True, False])
def test_a_killed_run_goes_on_with_its_own_files(mirror, tmp_path, on, monkeypatch, noted):
    """It has sent rows, and has more of them; perhaps it was killed before it could note what was sent. Another machine
    has not run since."""
    folder = StudyFolder(mirror.address)
    with monkeypatch.context() as patch:
        patch.setattr(lease.Lease, "give_back", lambda held: held._ended.set())
        if not noted:
            patch.setattr(LocalCopy, "_note", lambda *_: None)
        with folder.lock():
            write(mirror, trial__config_json="{}", trial__metrics_jsonl="1")
    write(mirror, trial__config_json="{}", trial__metrics_jsonl="12", trial__checkpoint_pt="12")
    with folder.lock():
        text = (mirror.folder / "trial/metrics.jsonl").read_text()
    assert text == (tmp_path / "there/trial/metrics.jsonl").read_text() == "12"
    assert not list(mirror.folder.glob(".aside/*"))


def test_who_only_reads_an_address_deletes_nothing_there_and_a_lost_one_takes_nothing_away(mirror, tmp_path, on):
    write(mirror, trial__config_json="{}", trial__checkpoint_pt="1")
    with StudyFolder(mirror.address).lock():
        pass
    there = tmp_path / "there/trial"
    (there / "result.json").write_text('{"status": "finished"}')  # killed before it deleted the checkpoint
    LocalCopy(tmp_path / "reader", mirror.address).fetch()
    assert (there / "checkpoint.pt").read_text() == "1"
    shutil.rmtree(tmp_path / "there")
    mirror.fetch()
    mirror.send()
    assert (there / "config.json").read_text() == "{}"


def test_files_are_replaced_where_a_move_onto_a_file_is_refused(there, on, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    move = LocalFileSystem.mv

    def refuse_existing(fs, source, target, **options):
        if fs.exists(target):
            raise FileExistsError(target)
        move(fs, source, target, **options)

    monkeypatch.setattr(LocalFileSystem, "mv", refuse_existing)
    folder = StudyFolder(there)
    for text in ("a", "other"):
        with folder.lock():
            (folder.path / "note.txt").write_text(text)
        assert (folder_of(there) / "note.txt").read_text() == text
    assert not list(folder_of(there).rglob("*.tmp"))


def test_a_run_at_work_elsewhere_is_refused(there, on, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr("platform.node", lambda: "one")
    with StudyFolder(there).lock():
        on("two")
        with pytest.raises(UserError, match=rf"Another run is at work in {there} \(process {os.getpid()} on one\)"):
            study().run(there, **QUIET)
        on("one")
    assert files(place(there))
    with pytest.raises(UserError, match="name one that they share by --out"):
        study(seeds=2).run(there, cluster=ClusterOptions("slurm"), **QUIET)


def test_a_run_that_was_taken_over_measures_and_writes_nothing_more(tmp_path, monkeypatch):
    held, take, reason = [], lease.Lease.take, "process 7 on two has taken x over"
    monkeypatch.setattr(lease.Lease, "take", lambda self: (held.append(self), take(self)))
    monkeypatch.setattr("vitmods.study.run._work", lambda *_: setattr(held[0], "lost", reason))
    monkeypatch.setattr("vitmods.study.run._measure_costs", lambda *_: (pytest.fail("measured") for _ in range(1)))
    with pytest.raises(UserError, match="process 7 on two has taken"):
        study().run(tmp_path / "x", **QUIET)
    assert not (tmp_path / "x/results.json").exists()


@pytest.mark.parametrize("when", ["before a trial", "before it is sent"])
def test_a_run_that_was_asleep_trains_and_sends_nothing_more(tmp_path, on, monkeypatch, when):
    """Another run takes the address over, and this one does not notice by itself: its lease is renewed much later."""
    out, other = f"file://{tmp_path}/there/x", json.dumps({"id": "another", "host": "two", "process": 7})
    monkeypatch.setattr("signal.pthread_kill", lambda *_: None)
    monkeypatch.setattr(lease.LeaseFile, "write", lambda *_: None)  # nor does it renew it at the same moment
    monkeypatch.setattr(lease, "BEAT_S", 600.0)
    monkeypatch.setattr(lease, "STALE_S", 0.0)
    monkeypatch.setattr(remote, "SEND_EVERY_S", 600.0 if when == "before it is sent" else 0.05)
    trained, train = [], TrialRunner._train
    there = tmp_path / "there/x"

    def one_trial(runner, trial):
        train(runner, trial)
        trained.append(trial)
        if when == "before a trial":
            while not (there / "trials/base/seed0/result.json").exists():
                time.sleep(0.02)
        (there / ".lease").write_text(other)

    monkeypatch.setattr(TrialRunner, "_train", one_trial)
    with pytest.raises(UserError, match=f"process 7 on two has taken {out} over"):
        study().run(out, **QUIET)
    assert len(trained) == 1
    sent = {name for name in files(there) if name.endswith("result.json")}
    assert sent == ({"trials/base/seed0/result.json"} if when == "before a trial" else set())
    assert (place(out) / "trials/base/seed0/result.json").exists()  # nothing is lost
    assert (there / ".lease").read_text() == other


class Server:
    """Moto's S3 on this machine, with faults of its own.

    fault: called for each request with its environment; the status to answer with, "drop" to close the connection
        without an answer, "lose" to do so once the request was carried out, or None.
    """

    def __init__(self):
        self._server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self._app, self._server._server.app = self._server._server.app, self._answer
        self.fault, self.stop = lambda request: None, self._server.stop
        self.url = "http://{}:{}".format(*self._server.get_host_and_port())

    def _answer(self, request, start_response):
        fault = self.fault(request)
        if fault and fault[0].isdigit():
            start_response(fault, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{fault[4:].replace(' ', '')}</Code></Error>".encode()]
        answer = self._app(request, start_response) if fault != "drop" else ()
        if fault is None:
            return answer
        for _ in answer:
            pass
        with suppress(OSError):
            request["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("dropped")


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("s3fs")
    server = Server()
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    yield server
    server.stop()


@pytest.fixture
def bucket(server, tmp_path):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    name = tmp_path.name.strip("_").replace("_", "-")
    s3fs.S3FileSystem().mkdir(name)  # the server keeps what it has as long as the process lives
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_study_in_a_bucket(bucket, on, capsys, monkeypatch):
    out = f"{bucket}/runs/x"
    command = ["compare", "--base", "mu2/2", "--arms", "dpn", "--seeds", "1", "--epochs", "1", "--limit-train", "200"]
    command += ["--device", "cpu", "--cost-seconds", "0", "--workers", "1", "--quiet", "--out", out]
    assert cli.main(command) == 0
    assert f"Report: {out}/report.html" in capsys.readouterr().out
    import fsspec

    fs, root = fsspec.url_to_fs(out)
    kept = {name[len(root) + 1 :] for name in fs.find(root)}
    assert kept == files(place(out))
    on("two")
    assert cli.main(["report", out]) == 0
    assert "dpn" in capsys.readouterr().out
    on("three")
    monkeypatch.setattr(TrialRun, "_train_step", lambda *_: pytest.fail("trained again"))
    assert cli.main(command) == 0
    assert lease.LEASE not in {name.rpartition("/")[2] for name in fs.find(root)}


def test_marks_of_folders_in_a_bucket_are_no_files_and_a_missing_bucket_is_reported(bucket, on, monkeypatch):
    mirror = copy_of(place(f"{bucket}/runs/x"))
    write(mirror, trials__a_txt="a", empty_txt="")
    mirror.send()
    for mark in ("/", "/trials/", "/trials", "/none/"):
        mirror._fs.call_s3("put_object", Bucket=bucket[5:], Key=f"runs/x{mark}")
    before = mirror._fs.find(mirror._root)
    on("two")
    second = copy_of(place(mirror.address))
    second.fetch()
    second.send()
    assert files(second.folder) == {"trials/a.txt", "empty.txt"}
    assert second._fs.find(second._root) == before
    monkeypatch.setattr(TrialRun, "_train_step", lambda *_: pytest.fail("trained"))
    with pytest.raises(Unreachable, match="none/x"):
        study().run("s3://none/x", **QUIET)


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_second_run_is_refused_also_where_a_store_cannot_create_exclusively(
    bucket, server, on, monkeypatch, exclusive
):
    asked, out = [], f"{bucket}/x"

    def fault(request):
        if "HTTP_IF_NONE_MATCH" in request:
            asked.append(1)
            return None if exclusive else "501 Not Implemented"
        return None

    server.fault = fault
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    folder = StudyFolder(out)
    with folder.lock():
        (folder.path / "note.txt").write_text("a")
        on("two")
        with pytest.raises(UserError, match="Another run is at work"), StudyFolder(out).lock():
            pass
        on("one")
    assert asked
    on("two")
    assert not copy_of(place(out)).has(lease.LEASE)  # it was given back
    with StudyFolder(out).lock():
        assert (place(out) / "note.txt").read_text() == "a"


RUNNER = """
import gc, os, sys
import matplotlib.backends.backend_svg, matplotlib.figure, s3fs, torch
import vitmods.report.page, vitmods.study.run, vitmods.study.trial
from vitmods import cli
from vitmods.tasks import TASKS
from vitmods.util import address, lease, remote
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports the compiler
list(TASKS), gc.freeze()  # so that no copy imports them, and the collector copies no memory
lease.BEAT_S, lease.STALE_S, remote.SEND_EVERY_S = 0.2, 2.0, 0.1
address._PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(2, 1)
        os._exit(cli.main(line.split()))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
UNALIKE = {"wall_s", "images_per_s", "data_wait", "created", "command", "environment", "id"}


def comparable(folder):
    """The files of a study without what differs between any two runs."""

    def alike(values):
        return {key: value for key, value in values.items() if key not in UNALIKE}

    contents = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix in (".lock", ".tmp") or path.name[0] == "." or name.startswith("logs/"):
            continue
        if "/tb/" in name:  # exactly one for each trial
            name, content = name.partition("events")[0], "one"
            assert name not in contents
        elif path.suffix in (".json", ".jsonl"):
            rows = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            content = [json.loads(row, object_hook=alike) for row in rows]
        elif path.suffix == ".csv":
            content = [alike(row) for row in csv.DictReader(path.open())]
        else:
            content = path.suffix == ".html" or path.read_bytes()
        contents[name] = content
    return contents


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.long)])
def test_kills_and_dropped_requests_end_in_the_same_files(kills, bucket, server, tmp_path, monkeypatch):
    """A tenth of all requests is dropped, half of these after they were carried out. Every fourth kill takes the local
    copy with it, and every fourth one is no kill: the copy is removed while the run works in it."""
    import s3fs

    draw = random.Random(kills)
    server.fault = lambda _: draw.choice(("drop", "lose")) if draw.random() < 0.1 else None
    command = ["compare", "--base", "mu2/2", "--arms", "dpn", "--seeds", "1", "--epochs", "4", "--limit-train", "200"]
    command += ["--device", "cpu", "--cost-seconds", "0", "--workers", "1", "--checkpoint-minutes", "0.002", "--quiet"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    log = (tmp_path / "log").open("w")
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )

    def start(out):
        print(*command, "--out", out, file=runner.stdin, flush=True)
        return int(runner.stdout.readline())

    def ended():
        return int(runner.stdout.readline())

    def fetched(out, name):
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        server.fault, fault = lambda _: None, server.fault
        fs.get(f"{out.removeprefix('s3://')}/", str(tmp_path / name), recursive=True)
        server.fault = fault
        return comparable(tmp_path / name)

    try:
        began = time.monotonic()
        start(str(tmp_path / "whole"))
        assert ended() == 0, (tmp_path / "log").read_text()
        whole_s = time.monotonic() - began
        unbroken = comparable(tmp_path / "whole")
        count, studies = 0, 0
        while count < kills:
            out = f"{bucket}/study{studies}"
            copy = tmp_path / f"data/vitmods/addresses/s3/{out[5:]}"
            for _ in range(1000):
                pid = start(out)
                if count < kills:
                    time.sleep(draw.uniform(0, whole_s))
                    event = draw.choice(("kill", "kill", "kill and remove", "remove"))
                    if event != "remove":
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    if event != "kill":
                        shutil.rmtree(copy, ignore_errors=True)
                if (code := ended()) == 0:
                    break
                count += 1
                assert code in (-signal.SIGKILL, 2), (tmp_path / "log").read_text()
            listed = fetched(out, f"study{studies}")
            assert listed.keys() == unbroken.keys()
            assert [name for name in unbroken if listed[name] != unbroken[name]] == []
            studies += 1
        print(f"{count} kills and removals, {studies} studies, {time.monotonic() - began:.0f} s")
    finally:
        runner.stdin.close()
        runner.kill()
        log.close()
