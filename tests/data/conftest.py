"""Small image folders made on the spot."""

import json

import numpy as np
import pytest

from .support import noise


@pytest.fixture
def make_folder(tmp_path):
    """make_folder({"cat": 5, "dog": 4}) -> a folder with so many PNG files of each class, all different."""

    def make(classes, under="pets", size=(12, 12), seed=0):
        root = tmp_path / under
        for c, (name, count) in enumerate(classes.items()):
            (root / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                noise(seed + 1000 * c + i, size).save(root / name / f"{i:03d}.png")
        return root

    return make


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test touches the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return tmp_path / "user-cache" / "vitmods"


def images_of_shard(folder, shard):
    """Name, label, offset and size of each image of a packed shard, in the order of the shard."""
    splits = json.loads((folder / "manifest.json").read_text())["splits"].values()
    number = [entry["file"] for facts in splits for entry in facts["shards"]].index(shard)
    with np.load(folder / "index.npz") as index:
        names, rows = index["names"].tobytes().decode().split("\0"), index["rows"]
    columns = (rows[name].tolist() for name in ("label", "offset", "size"))
    images = zip(names, *columns, strict=True)
    return [image for image, in_shard in zip(images, rows["shard"] == number, strict=True) if in_shard]


@pytest.fixture
def packed_images():
    return images_of_shard
