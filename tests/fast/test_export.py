"""Files of models: every change, read back by other programs, and refusals that leave what is there alone."""

import io
from importlib import import_module

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch

import vitmods as vm
from vitmods import adapters
from vitmods.changes import REGISTRY
from vitmods.changes.norm import kinds
from vitmods.model.slots import BranchConfig, NormConfig
from vitmods.util.errors import UserError

MODELS = {  # every change, and every kind of norm that may stand in a block: few models, since an export is slow
    "dropkey+dpn+dtn(blocks=1)+layerscale+normformer+gpsa(blocks=1)+qknorm+swiglu": {"depth": 2},
    "rms+subln+parallel+patchdropout+hmlp+prompts": {"depth": 2},
    "placement(attn=post,mlp=pre+post)+local+rope+size(deeper=2)": {},
    "relpos+gate+valueresidual+layernormscaling+registers+nobias": {"depth": 2},
    "levit": {
        "attn": BranchConfig(*map(NormConfig, ("scale", "batch", "instance", "group"))),
        "mlp": BranchConfig(*map(NormConfig, ("power", "switchable", "dyt", "derf"))),
    },
}
every_model = pytest.mark.parametrize("arm", MODELS)


@pytest.fixture(autouse=True)
def shallow(monkeypatch):
    monkeypatch.setattr("vitmods.layers.stems.local.LOCAL_DEPTH", 1)


def small(arm=""):
    torch.manual_seed(0)
    fields = MODELS.get(arm, {"depth": 2 if "blocks" in arm else 1})
    base = vm.vit("mu1/4", img_size=8, num_classes=5, **fields)
    return (vm.apply(base, *vm.parse_changes(arm)) if arm else base).eval()


def test_every_change_and_kind_of_norm_is_tried():
    models = list(map(small, MODELS))
    assert {change.name for model in models for change in model.changes} == set(REGISTRY)
    made = {type(module) for model in models for module in model.modules()}
    assert {kind.module for kind in kinds().values()} <= made


def run(graph, model, images):
    """Checks that ONNX Runtime computes what the model does."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    (actual,) = session.run(["logits"], {"images": images.numpy()})
    expected = model(images).detach().numpy()
    assert np.abs(actual - expected).max() <= 3e-4 * np.abs(expected).max()


@every_model
def test_onnx_runtime_computes_the_same(arm, tmp_path):
    model, path = small(arm), tmp_path / "model.onnx"
    assert vm.export(model, path) <= 1e-4
    run(path, model, torch.randn(7, 3, 8, 8))
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arm", [pytest.param(arm, marks=[pytest.mark.long] * (0 < number < 4)) for number, arm in enumerate(MODELS)]
)
def test_the_older_onnx_exporter(arm):
    """With trained weights: this exporter merges equal parameters, as untrained norms have them, and loses some."""
    model, images, graph = small(arm), torch.randn(7, 3, 8, 8), io.BytesIO()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name and "weight" in name), 0.1)
    torch.onnx.export(model, (images,), graph, dynamo=False, input_names=["images"], output_names=["logits"])
    run(graph.getvalue(), model, images)


def test_optimized_models_and_a_fixed_batch(tmp_path):
    model = vm.optimize_for_inference(small("dpn+layerscale"))
    vm.export(model, tmp_path / "m.onnx", batch=2)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [2, 3, 8, 8]


def test_torch_program(tmp_path):
    model = small("dtn(blocks=1)")
    assert vm.export(model, tmp_path / "m.pt2") <= 1e-5
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(images), model(images))


@every_model
def test_every_change_goes_through_safetensors(arm, tmp_path):
    model = small(arm)
    assert vm.export(model, tmp_path / "m.safetensors") == 0
    again = adapters.load(tmp_path / "m.safetensors")
    assert again.vit_config == model.vit_config
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert "none missing" in str(adapters.coverage(tmp_path / "m.safetensors"))


@pytest.mark.parametrize(
    ("name", "options", "prepare", "message"),
    [
        ("m.tflite", {}, vm.ViT.eval, "end the name"),
        ("m.bin", {"to": "onx"}, vm.ViT.eval, "onnx"),
        ("m.onnx", {"batch": 0}, vm.ViT.eval, "batch"),
        ("m.safetensors", {"batch": 3}, vm.ViT.eval, "any batch"),
        ("m.onnx", {}, vm.ViT.train, "eval"),
        ("m.onnx", {}, vm.ViT.bfloat16, "float32"),
    ],
)
def test_bad_requests(name, options, prepare, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vm.export(prepare(small()), tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_when_the_new_file_is_wrong(tmp_path, monkeypatch):
    path = tmp_path / "m.pt2"
    path.write_text("old")
    monkeypatch.setitem(import_module("vitmods.fast.export").TOLERANCE, "float32", -1.0)
    with pytest.raises(UserError, match="outputs differ"):
        vm.export(small(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"]


def without_head(data):
    weights = safetensors.torch.load(data)
    weights.pop("head.weight")
    return safetensors.torch.save(weights, {"vitmods_config": small().vit_config.to_json()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda data: b"\xff" * 8 + data[8:], "damaged"), (without_head, r"head\.weight")],
    ids=["hostile header", "missing tensor"],
)
def test_damaged_safetensors_are_refused(damage, message, tmp_path):
    path = tmp_path / "m.safetensors"
    vm.export(small(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        adapters.load(path)
