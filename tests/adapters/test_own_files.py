"""Files of our own: what goes with the weights comes back, and damaged or hostile ones are refused before they cost."""

import errno
import json

import pytest
from safetensors.torch import save_file

import vitmods as vm
from vitmods.adapters import load, open_checkpoint, save
from vitmods.util.errors import UserError


def small(**fields):
    return vm.vit("mu2/4", img_size=16, num_classes=5, **fields).eval()


def test_mean_and_std_of_the_images_go_along(tmp_path):
    model = small()
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    save(model, tmp_path / "m.safetensors")
    found = open_checkpoint(str(tmp_path / "m.safetensors")).pretrained_cfg
    assert (found["mean"], found["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


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
        ({"stem": {"kind": "evil"}}, "There is no stem 'evil'"),
        ({"bogus": 1}, "no setting 'bogus'"),
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
    found = load(tmp_path)
    assert (found.pretrained_cfg["mean"], found.pretrained_cfg["std"]) == ((0.4,), (0.3,))
    record["model"]["depth"] = 1
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"without a place here: blocks\.\*"):
        load(tmp_path)
