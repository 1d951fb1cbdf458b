"""Folders that timm and Hugging Face write: the model, and the mean and std of its pixels."""

import json

import pytest
import timm
import torch

import vitmods as vm
from vitmods.adapters import huggingface, load, open_checkpoint
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
    ours = open_checkpoint(str(folder))
    torch.testing.assert_close(ours(IMAGES), model(IMAGES), rtol=0, atol=1e-5)
    assert tuple(ours.pretrained_cfg["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(ours.pretrained_cfg["std"]) == (0.4, 0.5, 0.6)


def test_a_folder_of_timm_with_another_architecture_is_named(timm_folder):
    _, folder = timm_folder
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, "architecture": "no_such_vit"}))
    with pytest.raises(UserError, match="no_such_vit"):
        load(folder)


def test_truncated_weights_of_timm_are_an_error(timm_folder):
    _, folder = timm_folder
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        load(folder)


@pytest.fixture
def hugging_face_folder(tmp_path):
    pytest.importorskip("transformers")
    vm.adapters.to_huggingface(vm.vit("mu/8", img_size=32, num_classes=5)).save_pretrained(tmp_path)
    return tmp_path


def test_mean_and_std_come_from_the_preprocessor(hugging_face_folder):
    record = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "rescale_factor": 1 / 255}
    (hugging_face_folder / "preprocessor_config.json").write_text(json.dumps(record))
    model = load(hugging_face_folder)
    assert model.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)
    assert model.pretrained_cfg["std"] == (0.229, 0.224, 0.225)


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


def test_pixels_that_are_not_normalized_have_mean_0_and_std_1(hugging_face_folder):
    (hugging_face_folder / "preprocessor_config.json").write_text('{"do_normalize": false}')
    cfg = load(hugging_face_folder).pretrained_cfg
    assert (cfg["mean"], cfg["std"]) == ((0.0,) * 3, (1.0,) * 3)
