"""Images, tars and ImageNet layouts of a few small files."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from vitmods.papers.sources.imagenet import wnids

Jpeg = Callable[[int], bytes]
WriteTar = Callable[[Path, dict[str, bytes]], None]
WriteFiles = Callable[[Path, dict[str, bytes]], None]


@pytest.fixture
def jpeg() -> Jpeg:
    """jpeg(7) -> the bytes of an image that no other number gives."""

    def make(number: int) -> bytes:
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        return file.getvalue()

    return make


def _write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def _write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def write_files() -> WriteFiles:
    return _write_files


@pytest.fixture
def write_tar() -> WriteTar:
    return _write_tar


@pytest.fixture
def write_devkit() -> Callable[[Path, list[int]], None]:
    """write_devkit(root, classes): ILSVRC2012_devkit_t12.tar.gz, which says that validation image i is of class
    classes[i - 1]; its own numbers count the classes backwards, and it lists groups of classes too."""

    def write(root: Path, classes: list[int]) -> None:
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return tmp_path / "user-cache" / "vitmods"
