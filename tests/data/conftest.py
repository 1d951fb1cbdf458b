"""Small image folders made on the spot."""

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
