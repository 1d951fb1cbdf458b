"""Folders of small images, and the study that the Python call of a report makes."""

import numpy as np
import pytest
from PIL import Image

from vitmods.study.run import python_call


@pytest.fixture(scope="session")
def draw_images():
    def draw(root, splits, classes=("cat", "dog"), count=3, size=(8, 8, 3)):
        rng = np.random.default_rng(0)
        for folder in (root / split / name for split in splits for name in classes):
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / f"{number}.png")
        return root

    return draw


@pytest.fixture(scope="session")
def settings_of_call():
    """Settings of the study that `python_call` writes: those of `study`, if the call is complete."""

    def settings(study):
        call, names = python_call(study.settings, "runs/a b"), {}
        assert call.endswith(".run('runs/a b')")
        exec(call.replace("vm.Study(", "study = vm.Study(").removesuffix(".run('runs/a b')"), names)
        return names["study"].settings

    return settings
