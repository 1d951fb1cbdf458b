"""Pascal VOC's format (Everingham et al., IJCV 2010): an XML file an image.

    FOLDER/Annotations/0001.xml, FOLDER/JPEGImages/0001.jpg, FOLDER/ImageSets/Main/train.txt, val.txt, test.txt

Corners are pixels counted from 1, both inside of the box. Objects that are marked difficult are taken as COCO's crowds:
they are not trained on, and what is found in their boxes is neither right nor wrong.
"""

from pathlib import Path
from xml.etree import ElementTree

from vitmods.data.records import SPLITS, Broken, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import loose_images
from vitmods.data.sources.objects import OPTIONS, Found, source_of_boxes
from vitmods.util.errors import UserError
from vitmods.util.limits import lines_of, read_bytes

LAYOUT = "Expected Annotations/NAME.xml, JPEGImages/NAME.jpg and, where it is split, ImageSets/Main/train.txt."


@data_source(
    "voc",
    "voc:FOLDER",
    "boxes in Pascal VOC's format",
    options=OPTIONS,
    claims=lambda path: (path / "Annotations").is_dir() and (path / "JPEGImages").is_dir(),
)
def voc(spec: Spec) -> Source:
    """Images with boxes. Classes are the names that occur, sorted."""
    root = spec.folder
    if not (root / "Annotations").is_dir() or not (root / "JPEGImages").is_dir():
        raise UserError(f"{spec} is not in Pascal VOC's format. {LAYOUT}")
    files = {Path(name).stem: name for name in loose_images(root / "JPEGImages") if not name.startswith(".")}
    broken: list[Broken] = []
    splits = {
        split: [_image(root, name, files.get(name, f"{name}.jpg")) for name in names]
        for split, names in _splits(root, files, broken).items()
    }
    classes = sorted({label for images in splits.values() for image in images for label in image.labels})
    return source_of_boxes(spec, printable(root.resolve().name), classes, splits, broken)


def _splits(root: Path, files: dict[str, str], broken: list[Broken]) -> dict[str, list[str]]:
    """Names by split; all that have an XML file where nothing is split."""
    lists = root / "ImageSets" / "Main"
    found = {}
    for split in SPLITS:
        if (path := lists / f"{split}.txt").is_file():
            found[split] = list(dict.fromkeys(line.split()[0] for line in lines_of(path)))
    if "train" not in found and (path := lists / "trainval.txt").is_file():
        found["train"] = list(dict.fromkeys(word for line in lines_of(path) for word in line.split()))
    if found and "train" not in found:
        raise UserError(f"{printable(str(lists))} has {', '.join(found)} and no train.txt. {LAYOUT}")
    if found:
        return found
    names = sorted(path.stem for path in (root / "Annotations").glob("*.xml"))
    broken += [Broken("train", f"JPEGImages/{files[one]}", "has no XML file") for one in sorted({*files} - {*names})]
    return {"train": names}


def _image(root: Path, name: str, file: str) -> Found:
    found = Found(root / "JPEGImages" / file, (1, 1))
    try:
        raw = read_bytes(root / "Annotations" / f"{name}.xml", "XML")
        tree = ElementTree.fromstring(raw, ElementTree.XMLParser(target=_Builder()))
        found.size = int(_text(tree, "size/height")), int(_text(tree, "size/width"))
        for one in tree.iter("object"):
            left, top, right, bottom = (float(_text(one, f"bndbox/{k}")) for k in ("xmin", "ymin", "xmax", "ymax"))
            difficult = (one.findtext("difficult") or "0").strip() == "1"
            found.add((left - 1, top - 1, right, bottom), _text(one, "name"), crowd=difficult)
    except FileNotFoundError:
        found.wrong = "has no XML file"
    except (OSError, ValueError, LookupError, OverflowError, ElementTree.ParseError) as error:
        found.wrong = f"its XML file cannot be read: {error}"
    return found


class _Builder(ElementTree.TreeBuilder):
    """Without a document type: its entities can make a terabyte of a kilobyte, or read other files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a document type (<!DOCTYPE>), which is not read: leave it out")


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"{path} is missing")
    return text
