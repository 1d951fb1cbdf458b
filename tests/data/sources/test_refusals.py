"""Specs and layouts of every source that are refused: what is missing or wrong is said before an image is read."""

import gzip
import sys

import pytest

from vitmods.data.sources import SOURCES, open_source
from vitmods.util.errors import UserError

from ..support import write_files

PUBLISHED = [name for name, kind in SOURCES.items() if kind.layout]
ABOVE = "is above the folders of the classes. Give .*"
VAL = "val/ILSVRC2012_val_00000001.JPEG"
SECOND = "val/n01440764/ILSVRC2012_val_00000002.JPEG"
GONE = "the validation images are missing"
TRANSFER = ("cifar10", "cifar100", "cars", "flowers102", "pets", "food101", "dtd", "sun397")

# spec: (files as name -> content, or names alone, of one image each), message
REFUSED = {
    "{root}/nowhere": [("", r"The folder .*nowhere does not exist.*digits")],
    "{root}/" + "x" * 5000: [("", "is too long for this system")],
    "{root}/list.txt": [("list.txt", "is a file")],
    "{root}": [
        ("all/pets/train/cat/a.png all/pets/train/dog/a.png all/pets/test/cat/a.png", f"{ABOVE}all/pets"),
        ("pets/train/cat/a.png pets/train/dog/a.png", f"{ABOVE}pets"),
        ("all/pets/cat/a.png all/pets/dog/a.png", f"{ABOVE}all/pets"),
        ("I/Data/CLS/train/cat/a.png I/Data/CLS/train/dog/a.png", f"{ABOVE}I/Data/CLS"),
        ("pets/big/cat/a.png pets/big/dog/a.png pets/small/cat/a.png pets/small/dog/a.png",
         r"(?s)hold folders of the same names \(cat, dog\).*pets\?splits=big:train,small:train"),
        ("pets/train/cat/a.png pets/train/dog/a.png cars/train/bus/a.png cars/train/van/a.png",
         f"{ABOVE}cars or .*pets"),
        ("val/a/a.png val/b/a.png test/a/a.png",
         r"(?s)holds test and val, but not a train folder.*splits=test:train,val:train"),
        ("train/a/a.png val/a/a.png valid/a/a.png", r"val and valid .* keep one"),
        ("list.csv", r"No images in class folders under .*Expected FOLDER/class/image.jpg"),
        ("images/a.png masks/a.png", r"look like images and their masks.*if they are classes, write .*splits=none"),
        ("train/images/a.png train/masks/a.png", "look like images and their masks"),
        ("Image/a.png GT/a.png", "look like images and their masks"),
    ],
    "{root}?splits=cat": [("cat/a.png", "'cat' is not understood")],
    "{root}?splits=fox:train": [("cat/a.png", "does not have the folder fox")],
    "{root}?splits=cat:train&labels=a.csv": [("cat/a.png", "the splits are those of the table")],
    "{root}?label=x": [("cat/a.png", "label is a column of a table")],
    "": [("", "No data given")],
    "imagnet:/data": [("", r'nor a set called "imagnet" exists\. Did you mean \'imagenet\'')],
    "zzz:name": [("", "The folder zzz:name does not exist")],
    "imagenet:": [("", "does not say where the images are: write imagenet:FOLDER")],
    "imagenet:{root}": [
        ("", r"(?s)it holds nothing.*train/n01440764/\*\.JPEG.*devkit.*ILSVRC2012_img_train\.tar"
             r".*LOC_val_solution\.csv.*parquet.*image-net\.org.*Nothing is downloaded"),
        ("notes.txt", "it holds notes.txt"),
        ("n01484850/a.JPEG", "give the folder above, which holds train and val"),
        ("train/n01484850/a.JPEG", "there is train, but not val"),
        (f"train/n01484850/a.JPEG {VAL}", "neither class folders nor a list of labels"),
        (f"{VAL} val/n01484850/b.JPEG", "two layouts are mixed"),
        ("val/n01484850/b.JPEG val/cats/b.JPEG", "are not classes of this set: cats"),
        ("val/n01484850/readme", "No images in class folders under"),
        ({VAL: "", "val.txt": "1\n"}, "Numbers do not suffice"),
        ({VAL: "", "val.txt": "a.jpg 7\n"}, "without an image and class of ImageNet: 'a.jpg 7'"),
        ({VAL: "", "val.txt": "ILSVRC2012_val_00000002.JPEG 7\n"}, "lacks 1 of the 1 validation"),
        ({VAL: "", "val.txt": "n00000000\n"}, "Line 1 of the labels in .* is not a class"),
        ({VAL: "", "ILSVRC2012_devkit_t12.tar.gz": "x"}, "devkit .* cannot be read"),
        ({"ILSVRC2012_img_val.tar": gzip.compress(b"x" * 1024)}, "ILSVRC2012_img_val.tar cannot be used"),
        ({"ILSVRC2012_img_train.tar": b"", "ILSVRC2012_img_val.tar": b""}, "ILSVRC2012_img_train.tar cannot be used"),
    ],
    "imagenet:{root}?labels=nowhere": [(VAL, "The list of labels nowhere does not exist")],
    "imagenet:{root}?minival=yes": [("train/n01484850/a.JPEG val/n01484850/a.JPEG", "minival is 1 or 0")],
    "imagenet:{root}?minival=1": [("val/n01484850/a.JPEG", "out of ImageNet's train, which is not there")],
    "imagenet-v2:{root}": [("", "the class folder 0 is missing in .*\n.*Put there")],
    "imagenet-v2:{root}?variant=top-images": [("", "the folder imagenetv2-top-images-format-val is missing")],
    "imagenet-v2:{root}?variant=top-image": [
        ("", "Unknown variant \"top-image\" of ImageNet-V2. Did you mean 'top-images'")
    ],
    "imagenet-r:{root}": [("", "class folders such as n01443537 are missing")],
    "imagenet-r:{root}?variant=a": [("", 'unknown option "variant" of imagenet-r. It takes none')],
    "imagenet-r:{root}/none": [("", "the folder does not exist")],
    "imagenet-c:{root}": [("", "needs a corruption")],
    "imagenet-c:{root}?corruption=fogg&severity=1": [("", "Did you mean 'fog'")],
    "imagenet-c:{root}?corruption=fog&severity=6": [("", 'severity from 1 to 5, not "6"')],
    "imagenet-c:{root}?corruption=fog&severity=1": [("", "the folder fog/1 is missing")],
    "imagenet-real:{root}": [("", GONE)] + [
        ({SECOND: "", "real.json": text}, message) for text, message in (
            ("[[1], 2]", "not a JSON list of lists"), ("{", "not a JSON list of lists"),
            ("[[1000]]", "outside 0 to 999"), ("[[1]]", "1 validation images are not called"),
        )
    ],
    "imagenet-real:{root}/..?labels=none.json": [("", GONE)],
    "imagenet-real:{root}?labels=nothing.json": [(SECOND, r"nothing\.json does not exist")],
    "vtab:kiti?root={root}": [("", "Did you mean 'kitti-dist'")],
    "vtab:svhn": [("", r"write vtab:TASK\?root=FOLDER")],
    "vtab:dmlab?root={root}": [
        ("", "dmlab/train800.txt and a folder of the task are missing, and torchvision lacks it"),
        ([f"dmlab/train/{c}/{i}.jpg" for c in "ab" for i in range(50)], "200 images for val cannot be taken out of"),
    ],
    "vtab:svhn?root={root}": [("", "torchvision's SVHN cannot be read")],
    "vtab:svhn?root={root}&rooot=x": [("", 'unknown option "rooot" of vtab')],
    "torchvision:CIFAR10": [("", r"write torchvision:CIFAR10\?root=FOLDER")],
    "torchvision:CIFAR10?root={root}": [("", "CIFAR10 cannot be read from .*Nothing is downloaded")],
    "torchvision:Flowers102?root={root}": [("", "Flowers102 cannot be read from")],
    # downloads unless it is told not to
    "torchvision:SEMEION?root={root}": [("", "SEMEION cannot be read from .*: Dataset not found")],
    "torchvision:CIFAR1?root={root}": [("", "Did you mean 'CIFAR10'")],
    "torchvision:?root={root}": [("", "does not say where the images are: write torchvision:NAME")],
    "hf:some/set?streaming=yes": [("", "streaming is 0 or 1")],
    "hf:some/set?buffer=5": [("", "buffer is only for streaming=1")],
    "hf:some/set?color=red": [("", 'unknown option "color" of hf')],
    "wds:{root}": [
        ("a.txt", "does not hold shards"),
        ("a.tar.gz", "unpacked with gunzip"),
        ({"a.tar": "no tar file" * 99}, "is not a plain tar file"),
        ({"val-0.tar": b"\0" * 1024}, "shards of val, but none of train"),
    ],
    "wds:{root}/{{0..99999999999}}.tar": [("", "more than 100,000")],
    "wds:{root}/{{0..999}}/{{0..999}}.tar": [("", "more than 100,000")],
    "wds:{root}/{{00..9.tar": [("", "is not closed")],
    **{f"{{root}}?{query}": [("a/0.png b/0.png", "stream")]
       for query in ("stream=2", "buffer=0", "buffer=x", "color=red")},
    "{root}?strem=1": [("", r'unknown option "strem" of folder\. Did you mean \'stream\'')],
}  # fmt: skip
CASES = [
    pytest.param(spec, files, message, id=f"{spec[:40]}-{number}")
    for spec, rows in REFUSED.items()
    for number, (files, message) in enumerate(rows)
]


@pytest.mark.parametrize(("spec", "files", "message"), CASES)
def test_what_cannot_be_read_is_refused(tmp_path, spec, files, message):
    (tmp_path / "set").mkdir()
    write_files(tmp_path / "set", files)
    with pytest.raises(UserError, match=message):
        open_source(spec.format(root=tmp_path / "set"))
    assert files or list((tmp_path / "set").iterdir()) == [], "nothing is downloaded"


@pytest.mark.parametrize("spec", ["hf:uoft-cs/cifar10", "imagenet:{root}"])
def test_a_missing_library_is_an_error_that_says_how_to_get_it(spec, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    write_files(tmp_path, "data/validation-00000-of-00014.parquet")
    with pytest.raises(UserError, match=r"pip install .vitmods\[hf\]"):
        open_source(spec.format(root=tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_set_says_what_it_lacks(name, tmp_path):
    spec = SOURCES[name].usage.replace("FOLDER", str(tmp_path / "none")).replace("TASK", "dtd")
    with pytest.raises(UserError, match="the folder does not exist") as caught:
        open_source(spec)
    assert SOURCES[name].layout[-1] in str(caught.value)


@pytest.mark.parametrize("name", TRANSFER)
def test_missing_files_are_named_with_their_places(tmp_path, name):
    with pytest.raises(UserError) as caught:
        open_source(f"{name}:{tmp_path}")
    text = str(caught.value)
    assert text.startswith(f"{SOURCES[name].title} was not found in {tmp_path}: torchvision's")
    assert f"  {tmp_path}/{SOURCES[name].layout[0]}\n" in text
    assert SOURCES[name].origin in text
    assert "download=True" not in text
