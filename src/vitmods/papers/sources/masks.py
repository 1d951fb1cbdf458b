"""Images with masks in the layouts of ADE20K and CamVid."""

from pathlib import Path

from vitmods.data.records import Source, printable
from vitmods.data.sources import Spec
from vitmods.papers.sources import published_set
from vitmods.tasks.segmentation.masks import IGNORE, Coding
from vitmods.tasks.segmentation.sources import source_of_masks
from vitmods.util.errors import UserError
from vitmods.util.limits import lines_of

ADE = "ADEChallengeData2016"
_CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian",
           "bicyclist")  # fmt: skip


@published_set(
    "ade20k",
    looks_like=lambda path: any((path / part / "annotations" / "training").is_dir() for part in (".", ADE)),
)
def ade20k(spec: Spec) -> Source:
    """The official folder, or the one above it."""
    root = spec.folder if (spec.folder / "images").is_dir() else spec.folder / ADE
    names = {"train": "training", "val": "validation"}
    folders = {split: (root / "images" / name, root / "annotations" / name) for split, name in names.items()}
    listed = _object_info(root / "objectInfo150.txt")
    classes = listed or tuple(f"class {number}" for number in range(1, 151))
    coding = Coding(((0, IGNORE), *((number, number - 1) for number in range(1, 151))), False, "ADE20K")
    source = source_of_masks("ADE20K", classes, coding, folders, spec)
    if not listed:
        source.warnings.append("objectInfo150.txt is missing: classes have numbers for names.")
    return source


@published_set(
    "camvid",
    looks_like=lambda path: (path / "trainannot").is_dir(),
)
def camvid(spec: Spec) -> Source:
    """The 367, 101 and 233 frames of SegNet's split."""
    folders = {name: (spec.folder / name, spec.folder / f"{name}annot") for name in ("train", "val", "test")}
    coding = Coding((*((number, number) for number in range(11)), (11, IGNORE)), False, "CamVid")
    return source_of_masks("CamVid", _CAMVID, coding, folders, spec)


def _object_info(path: Path) -> tuple[str, ...]:
    """The first name of each class in ADE20K's table; none without the file."""
    if not path.is_file():
        return ()
    rows = [line.split("\t") for line in lines_of(path)[1:]]
    names = tuple(row[-1].split(",")[0].strip() for row in rows)
    if len(names) != 150:
        raise UserError(f"{printable(str(path))} lists {len(names)} classes, not 150: fetch it again.")
    return names if len(set(names)) == 150 else tuple(row[-1].strip() for row in rows)
