"""Files that were made to run code, to fill the memory or never to end: each is refused at once, with a reason."""

import functools
import gzip
import importlib
import io
import json
import os
import resource
import socket
import sys
import sysconfig
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import vitmods as vm
from vitmods.adapters import load, open_model, save
from vitmods.data.sources import open_source
from vitmods.data.sources.wds import MANIFEST_FORMAT, expand, open_tar, scan
from vitmods.data.splits import group_keys
from vitmods.model.config import ViTConfig
from vitmods.papers.sources.imagenet import from_archive
from vitmods.recipes import Recipe
from vitmods.stats.read import read_csv
from vitmods.study.arms import Function
from vitmods.study.bases import ForeignBase, rebuilt
from vitmods.study.store import StudyFolder
from vitmods.train import checkpoint
from vitmods.train.launch import launch
from vitmods.train.trial import read_scores
from vitmods.util import limits, registry
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user
from vitmods.util.lease import LeaseFile

from ..data.support import noise, write_files, write_tar

SOON_S = 60  # of CPU time, on any machine: what has no end takes more


@pytest.fixture(autouse=True)
def _soon():
    begun = time.process_time()
    yield
    assert time.process_time() - begun < SOON_S


def image(folder, name="a.png"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    noise(0, (8, 8)).save(folder / name)


# Code


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_a_program_of_torch_export_runs_nothing_unless_trusted(tmp_path):
    """torch.export.load unpickles what lies in the archive: what this file would do is checked first."""
    vm.export(vm.vit("mu1/4", img_size=8, num_classes=2).eval(), tmp_path / "good.pt2")
    mark, content = tmp_path / "mark", io.BytesIO()
    torch.save(Evil(mark), content)
    hit = lambda name, plain: content.getvalue() if "sample_inputs" in name else plain  # noqa: E731
    repacked(tmp_path / "good.pt2", tmp_path / "evil.pt2", hit)
    image(tmp_path)
    with pytest.raises(UserError, match=r"evil\.pt2 is a program: .*--trust"):
        vm.predict(tmp_path / "evil.pt2", tmp_path / "a.png", device="cpu")
    assert not mark.exists()
    with pytest.raises(UserError, match="cannot be read"):
        vm.predict(tmp_path / "evil.pt2", tmp_path / "a.png", device="cpu", trust=True)
    assert mark.exists(), "torch does not unpickle it any more: then it needs no trust either"


def record(**changed):
    known = {"base": "timm:vit_tiny_patch16_224", "edits": "", "num_classes": 2, "img_size": [32, 32], "in_chans": 3}
    return {**known, "tensors": "", **changed}


@pytest.fixture
def weights(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


MINE = """
from os import getpid
from json import dumps
calls = []
class Kept:
    def method(model):
        calls.append("method")
def outer(model):
    calls.append("outer")
    return model
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's that was imported, and not by the script."""
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    named = set()
    for where in ("util.registry", "study.arms"):
        monkeypatch.setattr(f"vitmods.{where}.named_by_user", named)
    module = importlib.import_module("mine_of_a_test")
    yield module
    del sys.modules["mine_of_a_test"]


TIMM_TINY, NOT_NAMED = "timm:vit_tiny_patch16_224", "did not name its module"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # os.execve("/bin/sh", ("sh", "script"), {}), in a process that has imported os
        ({"base": "python:os:execve", "num_classes": "/bin/sh", "img_size": ["sh", "x"], "in_chans": {}},
         "whole numbers"),
        ({"base": "python:torch:load", "num_classes": "evil.pth"}, "whole numbers"),
        ({"base": "python:os:getpid"}, "Python's own"),
        ({"base": "python:torch:sys.exit"}, NOT_NAMED),
        ({"edits": "python(os:system)"}, "Python's own"),
        *(({"edits": f"python({call})"}, NOT_NAMED)
          for call in ("torch:sys.exit", "torch:use_deterministic_algorithms", "mine_of_a_test:outer")),
        *(({"base": f"{TIMM_TINY}?{name}={value}"}, f"leave {name} out")
          for name, value in (("checkpoint_path", "evil.pth"), ("pretrained_cfg_overlay", "{'file':'x'}"))),
        ({"base": None}, "how its model was made"),
    ],
)  # fmt: skip
def test_a_record_of_a_trial_calls_nothing_but_models(changed, words, mine, weights):
    with pytest.raises(UserError, match=words):
        rebuilt(record(**changed), weights)
    assert mine.calls == []


@pytest.mark.parametrize("how", ["plugin", "script"])
def test_of_a_module_that_the_user_names_its_own_functions_alone_are_called(how, mine, weights, monkeypatch):
    if how == "plugin":
        registry.load_plugins(["mine_of_a_test"])
    else:
        monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    for path in ("getpid", "dumps", "Kept.method", "outer.__globals__", "calls", "__name__", "gone"):
        with pytest.raises(UserError, match="does not define a function"):
            Function(f"mine_of_a_test:{path}").resolve()
    assert Function("mine_of_a_test:outer").resolve() is mine.outer


@pytest.mark.parametrize("folder", ["lib/python3/site-packages", "dist-packages", "purelib", "stdlib"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_script_that_imports_an_installed_package_names_none_of_its_functions(
    folder, linked, mine, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys.modules["__main__"], "outer", mine.outer, raising=False)  # from mine_of_a_test import outer
    assert Function("mine_of_a_test:outer").resolve() is mine.outer
    paths = sysconfig.get_paths() | {name: str(tmp_path / name) for name in ("purelib", "stdlib")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    file = tmp_path / folder / "mine_of_a_test.py"
    file.parent.mkdir(parents=True)
    file.write_text(MINE)
    if linked:
        (tmp_path / "tree").symlink_to(file.parent)
        file = tmp_path / "tree" / file.name
    monkeypatch.setattr(mine, "__file__", str(file))
    with pytest.raises(UserError, match="Installed packages need --plugin"):
        Function("mine_of_a_test:outer").resolve()
    registry.load_plugins(["mine_of_a_test"])
    assert Function("mine_of_a_test:outer").resolve() is mine.outer


def test_what_the_user_passes_as_a_function_may_be_named(mine, monkeypatch):
    assert str(Function.of(mine.outer, "x")) == "python(mine_of_a_test:outer)"
    assert Function("mine_of_a_test:outer").resolve() is mine.outer
    with pytest.raises(UserError, match="did not name its module"):
        Function("mine_of_a_test:Kept").resolve()
    monkeypatch.setattr(sys.modules["__main__"], "Kept", mine.Kept, raising=False)  # from mine_of_a_test import Kept
    assert Function("mine_of_a_test:Kept").resolve() is mine.Kept
    monkeypatch.setattr(sys.modules["__main__"], "load", load, raising=False)  # from vitmods.adapters import load
    with pytest.raises(UserError, match="did not name its module"):
        Function(f"{load.__module__}:load").resolve()


# Size and network of models that a file describes


@contextmanager
def refused_in(most, words=""):
    """Refused, and before it takes `most` MB above what the process had."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=words or None):
        yield
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert taken < most, f"{taken:.0f} MB"


@pytest.fixture
def asked(monkeypatch):
    """What was asked of the network: names and addresses."""
    found = []

    def refuse(*address, **_):
        found.append(address)
        raise ConnectionError

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    return found


TOKENS = {"img_size": [1, 64], "in_chans": 100}
LIES = {
    "a giant": {"base": "timm:vit_giant_patch14_224"},
    "depth": {"base": "timm:vit_tiny_patch16_224?depth=1000000000"},
    "blocks": {"base": "timm:vit_tiny_patch16_224?depth=100000"},
    "width": {"base": "timm:vit_tiny_patch16_224?embed_dim=12288"},
    "classes": {"num_classes": 2**30},
    "side": {"img_size": [8000, 8000]},
    "windows": {"base": "timm:swin_tiny_patch4_window7_224", "img_size": [8000, 8000]},
    "our own": {"base": {"depth": 10**9, "embed_dim": 8, "num_heads": 1}},
    "our own width": {"base": {"depth": 1, "embed_dim": 2**20, "num_heads": 1}},
    "a change": {"base": {"embed_dim": 8, "num_heads": 1}, "edits": "replace(rms)+size(width=1000000,heads=1)"},
    "a regnet": {"base": "torchvision:regnet_y_128gf", "img_size": [224, 224]},
    "a side that others read": {"base": "timm:maxvit_tiny_tf_512", "img_size": [6144, 6144]},
    "a million blocks": {"base": "timm:vit_small_patch16_224?depth=1000000"},
    "a million in stages": {"base": "timm:swin_tiny_patch4_window7_224?depths=[1000000,2,2,2]"},
    "a million layers": {"base": "hf-text:bert?num_hidden_layers=1000000", **TOKENS},
    "text": {"base": "hf-text:bert?num_hidden_layers=1000000000", **TOKENS},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_record_of_a_trial_that_describes_a_larger_model_makes_none(lie, weights):
    """A count of blocks is refused before a library reads it."""
    words = "1000000, above the limit of 5,000" if "million" in lie else "another model|limit|larger|modules|whole|ViT"
    with refused_in(200, words):
        rebuilt(record(**LIES[lie]), weights)


@pytest.mark.parametrize("content", [b"", bytes(1 << 20), b"\x02" + bytes(7) + b"{}" + bytes(1 << 20)])
def test_weights_whose_header_tells_another_length_allow_no_memory(content, weights):
    weights.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read; it may be damaged"):
        rebuilt(record(), weights)


def test_a_regnet_is_made_up_to_the_size_of_its_weights(weights):
    large = {"base": "torchvision:regnet_y_16gf", "img_size": [224, 224]}  # 320 MB, made without the meta device
    with refused_in(100, "larger"):
        rebuilt(record(**large), weights)


FETCHED = {
    "torchvision:fasterrcnn_resnet50_fpn": "not have a classifier",
    "torchvision:fcn_resnet50": "not have a classifier",
    "timm:hf-hub:someone/model": "not have a model",
    "timm:local-dir:/tmp": "not have a model",
    "timm:resnet18?pretrained=1": "another model",
}


@pytest.mark.parametrize("base", FETCHED)
def test_a_record_of_a_trial_asks_nobody(base, weights, asked):
    with pytest.raises(UserError, match=FETCHED[base]):
        rebuilt(record(base=base, img_size=[224, 224]), weights)
    assert asked == []


HF = {
    "timm_wrapper": {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/model"},
    "its arguments": {
        "model_type": "timm_wrapper", "architecture": "resnet18", "model_args": {"pretrained_cfg": {"url": "http://x"}}
    },
    "a backbone": {"model_type": "beit", "use_pretrained_backbone": True, "backbone": "x/y"},
    "attention": {"model_type": "vit", "attn_implementation": "someone/kernels"},
    "code": {"model_type": "mine", "auto_map": {"AutoConfig": "code.py--Config"}},
    "depth": {"model_type": "vit", "num_hidden_layers": 10**9},
}  # fmt: skip


def test_a_new_model_of_hugging_face_has_a_limit_of_memory(tmp_path):
    pytest.importorskip("transformers")
    large = {"model_type": "vit", "hidden_size": 16384, "intermediate_size": 65536, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(large))
    with refused_in(200, "larger"):
        ForeignBase(f"hf:{tmp_path}", 2, (32, 32), 3).build()


@pytest.mark.parametrize("lie", HF)
def test_a_folder_of_hugging_face_asks_nobody(lie, tmp_path, asked):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(HF[lie]))
    options = "?architecture=hf-hub:someone/model" if lie == "its arguments" else ""
    base = ForeignBase(f"hf:{tmp_path}{options}", 2, (32, 32), 3)
    for read in (base.build, lambda: open_model(f"hf:{tmp_path}")):
        with refused_in(200):
            read()
    assert asked == []


TIMM = {
    "width": {"model_args": {"embed_dim": 12288}},
    "side": {"model_args": {"img_size": 8000}},
    "a million blocks": {"model_args": {"depth": 10**6}},
    "a giant": {"architecture": "vit_giant_patch14_224"},
    "size of input": {
        "model_args": {"depth": 1},
        "pretrained_cfg": {"input_size": [3, 8000, 8000], "fixed_input_size": True},
    },
    "hub": {"architecture": "hf-hub:someone/model"},
    "address": {"model_args": {"pretrained_cfg": {"url": "http://x"}}},
    "file": {"model_args": {"checkpoint_path": "/dev/zero"}},
    "class": {"model_args": {"block_fn": "Block"}},
    "no names": {"pretrained_cfg": [], "model_args": 3},
}  # fmt: skip


@pytest.mark.parametrize("lie", TIMM)
def test_a_folder_of_timm_that_lies_is_refused_before_memory_is_taken(lie, tmp_path, asked):
    plain = {"architecture": "vit_tiny_patch16_224", "num_classes": 2, "model_args": {"depth": 1, "img_size": 32}}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, depth=1, img_size=32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for values, refused in ((plain, False), ({**plain, **TIMM[lie]}, True)):
        (tmp_path / "config.json").write_text(json.dumps(values))
        with refused_in(200) if refused else nullcontext():
            load(tmp_path)
    assert asked == []


def test_an_existing_file_is_not_looked_up_on_the_hub(tmp_path, asked):
    save(vm.vit("mu1/4", img_size=8, num_classes=2), tmp_path / "model.safetensors")
    assert isinstance(vm.from_pretrained(tmp_path / "model.safetensors"), vm.ViT)
    assert asked == []


def test_offline_stops_this_thread_alone():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        connect = functools.partial(socket.create_connection, server.getsockname(), timeout=SOON_S)
        with limits.offline():
            with pytest.raises(ConnectionError, match="tried to use the network"):
                connect()
            with ThreadPoolExecutor() as others:
                others.submit(connect).result().close()
        connect().close()


def test_processes_of_one_training_do_not_import_from_the_working_directory(monkeypatch):
    started = []

    class Ended:
        returncode = 0

        def __init__(self, command, env, **_):
            started.append((command, env))

        def poll(self):
            return 0

    monkeypatch.setattr("subprocess.Popen", Ended)
    assert launch("vitmods", ["train"], 2) == 0
    for command, env in started:
        assert command[:3] == [sys.executable, "-P", "-m"]
        assert "" not in env["PYTHONPATH"].split(os.pathsep)


# Size


def test_json_that_is_too_deep_or_too_large_is_a_value_error(tmp_path, monkeypatch):
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="too deeply"):
            limits.parse_json(text)
    (tmp_path / "a.json").write_text("[1, 2, 3]")
    assert limits.read_json(tmp_path / "a.json") == [1, 2, 3]
    monkeypatch.setitem(limits.MOST_BYTES, "settings", 5)
    with pytest.raises(ValueError, match="more than"):
        limits.read_json(tmp_path / "a.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_a_device_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "study.json")  # reading it would wait for ever
    (tmp_path / "labels.csv").symlink_to("/dev/zero")
    for read in (StudyFolder(tmp_path).facts, lambda: open_source(str(tmp_path / "labels.csv"))):
        with pytest.raises(UserError, match="it is not a file"):
            read()


OBSTACLES = {
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "large": lambda path: path.write_bytes(bytes(1 << 17)),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", [".lease", ".lock"])
@pytest.mark.parametrize("what", OBSTACLES)
def test_what_lies_in_place_of_a_lock_or_lease_is_no_reason_to_wait(name, what, tmp_path):
    OBSTACLES[what](tmp_path / name)
    words = rf"{name} is not what a run writes .*: remove it"
    with pytest.raises(UserError, match=words), StudyFolder(tmp_path).lock():
        pass
    if name == ".lease":  # and at an address
        with pytest.raises(UserError, match=words.partition(" .*")[0]):
            LeaseFile(f"file://{tmp_path / name}").read()


def test_a_lease_cannot_move_the_cursor(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitmods.util.lease.STALE_S", 0.1)
    monkeypatch.setattr("vitmods.util.lease.SETTLE_S", 0.01)
    said = {"process": "\x1b]0;x\x07", "host": "\x1b[2J" + "a" * 500}
    (tmp_path / ".lease").write_text(json.dumps(said))
    with StudyFolder(tmp_path).lock():
        printed = capsys.readouterr().err
    assert "\\x1b[2Jaaa" in printed
    assert "\x1b" not in printed
    assert len(max(printed.splitlines(), key=len)) < 300


@pytest.mark.parametrize("read", [load, read_scores, lambda path: limits.read_npz(path)])
def test_arrays_that_unpack_to_much_more_are_refused(read, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "SMALL", 1 << 20)
    monkeypatch.setattr(limits.read_npz, "__defaults__", (None, 1 << 20))
    np.savez_compressed(tmp_path / "images.npz", groups_test=np.zeros(2**22, np.uint8))
    with pytest.raises((UserError, ValueError), match="would unpack to"):
        read(tmp_path / "images.npz")
    assert StudyFolder(tmp_path).images.read() is None


def test_an_array_whose_header_lies_about_its_size_is_refused(tmp_path):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": (2**45,)})
    with zipfile.ZipFile(tmp_path / "test.npz", "w") as archive:
        archive.writestr("a.npy", content.getvalue())
    with pytest.raises(UserError, match="damaged"):
        read_scores(tmp_path / "test.npz")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1, dtype=torch.float16).expand(2**40), torch.eye(3).to_sparse(), torch.empty(2**40, device="meta")],
    ids=["one number often", "sparse", "meta"],
)
def test_a_tensor_that_is_larger_than_its_file_is_refused(tensor, tmp_path):
    torch.save({"cls_token": tensor}, tmp_path / "m.pth")
    with pytest.raises(UserError, match="not a plain one"):
        load(tmp_path / "m.pth")


def repacked(source, target, change=lambda name, content: content, how=zipfile.ZIP_STORED):
    """The same archive with other contents, or packed in another way."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for member in old.infolist():
            new.writestr(member.filename, change(member.filename, old.read(member)))


def test_weights_that_unpack_to_much_more_are_refused(tmp_path, monkeypatch):
    torch.save({"cls_token": torch.zeros(2**20)}, tmp_path / "plain.pth")
    for name in ("m.pth", checkpoint.NAME):
        repacked(tmp_path / "plain.pth", tmp_path / name, how=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(UserError, match="would unpack to"):
        load(tmp_path / "m.pth")
    with pytest.warns(UserWarning, match="would unpack to"), pytest.raises(UserError, match="No checkpoint"):
        checkpoint.load(tmp_path)


MANY = ",".join(f"c{i}" for i in range(limits.MOST_COLUMNS))


@pytest.mark.parametrize(
    ("name", "first", "read"),
    [
        ("labels.csv", "file,labels", lambda path: open_source(str(path))),
        ("boxes.csv", "image,label,width,height,xmin,ymin,xmax,ymax", lambda path: open_source(f"boxes:{path.parent}")),
        ("s.csv", "arm,seed,score", read_csv),
        ("g.csv", "image,group", lambda path: group_keys(path, ["a"])),
        ("palette.csv", "name,r,g,b", lambda path: open_source(f"masks:{path.parent}")),
    ],
)
def test_a_table_with_very_many_columns_is_refused(name, first, read, tmp_path):
    """Each of its rows, however short, would take as much as its first line."""
    (tmp_path / name).write_text(f"{first},{MANY}\n" + "a\n" * 10_000)
    with pytest.raises(UserError, match="columns"):
        read(tmp_path / name)


def test_entities_of_xml_are_not_expanded(tmp_path):
    lines = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    bomb = f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY l0 "lol">{lines}]><annotation>&l9;</annotation>'
    image(tmp_path, "JPEGImages/a.png")
    (tmp_path / "Annotations").mkdir()
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / "Annotations/a.xml").write_bytes(bomb.encode(encoding))
        (broken,) = open_source(f"voc:{tmp_path}").broken
        assert "<!DOCTYPE>" in broken.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(f'*{a}' for _ in range(8))}]\n"
         for a, b in zip("abcdefgh", "bcdefghi")) + "names: *i\n", "an alias"),
        ("names: " + "[" * 5000, "cannot be read as YAML: it is nested more than 20 levels"),
        ("names: [[a, b], c]\ntrain: images\n", "does not name its classes"),
        ("names: {0: a, b: c}\ntrain: images\n", "numbered from 0"),
        ("names: [a]\ntrain: [1]\n", "folders, in words"),
        ("names: [a]\ntrain: \"a\\0b\"\n", "which is missing"),
        ("names: !!python/object/apply:os.system [x]", "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_yaml_that_is_more_than_names_and_folders_is_refused(text, words, tmp_path):
    image(tmp_path, "images/a.png")
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        open_source(f"yolo:{tmp_path}")


# Without end


BRACES = ["{a,b}" * 20, "{a,b}" * 40, "{0..99999}{0..99999}", f"{{0..{'9' * 5000}}}", "{0..-99999999999}"]


@pytest.mark.parametrize("pattern", [*BRACES, "{0..9}" * 5 + "x" * 5000])
def test_a_pattern_of_braces_has_an_end(pattern):
    with pytest.raises(UserError, match="train-"):
        expand(pattern)


def header(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.type = kind
    raw = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, b"Z"])
def test_a_tar_whose_sizes_run_backwards_has_an_end(kind, tmp_path):
    """CVE-2025-8194: such a header sends tarfile back to what it has read."""
    (tmp_path / "t.tar").write_bytes(
        header("a.png", 0) + header("b.png", 0) + header("c.png", -1024, kind) + bytes(1024)
    )
    with pytest.raises(UserError, match="cannot be used"):
        open_tar(tmp_path / "t.tar")
    assert "damaged" in scan(tmp_path / "t.tar").broken[-1][1]


def test_headers_that_follow_headers_have_an_end_and_labels_are_short(tmp_path):
    long = header("././@LongLink", 2, tarfile.GNUTYPE_LONGNAME) + b"a\0".ljust(512, b"\0")
    (tmp_path / "t.tar").write_bytes(header("a.png", 0) + long * 3000 + header("b.png", 0) + bytes(1024))
    with pytest.raises(UserError, match="a header is damaged"):
        open_tar(tmp_path / "t.tar")
    ((_, reason),) = scan(write_tar(tmp_path / "label.tar", {"a.png": bytes(10), "a.cls": bytes(2 << 20)})).broken
    assert "does not hold a label" in reason


def test_a_devkit_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(limits.MOST_BYTES, "archive", 1 << 20)
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    with pytest.raises(UserError, match="more than 1 MiB"):
        from_archive(tmp_path / "d.tar.gz")


# What only looks like data


@pytest.mark.parametrize(
    ("annotation", "size"),
    [
        *(({"segmentation": [[0, 0, far, 0, far, far, 0, far]]}, {}) for far in (1e9, float("nan"), 10**400)),
        ({"segmentation": {"size": [8, 8], "counts": "o" * 50}}, {}),
        ({"bbox": [float("inf"), 0, 1, 1]}, {}),
        ({"category_id": [1]}, {}),
        ({"image_id": {}}, {}),
        ({}, {"height": float("inf")}),
        ({}, {"height": 2**31, "width": 2**31}),
        ({}, {"id": []}),
    ],
    ids=str,
)
def test_numbers_of_coco_that_no_image_has_are_reported(annotation, size, tmp_path):
    image(tmp_path, "train/a.png")
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], **annotation}
    known = {"id": 1, "file_name": "a.png", "height": 8, "width": 8, **size}
    content = {"images": [known], "annotations": [box], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "train.json").write_text(json.dumps(content))
    assert open_source(f"coco:{tmp_path}").broken


def test_a_manifest_whose_classes_are_no_words_is_refused(tmp_path):
    about = {"format": MANIFEST_FORMAT, "name": "x", "classes": [["a"]], "unreadable": []}
    write_files(tmp_path, {"manifest.json": json.dumps({**about, "splits": {"train": {"shards": []}}})})
    with pytest.raises(UserError, match="are not words"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("read", "values", "words"),
    [
        (Recipe.from_dict,
         ({"crop_scale": [[1, 2, 3], 4]}, {"step_at": {"a": 1}}, {"train": [["a"]]}, {"epochs": []}), ""),
        (expand_user, ("a" * 5000, "a\0b", "\ud800"), r"too long|No file can be called"),
        (lambda options: ViTConfig.from_dict({"final_norm": {"kind": "rms", "options": options}}),
         ([[1]], [[1, 2, 3]], 3, [None]), "Invalid ViT settings"),
    ],
    ids=["recipe", "path", "config"],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_a_user_error(read, values, words):
    for value in values:
        with pytest.raises(UserError, match=words or None):
            read(value)
