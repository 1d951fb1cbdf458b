"""Models that were changed in place as folders: what is written is opened again, and other files are refused."""

import functools
import json
import os
import pickle
import shutil

import pytest
import timm
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import vitmods as vm
from vitmods.study.checkpoints import Checkpoint
from vitmods.util.errors import UserError

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
HF = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
EVERY = "norm(kind=rms,exact=false)+layerscale(init=0.5)+qknorm+dpn+normformer"


def own(num_classes, img_size, in_chans):
    return timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, img_size=img_size, **TINY)


MODELS = {
    "timm vit": (lambda: own(3, 32, 3), "timm:vit_tiny_patch16_224?embed_dim=32&depth=2&num_heads=2&patch_size=8"),
    "timm named": (lambda: timm.create_model("test_vit", num_classes=3), None),
    "function": (lambda: own(3, 32, 3), own),
    "hf dinov2": (lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**HF, num_labels=3)), None),
    "hf vit": (lambda: hf.ViTModel(hf.ViTConfig(**HF, intermediate_size=64)), None),
    "hf bert": (lambda: hf.BertModel(hf.BertConfig(**TEXT)), None),
}


@torch.no_grad()
def changed(name, text=EVERY):
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    model = vm.apply(model, *vm.parse_changes(text), in_place=True)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def output_of(model):
    torch.manual_seed(0)
    side = getattr(getattr(model, "patch_embed", None), "img_size", (32, 32))
    output = model(torch.arange(8)[None] if isinstance(model, hf.BertModel) else torch.randn(2, 3, *side))
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """write(name, text, folder): the folder of a changed model, which is made once."""

    @functools.cache
    def made(name, text):
        folder = tmp_path_factory.mktemp("written")
        vm.save_pretrained(changed(name, text), folder, base=MODELS[name][1])
        return folder

    return lambda name, text, folder: shutil.copytree(made(name, text), folder)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_opened_again(name, tmp_path):
    text = {"hf bert": EVERY.replace("+dpn", ""), "timm named": "layerscale(init=0.5)+dpn"}  # which is large
    model = changed(name, text.get(name, EVERY))
    vm.save_pretrained(model, tmp_path / "model", base=MODELS[name][1])
    again = vm.from_pretrained(tmp_path / "model")
    assert type(again) is type(model)
    assert not again.training
    assert again.vm_changes == model.vm_changes
    assert again.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(output_of(again), output_of(model), rtol=0, atol=0)
    twice = vm.apply(again, *vm.parse_changes("subln(rescale=false)"), in_place=True)  # and is changed further
    torch.testing.assert_close(output_of(pickle.loads(pickle.dumps(twice))), output_of(twice))
    vm.save_pretrained(twice, tmp_path / "twice", base=MODELS[name][1])
    torch.testing.assert_close(output_of(vm.from_pretrained(tmp_path / "twice")), output_of(twice), rtol=0, atol=0)
    if name != "hf bert":
        checkpoint = Checkpoint.open(str(tmp_path / "model"))
        assert (checkpoint.settings["in_chans"], type(checkpoint.model)) == (3, type(model))


def test_the_config_of_hugging_face_keeps_the_changes(tmp_path):
    model = changed("hf dinov2")
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["vitmods_changes"]
    assert [entry["change"] for entry in written] == list(map(str, model.vm_changes))
    torch.testing.assert_close(output_of(vm.from_pretrained(tmp_path)), output_of(model), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"vm\.from_pretrained opens it"):
        vm.adapters.load(tmp_path)


@pytest.mark.parametrize("text", ["norm(kind=rms,exact=false)", "layerscale(init=0.3)+qknorm"])
def test_what_timms_arguments_express_is_a_model_of_timm_alone(text, tmp_path):
    model = changed("timm vit", text)
    vm.save_pretrained(model, tmp_path, base=MODELS["timm vit"][1])
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert not hasattr(again, "vm_changes")
    torch.testing.assert_close(output_of(again), output_of(model), rtol=0, atol=1e-5)
    arguments = json.loads((tmp_path / "config.json").read_text())["model_args"]
    named = timm.create_model("vit_tiny_patch16_224", **arguments)
    named.load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_a_model_without_its_origin_or_of_another_is_not_written(tmp_path):
    model = changed("timm vit", "layerscale")
    with pytest.raises(UserError, match=r"another model.* Give base= with the options"):
        vm.save_pretrained(model, tmp_path)
    assert not (tmp_path / "vitmods.json").exists()
    with pytest.raises(UserError, match="without its origin: give base="):
        vm.save_pretrained(vm.apply(torchvision_vit(), vm.LayerScale(), in_place=True), tmp_path)
    with pytest.raises(UserError, match=r"vm\.save_pretrained writes"):
        vm.adapters.save(model, tmp_path / "model.safetensors")


def torchvision_vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=3)


def other_shape(folder):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "vm_" in name or "ls1" in name or "layer_scale" in name)
    save_file({**weights, name: torch.zeros(5)}, folder / "model.safetensors", {"format": "pt"})


def without_one(folder):
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if "vm_" in name)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def pickled(folder):
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [other_shape, without_one, cut, pickled])
@pytest.mark.parametrize("name", ["timm vit", "hf dinov2"])
def test_damaged_weights_are_refused(name, damage, write, tmp_path):
    folder = write(name, EVERY, tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=r"cannot be read|other weights|do not fit|missing"):
        vm.from_pretrained(folder)


def with_branch(record, count=1, **values):
    parts = record[0]["parts"]
    return [{**record[0], "parts": {**parts, "branches": [{**parts["branches"][0], **values}] * count}}]


RECORDS = {
    "no list": lambda record: 3,
    "no change": lambda record: [{}],
    "unknown change": lambda record: [{**record[0], "change": "antigravity"}],
    "a function": lambda record: [{**record[0], "change": "python(os:abort)"}],
    "another module": lambda record: with_branch(record, module="nowhere"),
    "huge": lambda record: with_branch(record, dim=10**12),
    "large": lambda record: with_branch(record, 200, dim=10**6),
}


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("name", ["timm vit", "hf dinov2"])
def test_damaged_records_are_refused_before_anything_is_run(name, kind, write, tmp_path):
    folder = write(name, "normformer", tmp_path / "model")
    file, key = {"hf": ("config.json", "vitmods_changes"), "ti": ("vitmods.json", "insertions")}[name[:2]]
    content = json.loads((path := folder / file).read_text())
    path.write_text(json.dumps({**content, key: RECORDS[kind](content[key])}))
    with pytest.raises(UserError):
        vm.from_pretrained(folder)


def indexed(names):
    """Weights in several files, by an index with other names."""

    def harm(folder):
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        files = dict(zip(weights, names * len(weights), strict=False))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    return harm


def with_file(name, **content):
    return lambda folder: (folder / name).write_text(json.dumps(content))


def with_config(**values):
    def harm(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return harm


def many_changes(folder):
    with_config(vitmods_changes=json.loads((folder / "config.json").read_text())["vitmods_changes"] * 101)(folder)


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


OUTSIDE = {
    "an adapter": (with_file("adapter_config.json", peft_type="LORA", r=10**6, target_modules=["query"]), "an adapter"),
    "weights of an adapter": (with_file("adapter_model.safetensors"), "an adapter"),
    "a file above": (indexed(["../outside.safetensors"]), "is not a file of weights in it"),
    "a path": (indexed(["/etc/passwd"]), "is not a file of weights in it"),
    "a path of Windows": (indexed(["..\\\\outside.safetensors"]), "is not a file of weights in it"),
    "escapes": (indexed(["\x1b[31m.safetensors"]), r"names '\\+x1b\[31m"),
    "a missing file": (indexed(["model-1.safetensors"]), "cannot be read"),
    "no names": (indexed([3]), "cannot be read"),
    "a pipe": (pipe, "cannot be read"),
    "quantization": (with_config(quantization_config={"quant_method": "awq"}), "asks for quantization"),
    "101 changes": (many_changes, "lists more than 100"),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_folder_of_hugging_face_reaches_nothing_outside_of_it(kind, write, tmp_path):
    folder, (harm, reason) = write("hf vit", "layerscale(init=0.5)", tmp_path / "model"), OUTSIDE[kind]
    harm(folder)
    with pytest.raises(UserError, match=reason) as refused:
        vm.from_pretrained(folder)
    assert "\x1b" not in str(refused.value)


def test_weights_in_several_files_are_read(tmp_path):
    model = changed("hf vit")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    torch.testing.assert_close(output_of(vm.from_pretrained(tmp_path)), output_of(model), rtol=0, atol=0)
    for name, path in {path.name: path for path in tmp_path.glob("model-*")}.items():  # as in the Hub's cache
        path.rename(tmp_path / f"blob {name}")
        path.symlink_to(f"blob {name}")
    half = vm.from_pretrained(tmp_path).half()
    half.save_pretrained(tmp_path / "half")
    assert {value.dtype for value in vm.from_pretrained(tmp_path / "half").parameters()} == {torch.float16}
