"""Weights from outside are tensors: no reader runs the code that a pickle in their place holds."""

import json
import pickle
import shutil

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import vitmods as vm
from vitmods.adapters import load, open_checkpoint
from vitmods.study.checkpoints import arms_in
from vitmods.util.errors import UserError


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def timm_folder(folder):
    name, sizes = "vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 48}
    model = timm.create_model(name, num_classes=5, **sizes).eval()
    record = {"num_classes": 5, "input_size": [3, 32, 32], "fixed_input_size": True, "first_conv": "patch_embed.proj"}
    config = {"architecture": name, "num_classes": 5, "model_args": sizes, "pretrained_cfg": record}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model


def hugging_face_folder(folder):
    pytest.importorskip("transformers")
    vm.adapters.to_huggingface(vm.vit("mu/8", img_size=32, num_classes=5)).save_pretrained(folder)


def trial_folder(folder):
    config = vm.vit("mu/8", img_size=32, num_classes=5).vit_config.to_json()
    (folder / "config.json").write_text(json.dumps({"model": json.loads(config)}))


FOLDERS = {"timm": timm_folder, "hugging face": hugging_face_folder, "trial": trial_folder, "no config": lambda _: None}
WRITERS = {
    "pickle": lambda evil, path: path.write_bytes(pickle.dumps(evil, protocol=2)),
    "zip": lambda evil, path: torch.save({"state_dict": {"cls_token": torch.zeros(1)}, "more": evil}, path),
    "legacy": lambda evil, path: torch.save(evil, path, _use_new_zipfile_serialization=False),
}


@pytest.fixture
def mark(tmp_path):
    path = tmp_path / "mark"
    yield path
    assert not path.exists(), "the pickle was run"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of each kind without their weights."""
    made = {kind: tmp_path_factory.mktemp("folder") for kind in FOLDERS}
    for kind, folder in made.items():
        FOLDERS[kind](folder)
        for weights in [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            weights.unlink()
    return made


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_with_a_pickle_is_refused(folders, tmp_path, mark, kind, writer, name):
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    WRITERS[writer](Evil(mark), folder / name)
    for read in (load, lambda path: open_checkpoint(str(path)), vm.adapters.coverage):
        with pytest.raises(UserError, match=name):
            read(folder)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("ending", ["pth", "pt", "ckpt", "bin", "safetensors", "npz"])
def test_a_file_with_a_pickle_is_refused(tmp_path, mark, writer, ending):
    path = tmp_path / f"weights.{ending}"
    WRITERS[writer](Evil(mark), path)
    with pytest.raises(UserError, match=path.name):
        load(path)
    arms_in(str(path))


def test_timm_is_never_given_a_file_to_open(tmp_path, monkeypatch):
    """Whatever timm's default is: versions before 1.0.26 open a .bin with all that it holds."""
    model = timm_folder(tmp_path)
    assert (tmp_path / "pytorch_model.bin").is_file()
    for name in ("_hub", "_builder"):
        monkeypatch.delattr(f"timm.models.{name}.load_state_dict_from_path")
    read = load(tmp_path)
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(read(images), model(images), rtol=0, atol=1e-5)
    assert "state_dict" not in read.pretrained_cfg


@pytest.mark.parametrize("record", ["[" * 100_000, '{"embed_dim":' * 50_000, '{"embed_dim": 64, "qk_norm": [1, 2]}'])
def test_metadata_that_is_no_config_is_refused(tmp_path, record):
    path = tmp_path / "model.safetensors"
    save_file({"cls_token": torch.zeros(1, 1, 64)}, path, {"vitmods_config": record})
    with pytest.raises(UserError, match=r"model\.safetensors|ViTConfig"):
        load(path)


def test_an_npz_that_unpacks_to_much_more_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(2**24, np.float32))
    with pytest.raises(UserError, match="would unpack to"):
        load(tmp_path / "bomb.npz")
