"""What is fuzzed: for each family what hostile input looks like, and what reads it.

Whatever the input, a reader gives a value or a UserError: never another exception, and neither minutes nor memory.
"""

import io
import json
import tarfile
import tempfile
import warnings
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

import vitmods as vm
from vitmods.adapters import load, open_model
from vitmods.changes import REGISTRY, parse_changes
from vitmods.data.read import Unreadable, decode
from vitmods.data.sources import open_source
from vitmods.data.sources.wds import expand, open_tar
from vitmods.data.splits import group_keys
from vitmods.finetune import load_delta, save_delta
from vitmods.model.config import ViTConfig
from vitmods.recipes import RECIPES, Recipe
from vitmods.recipes.registry import parse_recipe
from vitmods.stats.read import read_csv
from vitmods.study.arms import Function, parse_edits
from vitmods.study.bases import ForeignBase, rebuilt
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.grid import make_grid
from vitmods.study.store import StudyFolder
from vitmods.train.trial import read_examples, read_scores
from vitmods.util.errors import UserError

VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_dim": 8, "num_classes": 2}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, -(2**63), 10**400, 1e308, float("inf"), float("-inf"), float("nan"), 0.5, -0.0]),
    st.sampled_from(["", "layer", "rms", "dtn", "hmlp", "0", "-1", "../x", "/", "\0", "\ud800", "=1", "a" * 5000]),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=6), inside, max_size=3),
    max_leaves=6,
)


# Expressions ----------------------------------------------------------------------------------------------------------


def _expressions():
    names = [*REGISTRY, *RECIPES, "replace", "python", "base", "norms", "where", "heads", "rms", "dtn", "attn", "count"]
    fields = sorted({field for kind in REGISTRY.values() for field in kind.__dataclass_fields__})
    marks = [*"(),+=:{}.?&*-", "{0..9}", "{a,b}", "=true", "=1", "=1e309", "=nan", "=" + "9" * 5000, "\0", "\ud800"]
    word = st.one_of(st.sampled_from([*names, *fields]), st.sampled_from(marks), st.text(max_size=4))
    return st.lists(word, max_size=12).map("".join)


def expressions(text):
    for read in (parse_changes, parse_edits, expand, parse_recipe, lambda one: open_source(f"{one}?allow={one}")):
        _attempt(read, text)
    _attempt(lambda one: make_grid([one]), text)
    _attempt(lambda one: make_grid([one], "--sweep"), text)
    _attempt(ViTConfig.from_name, text)


def _recipe_texts():
    known = sorted({name for recipe in RECIPES for name in vm.recipes.registry.settings_of(RECIPES[recipe])})
    value = st.one_of(
        st.sampled_from(["S/16", "light1", "true", "1", "0", "-1", "1e400", "nan", "inf"]), st.text(max_size=6)
    )
    pair = st.builds("{}={}".format, st.sampled_from(known), value)
    return st.builds("{}({})".format, st.sampled_from(sorted(RECIPES)), st.lists(pair, max_size=3).map(",".join))


# Configs --------------------------------------------------------------------------------------------------------------


@st.composite
def _edited(draw, tree):
    """A tree of JSON in which some places hold something else, or nothing."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        node = tree
        while isinstance(node, dict | list) and node:
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            key = draw(st.sampled_from(list(keys)))
            if not isinstance(node[key], dict | list) or not node[key] or draw(st.booleans()):
                what = draw(st.integers(0, 3))
                if what:
                    node[key] = draw(VALUES)
                elif isinstance(node, dict) and draw(st.booleans()):
                    node[draw(st.text(max_size=6))] = node.pop(key)
                else:
                    del node[key]
                break
            node = node[key]
    return tree


def configs(values):
    kind, tree = values
    {"vit": ViTConfig.from_dict, "recipe": Recipe.from_dict, "rebuilt": _rebuilt}[kind](tree)


def _rebuilt(record):
    """As a trial's config.json says how to make its model again, beside small weights."""
    if isinstance(record, dict):
        with tempfile.TemporaryDirectory(prefix="fuzz") as where:
            weights = Path(where) / "model.safetensors"
            weights.write_bytes(save({"a": torch.zeros(1)}))
            rebuilt(record, weights)


CHANGED = vm.apply(vm.vit("mu2/8", img_size=16, num_classes=2), *parse_changes("dpn+dtn+subln"))
RECORD = {"base": "python:os:execve", "edits": "python(os:getcwd)", "num_classes": 2, "img_size": [8, 8], "in_chans": 3,
          "head": True, "class": "X", "tensors": ""}  # fmt: skip


def _configs():
    whole = json.loads(CHANGED.vit_config.to_json())
    return st.one_of(
        st.tuples(st.just("vit"), _edited({**whole, **VIT})),
        st.tuples(st.just("recipe"), _edited(Recipe().to_dict())),
        st.tuples(
            st.just("recipe"), st.dictionaries(st.sampled_from(sorted(vm.recipes.recipe.fields_by_name())), VALUES)
        ),
        st.tuples(st.just("rebuilt"), _edited(RECORD)),
    )


# Files ----------------------------------------------------------------------------------------------------------------


def _written(write):
    """The bytes that `write` puts into a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _image(kind="PNG", mode="RGB", side=8):
    return _written(lambda file: Image.new(mode, (side, side), 1).save(file, kind))


def _tar(files, form=tarfile.PAX_FORMAT):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _npz(**arrays):
    return _written(lambda file: np.savez_compressed(file, **arrays))


def _json(value):
    return json.dumps(value).encode()


def _look(spec):
    source = open_source(spec)
    for records in source.splits.values():
        for key in islice(records.keys.tolist(), 3):
            try:
                raw = records.fetch(key)
                if isinstance(raw, bytes):
                    decode(raw, 3)
            except Unreadable:
                pass


def _safetensors(metadata, convert=lambda model: model):
    model = convert(vm.vit(ViTConfig.from_dict(VIT)))
    return save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, metadata)


def _hugging_face():
    """Weights that fit `HF`, so that its reader is reached."""
    from vitmods.adapters import to_huggingface

    return _safetensors(None, to_huggingface)


def _delta():
    base, tuned = (vm.vit(ViTConfig.from_dict(VIT)) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        save_delta(base, tuned, Path(folder) / "d.safetensors")
        return base, (Path(folder) / "d.safetensors").read_bytes()


def _study(folder):
    study = StudyFolder(folder)
    for read in (study.facts, lambda: study.check_same_study({}), study.samples, lambda: study.images.groups(["test"])):
        _attempt(lambda _, read=read: read(), None)
    read_examples(folder)
    _attempt(read_scores, folder / "test.npz")


BASE, DELTA = _delta()
PIXELS = _image()
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "height": 8, "width": 8}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 1, 4, 4], "area": 4, "iscrowd": 0,
         "segmentation": [[1, 1, 5, 1, 5, 5]]},
        {"id": 2, "image_id": 1, "category_id": 3, "bbox": [1, 1, 4, 4], "iscrowd": 1,
         "segmentation": {"size": [8, 8], "counts": [1, 3, 60]}},
        {"id": 3, "image_id": 1, "category_id": 3, "bbox": [1, 1, 4, 4],
         "segmentation": {"size": [8, 8], "counts": "13l1"}},
    ],
    "categories": [{"id": 3, "name": "cat"}],
}  # fmt: skip
VOC = (
    b"<annotation><size><width>8</width><height>8</height></size><object><name>cat</name><difficult>0</difficult>"
    b"<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>5</ymax></bndbox></object></annotation>"
)
TRIAL = {
    "model": VIT, "task": "classification", "arm": "base", "seed": 0, "recipe": Recipe().to_dict(),
    "images": {"img_size": [8, 8], "in_chans": 3}, "data": {"classes": ["a", "b"], "fingerprint": "x"},
}  # fmt: skip
HF = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 8, "image_size": 8, "patch_size": 4, "hidden_act": "gelu",
    "layer_norm_eps": 1e-6, "attention_probs_dropout_prob": 0.0, "id2label": {"0": "a", "1": "b"},
}  # fmt: skip
FACTS = {
    "schema": 3, "created": "", "command": "", "splits": ["test"], "settings": {"a": 1}, "models": {}, "data": {},
    "resolved": {}, "environment": {}, "warnings": [], "margins": {}, "plugins": [], "plan": {"seeds": 0},
}  # fmt: skip
A, M = {"a.png": PIXELS}, {"images/a.png": PIXELS, "masks/a.png": PIXELS}
NAMED = {"classes.txt": b"cat\ndog\n", **M}
YOLO = {"data.yaml": b"names: [cat, dog]\ntrain: images\n", "images/a.png": PIXELS}
SHARD = _tar({**A, "a.cls": b"1"})
BOXES = b"image,split,width,height,label,xmin,ymin,xmax,ymax\na.png,train,8,8,cat,1,1,4,4\n"
MANIFEST = {"format": "vitmods shards 2", "name": "x", "classes": ["a"], "unreadable": [],
            "index_sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "splits": {"train": {"shards": [{"file": "a.tar", "bytes": 1, "sha256": ""}]}}}  # fmt: skip
LISTOPS = b"Source\tTarget\n( ( [MAX 1 ) 2 ) ]\t2\n"
PAIRS = b'{"image": "a.png", "captions": ["a"], "split": "train", "group": "g"}\n'
CAPTIONED = {**A, "a.json": b'{"caption": "a", "group": 1}', "b.png": PIXELS, "b.txt": b"b"}
OWN = _safetensors({"vitmods_config": json.dumps(VIT)})
FLAX = {"cls": np.zeros((1, 1, 8), np.float32), "embedding/kernel": np.zeros((4, 4, 3, 8), np.float32)}
PTH = _written(lambda file: torch.save({"model": {"cls_token": torch.zeros(1, 1, 8)}}, file))
PROCESSOR = {"do_normalize": True, "image_mean": [0.5], "image_std": [1], "rescale_factor": 1 / 255}
EXAMPLES = {"schema": 1, "images": [{"id": "a", "panels": ["x"]}], "legend": {"a": "#000000"}}
IMAGES = {"names": np.zeros(1, np.uint64), "contents": np.zeros(1), "groups_test": np.array(["a"])}
# name: the file that is hit and what it holds, the files beside it, and the spec or function that reads the folder
INDEX = {"metadata": {"total_size": 9}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}
READERS = {
    "coco": ("train.json", COCO, A, "coco:{}"),
    "boxes": ("boxes.csv", BOXES, A, "boxes:{}"),
    "voc": ("Annotations/a.xml", VOC, {"JPEGImages/a.png": PIXELS}, "voc:{}"),
    "yolo": ("data.yaml", YOLO["data.yaml"], {**YOLO, "labels/a.txt": b"0 .5 .5 .2 .2\n"}, "yolo:{}"),
    "yolo labels": ("labels/a.txt", b"0 .1 .1 .5 .1 .5 .5\n", YOLO, "yolo:{}"),
    "labels": ("labels.csv", b"file,labels,split\na.png,cat;dog,train\n", A, "{}/labels.csv"),
    "lists": ("train.txt", b"c/a.png,c\nd/b.png,d\n", {"c/a.png": PIXELS, "d/b.png": PIXELS},
              "{}?splits=train.txt:train"),
    "palette": ("palette.csv", b"name,r,g,b\ncat,1,1,1\ndog,2,2,2\n", M, "masks:{}"),
    "mask": ("masks/a.png", _image(mode="L"), NAMED, "masks:{}"),
    "mask classes": ("classes.txt", NAMED["classes.txt"], {**NAMED, "masks/a.png": _image(mode="P")}, "masks:{}"),
    "wds": ("train.tar", SHARD, {}, "wds:{}"),
    "wds json": ("train.tar", _tar({**A, "a.json": b'{"label": 1}'}, tarfile.GNU_FORMAT), {}, "wds:{}"),
    "tar": ("a.tar", _tar({"x/a.png": PIXELS, "b.tar": _tar({"b" * 200: PIXELS})}), {},
            lambda f: open_tar(f / "a.tar")),
    "wds classes": ("classes.json", ["cat", "dog"], {"train.tar": SHARD}, "wds:{}"),
    "manifest": ("manifest.json", MANIFEST, {"index.npz": b""}, "{}"),
    "listops": ("basic_val.tsv", LISTOPS, {f"basic_{split}.tsv": LISTOPS for split in ("train", "test")}, "listops:{}"),
    **{f"image {kind}": (f"train/c/a.{kind.lower()}", _image(kind), {"train/d/b.png": PIXELS}, "{}")
       for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA", "PCX")},
    "pairs": ("p.jsonl", PAIRS, A, lambda f: open_source(f"pairs:{f}/p.jsonl")),
    "pairs in shards": ("train.tar", _tar(CAPTIONED), {}, lambda f: open_source(f"pairs:{f}")),
    "scores": ("s.csv", b"arm,seed,score,image\nbase,0,1,a\ndpn,0,1,a\n", {}, lambda f: read_csv(f / "s.csv")),
    "groups": ("g.csv", b"image,group\na,1\n", {}, lambda f: group_keys(f / "g.csv", ["a"])),
    "own": ("f.safetensors", OWN, {}, lambda f: load(f / "f.safetensors")),
    "delta": ("d", DELTA, {}, lambda f: load_delta(BASE, f / "d")),
    "npz": ("f.npz", _npz(**FLAX), {}, lambda f: load(f / "f.npz")),
    "pth": ("f.pth", PTH, {}, lambda f: load(f / "f.pth")),
    "index": ("model.safetensors.index.json", INDEX, {"a.safetensors": _hugging_face(), "config.json": _json(HF)},
              load),
    "trial": ("config.json", TRIAL, {"model.safetensors": _safetensors(None)}, lambda f: Checkpoint.open(str(f))),
    "hf": ("config.json", HF, {"model.safetensors": _hugging_face()}, load),
    "pixels": ("preprocessor_config.json", PROCESSOR, {"f.safetensors": OWN}, lambda f: load(f / "f.safetensors")),
    "study": ("study.json", FACTS, {}, _study),
    "samples": ("samples.npz", _npz(names=np.array(["a"]), image0=np.zeros((2, 2), np.uint8)), {}, _study),
    "images": ("images.npz", _npz(**IMAGES), {}, _study),
    "test": ("test.npz", _npz(ids=np.array(["a"]), correct=np.ones(1)), {}, _study),
    "examples": ("examples/examples.json", EXAMPLES, {"examples/0-x.png": PIXELS}, _study),
}  # fmt: skip


TOKENS = b'-1 1e999 nan , " &a; ../ { *a 7777777 \x1b[31m'.split()
TOKENS += [b"\0" * 8, b"\xff" * 8, b"9" * 20, b"\n", b"<!DOCTYPE a>", b"\x80" + b"\xff" * 11, b"[" * 2000]


@st.composite
def _bytes(draw, content):
    """Bytes of which some are others, more, fewer or moved."""
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 1, 1, 2, 4, 8, 64, 512]))
        token = st.sampled_from(TOKENS)
        new = draw(st.binary(max_size=12) | token)
        if draw(st.integers(0, 9)) == 0:
            new = content[draw(st.integers(0, len(content))) :][:512]
        content = content[:place] + new + content[place + length :]
    return content


def raw_of(content):
    return _json(content) if isinstance(content, dict | list) else content


@st.composite
def _files(draw):
    name = draw(st.sampled_from(sorted(READERS)))
    content = READERS[name][1]
    if isinstance(content, dict | list) and draw(st.integers(0, 4)):
        return name, _json(draw(_edited(content)))
    return name, draw(_bytes(raw_of(content)))


def files(value):
    name, content = value
    hit, _, others, read = READERS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz") as where:
        for path, one in {**others, hit: content}.items():
            place = Path(where) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(one)
        _look(read.format(where)) if isinstance(read, str) else read(Path(where))


# Models that a file describes -----------------------------------------------------------------------------------------

TIMM = {"architecture": "vit_tiny_patch16_224", "num_classes": 2, "num_features": 8, "global_pool": "token",
        "model_args": {"img_size": [8, 8], "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2,
                       "mlp_ratio": 1.0, "act_layer": "gelu", "norm_layer": "layernorm", "init_values": 0.1},
        "pretrained_cfg": {"num_classes": 2, "input_size": [3, 8, 8], "fixed_input_size": True, "mean": [0.5, 0.5, 0.5],
                           "std": [0.5, 0.5, 0.5], "first_conv": "patch_embed.proj", "classifier": "head"}}  # fmt: skip
ADDRESSES = [
    "hf-hub:someone/model", "someone/model", "hf_hub:x/y", "local-dir:/tmp", "http://127.0.0.1/x.pth",
    "file:///dev/zero",
]  # fmt: skip
NAMES = [
    *ADDRESSES, "vit_giant_patch14_224", "vit_gigantic_patch14_224", "swin_large_patch4_window12_384", "resnet18",
    "vit_tiny_patch16_224", "vitmods_vit", "eva_giant_patch14_560", "vit_base_patch16_224.augreg_in1k",
]  # fmt: skip
SIZES = [8000, 12288, 10**5, 10**6, 10**9, 2**31, 2**63, 10**400, 1e308, 0, -1]
EXTRA = [
    "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained", "cache_dir", "block_fn", "use_naflex",
    "features_only", "depth", "depths", "img_size", "embed_dim", "window_size", "weights_backbone", "image_size",
    "num_hidden_layers", "hidden_size", "architecture", "auto_map", "attn_implementation", "_attn_implementation",
    "use_pretrained_backbone", "use_timm_backbone", "backbone", "backbone_config", "model_type", "model_args",
    "num_labels", "quantization_config", "torch_dtype", "num_channels", "patch_size",
]  # fmt: skip
OPTIONS = st.dictionaries(
    st.sampled_from(EXTRA), st.sampled_from([*SIZES, *ADDRESSES, True, None]).map(str), max_size=2
).map(lambda given: "&".join(f"{name}={value}" for name, value in given.items()))
MODULES = [
    "os", "sys", "torch", "torch.hub", "timm", "subprocess", "vitmods", "builtins", "numpy", "tests.fuzz.families",
]  # fmt: skip
CALLS = [
    "system", "sys.exit", "load", "exit", "hub.load", "load_state_dict_from_url", "create_model", "run", "save",
    "__dict__",
]  # fmt: skip
TORCHVISION = [
    "fasterrcnn_resnet50_fpn", "vit_b_16", "swin_t", "regnet_y_128gf", "resnet18", "fcn_resnet50", "r3d_18",
    "raft_large", "quantized_resnet18",
]  # fmt: skip
CHANGES = [
    "dpn", "replace(rms)", "replace(dtn)+dpn", "size(width=1000000,heads=1)", "size(depth=1000000)",
    "parallel(branches=1000000)", "subln+rms", "hmlp",
]  # fmt: skip
BASES = st.one_of(
    st.builds("timm:{}?{}".format, st.sampled_from(NAMES), OPTIONS),
    st.builds("torchvision:{}?{}".format, st.sampled_from(TORCHVISION), OPTIONS),
    st.builds("hf-text:{}?{}".format, st.sampled_from(["bert", "reformer", "llama", "big_bird", *ADDRESSES]), OPTIONS),
    st.builds("hf:{}?{}".format, st.sampled_from(["HERE", "someone/model", "/tmp", "."]), OPTIONS),
    st.builds("python:{}:{}".format, st.sampled_from(MODULES), st.sampled_from(CALLS)),
    _edited({**VIT, "depth": 1}),
)  # fmt: skip
EDITS = st.one_of(
    st.sampled_from(["", *CHANGES]), st.builds("python({}:{})".format, st.sampled_from(MODULES), st.sampled_from(CALLS))
)


@st.composite
def _large(draw, tree):
    """The same tree with a size, an address or a name of code in one place more."""
    tree = draw(_edited(tree)) if draw(st.booleans()) else json.loads(json.dumps(tree))
    inside = [tree, *(value for value in tree.values() if isinstance(value, dict))] if isinstance(tree, dict) else [{}]
    node = draw(st.sampled_from(inside))
    name = draw(st.sampled_from([*EXTRA, *node]))
    node[name] = draw(st.sampled_from([*SIZES, *NAMES, *EXTRA, [8000, 8000], [10**6] * 4, {"url": ADDRESSES[4]}, True]))
    return tree


def _models():
    size = st.sampled_from([[8, 8], [224, 224], [8000, 8000], [2**40, 8], [0, 0], ["a", None]])
    record = st.fixed_dictionaries(
        {"base": BASES, "edits": EDITS, "num_classes": st.sampled_from([2, 2**20, 2**30, "x"]), "img_size": size,
         "in_chans": st.sampled_from([1, 3, 2**20, None]), "head": st.booleans(), "class": st.just("X"),
         "tensors": st.just("")}
    )  # fmt: skip
    return st.one_of(
        *(st.tuples(st.just(kind), _large(values)) for kind, values in PLAIN),
        st.tuples(st.just("trial"), st.builds(lambda model: {**TRIAL, "model": model}, record)),
    )


class Reached(BaseException):
    """The network, or a function that a file names. Not an Exception, so that no reader takes it for damage."""


def _reach(*address, **_):
    raise Reached(address)


def _resolve(function, resolve=Function.resolve):
    raise Reached(resolve(function))


def models(value):
    """A folder of timm, of Hugging Face or of a trial, with the weights of a small ViT, by all its readers."""
    kind, record = value
    with tempfile.TemporaryDirectory(prefix="fuzz") as where, ExitStack() as stack:
        for name in ("socket.getaddrinfo", "socket.socket.connect"):
            stack.enter_context(patch(name, _reach))
        stack.enter_context(patch.object(Function, "resolve", _resolve))
        folder = Path(where)
        (folder / "model.safetensors").write_bytes(WEIGHTS[kind])
        (folder / "config.json").write_bytes(_json(record).replace(b"hf:HERE", f"hf:{where}".encode()))
        _attempt(load, folder)
        if kind == "hf":
            _attempt(lambda one: ForeignBase(f"hf:{one}", 2, (8, 8), 3).build(), folder)
            _attempt(lambda one: open_model(f"hf:{one}"), folder)
        if kind == "trial":
            _attempt(lambda one: Checkpoint.open(str(one)), folder)


WRAPPED = {"model_type": "timm_wrapper", "architecture": "resnet18", "num_classes": 2, "model_args": {}}
FROM_TIMM = {**TRIAL, "model": {**RECORD, "base": "timm:vit_tiny_patch16_224", "edits": "replace(rms)"}}
PLAIN = [("timm", TIMM), ("hf", HF), ("hf", {**HF, "model_type": "beit"}), ("hf", WRAPPED), ("trial", FROM_TIMM)]
WEIGHTS = {"timm": _safetensors(None), "trial": _safetensors(None),
           "hf": _hugging_face()}  # fmt: skip


def _attempt(read, value):
    try:
        read(value)
    except UserError:
        return


FAMILIES = {
    "expressions": (_expressions(), expressions),
    "recipes": (_recipe_texts(), lambda text: parse_recipe(text, model="S/16")),
    "configs": (_configs(), configs),
    "files": (_files(), files),
    "models": (_models(), models),
}
"""name -> what hostile input looks like, and what reads it"""


def run(family, value):
    """Read one input; whatever but a UserError comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _attempt(FAMILIES[family][1], value)
