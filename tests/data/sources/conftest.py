"""Images, tars and ImageNet layouts of a few small files."""

import io
import tarfile

import numpy as np
import pytest
import scipy.io
from PIL import Image

from vitmods.papers.sources.imagenet import wnids


@pytest.fixture
def jpeg():
    """jpeg(7) -> the bytes of an image that no other number gives."""

    def make(number):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        return file.getvalue()

    return make


def _write_files(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def _write_tar(path, files, mode="w"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def write_files():
    return _write_files


@pytest.fixture
def write_tar():
    return _write_tar


@pytest.fixture
def write_devkit():
    """write_devkit(root, classes): ILSVRC2012_devkit_t12.tar.gz, which says that validation image i is of class
    classes[i - 1]; its own numbers count the classes backwards, and it lists groups of classes too."""

    def write(root, classes):
        fields = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "f8")]
        rows = [(1000 - i, wnid, f"name of {i}", "what it is", 0) for i, wnid in enumerate(wnids())]
        rows.append((1001, "n00001740", "entity", "anything", 3))
        meta = io.BytesIO()
        scipy.io.savemat(meta, {"synsets": np.array(rows, dtype=fields)})
        truth = "".join(f"{1000 - c}\n" for c in classes).encode()
        base = "ILSVRC2012_devkit_t12"
        content = {
            f"{base}/data/meta.mat": meta.getvalue(),
            f"{base}/data/ILSVRC2012_validation_ground_truth.txt": truth,
        }
        _write_tar(root / f"{base}.tar.gz", content, "w:gz")

    return write
