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
    """What is read of other studies: the name of each file and its bytes."""
    reads, read = [], FinishedTrial.read

    def counted(trial, name):
        content = read(trial, name)
        reads.append((name, len(content)))
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


def content(name, change):
    """Other bytes in a file."""
    return name, lambda path, private: path.write_bytes(change(path.read_bytes()))


def packed(change, split="test"):
    """Another .npz: change gets the bytes of each member by its name, and how each is written."""

    def harm(path, private):
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: archive.read(member) for member in archive.infolist()}
        how = zipfile.ZIP_DEFLATED
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", how) as archive:
            warnings.simplefilter("ignore")  # of a name that comes twice
            for name, values in change(members):
                archive.writestr(name, values)

    return f"{split}.npz", harm


def member(name, values):
    """One member in another's place, or a further one."""
    return packed(lambda members: {**members, f"{name}.npy": values}.items())


def header(text, values=b""):
    text = text.ljust(118).encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values


def encrypted(content):
    """The flags of all members say that they are."""
    flags = re.sub(rb"(PK\x03\x04..).", lambda found: found[1] + b"\x01", content, flags=re.DOTALL)
    return re.sub(rb"(PK\x01\x02....).", lambda found: found[1] + b"\x01", flags, flags=re.DOTALL)


def device(path, private):
    path.unlink()
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def socket_file(path, private):
    path.unlink()
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def gone(path, private):
    path.unlink()
    path.symlink_to("/nowhere")


def to(target):
    def harm(path, private):
        path.unlink()
        path.symlink_to(target)

    return harm


def between(name, replace):
    """A file of the name is replaced between its check and its being opened."""

    def harm(trial, private):
        RACES[str(trial / name)] = lambda: replace(trial / name, private)

    return harm


RACES = {}
DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
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
OF_CURVES = {
    "empty curve": lambda old: b"",
    "NaN in the curve": lambda old: old.replace(b'"top1": 0.', b'"top1": NaN, "x": 0.'),
    "infinite curve": lambda old: old.replace(b'"loss": 0.', b'"loss": -Infinity, "x": 0.'),
    "deep curve": lambda old: old + DEEP,
    "curve not UTF-8": lambda old: old + b"\xff\xfe",
    "curve of lists": lambda old: old.replace(b'"top1": 0.', b'"top1": [1], "x": 0.'),
    "curve without steps": lambda old: old.replace(b'"step"', b'"steps"'),
    "curve of other steps": lambda old: old.replace(b'"step": ', b'"step": 9'),
    "growing curve": lambda old: old + old[:40],
}
FIELDS = {"metrics": [3, "x", None, [1]], "steps": ["x", None, [], 1e400], "seed": ["x", None, {}, -1]}
FIELDS |= {
    "status": [None, 1, [], {}],
    "split": [None, 4, ["test"]],
    "params": ["many", [], None],
    "wall_s": [{}, None],
}
CONFIG_FIELDS = {"recipe": [None, 3, "x", {}], "images": [None, [], 3], "data": [[], "x", {}], "model": [None, 3, []]}
CONFIG_FIELDS |= {"environment": [None, "x", {}], "seed": ["0", None, 0.5, [0]], "changes": [None, 1, ["dpn"]]}
SHAPES = {
    "pickle": header("{'descr': '|O', 'fortran_order': False, 'shape': (12,), }", pickle.dumps([1] * 12)),
    "shape of another": header("{'descr': '<f8', 'fortran_order': False, 'shape': (12,), }", b"\0" * 40),
    "enormous shape": header("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }"),
    "negative shape": header("{'descr': '<f8', 'fortran_order': False, 'shape': (-12,), }", b"\0" * 96),
    "code in its header": header("__import__('os').system('touch /tmp/owned')"),
    "deep header": header("(" * 2000 + ")" * 2000),
    "unknown kind": header("{'descr': '<q9', 'fortran_order': False, 'shape': (12,), }", b"\0" * 108),
    "junk": b"junk" * 30,
    "bomb": header("{'descr': '|b1', 'fortran_order': False, 'shape': (400000000,), }", b"\0" * (300 << 20)),
}
MEMBERS = {
    f"a scores file with {name} for {kind}": member(kind, values)
    for name, values in SHAPES.items()
    for kind in (("top1",) if name == "bomb" else ("top1", "ids"))
}
TWO = np.array([[0.5, 0.5]] * 12)
MORE = {
    f"{kind} for {name}": content(name, change)
    for kind, change in OF_JSON.items()
    for name in ("config.json", "result.json", "test.json")
}
MORE |= {kind: content("metrics.jsonl", change) for kind, change in OF_CURVES.items()}
MORE |= {
    f"{name} is {value!r}": (".", of("result.json", lambda r, name=name, value=value: r.update({name: value})))
    for name, values in FIELDS.items()
    for value in values
}
MORE |= {
    f"config: {name} is {value!r}": (".", of("config.json", lambda c, name=name, value=value: c.update({name: value})))
    for name, values in CONFIG_FIELDS.items()
    for value in values
}
MORE |= MEMBERS
MORE |= {
    f"scores: {kind}": (".", scores(change))
    for kind, change in {
        "complex": lambda s: s.update(top1=s["top1"] + 1j),
        "times": lambda s: s.update(top1=s["top1"].astype("M8[s]")),
        "bytes": lambda s: s.update(top1=s["top1"].astype("S5")),
        "not a number": lambda s: s.update(top1=np.full(12, np.nan)),
        "infinite": lambda s: s.update(nll=np.full(12, np.inf)),
        "large": lambda s: s.update(top1=np.full(12, 1e300)),
        "two columns": lambda s: s.update(top1=TWO),
        "one number": lambda s: s.update(top1=np.array(0.5)),
        "nobody's ids": lambda s: s.pop("ids"),
        "ids in reverse": lambda s: s.update(ids=s["ids"][::-1]),
        "ids that repeat": lambda s: s.update(ids=s["ids"][[0] * 12]),
        "ids of numbers": lambda s: s.update(ids=np.arange(12)),
        "other predictions": lambda s: s.update(predicted=1 - s["predicted"]),
        "predictions of nothing": lambda s: s.update(predicted=np.full(12, -5)),
        "records": lambda s: s.update(top1=np.zeros(12, [("a", "f8"), ("b", "f8")])),
        "empty": lambda s: s.clear(),
    }.items()
}
MORE |= {
    "an encrypted scores file": content("test.npz", encrypted),
    "a cut scores file": content("test.npz", lambda old: old[:-30]),
    "no scores in the file": packed(lambda members: {}.items()),
    "members that are no arrays": packed(lambda members: [*members.items(), ("../../../escaped", SECRET)]),
    "a member elsewhere": packed(lambda members: [(f"../{name}", values) for name, values in members.items()]),
    "members with two contents": packed(lambda members: [*members.items(), ("top1.npy", SHAPES["junk"])]),
    "thousands of members": packed(lambda members: [*members.items(), *((f"{i}.npy", b"") for i in range(2_000))]),
    "a plain array": ("test.npz", lambda path, private: path.write_bytes(SHAPES["junk"])),
    "swapped scores": (".", lambda trial, private: shutil.copy(trial / "val.npz", trial / "test.npz")),
    "a loop of two links": ("result.json", lambda path, private: (
        path.unlink(), path.symlink_to("other"), path.with_name("other").symlink_to(path.name))),
    "only links": (".", lambda trial, private: [link(trial / name, private) for name in FILES]),
    "links into itself": (".", lambda trial, private: [
        ((trial / name).rename(trial / f"{name}.kept"), (trial / name).symlink_to(f"{name}.kept")) for name in FILES]),
    "a locked folder of pictures": (".", examples('{"images": [{"panels": [[1]]}]}')),
    "a name of another folder in the pictures": (".", examples('{"images": {"../..": 1}}')),
    "deep pictures": (".", examples(DEEP.decode())),
}  # fmt: skip
AS_LINKS = {"a dangling link": gone, "a link to memory": to("/proc/self/mem"), "a link to a device": to("/dev/zero")}
AS_LINKS |= {"a socket": socket_file, "a device": device}
LATE = {"link": link, "pipe": pipe, "sparse file": sparse}
MORE |= {
    f"{kind} for {name}": (name, harm)
    for name in ("config.json", "result.json", "test.npz", "metrics.jsonl")
    for kind, harm in AS_LINKS.items()
}
MORE |= {
    f"a {kind} that replaces {name} at the last moment": (".", between(name, harm))
    for name in ("config.json", "test.npz", "metrics.jsonl")
    for kind, harm in LATE.items()
}
HARMS |= MORE
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
NAMES = [
    "-rf",
    "a\nb",
    "\x1b]0;owned\x07",
    "x" * 255,
    os.fsdecode(b"\xff\xfe"),
    "...",
    " ",
    "$(touch owned)",
    "Base",
    "\u202etxt",
]
WHOLE = {
    "times in the future": lambda trial: [os.utime(path, (1 << 33, 1 << 33)) for path in trial.iterdir()],
    "times before 1970": lambda trial: [os.utime(path, (-5e9, -5e9)) for path in trial.iterdir()],
    "second names": lambda trial: [os.link(trial / name, trial / f"{name}.2") for name in FILES],
    "names in another case": lambda trial: [(trial / name.upper()).write_text(SECRET) for name in FILES],
    "setuid": lambda trial: [(trial / name).chmod(0o6755) for name in FILES],
    "read by its owner alone": lambda trial: [(trial / name).chmod(0o400) for name in FILES],
    "more files": lambda trial: [(trial / f"{i}.json").write_text(SECRET) for i in range(300)],
    "hidden copies": lambda trial: [(trial / f".{name}").write_text(SECRET) for name in FILES],
    "code": lambda trial: [(trial / name).write_text(SECRET) for name in ("conftest.py", "sitecustomize.py", "x.pth")],
    "weights of junk": lambda trial: (trial / "model.safetensors").write_bytes(b"\xff" * 64),
    "weights behind a link": lambda trial: link(trial / "model.safetensors", trial.parents[4]),
    "curves of TensorBoard": lambda trial: [path.write_text(SECRET) for path in (trial / "tb").iterdir()],
    "pictures that nobody names": lambda trial: (
        (trial / "examples").mkdir(), (trial / "examples" / "0-x.png").write_text(SECRET)),
    "pictures elsewhere": lambda trial: examples('{"images": [{"panels": {"../../x": 1, "a/b": 2, "..": 3}}]}')(
        trial, trial.parents[4] / "".join(trial.parts[-2:])),
    "a lock of its own": lambda trial: (trial / ".lock").write_text(SECRET),
    "rests of a copy": lambda trial: shutil.copytree(trial, trial.with_name(f"{trial.name}.tmp")),
}  # fmt: skip


def every_byte(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def hostile(neighbor, root, place, harm, trials=("base/seed0", "dpn/seed0")):
    """Copy the neighbor, and harm its trials in one way."""
    shutil.copytree(neighbor, root / "runs" / "theirs")
    for number, name in enumerate(trials):
        private = root / f"private{number}"
        private.mkdir()
        trial = root / "runs" / "theirs" / "trials" / name
        harm(trial if place == "." else trial / place, private)


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


@pytest.mark.parametrize("name", HARMS)
def test_a_hostile_trial_is_not_reused_and_one_line_says_why(neighbor, beside, tmp_path, name, races, reads):
    place, harm = HARMS[name]
    if harm in (foreign, device) and not is_root:
        pytest.skip("root alone gives files away")
    hostile(neighbor, tmp_path, place, harm)
    state, said = beside(tmp_path / "runs")
    assert sum(size for _, size in reads) < 16 << 20, "what is too large is not read"
    assert not [record for record in state.records.values() if record.ended]
    assert not list((tmp_path / "runs" / "mine").rglob("*.json*"))
    assert not list((tmp_path / "runs" / "mine").rglob("*.np*"))
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


@pytest.mark.parametrize("name", [*NAMES, *WHOLE])
def test_names_and_further_files_of_a_whole_neighbor_change_nothing(neighbor, beside, tmp_path, name):
    hostile(neighbor, tmp_path, ".", lambda trial, private: None)
    theirs = tmp_path / "runs" / "theirs"
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
    assert len([*(tmp_path / "runs" / "mine").rglob("*.safetensors")]) == 2


def test_of_many_damaged_twins_few_are_read(neighbor, beside, tmp_path, reads):
    hostile(neighbor, tmp_path, "metrics.jsonl", junk)
    twins = tmp_path / "runs" / "theirs" / "trials"
    for number in range(3 * MOST_EQUAL):
        shutil.copytree(twins / "base" / "seed0", twins / f"arm{number}" / "seed0")
    _, said = beside(tmp_path / "runs")
    read = [name for name, _ in reads]
    assert read.count("metrics.jsonl") <= MOST_EQUAL + 1, "of each of the trials that are wanted"
    assert said.count("\n") == 1


def test_a_full_disk_while_trials_are_copied_is_a_clear_error_and_leaves_nothing(
    neighbor, beside, tmp_path, monkeypatch
):
    hostile(neighbor, tmp_path, ".", lambda trial, private: None)
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
