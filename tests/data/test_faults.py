"""Faults that are planted in data sets: each is refused, or reported, before anything is trained.

Those of shards are in test_shards.py, where each is read at once and as a stream.
"""

import json

import numpy as np
import pytest
from PIL import Image

from vitmods import data
from vitmods.recipes import small_detection
from vitmods.tasks.detection.task import Detection
from vitmods.tasks.segmentation.task import Segmentation
from vitmods.tasks.sequences.data import load_sequences
from vitmods.util.errors import UserError

from .support import encoded, noise, write_files

SIZE = (24, 32)  # height and width
VIEWS = {"mask": Segmentation, "boxes": Detection}
FAULTS = {}
PETS = ("cat", "dog")


def faults(target, plant, rows):
    """`rows`: name -> what has to be said, the arguments of `plant`, which makes the faulty set in a folder and returns
    its spec (None: the folder), and options of loading; a value that can be called is called with the folder."""
    for name, (says, arguments, *options) in rows.items():
        assert name not in FAULTS
        FAULTS[name] = plant, arguments, says, target, *(options or [{}])


def png(seed=0, size=SIZE, kind="PNG"):
    return encoded(noise(seed, size), kind)


# Class folders


def folders(root, names=PETS, splits=("",), count=8, extra=None):
    """SPLIT/NAME folders; `extra`: files beside them, of bytes, of other files, or empty folders."""
    number = 0
    for split in splits:
        for name in names:
            write_files(root / split / name, {f"{i}.png": png(100 * number + i) for i in range(count)})
            number += 1
    for name, content in (extra or {}).items():
        if content is None:
            (root / name).mkdir(parents=True)
        else:
            write_files(root, {name: content if isinstance(content, bytes) else (root / content).read_bytes()})


def one(*names, **options):
    return {"names": names, "count": 4, **options}


def two(**options):
    return {"splits": ("train", "val"), "count": 4, **options}


def twelve_bits_in_sixteen(root):
    for i in range(12):
        values = Image.fromarray(np.random.default_rng(i).integers(0, 4096, SIZE, dtype=np.uint16))
        write_files(root, {f"{PETS[i % 2]}/{i}.png": encoded(values)})


FLOATS = encoded(Image.fromarray(np.full(SIZE, 7.5, np.float32)), "TIFF")
SAME = {f"{PETS[i % 2]}/{i}.png": png() for i in range(6)}
faults("class", folders, {
    "image_cut_off": ("truncated", {"extra": {"cat/0.jpg": png(0, (200, 200), "JPEG")[:2000]}}),
    "float_pixels_out_of_range": ("outside 0 to 1", {"extra": {"cat/0.tif": FLOATS}}),
    "one_class": ("All images have one class", one("cat", count=9)),
    "classes_of_which_one_can_be_read": ("All images have one class",
                                         one("cat", "dog", extra={f"dog/{i}.png": b"" for i in range(4)}),
                                         {"unreadable": "skip"}),
    "loose_images": ("does not say the class of its images", one(".")),
    "two_folders_for_a_split": ("Both val and valid", two(splits=("train", "val", "valid"), count=2)),
    "misspelled_split": ("vla holds the classes of train", two(splits=("train", "vla"))),
    "image_of_val_in_train": ("are also in train, byte for byte", two(extra={"val/cat/copy.png": "train/cat/0.png"})),
    "class_of_val_alone": ("Classes in val without any training image: cow", two(extra={"val/cow/0.png": png(999)})),
    "class_without_images": ("do not hold images and are not classes: cow", {"extra": {"cow": None}}),
    "train_without_images": ("No training image is readable", two(splits=("test",), extra={"train/cat": None})),
    "split_without_images": ("Images in test are missing", two(extra={"test/cat": None})),
    "copies_of_one_image": ("Images to evaluate on are missing", one(extra=SAME)),
    "one_image_in_two_classes": ("have other labels than the first (dog/copy.png = cat/0.png)",
                                 {"extra": {"dog/copy.png": "cat/0.png"}}),
    "one_class_spelled_in_two_ways": ("'Cat' = 'cat'", one("Cat", "cat", "dog")),
    "images_beside_class_folders": ("images directly in", {"extra": {"loose.png": png(999)}}),
    "panorama": ("only their middle is used", {"extra": {"cat/0.png": png(0, (20, 400))}}),
    "splits_inside_of_classes": ("splits=*/train:train,*/val:val",
                                 two(names=("train", "val"), splits=PETS)),
    "thumbnails": ("which are enlarged", {"extra": {"cat/0.png": png(0, (5, 5))}}),
})  # fmt: skip
faults("class", twelve_bits_in_sixteen, {
    "values_of_12_bits_in_files_of_16": ("nearly black: the largest value is 16 of 255", {})
})  # fmt: skip


# Tables of labels


def labels(root, rows, header="file,labels,split", listed=()):
    write_files(root, {f"{i}.png": png(i) for i in range(6)})
    write_files(root, {"labels.csv": f"{header}\n" + "\n".join(rows)})
    if listed:
        (root / "classes.txt").write_text("\n".join(listed))


GOOD = ("0.png,cat,train", "1.png,dog,train", "2.png,cat;dog,train", "3.png,cat,val", "4.png,dog,val")
IN_ALL = [row.replace(",cat", ",animal;cat").replace(",dog", ",animal;dog") for row in GOOD]
faults("labels", labels, {
    **{f"table_{name}": (says, {"rows": [*GOOD, row]}) for name, says, row in (
        ("names_a_file_that_is_missing", "line 7: 9.png is missing", "9.png,cat,val"),
        ("names_a_file_twice", "line 7: 0.png is cat in one line and dog in another: leave one out", "0.png,dog,val"),
        ("with_an_unknown_split", "has the split holdout", "5.png,cat,holdout"),
        ("with_a_label_in_two_cases", "'Cat' = 'cat'", "5.png,Cat,train"),
    )},
    "table_with_a_misspelled_label": ("has the label cta. Did you mean 'cat'?",
                                      {"rows": [*GOOD, "5.png,cta,train"], "listed": PETS}),
    "table_with_labels_between_commas": ("with labels separated by ; or |, not by commas",
                                         {"rows": ["0.png,cat,dog,indoor,train", *GOOD[1:]]}),
    "table_in_which_all_images_have_the_same_labels": ("training images have the same labels", {
        "rows": [f"{i}.png,cat,{'train' if i < 4 else 'val'}" for i in range(6)]}),
    "table_with_a_label_of_every_image": ("Labels of every training image, from which nothing is learned: animal",
                                          {"rows": IN_ALL}),
    "table_without_labels": ("Which column of", {"rows": ["0.png;0.5", "1.png;0.25"], "header": "file;weight"}),
})  # fmt: skip


# Masks


def masks(root, change=lambda split, i, mask: mask, names="sky\ntree\nroad\n", ending="png", extra=lambda root: {}):
    for split in ("train", "val"):
        for i in range(3):
            write_files(root, {f"images/{split}/{i}.jpg": png(10 * len(split) + i, kind="JPEG")})
            mask = change(split, i, np.random.default_rng(i).integers(0, 3, SIZE).astype(np.uint8))
            if mask is not None:
                kind = {"jpg": "JPEG", "tif": "TIFF"}.get(ending, "PNG")
                write_files(root, {f"masks/{split}/{i}.{ending}": encoded(Image.fromarray(mask), kind)})
    write_files(root, {"classes.txt": names, **extra(root)})
    return f"masks:{root}"


def copies(root):
    flat = {f"masks/train/copy{i}.png": encoded(Image.fromarray(np.full(SIZE, i, np.uint8))) for i in range(2)}
    return flat | {f"images/train/copy{i}.jpg": (root / f"images/train/{i}.jpg").read_bytes() for i in range(2)}


faults("mask", masks, {
    "masks_of_0_and_255": ("No mask shows cell (1); masks hold 0, 255 (ignored)", {
        "change": lambda split, i, mask: ((mask > 1) * 255).astype(np.uint8), "names": "background\ncell\n"}),
    "masks_of_fractions": ("its mask holds 0.5, and values are whole numbers", {
        "change": lambda split, i, mask: mask.astype(np.float32) / 2, "ending": "tif"}),
    "masks_as_jpeg": ("whose compression alters values", {"ending": "jpg"}),
    **{f"masks_{name}": (says, {"change": change}) for name, says, change in (
        ("that_count_from_1", "its mask holds the value 3, which classes.txt does not know",
         lambda split, i, mask: mask + 1),
        ("of_colors_without_a_palette", "its mask has colors",
         lambda split, i, mask: np.stack([mask, mask, 2 - mask], axis=2)),
        ("of_another_size", "its mask is 23 x 32, the image 24 x 32", lambda split, i, mask: mask[i > 1 :]),
        ("missing", "lacks a mask in", lambda split, i, mask: mask if i else None),
        ("that_ignore_all", "no pixel of its mask has a class",
         lambda split, i, mask: mask if i else np.full_like(mask, 255)),
        ("with_a_class_in_val_alone", "Classes in val without any training image: road",
         lambda split, i, mask: mask if split == "val" else mask.clip(max=1)),
    )},
    "masks_with_one_value_for_two_classes": ("gives the value 1 to two classes", {"names": "sky\ntree\nroad,1\n"}),
    "images_beside_the_splits_of_masks": ("are in no split: not used",
                                          {"extra": lambda root: {"images/loose.jpg": png(kind="JPEG")}}),
    "masks_with_two_lists_of_classes": ("has both classes.txt and palette.csv", {
        "extra": lambda root: {"palette.csv": "name,r,g,b\nsky,0,0,0\nroad,1,1,1\n"}}),
    "images_with_two_masks": ("2 copies of images, byte for byte, have other labels", {"extra": copies}),
})  # fmt: skip


# COCO


def coco(root, change=lambda split, content: None, end=None):
    outline, categories = [[4, 2, 14, 2, 14, 12, 4, 12]], ("cat", "dog")
    for split in ("train", "val"):
        write_files(root / split, {f"{i}.png": png(10 * len(split) + i) for i in range(3)})
        boxes = [{"id": i, "image_id": i, "category_id": 1 + i % 2, "bbox": [4, 2, 10, 10], "segmentation": outline}
                 for i in range(3)]  # fmt: skip
        content = {
            "images": [{"id": i, "file_name": f"{i}.png", "height": SIZE[0], "width": SIZE[1]} for i in range(3)],
            "annotations": boxes,
            "categories": [{"id": i, "name": name} for i, name in enumerate(categories, 1)],
        }
        change(split, content)
        (root / f"{split}.json").write_text(json.dumps(content)[:end])
    return f"coco:{root}"


def first(key="annotations", **values):
    return lambda split, content: content[key][0].update(values)


def every(**values):
    return lambda split, content: [annotation.update(values) for annotation in content["annotations"]]


TWICE = {"id": 9, "file_name": "0.png", "height": SIZE[0], "width": SIZE[1]}
faults("boxes", coco, {"coco_cut_off": ("is not readable JSON; it may be cut off", {"end": 100})} | {
    f"coco_{name}": (says, {"change": change}) for name, says, change in (
        ("crowd_in_words", "has iscrowd '0', which is 0 or 1", first(iscrowd="0")),
        ("area_below_0", "has the area -1", first(area=-1)),
        ("area_that_is_no_number", "has the area nan", first(area=float("nan"))),
        ("area_above_the_image_s", "has the area 1000000.0", first(area=1e6)),
        ("box_of_corners", "is outside of 32 x 24 pixels: 12, 12, 40, 34", first(bbox=[12, 12, 28, 22])),
        ("box_without_width", "is empty", first(bbox=[4, 2, 0, 10])),
        ("boxes_of_fractions", "look like fractions", every(bbox=[0.1, 0.1, 0.4, 0.4], segmentation=[])),
        ("category_that_is_not_listed", "has the unknown category 7", first(category_id=7)),
        ("annotation_of_no_image", "is of image 99, not listed", first(image_id=99)),
        ("outline_of_another_object", "an outline from 20, 14, 30, 20", first(segmentation=[[20, 14, 30, 14, 30, 20]])),
        ("outline_of_fractions", "an outline from 0.1, 0.1, 0.4, 0.4",
         first(segmentation=[[0.1, 0.1, 0.4, 0.1, 0.4, 0.4]])),
        ("no_object", "No image of train has an object", lambda split, content: content.update(annotations=[])),
        ("crowds_alone", "No image of val has an object", every(iscrowd=1)),
        ("image_of_another_size", "is 32 x 24 pixels, and its boxes are for 24 x 32",
         first("images", height=32, width=24)),
        ("image_twice", "is listed a second time", lambda split, content: content["images"].append(TWICE)),
        ("box_twice", "the same box of the same class twice (train/0.png",
         lambda split, content: content["annotations"].append({**content["annotations"][0], "id": 9})),
        ("file_that_is_missing", "No such file", first("images", file_name="x.png")),
        ("other_categories_in_val", "has other categories", lambda split, c: first("categories", name=split)(split, c)),
        ("category_twice", "two categories have one id or one name", first("categories", name="dog")),
    )
})  # fmt: skip


# YOLO, Pascal VOC and tables of boxes


def yolo(root, line="0 0.5 0.5 0.25 0.25", yaml="names: [cat, dog]\n", labels="labels", gone=()):
    for split in ("train", "val"):
        for i in range(2):
            write_files(root, {f"images/{split}/{i}.png": png(10 * len(split) + i), f"{labels}/{split}/{i}.txt": line})
    write_files(root, {"data.yaml": f"train: images/train\nval: images/val\n{yaml}"})
    for name in gone:
        (root / name).unlink()
    return f"yolo:{root}"


faults("boxes", yolo, {
    "yolo_pixels": ("is outside of its image", {"line": "0 16 12 8 6"}),
    "yolo_class_that_is_not_named": ("is of class 2, and the classes are 2", {"line": "2 0.5 0.5 0.25 0.25"}),
    "yolo_confidence": ("neither four numbers nor a polygon", {"line": "0 0.5 0.5 0.25 0.25 0.9"}),
    "yolo_fewer_names_than_classes": ("nc is 3, and there are 2 names", {"yaml": "nc: 3\nnames: [cat, dog]\n"}),
    "yolo_name_twice": ("does not name its classes, each once", {"yaml": "names: [cat, cat]\n"}),
    "yolo_split_that_is_missing": ("names images/test for test, which is missing",
                                   {"yaml": "test: images/test\nnames: [cat]\n"}),
    "yolo_nan": ("is empty", {"line": "0 nan 0.5 0.25 0.25"}),
    "yolo_labels_in_another_folder": ("No image of train has an object", {"labels": "annotations"}),
    "yolo_labels_without_an_image": ("lacks an image", {"gone": ["images/train/0.png"]}),
})  # fmt: skip


def voc(root, corners=(3, 3, 12, 12), size=SIZE, hard=0, val="2\n3", known=range(4)):
    box = "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), corners))
    annotation = (
        f"<annotation><size><width>{size[1]}</width><height>{size[0]}</height></size><object><name>cat</name>"
        f"<difficult>{hard}</difficult><bndbox>{box}</bndbox></object></annotation>"
    )
    write_files(root, {f"JPEGImages/{i}.jpg": png(i, kind="JPEG") for i in range(4)})
    write_files(root, {f"Annotations/{i}.xml": annotation for i in known})
    write_files(root, {"ImageSets/Main/train.txt": "0\n1", "ImageSets/Main/val.txt": val})
    return f"voc:{root}"


faults("boxes", voc, {
    "voc_corners_in_wrong_order": ("is empty", {"corners": (12, 12, 3, 3)}),
    "voc_no_size": ("its size cannot be 0 x 0 pixels", {"size": (0, 0)}),
    "voc_sides_that_changed_places": ("its boxes are for 24 x 32", {"size": SIZE[::-1]}),
    "voc_difficult_objects_alone": ("No image of train has an object", {"hard": 1}),
    "voc_image_of_two_splits": ("also in train, byte for byte", {"val": "1\n2\n"}),
    "voc_image_without_annotation": ("lacks an XML file", {"known": (1, 2, 3)}),
})  # fmt: skip


def boxes(root, row):
    good = ["0.png,train,32,24,cat,2,2,9,9", "1.png,train,32,24,dog,2,2,9,9", "2.png,val,32,24,cat,2,2,9,9"]
    rows = "\n".join(["image,split,width,height,label,xmin,ymin,xmax,ymax", *good, row])
    write_files(root, {"boxes.csv": rows, **{f"{i}.png": png(i) for i in range(4)}})


faults("boxes", boxes, {f"boxes_{name}": (says, {"row": row}) for name, says, row in (
    ("numbers_in_words", "could not convert string to float: 'ten'", "3.png,val,32,24,cat,ten,2,9,9"),
    ("another_size", "gives it another split or size", "0.png,train,24,32,cat,2,2,9,9"),
    ("unknown_split", "the split 'trian' is not one of", "3.png,trian,32,24,cat,2,2,9,9"),
    ("no_label", "has the label '', which is not a class", "3.png,train,32,24,,2,2,9,9"),
    ("row_twice", "the same box of the same class twice", "0.png,train,32,24,cat,2,2,9,9"),
    ("label_in_two_cases", "'Dog' = 'dog'", "3.png,train,32,24,Dog,2,2,9,9"),
)})  # fmt: skip


# Sequences


def sequences(root, line):
    for number, split in enumerate(("train", "val", "test")):
        rows = [f"[MIN {number} {i} ]\t{min(number, i)}" for i in range(1, 9)]
        (root / f"basic_{split}.tsv").write_text("\n".join(["Source\tTarget", *rows, line if split == "train" else ""]))
    return f"listops:{root}"


faults("tokens", sequences, {
    "sequences_unknown_token": ("basic_train.tsv, line 10", {"line": "[MAX 1 [LOG 2 ] ]\t2"}),
    "sequences_value_that_is_no_digit": ("a digit in Target", {"line": "[MAX 1 2 ]\t12"}),
    "sequences_line_without_value": ("a digit in Target", {"line": "[MAX 1 2 ]"}),
    "sequence_of_two_splits": ("also in train", {"line": "[MIN 2 4 ]\t2"}),
})  # fmt: skip


# Splits and groups


def split_file(*rows):
    return {"split_file": lambda root: write_files(root, {"split.csv": "\n".join(rows)}) / "split.csv"}


def listed(**splits):
    usual = ["train"] * 6 + ["val"] * 2
    return [f"{k}/{i}.png,{splits.get(f'{k}{i}', usual[i])}" for k in PETS for i in range(8)]


NO_TRAIN = [row.replace("train", "test") for row in listed()]
faults("class", folders, {f"split_file_{name}": (says, {}, split_file(*rows)) for name, says, rows in (
    ("names_an_image_that_is_missing", "names 1 images that", ["image,split", *listed(), "cat/99.png,val"]),
    ("has_an_unknown_split", 'into the split "holdout"', ["image,split", *listed(cat3="holdout")]),
    ("names_an_image_twice", "names cat/0.png 2 times", ["image,split", *listed(), "cat/0.png,val"]),
    ("has_other_labels", "labels of the data set", ["image,split,label", *(f"{row},cat" for row in listed())]),
    ("leaves_train_empty", "does not name any training image", ["image,split", *NO_TRAIN]),
    ("leaves_images_out", "1 images that", ["image,split", *listed()[:-1]]),
    ("tears_groups", "groups of val are also",
     ["image,split,group", *(f"{row},{row[4]}" for row in listed(dog0="val"))]),
    ("has_no_column_split", "does not have the column split", ["image,part", *listed()]),
)})  # fmt: skip
faults("class", folders, {
    "groups_that_are_one": ("Images to evaluate on are missing", {}, {"group_by": "png"}),
    "groups_in_a_mapping": ("not a dict: write the groups into", {}, {"group_by": {"cat/0.png": "a"}}),
})  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused_or_reported(name, tmp_path):
    plant, arguments, says, target, options = FAULTS[name]
    (tmp_path / "set").mkdir()
    spec = plant(tmp_path / "set", **arguments) or str(tmp_path / "set")
    options = {key: value(tmp_path / "set") if callable(value) else value for key, value in options.items()}
    try:
        if target == "tokens":
            loaded = load_sequences(spec, img_size=(1, 16), in_chans=16, **options)
        else:
            task = VIEWS[target]() if target in VIEWS else None
            views = {"joint": task.joint, "joint_view": task.joint_view} if task else {}
            how = {"img_size": SIZE, "augment": small_detection().augment, "target": target, **views}
            loaded = data.load(spec, **how, **options)
        text = "\n".join(loaded.summary()["warnings"])
    except UserError as error:
        text = str(error)
    assert says in text
