"""Files and folders with weights: what is written comes back, and damaged or hostile ones are refused."""

import errno
import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import vitmods as vm
from vitmods.adapters import huggingface, load, open_checkpoint, save
from vitmods.util.errors import UserError

IMAGES = torch.rand(2, 3, 32, 32)


@pytest.fixture
def timm_folder(tmp_path):
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, drop_path_rate=0.1).eval()
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    save_for_hf(model, str(tmp_path / "timm"), model_args={"img_size": 32, "depth": 2}, safe_serialization=True)
    return model, tmp_path / "timm"


def test_a_folder_of_timm_gives_its_model_and_pixels(timm_folder):
    model, folder = timm_folder
    converted = open_checkpoint(str(folder))
    torch.testing.assert_close(converted(IMAGES), model(IMAGES), rtol=0, atol=1e-5)
    assert tuple(converted.pretrained_cfg["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(converted.pretrained_cfg["std"]) == (0.4, 0.5, 0.6)


def test_folders_of_timm_that_cannot_be_read(timm_folder):
    _, folder = timm_folder
    config, weights = folder / "config.json", next(folder.glob("*.safetensors"))
    written = config.read_text()
    config.write_text(json.dumps({**json.loads(written), "architecture": "no_such_vit"}))
    with pytest.raises(UserError, match="no_such_vit"):
        load(folder)
    config.write_text(written)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        load(folder)


@pytest.fixture
def hugging_face_folder(tmp_path):
    pytest.importorskip("transformers")
    vm.adapters.to_huggingface(vm.vit("mu/8", img_size=32, num_classes=5)).save_pretrained(tmp_path)
    return tmp_path


def test_mean_and_std_come_from_the_preprocessor_unless_pixels_are_not_normalized(hugging_face_folder):
    record = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "rescale_factor": 1 / 255}
    (hugging_face_folder / "preprocessor_config.json").write_text(json.dumps(record))
    model = load(hugging_face_folder)
    assert model.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)
    assert model.pretrained_cfg["std"] == (0.229, 0.224, 0.225)
    (hugging_face_folder / "preprocessor_config.json").write_text('{"do_normalize": false}')
    cfg = load(hugging_face_folder).pretrained_cfg
    assert (cfg["mean"], cfg["std"]) == ((0.0,) * 3, (1.0,) * 3)


def test_names_of_classes_come_from_the_config(hugging_face_folder):
    path = hugging_face_folder / "config.json"
    record = json.loads(path.read_text())
    count = load(hugging_face_folder).vit_config.num_classes
    for named in ({str(k): f"class {k}" for k in range(count)}, {"0": "a"}):
        path.write_text(json.dumps({**record, "id2label": named}))
        label_names = load(hugging_face_folder).pretrained_cfg.get("label_names")
        assert label_names == (tuple(named.values()) if len(named) == count else None)


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
    path = hugging_face_folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
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


@pytest.mark.parametrize("pixels", ["3", '{"mean": 3}', '{"mean": ["a"]}', "{"])
def test_pixels_that_are_none(tmp_path, pixels):
    model = small()
    metadata = {"vitmods_config": model.vit_config.to_json(), "vitmods_pixels": pixels}
    save_file(model.state_dict(), tmp_path / "m.safetensors", metadata=metadata)
    with pytest.raises(UserError, match="may be damaged"):
        load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"depth": 10**9}, "more blocks than the file has tensors"),
        ({"embed_dim": 1 << 20}, "shapes do not fit"),
        ({"img_size": [1 << 20, 1 << 20]}, "shapes do not fit"),
        ({"embed_dim": 10**13, "mlp_dim": 10**13}, "embed_dim of a ViTConfig is a whole number below"),
        ({"depth": 2.5}, "depth of a ViTConfig is a whole number"),
        ({"embed_dim": "a"}, "embed_dim of a ViTConfig is a whole number"),
        ({"attn": None}, "attn of a ViTConfig is BranchConfig"),
        ({"stem": {"kind": "hmlp", "inner": 5}}, "inner of a StemConfig is NormConfig or None"),
        ({"stem": {"kind": "evil"}}, "Unknown stem 'evil'"),
        ({"bogus": 1}, "does not have a setting 'bogus'"),
    ],
    ids=str,
)
def test_configs_that_do_not_belong_to_the_weights(tmp_path, edit, words):
    model = small()
    config = json.dumps({**json.loads(model.vit_config.to_json()), **edit})
    save_file(model.state_dict(), tmp_path / "m.safetensors", metadata={"vitmods_config": config})
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
