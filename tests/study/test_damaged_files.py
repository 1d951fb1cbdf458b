"""Any one file of a study is damaged or cannot be written: it is named, all else is reported, and the study resumes."""

import builtins
import errno
import gc
import io
import itertools
import json
import shutil
import warnings
from pathlib import Path

import pytest

from vitmods.data.splits import SPLIT_FILE
from vitmods.recipes import plain
from vitmods.study import Answer, Study
from vitmods.study.store import StudyFolder
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=32)
TRIAL = "trials/dpn/seed0"
DAMAGES = {
    "half": lambda whole: whole[: len(whole) // 2],
    "other": lambda whole: b'{"base": [1], "arms": {"dpn": 3}}',
    "nested": lambda whole: b"[" * 100_000,
}


def study(**options):
    # The expected calibration error is measured after training: the trials have a test.json.
    settings = {"recipe": RECIPE, "limit_train": 64, "data": "digits", "seeds": 2, "metric": "ece"}
    return Study("mu/4", ["dpn"], **{**settings, **options})


HOW = {"workers": 1, "device": "cpu", "cost_seconds": 0.01, "progress": False}


GROUPED = {"group_by": r"\d\d$"}  # so that images.npz and split.csv have groups


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    assert study(**GROUPED).run(out, **HOW).complete
    (out / TRIAL / "warnings.json").write_text('["odd"]')
    return Answer.load(out), out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "copy")


def load(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = Answer.load(path)
    return answer, " ".join(str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))


def damage(path, how):
    path.write_bytes(DAMAGES[how](path.read_bytes()))


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "result.json", "test.json", "test.npz", "val.npz"])
def test_a_trial_with_a_damaged_file_is_missing_and_the_others_count(finished, copy, name, how):
    damage(copy / TRIAL / name, how)
    answer, _ = load(copy)
    if (name, how) == ("config.json", "other"):  # the report reads its environment alone
        assert repr(answer.effects) == repr(finished[0].effects)
        return
    assert (answer["dpn"].n, answer.complete) == (1, False)
    assert answer.base.scores == finished[0].base.scores
    if (name, how) != ("test.json", "other"):  # no protocols in it: it is measured again
        assert name in answer.failed[0] or TRIAL in answer.failed[0]


@pytest.mark.parametrize("name", ["test.npz", "val.npz"])
def test_lost_scores_of_images_are_missing_for_their_trial_alone_and_measured_again(copy, name):
    before = study(**GROUPED, metric="top1").run(copy, **HOW)
    (copy / TRIAL / name).unlink()
    answer, _ = load(copy)
    assert (answer["dpn"].n, answer.complete) == (1, False)
    assert f"{name} is missing. Run the study's command again" in answer.failed[0]
    assert repr(study(**GROUPED, metric="top1").run(copy, **HOW).effects) == repr(before.effects)
    (copy / TRIAL / name).unlink()
    (copy / TRIAL / "model.safetensors").unlink()
    assert f"{name} is missing. Remove that folder" in load(copy)[0].failed[0]


BESIDE_SCORES = [f"{TRIAL}/metrics.jsonl", f"{TRIAL}/warnings.json", "costs.json", "images.npz", "samples.npz"]
BESIDE_SCORES += [SPLIT_FILE, "results.json", "results.csv"]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", BESIDE_SCORES)
def test_what_a_study_has_beside_its_scores_does_not_stop_the_report(finished, copy, name, how):
    damage(copy / name, how)
    answer, told = load(copy)
    assert repr(answer.effects) == repr(finished[0].effects)
    assert answer.complete
    if name.endswith("warnings.json"):
        assert "warnings.json is damaged" in answer.report().read_text() or how == "other"
    if name in ("costs.json", "samples.npz"):
        assert f"{name} is damaged" in told
        if how == "half":
            study(**GROUPED).run(copy, **HOW)
            assert (load(copy)[1] == "") is (name == "costs.json")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_study_json_is_named(copy, how):
    damage(copy / "study.json", how)
    for read in (Answer.load, lambda out: StudyFolder(out).check_same_study({})):
        with pytest.raises(UserError, match=r"study\.json is damaged"):
            read(copy)


def test_groups_are_those_of_the_split_file_and_the_next_run_writes_both_again(finished, copy):
    (copy / "images.npz").write_bytes(b"PK")
    content = (copy / SPLIT_FILE).read_bytes()
    (copy / SPLIT_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"images\.npz is damaged, and split\.csv cannot take its place.*same command"):
        Answer.load(copy)
    assert repr(study(**GROUPED).run(copy, **HOW).effects) == repr(finished[0].effects)
    for name in ("images.npz", SPLIT_FILE):
        assert (copy / name).read_bytes() == (finished[1] / name).read_bytes()


JUNK = (None, "x", {"a": None})


def damaged_sections(whole):
    """(where, what study.json holds): each section as something else or missing, and what sections hold likewise."""
    for section, value in whole.items():
        yield section, {name: other for name, other in whole.items() if name != section}
        for junk in JUNK:
            yield f"{section}={junk!r}", {**whole, section: junk}
        for name in value if isinstance(value, dict) else ():
            yield f"{section}.{name}", {**whole, section: {n: v for n, v in value.items() if n != name}}
            yield f"{section}.{name}=junk", {**whole, section: {**value, name: {"a": None}}}


def test_whatever_a_section_of_study_json_holds_is_read_or_refused(copy):
    path, refusals, odd = copy / "study.json", {}, {}
    content = json.loads(path.read_text())
    for where, values in damaged_sections(content):
        path.write_text(json.dumps(values))
        try:
            load(copy)
        except UserError as error:
            refusals[where] = str(error)
        except Exception as error:
            odd[where] = repr(error)
    assert not odd
    assert len(refusals) > 40
    of_sections = {where: text for where, text in refusals.items() if "." not in where.partition("=")[0]}
    assert [where for where, text in of_sections.items() if "study.json" not in text] == []


OF_A_TRIAL = ["config.json", "tb/events.out", "metrics.jsonl", "checkpoint.pt", "model.safetensors", "val.npz"]
OF_A_TRIAL += ["test.npz", "result.json", "test.json", "warnings.json"]
FILES = [".lock", ".lease", "images.npz", "split.csv", "samples.npz", "study.json"]
FILES += [*(f"dpn/seed0/{name}" for name in OF_A_TRIAL), "costs.json", "results.json", "results.csv", "report.html"]
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


def run_whole(out):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return study(seeds=1).run(out, **HOW, checkpoint_every_steps=1)


@pytest.fixture
def left_open():
    """What was not closed: Python's warnings of it come before the message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)

        def unclosed():
            gc.collect()
            return [str(warning.message) for warning in caught if "unclosed" in str(warning.message)]

        yield unclosed


@pytest.mark.slow
def test_a_full_disk_at_any_kind_of_file_is_one_clear_error(tmp_path, disk, left_open, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("vitmods.train.checkpoint.remove", lambda folder: None)
        unbroken, out = run_whole(tmp_path / "whole"), tmp_path / "broken"
    unbroken.report()
    gc.freeze()  # what is there by now is not looked at again and again
    kinds = {Path(name).name for name in FILES}
    files = (path for path in (tmp_path / "whole").rglob("*") if path.is_file())
    names = [path.name for path in files if not path.name.startswith((".vitmods-looks", "checkpoint.previous"))]
    assert {name for name in names if not name.startswith(tuple(kinds))} == set(), "a new kind of file: add it"
    for name, (code, words) in zip(FILES, itertools.cycle(ERRORS.items())):
        if name == "dpn/seed0/warnings.json":  # something to warn of
            config = json.loads((out / TRIAL / "config.json").read_text())
            config["environment"]["threads"] = 77
            (out / TRIAL / "config.json").write_text(json.dumps(config))
            (out / TRIAL / "result.json").unlink()
            for file in ("checkpoint.pt", "metrics.jsonl"):  # the one holds how long the other was
                shutil.copy(tmp_path / "whole" / TRIAL / file, out / TRIAL)
        if name == "costs.json":
            (out / name).unlink()
        refused = disk(name, code)
        try:
            answer = run_whole(out)
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
    answer = run_whole(out)
    assert answer.complete
    assert answer.base.scores == unbroken.base.scores
    assert answer.arms[0].scores == unbroken.arms[0].scores
