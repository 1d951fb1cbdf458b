"""From every kind of model that a study may end with to every form of file: the outputs, or a refusal with a form that
works. Each has had low-rank adapters, which are merged. Every change and kind of norm goes through some forms."""

import io
import json
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder

import onnxruntime
import pytest
import timm
import torch
import transformers as hf
from torch import nn

import vitmods as vm
from vitmods.changes import REGISTRY
from vitmods.changes.norm import kinds
from vitmods.cli import main
from vitmods.finetune.adapters import merge_adapters
from vitmods.model.slots import BranchConfig, NormConfig
from vitmods.recipes import Recipe
from vitmods.study.arms import parse_edits
from vitmods.study.bases import ForeignBase, record_of
from vitmods.train.trial import _save_weights
from vitmods.util.errors import UserError

TIMM = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
SPEC = "timm:vit_tiny_patch16_224?patch_size=4&embed_dim=16&depth=1&num_heads=2"
SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "patch_size": 2, "window_size": 2, "img_size": 16}
SWIN_SPEC = "timm:swin_tiny_patch4_window7_224?embed_dim=16&depths=(1,1)&num_heads=(2,4)&patch_size=2&window_size=2"
HF = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}


def own(changes, **fields):
    return vm.apply(vm.vit("mu1/4", img_size=16, num_classes=5, **fields), *vm.parse_changes(changes))


def placed(model, changes):
    return vm.apply(model, *vm.parse_changes(changes), in_place=True)


def of_timm():
    return timm.create_model("vit_tiny_patch16_224", **TIMM)


def of_hf():
    return hf.ViTForImageClassification(hf.ViTConfig(**HF, intermediate_size=64, num_labels=5))


def from_dinov2():
    """As a study reads a folder of Dinov2, with a new head on the class token."""
    model = vm.adapters.from_huggingface(hf.Dinov2Model(hf.Dinov2Config(**HF)).eval())
    model.reset_classifier(5)
    return model


WINNERS = {
    "ours, with scales": lambda: own("layerscale+layernormscaling", drop_path=0.1),
    "ours, dpn": lambda: own("dpn"),
    "timm, layerscale": lambda: placed(of_timm(), "layerscale"),
    "timm, dpn": lambda: placed(of_timm(), "dpn"),
    "swin, layerscale": lambda: placed(
        timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN), "layerscale"
    ),
    "hf, layerscale": lambda: placed(of_hf(), "layerscale"),
    "hf, qknorm": lambda: placed(of_hf(), "qknorm"),
    "dinov2": from_dinov2,
}
FORMS = ("onnx", "float16", "int8", "any size", "pt2", "safetensors", "timm", "hf", "hub")
REFUSED_FORMS = {
    "ours, with scales": (),
    "ours, dpn": ("timm", "hf"),
    "timm, layerscale": (),  # in timm's own slots: it is read
    "timm, dpn": ("any size", "safetensors", "timm", "hf"),
    "swin, layerscale": ("any size", "safetensors", "hf"),
    "hf, layerscale": ("any size", "safetensors", "timm"),
    "hf, qknorm": ("any size", "safetensors", "timm", "hf"),
    "dinov2": (),
}
SLOW = {"onnx", "float16", "int8", "any size", "pt2"}  # graphs take seconds: each form of one or two models
WRITTEN = {
    ("ours, with scales", "any size"), ("timm, dpn", "float16"), ("hf, qknorm", "int8"), ("dinov2", "onnx"),
    ("ours, dpn", "pt2"), ("hf, qknorm", "pt2"),
}  # fmt: skip
CELLS = [
    (name, form, form not in refused)
    for name, refused in REFUSED_FORMS.items()
    for form in FORMS
    if form in refused or form not in SLOW or (name, form) in WRITTEN
]
CHANGES = {  # every change, and every kind of norm that may stand in a block: few models, since an export is slow
    "dropkey+dpn+dtn(blocks=1)+layerscale+normformer+gpsa(blocks=1)+qknorm+swiglu": {"depth": 2},
    "rms+subln+parallel+patchdropout+hmlp+prompts": {"depth": 2},
    "placement(attn=post,mlp=pre+post)+levit+relpos+gate+valueresidual+registers+nobias": {"depth": 2},
    "local+rope+size(deeper=2)+layernormscaling": {
        "attn": BranchConfig(*map(NormConfig, ("scale", "batch", "instance", "group"))),
        "mlp": BranchConfig(*map(NormConfig, ("power", "switchable", "dyt", "derf"))),
    },
}
TOLERANCE = {"float16": 2e-2, "int8": 5e-2}  # of the largest output; 1e-5 for the others
IMAGES = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(2))


@cache
def winner(name):
    torch.manual_seed(0)
    model = WINNERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # nothing is 0 or 1
            parameter.add_(torch.randn_like(parameter) * 0.1)
    vm.train_only(model, "lora(rank=2)")
    for key, parameter in model.named_parameters():
        if ".lora_B." in key:
            nn.init.normal_(parameter, 0, 0.1)
    merge_adapters(model)
    return model.requires_grad_(False)


@torch.no_grad()
def outputs(model, images=IMAGES):
    out = model(images)
    return getattr(out, "logits", out)


class Blocker(MetaPathFinder):
    """While it is on, vitmods cannot be imported."""

    def __enter__(self):
        names = [name for name in sys.modules if name.partition(".")[0] == "vitmods"]
        self.hidden = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, self)

    def __exit__(self, *error):
        sys.meta_path.remove(self)
        sys.modules.update(self.hidden)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vitmods":
            raise ImportError("vitmods is blocked")


HOW = {
    "onnx": ("m.onnx", {}), "float16": ("m.onnx", {"precision": "float16"}), "pt2": ("m.pt2", {}),
    "int8": ("m.onnx", {"precision": "int8"}), "any size": ("m.onnx", {"img_size": "any"}),
    "safetensors": ("m.safetensors", {}),
}  # fmt: skip


def write(model, form, folder, base=None):
    """Write a form; returns what opens and runs it."""
    if form in HOW:
        name, options = HOW[form]
        vm.export(model, folder / name, **options)
    else:
        vm.save_pretrained(model, folder, base=base, library=None if form == "hub" else form)
    return lambda: OPEN[form if form in OPEN else "onnx"](folder)


def open_onnx(file):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


OPEN = {
    "safetensors": lambda folder: vm.adapters.load(folder / "m.safetensors"),
    "hub": vm.from_pretrained,
    "onnx": lambda folder: open_onnx(folder / "m.onnx"),
    "pt2": lambda folder: torch.export.load(folder / "m.pt2").module(),
    "timm": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True).eval(),
    "hf": lambda folder: hf.AutoModelForImageClassification.from_pretrained(folder).eval(),
}


@pytest.mark.parametrize(("name", "form", "works"), CELLS, ids=[f"{name}: {form}" for name, form, _ in CELLS])
def test_routes(name, form, works, tmp_path):
    model, base = winner(name), {"timm": SPEC, "swin": SWIN_SPEC}.get(name.partition(",")[0])
    if not works:
        before = list(tmp_path.iterdir())
        with pytest.raises(UserError, match=r"onnx|vm\.save_pretrained") as refused:
            write(model, form, tmp_path, base)
        assert list(tmp_path.iterdir()) == before
        assert len(str(refused.value)) < 700
        return
    run = write(model, form, tmp_path, base)
    if form in ("safetensors", "hub"):
        opened = run()
    else:
        with Blocker():
            opened = run()
    expected = outputs(model)
    difference = (outputs(opened) - expected).abs().max() / expected.abs().max()
    assert difference <= TOLERANCE.get(form, 1e-5)
    if form == "any size":
        larger = torch.randn(2, 3, 24, 12)
        model = vm.vit(model.vit_config.with_(dynamic_img_size=True)).eval()
        model.load_state_dict(winner(name).state_dict())
        torch.testing.assert_close(outputs(opened, larger), outputs(model, larger), rtol=1e-4, atol=1e-4)


ELSEWHERE = """
import sys
sys.modules["vitmods"] = None
import torch, timm, transformers
images = torch.load("images.pt")
opened = [
    timm.create_model("local-dir:timm", pretrained=True).eval(),
    transformers.AutoModelForImageClassification.from_pretrained("hf").eval(),
]
with torch.no_grad():
    torch.save([getattr(out, "logits", out) for out in (model(images) for model in opened)], "outputs.pt")
"""


@pytest.mark.long
def test_another_process_without_vitmods(tmp_path):
    model = winner("ours, with scales")
    for form in ("timm", "hf"):
        (tmp_path / form).mkdir()
        write(model, form, tmp_path / form)
    torch.save(IMAGES, tmp_path / "images.pt")
    subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, check=True)
    for logits in torch.load(tmp_path / "outputs.pt"):
        torch.testing.assert_close(logits, outputs(model), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A trial of a model of timm, changed in place, as training ends it."""
    model, folder = winner("timm, dpn"), tmp_path_factory.mktemp("a study") / "trials" / "dpn" / "seed0"
    folder.mkdir(parents=True)
    recipe = Recipe().with_(mean=(0.25, 0.5, 0.75))
    config = {
        "schema": 1, "arm": "dpn", "changes": "dpn", "seed": 0, "task": "classification", "recipe": recipe.to_dict(),
        "model": record_of(model, ForeignBase(SPEC, 5, (16, 16), 3), parse_edits("dpn")),
        "data": {"name": "letters", "classes": list("abcde"), "splits": {}, "fingerprint": ""},
        "images": {"data": "letters", "img_size": [16, 16], "in_chans": 3, "task": "classification"},
    }  # fmt: skip
    weights = _save_weights(model, model.state_dict(), folder)
    result = {"schema": 1, "status": "finished", "split": "test", "metrics": {}, "weights": weights}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_trial_of_another_library_says_how_images_are_prepared(trial, tmp_path):
    assert main(["export", str(trial), "--to", "torch", "--out", str(tmp_path / "two words.pt2")]) == 0
    extra = {"metadata.json": ""}
    program = torch.export.load(tmp_path / "two words.pt2", extra_files=extra).module()
    known = json.loads(extra["metadata.json"])
    assert (known["input_size"], known["label_names"], known["mean"]) == ([3, 16, 16], list("abcde"), [0.25, 0.5, 0.75])
    torch.testing.assert_close(program(IMAGES), outputs(winner("timm, dpn")), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--to safetensors", "write a graph"),
        ("--to onnx --img-size any", "write a graph"),
        ("--to timm", "--to onnx"),
        ("--to hf", "--to onnx"),
        ("--to torch --precision int8", "written as ONNX"),
        ("--to timm --precision int8", "leave it out"),
    ],
)
def test_what_a_trial_cannot_be_is_refused_with_a_form_that_works(
    options, reason, trial, tmp_path, refused, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.export.export", None)
    assert reason in refused(f"export '{trial}' {options}")
    assert list(tmp_path.iterdir()) == []


def test_finetune_says_first_that_it_starts_from_its_base(trial, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitmods.cli.finetune.run_trial", None)
    assert "start from a trial of base" in refused("finetune --data digits --img-size 16 --model", trial)
    assert not list(tmp_path.iterdir())


def test_a_head_of_dinov2_stays_in_its_class(tmp_path):
    source = hf.Dinov2ForImageClassification(hf.Dinov2Config(**HF, num_labels=4)).eval()
    model = vm.adapters.from_huggingface(source)
    vm.save_pretrained(model, tmp_path, library="hf")
    again = OPEN["hf"](tmp_path)
    assert type(again) is hf.Dinov2ForImageClassification
    torch.testing.assert_close(outputs(again), outputs(model), rtol=1e-5, atol=1e-5)


def test_a_folder_of_another_model_is_replaced(tmp_path):
    vm.save_pretrained(winner("timm, dpn"), tmp_path, base=SPEC)
    vm.save_pretrained(winner("hf, layerscale"), tmp_path, library="hf")
    vm.save_pretrained(winner("timm, layerscale"), tmp_path, library="timm")
    torch.testing.assert_close(outputs(vm.from_pretrained(tmp_path)), outputs(winner("timm, layerscale")))


class Chooses(nn.Module):
    """Of images, but no graph: it looks at what it computes."""

    def __init__(self):
        super().__init__()
        self.inside = of_timm()

    def forward(self, images):
        logits = self.inside(images)
        return logits if logits.sum().item() > 0 else -logits


REFUSED = {
    "no images": (
        lambda: hf.BertModel(hf.BertConfig(**{**HF, "intermediate_size": 16, "vocab_size": 9})),
        {},
        "images",
    ),
    "no graph": (Chooses, {}, "torch cannot write"),
    "rotary": (lambda: own("rope"), {"img_size": "any"}, "a file for each"),
    "half": (lambda: own("dpn").bfloat16(), {"name": "m.onnx"}, "precision='float32'"),
    "ending": (lambda: own("dpn"), {"to": "onnx"}, "a file of onnx is opened by its ending: call it m.onnx"),
    "precision": (lambda: own("dpn"), {"precision": "fp16"}, "float16"),
    "size": (lambda: own("dpn"), {"img_size": 17}, "use 16 or 20"),
    "size of another library": (of_timm, {"img_size": 17}, "17"),
    "name": (lambda: own(""), {"name": "m.tflite"}, "end the name"),
    "form": (lambda: own(""), {"to": "onx"}, "onnx"),
    "batch": (lambda: own(""), {"batch": 0}, "batch"),
    "weights of a batch": (lambda: own(""), {"name": "m.safetensors", "batch": 3}, "any batch"),
    "training": (lambda: own(""), {"train": True}, "eval"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_graphs(kind, tmp_path):
    make, options, reason = REFUSED[kind]
    options = {"name": "m.pt2", "train": False} | options
    with pytest.raises(UserError, match=reason):
        vm.export(make().train(options.pop("train")), tmp_path / options.pop("name"), **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["timm", "keras"])
def test_refused_folders(library, tmp_path):
    (tmp_path / "a file").write_text("x")
    with pytest.raises(UserError, match="Cannot write" if library == "timm" else "library is timm or hf"):
        vm.save_pretrained(winner("timm, layerscale"), tmp_path / "a file", library=library)


def test_other_channels_without_a_head_in_half_precision(tmp_path):
    channels = 4
    model = placed(timm.create_model("vit_tiny_patch16_224", **{**TIMM, "num_classes": 0}, in_chans=channels), "dpn")
    model = model.eval().bfloat16()
    vm.export(model, tmp_path / "a folder" / "m.1.pt2", precision="float32")
    images = torch.randn(2, channels, 16, 16)
    program = torch.export.load(tmp_path / "a folder" / "m.1.pt2").module()
    torch.testing.assert_close(program(images), model.float()(images), rtol=1e-4, atol=1e-4)


@pytest.fixture
def changed(request, monkeypatch):
    monkeypatch.setattr("vitmods.layers.stems.local.LOCAL_DEPTH", 1)
    return small(request.param)


def small(arm):
    torch.manual_seed(0)
    return vm.apply(vm.vit("mu1/4", img_size=8, num_classes=5, **CHANGES[arm]), *vm.parse_changes(arm)).eval()


every_model = pytest.mark.parametrize("changed", CHANGES, indirect=True)


def test_every_change_and_kind_of_norm_is_tried():
    models = list(map(small, CHANGES))
    assert {change.name for model in models for change in model.changes} == set(REGISTRY)
    made = {type(module) for model in models for module in model.modules()}
    assert {kind.module for kind in kinds().values()} <= made


def computes(graph, model):
    """ONNX Runtime computes what the model does, for any number of images."""
    actual, expected = open_onnx(graph)(IMAGES[:, :, :8, :8]), outputs(model, IMAGES[:, :, :8, :8])
    assert (actual - expected).abs().max() <= 3e-4 * expected.abs().max()


@every_model
def test_onnx_runtime_computes_the_same(changed, tmp_path):
    assert vm.export(changed, tmp_path / "model.onnx") <= 1e-4
    computes(tmp_path / "model.onnx", changed)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changed",
    [pytest.param(arm, marks=[pytest.mark.long] * (number in (1, 2))) for number, arm in enumerate(CHANGES)],
    indirect=True,
)
def test_the_older_onnx_exporter(changed):
    """With trained weights: this exporter merges equal parameters, as untrained norms have them, and loses some."""
    graph = io.BytesIO()
    for name, parameter in changed.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name and "weight" in name), 0.1)
    names = {"input_names": ["images"], "output_names": ["logits"]}
    torch.onnx.export(changed, (torch.randn(5, 3, 8, 8),), graph, dynamo=False, **names)
    computes(graph.getvalue(), changed)


@every_model
def test_every_change_goes_through_safetensors(changed, tmp_path):
    path = tmp_path / "m.safetensors"
    assert vm.export(changed, path) == 0
    again = vm.adapters.load(path)
    assert again.vit_config == changed.vit_config
    assert all(torch.equal(value, changed.state_dict()[name]) for name, value in again.state_dict().items())
    assert "none missing" in str(vm.adapters.coverage(path))


def test_optimized_models_and_a_fixed_batch(tmp_path):
    vm.export(vm.optimize_for_inference(own("dpn+layerscale").eval()), tmp_path / "m.onnx", batch=2)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [2, 3, 16, 16]


def test_nothing_is_overwritten_when_the_new_file_is_wrong(tmp_path, monkeypatch):
    path = tmp_path / "m.pt2"
    path.write_text("old")
    monkeypatch.setitem(import_module("vitmods.fast.export").TOLERANCE, "float32", -1.0)
    with pytest.raises(UserError, match="outputs differ"):
        vm.export(own("").eval(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"]
