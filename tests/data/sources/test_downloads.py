"""torchvision downloads only where the spec asks for it."""

from pathlib import Path
from typing import ClassVar

import pytest
from torchvision import datasets

from vitmods.data.sources import open_source
from vitmods.util.errors import UserError


class Fetched:
    """Stands in for a set of torchvision's that can be downloaded."""

    asked: ClassVar[list[bool]] = []

    def __init__(self, root: Path, train: bool = True, download: bool = False) -> None:
        self.asked.append(download)
        if not download:
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.targets = [0, 1]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> tuple[None, int]:
        return None, self.targets[i]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CIFAR10", Fetched)
    monkeypatch.setattr(Fetched, "asked", [])


@pytest.mark.parametrize("spec", ["torchvision:CIFAR10?root={root}", "cifar10:{root}"])
def test_only_when_asked(tmp_path: Path, spec: str) -> None:
    with pytest.raises(UserError, match="Nothing is downloaded unless asked for") as caught:
        open_source(spec.format(root=tmp_path))
    assert "download=1" in str(caught.value)
    assert "download=True" not in str(caught.value)
    assert not any(Fetched.asked)
    separator = "&" if "?" in spec else "?"
    source = open_source(f"{spec.format(root=tmp_path)}{separator}download=1")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 2, "test": 2}
    with pytest.raises(UserError, match="Nothing is downloaded"):
        open_source(f"{spec.format(root=tmp_path)}{separator}download=0")


def test_sets_that_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="torchvision cannot download FakeData"):
        open_source(f"torchvision:FakeData?root={tmp_path}&download=1")
