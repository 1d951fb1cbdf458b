"""Other people's folders next to a study, and damaged ones: nothing of theirs is copied, believed or waited for."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import socket
import stat
import struct
import warnings
import zipfile
from collections import Counter
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vitmods.recipes import plain
from vitmods.study import Study
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import open_study
from vitmods.study.reuse import MOST_EQUAL, FinishedTrial, Pool
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder
from vitmods.study.trial import answer_splits
from vitmods.util import lease, limits
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
    return Study("mu/4", ["dpn"], images, **{"recipe": recipe, "seeds": 1, "metric": "ece", **options})


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
        mine = replace(prepared, settings=replace(prepared.settings, **settings))
        capsys.readouterr()
        state = StudyState(folder, mine.settings, Evaluated(answer_splits(mine.settings, mine.dataset)))
        Pool(mine).copy(state)
        return state, capsys.readouterr().err

    return reuse


@pytest.fixture
def reads(monkeypatch):
    """What is read of other studies: the study, the name of each file and its bytes."""
    reads, read = [], FinishedTrial.read

    def counted(trial, name):
        content = read(trial, name)
        reads.append((trial.study.path, name, len(content)))
        return content

    monkeypatch.setattr(FinishedTrial, "read", counted)
    return reads


def rewrite(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def link(path, private):
    """To a private file that would be a whole one here."""
    secret = private / path.name
    shutil.copy(path, secret)
    path.unlink()
    path.symlink_to(secret)


def instead(make):
    """Something else in the place of a file."""

    def harm(path, private):
        path.unlink()
        make(path)

    return harm


def socket_file(path):
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def foreign(path, private):
    os.chown(path, OTHER, OTHER)


def content(change):
    """Other bytes in a file."""
    return lambda path, private: path.write_bytes(change(path.read_bytes()))


def of(name, change):
    """A change of a file of JSON."""

    def harm(trial, private):
        values = json.loads((trial / name).read_text())
        change(values)
        (trial / name).write_text(json.dumps(values))

    return harm


def fields(name, kinds):
    """Values of other kinds in the fields of a file of JSON."""
    return {
        f"{name}: {field} is {value!r}": (".", of(name, lambda c, field=field, value=value: c.update({field: value})))
        for field, values in kinds.items()
        for value in values
    }


def scores(change, split="test", **results):
    """Other scores of images, and other results."""

    def harm(trial, private):
        with np.load(trial / f"{split}.npz") as arrays:
            columns = dict(arrays)
        change(columns)
        np.savez(trial / f"{split}.npz", **columns)
        result = json.loads((trial / "result.json").read_text())
        rewrite(trial / "result.json", metrics={**result["metrics"], **results})

    return ".", harm


def logged(line):
    def harm(path, private):
        rows = path.read_text().splitlines()
        path.write_text("\n".join([*rows[:-1], line(json.loads(rows[-1]))]) + "\n")

    return "metrics.jsonl", harm


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
    place = trial.joinpath(*["deeper"] * 60)
    place.mkdir(parents=True)
    for name in FILES:
        shutil.move(trial / name, place / name)


def packed(change):
    """Another .npz: change gets the bytes of each member by its name, and how each is written."""

    def harm(path, private):
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: archive.read(member) for member in archive.infolist()}
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            warnings.simplefilter("ignore")  # of a name that comes twice
            for name, values in change(members):
                archive.writestr(name, values)

    return "test.npz", harm


def header(text, values=b""):
    text = text.ljust(118).encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values


def encrypted(content):
    """The flags of all members say that they are."""
    flags = re.sub(rb"(PK\x03\x04..).", lambda found: found[1] + b"\x01", content, flags=re.DOTALL)
    return re.sub(rb"(PK\x01\x02....).", lambda found: found[1] + b"\x01", flags, flags=re.DOTALL)


def between(name, replace):
    """A file of the name is replaced between its check and its being opened."""

    def harm(trial, private):
        RACES[str(trial / name)] = lambda: replace(trial / name, private)

    return harm


RACES = {}
DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
ALONE = {  # in the place of one file
    "link": link,
    "looping link": instead(lambda path: path.symlink_to(path.name)),
    "pipe": instead(os.mkfifo),
    "folder": instead(Path.mkdir),
    "sparse file": lambda path, private: os.truncate(path, 3 << 30),
    "junk": content(lambda old: b"[" * 100_000),
    "zeros": content(lambda old: b"\0" * (1 << 20)),  # as large as is read
    "another user's": foreign,
}
LINKS = {
    "dangling link": instead(lambda path: path.symlink_to("/nowhere")),
    "link to memory": instead(lambda path: path.symlink_to("/proc/self/mem")),
    "link to a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "socket": instead(socket_file),
    "device": instead(lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))),
}
LATE = ("link", "pipe", "sparse file")
OF_JSON = {
    "empty": lambda old: b"",
    "deep": lambda old: DEEP,
    "a list": lambda old: b"[]",
    "a number": lambda old: b"7",
    "null": lambda old: b"null",
    "not UTF-8": lambda old: b"\xff\xfe\x00" + old,
    "cut": lambda old: old[:-20],
    "a number of 5,000 digits": lambda old: old.rstrip()[:-1] + b', "schema": ' + b"9" * 5000 + b"}",
    "a surrogate": lambda old: old.rstrip()[:-1] + b', "\\ud800": "\\udfff", "schema": [}',
    "a pickle": lambda old: pickle.dumps({"a": 1}),
}
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
CONFIG_FIELDS = {"recipe": [None, 3, "x", {}], "images": [None, [], 3], "data": [[], "x", {}], "model": [None, 3, []]}
CONFIG_FIELDS |= {"environment": [None, "x", {}], "seed": ["0", None, 0.5, [0]], "changes": [None, 1, ["dpn"]]}
RESULTS = {
    "score": lambda r: r["metrics"].update(top1=0.99),
    "not a number": lambda r: r["metrics"].update(top1="\x1b[31m"),
    "infinite": lambda r: r["metrics"].update(loss=float("inf")),
    "time": lambda r: r.update(wall_s="soon"),
    "no steps": lambda r: r.pop("steps"),
    "fewer steps": lambda r: r.update(steps=1),
    "message": lambda r: r.update(message={"a": 1}),
}
RESULT_FIELDS = {"metrics": [3, "x", None, [1]], "steps": ["x", None, [], 1e400], "seed": ["x", None, {}, -1]}
RESULT_FIELDS |= {"status": [None, 1, [], {}, "\x1b[31m"], "split": [None, 4, ["test"]]}
RESULT_FIELDS |= {"params": ["many", [], None], "wall_s": [{}, None]}
CURVES = {
    "empty": lambda old: b"",
    "NaN": lambda old: old.replace(b'"top1": 0.', b'"top1": NaN, "x": 0.'),
    "infinite": lambda old: old.replace(b'"loss": 0.', b'"loss": -Infinity, "x": 0.'),
    "deep": lambda old: old + DEEP,
    "not UTF-8": lambda old: old + b"\xff\xfe",
    "lists": lambda old: old.replace(b'"top1": 0.', b'"top1": [1], "x": 0.'),
    "no steps": lambda old: old.replace(b'"step"', b'"steps"'),
    "other steps": lambda old: old.replace(b'"step": ', b'"step": 9'),
    "growing": lambda old: old + old[:40],
}
SCORES = {
    "all right": lambda s: s.update(top1=np.ones(12, bool)),
    "text": lambda s: s.update(top1=np.array(["a"] * 12)),
    "other images": lambda s: s.update(ids=np.array([f"x{i}" for i in range(12)])),
    "objects": lambda s: s.update(top1=np.array([None] * 12)),
    "fewer images": lambda s: s.update({name: values[:3] for name, values in s.items()}),
    "complex": lambda s: s.update(top1=s["top1"] + 1j),
    "times": lambda s: s.update(top1=s["top1"].astype("M8[s]")),
    "bytes": lambda s: s.update(top1=s["top1"].astype("S5")),
    "not a number": lambda s: s.update(top1=np.full(12, np.nan)),
    "infinite": lambda s: s.update(nll=np.full(12, np.inf)),
    "large": lambda s: s.update(top1=np.full(12, 1e300)),
    "two columns": lambda s: s.update(top1=np.full((12, 2), 0.5)),
    "one number": lambda s: s.update(top1=np.array(0.5)),
    "nobody's ids": lambda s: s.pop("ids"),
    "ids in reverse": lambda s: s.update(ids=s["ids"][::-1]),
    "ids that repeat": lambda s: s.update(ids=s["ids"][[0] * 12]),
    "ids of numbers": lambda s: s.update(ids=np.arange(12)),
    "other predictions": lambda s: s.update(predicted=1 - s["predicted"]),
    "predictions of nothing": lambda s: s.update(predicted=np.full(12, -5)),
    "records": lambda s: s.update(top1=np.zeros(12, [("a", "f8"), ("b", "f8")])),
    "empty": lambda s: s.clear(),
}
SHAPES = {
    "pickle": header("{'descr': '|O', 'fortran_order': False, 'shape': (12,), }", pickle.dumps([1] * 12)),
    "shape of another": header("{'descr': '<f8', 'fortran_order': False, 'shape': (12,), }", b"\0" * 40),
    "enormous shape": header("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }"),
    "negative shape": header("{'descr': '<f8', 'fortran_order': False, 'shape': (-12,), }", b"\0" * 96),
    "code in its header": header("__import__('os').system('touch /tmp/owned')"),
    "deep header": header("(" * 2000 + ")" * 2000),
    "unknown kind": header("{'descr': '<q9', 'fortran_order': False, 'shape': (12,), }", b"\0" * 108),
    "junk": b"junk" * 30,
}
BOMB = header("{'descr': '|b1', 'fortran_order': False, 'shape': (400000000,), }", b"\0" * (300 << 20))
DATA = ("config.json", "result.json", "test.npz", "metrics.jsonl")
HARMS = {  # of one trial: a file or the whole, and what is done to it
    "files": {f"{kind} for {name}": (name, harm) for kind, harm in ALONE.items() for name in FILES}
    | {f"{kind} for {name}": (name, harm) for kind, harm in LINKS.items() for name in DATA}
    | {f"{kind} too late for {name}": (".", between(name, ALONE[kind])) for kind in LATE for name in DATA}
    | {
        "a loop of two links": ("result.json", lambda path, private: (
            path.unlink(), path.symlink_to("other"), path.with_name("other").symlink_to(path.name))),
        "only links": (".", lambda trial, private: [link(trial / name, private) for name in FILES]),
        "links into itself": (".", lambda trial, private: [
            ((trial / n).rename(trial / f"{n}.kept"), (trial / n).symlink_to(f"{n}.kept")) for n in FILES]),
        "link for a trial": (".", moved_behind_a_link),
        "another user's trial": (".", foreign),
        "far below": (".", deep),
        "only a result": (".", lambda trial, private: (trial / "config.json").unlink()),
    },
    "json": {
        f"{kind} for {name}": (name, content(change))
        for kind, change in OF_JSON.items()
        for name in ("config.json", "result.json", "test.json")
    },
    "config": {name: (".", of("config.json", change)) for name, change in CONFIGS.items()}
    | fields("config.json", CONFIG_FIELDS),
    "result": {name: (".", of("result.json", change)) for name, change in RESULTS.items()}
    | fields("result.json", RESULT_FIELDS)
    | {"calibrated": (".", of("test.json", lambda e: e["protocols"]["calibration"]["metrics"].update(ece=0.0)))},
    "curve": {name: ("metrics.jsonl", content(change)) for name, change in CURVES.items()}
    | {
        "better": logged(lambda row: json.dumps({**row, "top1": 0.99})),
        "text": logged(lambda row: json.dumps({**row, "top1": "\x1b[31m"})),
        "none": logged(lambda row: "["),
    },
    "scores": {name: scores(change) for name, change in SCORES.items()}
    | {
        "all right, and said so": scores(lambda s: s.update(top1=np.ones(12, bool)), top1=1.0),
        "right on val": scores(lambda s: s.update(top1=np.ones(6, bool)), "val"),
        "none": ("test.npz", lambda path, private: path.unlink()),
        "swapped": (".", lambda trial, private: shutil.copy(trial / "val.npz", trial / "test.npz")),
    },
    "packed": {
        f"{name} for {kind}": packed(lambda old, kind=kind, values=values: {**old, f"{kind}.npy": values}.items())
        for name, values in SHAPES.items()
        for kind in ("top1", "ids")
    }
    | {
        "a bomb": packed(lambda old: {**old, "top1.npy": BOMB}.items()),
        "encrypted": ("test.npz", content(encrypted)),
        "cut": ("test.npz", content(lambda old: old[:-30])),
        "nothing": packed(lambda old: {}.items()),
        "members that are no arrays": packed(lambda old: [*old.items(), ("../../../escaped", SECRET)]),
        "members elsewhere": packed(lambda old: [(f"../{name}", values) for name, values in old.items()]),
        "members with two contents": packed(lambda old: [*old.items(), ("top1.npy", SHAPES["junk"])]),
        "thousands of members": packed(lambda old: [*old.items(), *((f"{i}.npy", b"") for i in range(2_000))]),
        "a plain array": ("test.npz", content(lambda old: SHAPES["junk"])),
    },
    "examples": {
        "elsewhere": (".", examples('{"images": [], "legend": {}}', linked=True)),
        "junk": (".", examples('{"images": [{"panels": 3}]}')),
        "a list": (".", examples('{"images": [{"panels": [[1]]}]}')),
        "a name of another folder": (".", examples('{"images": {"../..": 1}}')),
        "deep": (".", examples(DEEP.decode())),
    },
}  # fmt: skip
PIPE = ALONE["pipe"]
OF_STUDIES = {
    "pipe for the lock": lambda root: (
        PIPE(root / ".lock", root), (root / ".lease").write_text(json.dumps({"machine": lease.machine()}))),
    "pipe for the lease": lambda root: os.mkfifo(root / ".lease"),
    "pipe for study.json": lambda root: PIPE(root / "study.json", root),
    "link for study.json": lambda root: link(root / "study.json", root.parent.parent),
    "another user's study": lambda root: foreign(root, root),
    "another user's study.json": lambda root: foreign(root / "study.json", root),
    "another user's trials": lambda root: foreign(root / "trials", root),
    "another user's link": lambda root: (
        shutil.move(root, root.parent.parent / "moved"), root.symlink_to("../moved"),
        os.chown(root, OTHER, OTHER, follow_symlinks=False)),
    "file for trials": lambda root: (shutil.rmtree(root / "trials"), (root / "trials").write_text("")),
}  # fmt: skip
NAMES = ["-rf", "a\nb", "\x1b]0;owned\x07", "x" * 255, os.fsdecode(b"\xff\xfe"), "...", " ", "$(touch owned)", "Base"]
NAMES += ["\u202etxt"]
WHOLE = {  # of a trial
    "times in the future": lambda trial: [os.utime(path, (1 << 33, 1 << 33)) for path in trial.iterdir()],
    "times before 1970": lambda trial: [os.utime(path, (-5e9, -5e9)) for path in trial.iterdir()],
    "second names": lambda trial: [os.link(trial / name, trial / f"{name}.2") for name in FILES],
    "names in another case": lambda trial: [(trial / name.upper()).write_text(SECRET) for name in FILES],
    "setuid": lambda trial: [(trial / name).chmod(0o6755) for name in FILES],
    "read by its owner alone": lambda trial: [(trial / name).chmod(0o400) for name in FILES],
    "more files": lambda trial: [(trial / f"{i}.json").write_text(SECRET) for i in range(300)],
    "code": lambda trial: [(trial / name).write_text(SECRET) for name in ("conftest.py", "sitecustomize.py", "x.pth")],
    "weights of junk": lambda trial: (trial / "model.safetensors").write_bytes(b"\xff" * 64),
    "weights behind a link": lambda trial: link(trial / "model.safetensors", trial.parents[4]),
    "curves of TensorBoard": lambda trial: [path.write_text(SECRET) for path in (trial / "tb").iterdir()],
    "pictures that nobody names": lambda trial: (
        (trial / "examples").mkdir(), (trial / "examples" / "0-x.png").write_text(SECRET)),
    "pictures elsewhere": lambda trial: examples('{"images": [{"panels": {"../../x": 1, "a/b": 2, "..": 3}}]}')(
        trial, trial.parents[4] / "".join(trial.parts[-2:])),
    "rests of a copy": lambda trial: shutil.copytree(trial, trial.with_name(f"{trial.name}.tmp")),
}  # fmt: skip


def every_byte(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def hostile(neighbor, root, place, harm, trials=("base/seed0", "dpn/seed0")):
    """Copy the neighbor, and harm its trials in one way."""
    theirs = root / "runs" / "theirs"
    shutil.copytree(neighbor, theirs)
    for number, name in enumerate(trials):
        private = root / f"private{number}"
        private.mkdir()
        harm(theirs / "trials" / name / place, private)
    return theirs


def nothing(trial, private):
    pass


@pytest.fixture
def races(monkeypatch):
    """Replace the files that are to be between the check of their names and their being opened."""
    before = limits.check_file

    def check(path, *how, **more):
        before(path, *how, **more)
        RACES.pop(str(path), lambda: None)()

    monkeypatch.setattr(limits, "check_file", check)
    yield
    RACES.clear()


def beside_each(neighbor, root, names):
    """Copies of the neighbor with one trial, by name."""
    for number, name in enumerate(names):
        copy = root / "runs" / f"{number:03}"
        shutil.copytree(neighbor, copy, ignore=shutil.ignore_patterns("dpn", "model.safetensors", "tb"))
        yield name, copy


def refused(said, names):
    """The names of the studies of which is said that they are not reused."""
    return sorted(names[int(number)] for number in re.findall(r"^Not reused: \S*/runs/(\d{3})[/:].", said, re.M))


@pytest.mark.parametrize("group", HARMS)
def test_hostile_trials_are_not_reused_and_one_line_for_each_says_why(
    neighbor, beside, tmp_path, group, races, reads, monkeypatch
):
    monkeypatch.setattr("vitmods.study.reuse.MOST_EQUAL", 1000)
    harms = {name: harm for name, harm in HARMS[group].items() if is_root or not re.match("another user|device", name)}
    for name, copy in beside_each(neighbor, tmp_path, harms):
        place, harm = harms[name]
        private = tmp_path / f"private{copy.name}"
        private.mkdir()
        harm(copy / "trials/base/seed0" / place, private)
    state, said = beside(tmp_path / "runs")
    sizes = Counter()
    for study, _, size in reads:
        sizes[study] += size
    assert max(sizes.values()) < 16 << 20, "what is too large is not read"
    assert not [record for record in state.records.values() if record.ended]
    assert not list((tmp_path / "runs" / "mine").rglob("*.json*"))
    assert not list((tmp_path / "runs" / "mine").rglob("*.np*"))
    assert refused(said, [*harms]) == sorted({*harms} - {"far below"}), "which does not look like a trial"
    assert said.count("\n") == said.count("Not reused")
    assert "\x1b" not in said


@pytest.mark.skipif(not is_root, reason="root alone gives files away")
def test_hostile_studies_are_left_alone(neighbor, beside, tmp_path):
    for name, copy in beside_each(neighbor, tmp_path, OF_STUDIES):
        OF_STUDIES[name](copy)
    state, said = beside(tmp_path / "runs")
    assert not [record for record in state.records.values() if record.ended]
    others = {"another user's study", "another user's link"}
    assert refused(said, [*OF_STUDIES]) == sorted({*OF_STUDIES} - others - {"file for trials"})
    assert said.count("2 studies of other users") == 1


@pytest.mark.parametrize("name", [*NAMES, *WHOLE])
def test_names_and_further_files_of_a_whole_neighbor_change_nothing(neighbor, beside, tmp_path, name):
    theirs = hostile(neighbor, tmp_path, ".", nothing)
    if name in NAMES:
        theirs.rename(theirs.with_name(name))
    else:
        for trial in (theirs / "trials").glob("*/*"):
            (tmp_path / "".join(trial.parts[-2:])).mkdir()
            WHOLE[name](trial)
    state, said = beside(tmp_path / "runs")
    mine = tmp_path / "runs" / "mine"
    assert all(record.ended for record in state.records.values())
    assert not {"\x1b", "\u202e"} & {*said}
    assert SECRET.encode() not in every_byte(mine)
    for trial in neighbor.glob("trials/*/*"):
        copied = mine / trial.relative_to(neighbor)
        assert {path.name for path in copied.iterdir()} - {"examples"} == {*FILES, "reused.json"}
        for file in ("metrics.jsonl", "test.npz", "val.npz", "test.json"):
            assert (copied / file).read_bytes() == (trial / file).read_bytes()
            assert stat.S_IMODE((copied / file).stat().st_mode) & 0o7111 == 0


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
    assert f"2 of 2 trials were trained in {tmp_path}/runs/theirs." in said
    names = {path.name for path in mine.glob("trials/*/*/*")}
    assert names == {*FILES, "reused.json"}
    assert SECRET.encode() not in every_byte(mine)
    assert b"\\u001b" not in every_byte(mine)
    mask = os.umask(0)
    os.umask(mask)
    for path in mine.rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask
    whole = neighbor / "trials" / "dpn" / "seed0"
    for name in ("metrics.jsonl", "test.npz", "val.npz", "test.json", "config.json"):
        assert (mine / "trials" / "dpn" / "seed0" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not is_root, reason="root alone gives files away")
def test_another_user_s_study_counts_where_it_is_named(neighbor, beside, tmp_path):
    theirs = hostile(neighbor, tmp_path, ".", nothing)
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
    assert len([*(tmp_path / "runs" / "mine").rglob("*.safetensors")]) == 2


def test_of_many_damaged_twins_few_are_read(neighbor, beside, tmp_path, reads):
    twins = hostile(neighbor, tmp_path, "metrics.jsonl", ALONE["junk"]) / "trials"
    for number in range(3 * MOST_EQUAL):
        shutil.copytree(twins / "base" / "seed0", twins / f"arm{number}" / "seed0")
    _, said = beside(tmp_path / "runs")
    read = [name for _, name, _ in reads]
    assert read.count("metrics.jsonl") <= MOST_EQUAL + 1, "of each of the trials that are wanted"
    assert said.count("\n") == 1


def test_a_full_disk_while_trials_are_copied_is_a_clear_error_and_leaves_nothing(
    neighbor, beside, tmp_path, monkeypatch
):
    hostile(neighbor, tmp_path, ".", nothing)
    write, full = Path.write_bytes, []

    def refuse(path, content):
        if path.name == "test.npz" and path.parent.parts[-2:] == ("dpn", "seed0.tmp"):
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
