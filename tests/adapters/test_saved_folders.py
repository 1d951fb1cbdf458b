"""Files and folders with weights: what is written comes back, and damaged or hostile ones are refused."""

import errno
import json
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

import vitmods as vm
from vitmods.adapters import huggingface, load, open_checkpoint, save
from vitmods.util.errors import UserError

IMAGES = torch.rand(2, 3, 32, 32)


def test_a_folder_of_timm_gives_its_model_and_pixels_or_says_what_is_wrong(tmp_path):
    sizes = {"img_size": 32, "depth": 2, "embed_dim": 48, "init_values": 0.1}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, drop_path_rate=0.1, **sizes).eval()
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    save_for_hf(model, str(tmp_path), model_args=sizes, safe_serialization=True)
    converted = open_checkpoint(str(tmp_path))
    torch.testing.assert_close(converted(IMAGES), model(IMAGES), rtol=0, atol=1e-5)
    assert tuple(converted.pretrained_cfg["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(converted.pretrained_cfg["std"]) == (0.4, 0.5, 0.6)

    config, weights = tmp_path / "config.json", next(tmp_path.glob("*.safetensors"))
    written = config.read_text()
    config.write_text(json.dumps({**json.loads(written), "architecture": "no_such_vit"}))
    with pytest.raises(UserError, match="no_such_vit"):
        load(tmp_path)
    config.write_text(written)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hugging_face")
    vm.adapters.to_huggingface(vm.vit("mu/8", img_size=32, num_classes=5)).save_pretrained(folder)
    return folder


@pytest.fixture
def hugging_face_folder(hugging_face, tmp_path):
    return shutil.copytree(hugging_face, tmp_path, dirs_exist_ok=True)


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_pixels_come_from_the_preprocessor_and_names_of_classes_from_the_config(hugging_face_folder):
    record = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "rescale_factor": 1 / 255}
    preprocessor = hugging_face_folder / "preprocessor_config.json"
    preprocessor.write_text(json.dumps(record))
    cfg = load(hugging_face_folder).pretrained_cfg
    assert (cfg["mean"], cfg["std"]) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    preprocessor.write_text('{"do_normalize": false}')
    cfg = load(hugging_face_folder).pretrained_cfg
    assert (cfg["mean"], cfg["std"]) == ((0.0,) * 3, (1.0,) * 3)
    for named, expected in (({str(k): f"class {k}" for k in range(5)}, 5), ({"0": "a"}, None)):
        edit(hugging_face_folder / "config.json", id2label=named)
        label_names = load(hugging_face_folder).pretrained_cfg.get("label_names")
        assert label_names == (expected and tuple(named.values()))


ODD = [
    *(("hidden_act", value) for value in ([], {}, "relu", None)),
    *(("layer_norm_eps", value) for value in ("x", [], None, 10**400)),
    *(("attention_probs_dropout_prob", value) for value in (None, [[1]], "x")),
    *(("id2label", value) for value in (True, [[1]], "x", 3)),
    *(("num_hidden_layers", value) for value in (100_000, 4_000, "1", None, [])),
    *(("hidden_size", value) for value in (10**400, None, -1)),
    *(("model_type", value) for value in ([], None)),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_a_config_of_hugging_face_that_cannot_be_followed_is_an_error(name, value, hugging_face_folder, monkeypatch):
    monkeypatch.setattr(huggingface, "rows_of", lambda *_: pytest.fail("a table of all blocks is made"))
    edit(hugging_face_folder / "config.json", **{name: value})
    with pytest.raises(UserError, match=r"cannot be read|limit|fit|whole|has to|Not covered|positive|depth|embed_dim"):
        load(hugging_face_folder)


@pytest.mark.parametrize(
    ("record", "word"), [("{", "cannot be read"), ('{"rescale_factor": 1}', "0, 1"), ('{"image_mean": 3}', "cannot")]
)
def test_a_preprocessor_that_cannot_be_followed_is_an_error(hugging_face_folder, record, word):
    (hugging_face_folder / "preprocessor_config.json").write_text(record)
    with pytest.raises(UserError, match=word):
        load(hugging_face_folder)


def small(**fields):
    return vm.vit("mu2/4", img_size=16, num_classes=5, **fields).eval()


def test_mean_and_std_of_the_images_go_along(tmp_path):
    model = small()
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    save(model, tmp_path / "m.safetensors")
    loaded = open_checkpoint(str(tmp_path / "m.safetensors")).pretrained_cfg
    assert (loaded["mean"], loaded["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize(
    ("config", "pixels", "words"),
    [
        *(({}, pixels, "may be damaged") for pixels in ("3", '{"mean": 3}', '{"mean": ["a"]}', "{")),
        ({"depth": 10**9}, None, "more blocks than the file has tensors"),
        ({"embed_dim": 1 << 20}, None, "shapes do not fit"),
        ({"img_size": [1 << 20, 1 << 20]}, None, "shapes do not fit"),
        ({"embed_dim": 10**13, "mlp_dim": 10**13}, None, "embed_dim of a ViTConfig is a whole number below"),
        ({"depth": 2.5}, None, "depth of a ViTConfig is a whole number"),
        ({"embed_dim": "a"}, None, "embed_dim of a ViTConfig is a whole number"),
        ({"attn": None}, None, "attn of a ViTConfig is BranchConfig"),
        ({"stem": {"kind": "hmlp", "inner": 5}}, None, "inner of a StemConfig is NormConfig or None"),
        ({"stem": {"kind": "evil"}}, None, "Unknown stem 'evil'"),
        ({"bogus": 1}, None, "does not have a setting 'bogus'"),
    ],
    ids=str,
)
def test_metadata_that_do_not_belong_to_the_weights(tmp_path, config, pixels, words):
    model = small()
    metadata = {"vitmods_config": json.dumps({**json.loads(model.vit_config.to_json()), **config})}
    if pixels is not None:
        metadata["vitmods_pixels"] = pixels
    save_file(model.state_dict(), tmp_path / "m.safetensors", metadata=metadata)
    with pytest.raises(UserError, match=words):
        load(tmp_path / "m.safetensors")  # without making anything of that size, or it would be a MemoryError


@pytest.mark.parametrize(
    ("name", "fields"), [("m.safetensors", {}), ("m.pth", {}), ("m.npz", {"activation": "gelu_tanh"})]
)
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, name, fields):
    path, model = tmp_path / name, small(**fields)
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        save(model, path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == [name]
    monkeypatch.undo()
    save(model, path)
    assert load(path, **({"num_heads": 2} if name == "m.pth" else {})).vit_config.embed_dim == 32


@pytest.mark.parametrize("source", ["S/16", "timm:no_such", "hf:folder"])
def test_names_without_weights_are_no_checkpoints(source):
    with pytest.raises(UserError, match=f"There is no checkpoint '{source}'"):
        open_checkpoint(source)


def test_a_trials_config_says_what_the_weights_are(tmp_path):
    model = small()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    record = {"model": json.loads(model.vit_config.to_json()), "recipe": {"augment": {"mean": [0.4], "std": [0.3]}}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    loaded = load(tmp_path)
    assert (loaded.pretrained_cfg["mean"], loaded.pretrained_cfg["std"]) == ((0.4,), (0.3,))
    record["model"]["depth"] = 1
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"without a place here: blocks\.\*"):
        load(tmp_path)
