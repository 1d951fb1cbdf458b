"""Corruptions as users call them: the same in any batch and at any time; bad input."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vitmods.papers.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, check_corruptions, corrupt
from vitmods.papers.corruptions.functions import FILES
from vitmods.util.errors import UserError

from .corruption_images import images as source_images
from .corruption_images import photographs

ALL = CORRUPTIONS + EXTRA
RANDOM = [name for name in ALL if name not in (
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate"
)]  # fmt: skip


def eight(side):
    """Eight different images."""
    three = source_images(side)
    return torch.cat([three, three.flip(3), three.roll(9, 2)[:2]])


@pytest.mark.parametrize("side", [32, 224])
@pytest.mark.parametrize("name", ALL)
def test_an_image_does_not_depend_on_its_batch(textures, name, side):
    images, index = eight(side), torch.tensor([5, 0, 3, 900, 7, 8, 11, 2])
    kept = images.clone()
    severity = 1 + (ALL.index(name) + side // 32) % 5
    together = corrupt(images, name, severity, seed=3, index=index, textures=textures)
    assert together.shape == images.shape
    assert together.dtype == torch.uint8
    assert together.is_contiguous()
    assert torch.equal(images, kept)
    for i in (0, 3, 6) if side < 224 else (5,):
        alone = corrupt(images[i : i + 1], name, severity, seed=3, index=index[i : i + 1].numpy(), textures=textures)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("name", ALL)
def test_draws_differ_by_index_and_seed_where_there_are_any(textures, name):
    images = source_images(64)[:1].expand(2, -1, -1, -1)

    def done(seed, index):
        return corrupt(images, name, 2, seed=seed, index=np.array(index), textures=textures)

    first = done(0, [4, 5])
    assert not torch.equal(first, images)
    assert torch.equal(first, done(0, [4, 5]))
    assert torch.equal(done(0, [5, 4]), first.flip(0))
    assert torch.equal(first[0], first[1]) == (name not in RANDOM)
    assert torch.equal(done(1, [4, 5])[0], first[0]) == (name not in RANDOM)
    none = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    assert corrupt(none, name, 1, seed=0, index=np.arange(0), textures=textures).shape == (0, 3, 32, 32)


def test_severities_have_noise_of_their_own():
    gray = torch.full((1, 3, 64, 64), 128, dtype=torch.uint8)
    weak, two = (corrupt(gray, "gaussian_noise", s, seed=0, index=np.array([0])).double() - 128 for s in (1, 2))
    assert abs(np.corrcoef(weak.flatten(), two.flatten())[0, 1]) < 0.05


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 9, 200), (3, 200, 11), (1, 28, 28)], ids=str)
def test_small_long_and_gray_images(textures, name, shape):
    if name == "saturate" and shape[0] == 1:
        pytest.skip("refused, see below")
    images = torch.randint(0, 256, (2, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for severity in (1, 5):
        done = corrupt(images, name, severity, seed=0, index=np.arange(2), textures=textures)
        assert done.shape == images.shape
        if (name, severity, min(shape[1:])) != ("zoom_blur", 1, 8):  # an eighth of 8 pixels is less than one
            assert not torch.equal(done, images)


IMAGE = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "severity", "images", "words"),
    [
        ("gausian_noise", 1, IMAGE, "Did you mean 'gaussian_noise'"),
        ("jpeg", 1, IMAGE, "jpeg_compression"),
        ("fog", 0, IMAGE, "from 1 to 5, not 0"),
        ("fog", 6, IMAGE, "not 6"),
        ("fog", True, IMAGE, "not True"),
        ("fog", 2.5, IMAGE, "not 2.5"),
        ("fog", 1, IMAGE.float(), "uint8"),
        ("fog", 1, IMAGE[0], r"\(3, 32, 32\)"),
        ("fog", 1, IMAGE.expand(1, 3, 32, 32)[:, :2], "1 or 3 channels"),
        ("fog", 1, IMAGE[..., :7], "at least 8 pixels"),
        ("fog", 1, torch.cat([IMAGE, IMAGE]), "2 images came with 1 indices"),
        ("saturate", 1, IMAGE[:, :1], "needs color"),
    ],
)
def test_bad_input_has_one_clear_error(name, severity, images, words):
    with pytest.raises(UserError, match=words):
        corrupt(images, name, severity, seed=0, index=np.arange(1))


def test_frost_says_which_files_go_where_and_which_is_broken(tmp_path, textures, monkeypatch):
    monkeypatch.delenv("VITMODS_FROST", raising=False)
    check_corruptions([name for name in ALL if name != "frost"])
    with pytest.raises(
        UserError, match=r"a folder with frost1.png, frost2.png.*, named by textures .* or VITMODS_FROST"
    ):
        check_corruptions(ALL)
    (tmp_path / "frost2.png").write_bytes(b"")
    with pytest.raises(UserError, match=f"cannot find frost1.png, frost3.png, frost4.jpg, frost5.jpg in {tmp_path}"):
        check_corruptions(["frost"], textures=tmp_path)
    with pytest.raises(UserError, match=r"cannot find frost1\.png"):
        corrupt(IMAGE, "frost", 1, seed=0, index=np.arange(1), textures=tmp_path)
    monkeypatch.setenv("VITMODS_FROST", str(textures))
    check_corruptions(ALL)
    assert corrupt(IMAGE, "frost", 1, seed=0, index=np.arange(1)).any()
    for name in FILES:
        (tmp_path / name).write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"frost1.png cannot be read .* Copy it anew"):
        corrupt(IMAGE, "frost", 1, seed=0, index=np.arange(1), textures=tmp_path)


@pytest.fixture
def real_textures():
    packed = os.environ.get("VITMODS_DATA")
    folder = Path(packed or "") / "frost_textures"
    if not packed or not folder.is_dir():
        pytest.skip("VITMODS_DATA does not name a folder with frost_textures")
    return folder


@pytest.mark.parametrize("side", [32, 64, 224])
def test_frost_with_the_published_textures(real_textures, side):
    """At different places of five textures; it brightens, turns blue, and does more harm at every severity."""
    clean = photographs(side).repeat(12, 1, 1, 1)
    arguments = {"seed": 0, "index": np.arange(24), "textures": real_textures}
    done = torch.stack([corrupt(clean, "frost", severity, **arguments) for severity in SEVERITIES]).double()
    errors = (done - clean).square().mean((1, 2, 3, 4)).tolist()
    assert errors == sorted(errors)
    means = done[4].mean((0, 2, 3)) - clean.double().mean((0, 2, 3))
    assert 20 < means[0] < means[2]
    assert len({round(float(p.mean()), 4) for p in done[4]}) == 24
