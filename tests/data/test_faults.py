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

SIZE = (24, 32)  # height and width
VIEWS = {"mask": Segmentation, "boxes": Detection}
FAULTS = {}


def fault(says, target="class", **options):
    """Register a function that makes a faulty set in a folder and returns its spec (None: the folder), and what has to
    be said of it."""

    def register(plant):
        FAULTS[plant.__name__] = plant, says, target, options
        return plant

    return register


def image(path, seed=None, size=SIZE, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, str(path)[-40:])) if seed is None else seed
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def classes(root, counts=(("cat", 8), ("dog", 8))):
    """Class folders; names may have a split's folder before them."""
    for number, (name, count) in enumerate(counts):
        for i in range(count):
            image(root / name / f"{i}.png", seed=100 * number + i)
    return root


def split_classes(root):
    return classes(root, [(f"{split}/{name}", 4) for split in ("train", "val") for name in ("cat", "dog")])


# Class folders


def in_both(root, names, splits, count=4):
    return classes(root, [(f"{split}/{name}", count) for split in splits for name in names])


def twelve_bits_in_sixteen(root):
    for i in range(12):
        path = root / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 4096, SIZE, dtype=np.uint16)).save(path)


def copies_of_one_image(root):
    for i in range(6):
        image(root / ("cat" if i % 2 else "dog") / f"{i}.png", seed=0)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:2000])


PETS = ("cat", "dog")
for name, says, plant in (
    ("image_cut_off", "truncated", lambda root: cut_off(image(classes(root) / "cat" / "0.jpg", size=(200, 200)))),
    ("image_empty", "the file is empty (0 bytes)", lambda root: (classes(root) / "cat/0.png").write_bytes(b"")),
    ("text_called_png", "not an image in a known format",
     lambda root: (classes(root) / "cat/0.png").write_text("<html>Not found</html>")),
    ("link_to_nowhere", "No such file", lambda root: (classes(root) / "cat/9.png").symlink_to(root / "nowhere.png")),
    ("float_pixels_out_of_range", "outside 0 to 1",
     lambda root: Image.fromarray(np.full(SIZE, 7.5, np.float32)).save(classes(root) / "cat/0.tif")),
    ("one_class", "All images have one class", lambda root: classes(root, [("cat", 9)])),
    ("images_and_masks_as_classes", "look like images and their masks",
     lambda root: classes(root, [("images", 4), ("masks", 4)])),
    ("splits_without_class_folders", "no class of each image, not a class",
     lambda root: classes(root, [("train", 4), ("val", 4)])),
    ("loose_images", "no class of each image, not a class", lambda root: classes(root, [(".", 4)])),
    ("one_level_too_high", "is above the folders of the classes",
     lambda root: in_both(root, PETS, ("download/pets/train", "download/pets/val"), 2)),
    ("two_folders_for_a_split", "Both val and valid", lambda root: in_both(root, PETS, ("train", "val", "valid"), 2)),
    ("misspelled_split", "these folders were not used: vla", lambda root: in_both(root, PETS, ("train", "vla"))),
    ("image_of_val_in_train", "are also in train, byte for byte",
     lambda root: (split_classes(root) / "val/cat/copy.png").write_bytes((root / "train/cat/0.png").read_bytes())),
    ("class_of_val_alone", "Classes in val without any training image: cow",
     lambda root: classes(split_classes(root), [("val/cow", 2)])),
    ("class_without_images", "do not hold images and are not classes: cow",
     lambda root: (classes(root) / "cow").mkdir()),
    ("train_without_images", "No training image is readable",
     lambda root: (in_both(root, PETS, ("test",)) / "train/cat").mkdir(parents=True)),
    ("split_without_images", "Images in test are missing",
     lambda root: (split_classes(root) / "test/cat").mkdir(parents=True)),
    ("copies_of_one_image", "Images to evaluate on are missing", copies_of_one_image),
    ("one_image_in_two_classes", "have other labels than the first (dog/copy.png = cat/0.png)",
     lambda root: (classes(root) / "dog/copy.png").write_bytes((root / "cat/0.png").read_bytes())),
    ("one_class_spelled_in_two_ways", "'Cat' = 'cat'",
     lambda root: classes(root, [("Cat", 4), ("cat", 4), ("dog", 4)])),
    ("images_beside_class_folders", "images directly in", lambda root: image(classes(root) / "loose.png")),
    ("panorama", "only their middle is used", lambda root: image(classes(root) / "cat/0.png", size=(20, 400))),
    ("splits_inside_of_classes", "Folders inside of class folders are not splits: train, val",
     lambda root: in_both(root, ("train", "val"), PETS)),
    ("values_of_12_bits_in_files_of_16", "nearly black: the largest value is 16 of 255", twelve_bits_in_sixteen),
    ("thumbnails", "which are enlarged", lambda root: image(classes(root) / "cat/0.png", size=(5, 5))),
):  # fmt: skip
    FAULTS[name] = plant, says, "class", {}


@fault("All images have one class", unreadable="skip")
def classes_of_which_one_can_be_read(root):
    classes(root)
    for path in (root / "dog").iterdir():
        path.write_bytes(b"")


# Tables of labels


def labels(root, rows, header="file,labels,split", listed=()):
    for i in range(6):
        image(root / f"{i}.png", seed=i)
    (root / "labels.csv").write_text(f"{header}\n" + "\n".join(rows))
    if listed:
        (root / "classes.txt").write_text("\n".join(listed))


GOOD = ("0.png,cat,train", "1.png,dog,train", "2.png,cat;dog,train", "3.png,cat,val", "4.png,dog,val")
for name, says, rows, options in (
    ("names_a_file_that_is_missing", "line 7: 9.png is missing", [*GOOD, "9.png,cat,val"], {}),
    ("names_a_file_twice", "line 7: 0.png is named a second time", [*GOOD, "0.png,dog,val"], {}),
    ("with_an_unknown_split", "has the split holdout", [*GOOD, "5.png,cat,holdout"], {}),
    ("with_labels_between_commas", "with labels separated by ; or |, not by commas",
     ["0.png,cat,dog,indoor,train", *GOOD[1:]], {}),
    ("with_a_misspelled_label", "has the label cta. Did you mean 'cat'?", [*GOOD, "5.png,cta,train"], {"listed": PETS}),
    ("with_a_label_in_two_cases", "'Cat' = 'cat'", [*GOOD, "5.png,Cat,train"], {}),
    ("in_which_all_images_have_the_same_labels", "training images have the same labels",
     [f"{i}.png,cat,{'train' if i < 4 else 'val'}" for i in range(6)], {}),
    ("with_a_label_of_every_image", "Labels of every training image, from which nothing is learned: animal",
     [row.replace(",cat", ",animal;cat").replace(",dog", ",animal;dog") for row in GOOD], {}),
    ("of_a_spreadsheet_with_semicolons", 'first line is "file;labels"', ["0.png;cat"], {"header": "file;labels"}),
):  # fmt: skip
    FAULTS[f"table_{name}"] = (lambda root, rows=rows, o=options: labels(root, rows, **o)), says, "labels", {}


# Masks


def masks(root, change=lambda split, i, mask: mask, names="sky\ntree\nroad\n", ending="png"):
    for split in ("train", "val"):
        for i in range(3):
            image(root / "images" / split / f"{i}.jpg", seed=10 * len(split) + i)
            mask = np.random.default_rng(i).integers(0, 3, SIZE).astype(np.uint8)
            path = root / "masks" / split / f"{i}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if (mask := change(split, i, mask)) is not None:
                Image.fromarray(mask).save(path)
    (root / "classes.txt").write_text(names)
    return f"masks:{root}"


for name, says, options in (
    ("of_0_and_255", "No mask shows cell (1); masks hold 0, 255 (ignored)",
     {"change": lambda split, i, mask: ((mask > 1) * 255).astype(np.uint8), "names": "background\ncell\n"}),
    ("that_count_from_1", "its mask holds the value 3, which classes.txt does not know",
     {"change": lambda split, i, mask: mask + 1}),
    ("of_fractions", "its mask holds 0.5, and values are whole numbers",
     {"change": lambda split, i, mask: mask.astype(np.float32) / 2, "ending": "tif"}),
    ("as_jpeg", "whose compression alters values", {"ending": "jpg"}),
    ("of_colors_without_a_palette", "its mask has colors",
     {"change": lambda split, i, mask: np.stack([mask] * 3, axis=2)}),
    ("of_another_size", "its mask is 23 x 32, the image 24 x 32", {"change": lambda split, i, mask: mask[i > 1 :]}),
    ("missing", "lacks a mask in", {"change": lambda split, i, mask: mask if i else None}),
    ("that_ignore_all", "no pixel of its mask has a class",
     {"change": lambda split, i, mask: mask if i else np.full_like(mask, 255)}),
    ("with_a_class_in_val_alone", "Classes in val without any training image: road",
     {"change": lambda split, i, mask: mask if split == "val" else mask.clip(max=1)}),
    ("with_one_value_for_two_classes", "gives the value 1 to two classes", {"names": "sky\ntree\nroad,1\n"}),
):  # fmt: skip
    FAULTS[f"masks_{name}"] = (lambda root, o=options: masks(root, **o)), says, "mask", {}


@fault("are in no split: not used", "mask")
def images_beside_the_splits_of_masks(root):
    spec = masks(root)
    image(root / "images" / "loose.jpg")
    return spec


@fault("has both classes.txt and palette.csv", "mask")
def masks_with_two_lists_of_classes(root):
    spec = masks(root)
    (root / "palette.csv").write_text("name,r,g,b\nsky,0,0,0\nroad,1,1,1\n")
    return spec


@fault("2 copies of images, byte for byte, have other labels", "mask")
def images_with_two_masks(root):
    spec = masks(root)
    for i in range(2):
        (root / f"images/train/copy{i}.jpg").write_bytes((root / f"images/train/{i}.jpg").read_bytes())
        Image.fromarray(np.full(SIZE, i, np.uint8)).save(root / f"masks/train/copy{i}.png")
    return spec


# COCO


def coco(root, change=lambda split, content: None):
    for split in ("train", "val"):
        content = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]}
        for i in range(3):
            image(root / split / f"{i}.png", seed=10 * len(split) + i)
            content["images"].append({"id": i, "file_name": f"{i}.png", "height": SIZE[0], "width": SIZE[1]})
            outline = [[4, 2, 14, 2, 14, 12, 4, 12]]
            annotation = {
                "id": i,
                "image_id": i,
                "category_id": 1 + i % 2,
                "bbox": [4, 2, 10, 10],
                "segmentation": outline,
            }
            content["annotations"].append(annotation)
        change(split, content)
        (root / f"{split}.json").write_text(json.dumps(content))
    return f"coco:{root}"


def first(**values):
    return lambda split, content: content["annotations"][0].update(values)


def every(**values):
    return lambda split, content: [annotation.update(values) for annotation in content["annotations"]]


for name, says, change in (
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
     lambda split, content: content["images"][0].update(height=32, width=24)),
    ("image_twice", "is listed a second time", lambda split, content: content["images"].append(
        {"id": 9, "file_name": "0.png", "height": SIZE[0], "width": SIZE[1]})),
    ("box_twice", "the same box of the same class twice (train/0.png",
     lambda split, content: content["annotations"].append({**content["annotations"][0], "id": 9})),
    ("file_that_is_missing", "No such file", lambda split, content: content["images"][0].update(file_name="x.png")),
    ("other_categories_in_val", "has other categories",
     lambda split, content: content["categories"][0].update(name=split)),
    ("category_twice", "two categories have one id or one name",
     lambda split, content: content["categories"][0].update(name="dog")),
):  # fmt: skip
    FAULTS[f"coco_{name}"] = lambda root, change=change: coco(root, change), says, "boxes", {}


@fault("is not readable JSON; it may be cut off", "boxes")
def coco_cut_off(root):
    spec = coco(root)
    (root / "val.json").write_text((root / "val.json").read_text()[:100])
    return spec


# YOLO, Pascal VOC and tables of boxes


def yolo(root, line="0 0.5 0.5 0.25 0.25", yaml="names: [cat, dog]\n"):
    for split in ("train", "val"):
        for i in range(2):
            image(root / "images" / split / f"{i}.png", seed=10 * len(split) + i)
            (root / "labels" / split).mkdir(parents=True, exist_ok=True)
            (root / "labels" / split / f"{i}.txt").write_text(line)
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\n{yaml}")
    return f"yolo:{root}"


for name, says, options in (
    ("pixels", "is outside of its image", {"line": "0 16 12 8 6"}),
    ("class_that_is_not_named", "is of class 2, and the classes are 2", {"line": "2 0.5 0.5 0.25 0.25"}),
    ("confidence", "neither four numbers nor a polygon", {"line": "0 0.5 0.5 0.25 0.25 0.9"}),
    ("fewer_names_than_classes", "nc is 3, and there are 2 names", {"yaml": "nc: 3\nnames: [cat, dog]\n"}),
    ("name_twice", "does not name its classes, each once", {"yaml": "names: [cat, cat]\n"}),
    ("split_that_is_missing", "names images/test, which is missing", {"yaml": "test: images/test\nnames: [cat]\n"}),
    ("nan", "is empty", {"line": "0 nan 0.5 0.25 0.25"}),
):
    FAULTS[f"yolo_{name}"] = lambda root, options=options: yolo(root, **options), says, "boxes", {}


@fault("No image of train has an object", "boxes")
def yolo_labels_in_another_folder(root):
    spec = yolo(root)
    (root / "labels").rename(root / "annotations")
    return spec


@fault("lacks an image", "boxes")
def yolo_labels_without_an_image(root):
    spec = yolo(root)
    (root / "images/train/0.png").unlink()
    return spec


def voc(root, corners=(3, 3, 12, 12), size=SIZE, hard=0):
    (root / "ImageSets/Main").mkdir(parents=True)
    (root / "Annotations").mkdir()
    for i in range(4):
        image(root / "JPEGImages" / f"{i}.jpg", seed=i)
        box = "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), corners))
        (root / "Annotations" / f"{i}.xml").write_text(
            f"<annotation><size><width>{size[1]}</width><height>{size[0]}</height></size><object><name>cat</name>"
            f"<difficult>{hard}</difficult><bndbox>{box}</bndbox></object></annotation>"
        )
    for split, names in (("train", "0\n1"), ("val", "2\n3")):
        (root / "ImageSets/Main" / f"{split}.txt").write_text(names)
    return f"voc:{root}"


for name, says, options in (
    ("corners_in_wrong_order", "is empty", {"corners": (12, 12, 3, 3)}),
    ("no_size", "its size cannot be 0 x 0 pixels", {"size": (0, 0)}),
    ("sides_that_changed_places", "its boxes are for 24 x 32", {"size": SIZE[::-1]}),
    ("difficult_objects_alone", "No image of train has an object", {"hard": 1}),
):
    FAULTS[f"voc_{name}"] = lambda root, options=options: voc(root, **options), says, "boxes", {}


@fault("also in train, byte for byte", "boxes")
def voc_image_of_two_splits(root):
    spec = voc(root)
    (root / "ImageSets/Main/val.txt").write_text("1\n2\n")
    return spec


@fault("lacks an XML file", "boxes")
def voc_image_without_annotation(root):
    spec = voc(root)
    (root / "Annotations/0.xml").unlink()
    return spec


def boxes(root, row):
    for i in range(4):
        image(root / f"{i}.png", seed=i)
    good = ["0.png,train,32,24,cat,2,2,9,9", "1.png,train,32,24,dog,2,2,9,9", "2.png,val,32,24,cat,2,2,9,9"]
    (root / "boxes.csv").write_text("\n".join(["image,split,width,height,label,xmin,ymin,xmax,ymax", *good, row]))


for name, says, row in (
    ("numbers_in_words", "could not convert string to float: 'ten'", "3.png,val,32,24,cat,ten,2,9,9"),
    ("another_size", "gives it another split or size", "0.png,train,24,32,cat,2,2,9,9"),
    ("unknown_split", "the split 'trian' is not one of", "3.png,trian,32,24,cat,2,2,9,9"),
    ("no_label", "has the label '', which is not a class", "3.png,train,32,24,,2,2,9,9"),
    ("row_twice", "the same box of the same class twice", "0.png,train,32,24,cat,2,2,9,9"),
    ("label_in_two_cases", "'Dog' = 'dog'", "3.png,train,32,24,Dog,2,2,9,9"),
):
    FAULTS[f"boxes_{name}"] = lambda root, row=row: boxes(root, row), says, "boxes", {}


# Sequences


def sequences(root, line="[MAX 1 2 ]\t2"):
    for number, split in enumerate(("train", "val", "test")):
        rows = [f"[MIN {number} {i} ]\t{min(number, i)}" for i in range(1, 9)]
        (root / f"basic_{split}.tsv").write_text("\n".join(["Source\tTarget", *rows, line if split == "train" else ""]))
    return f"listops:{root}"


for name, says, line in (
    ("unknown_token", "basic_train.tsv, line 10", "[MAX 1 [LOG 2 ] ]\t2"),
    ("value_that_is_no_digit", "a digit in Target", "[MAX 1 2 ]\t12"),
    ("line_without_value", "a digit in Target", "[MAX 1 2 ]"),
    ("sequence_of_two_splits", "also in train", "[MIN 2 4 ]\t2"),
):
    FAULTS[f"sequences_{name}"] = lambda root, line=line: sequences(root, line), says, "tokens", {}


# Hugging Face


def saved(root, labels, **others):
    datasets = pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")
    pixels = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (*SIZE, 3), dtype=np.uint8)) for i in range(9)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    splits = {
        split: datasets.Dataset.from_dict({"image": pixels[: len(values)], "label": values}, features=features)
        for split, values in {"train": labels, **others}.items()
    }
    datasets.DatasetDict(splits).save_to_disk(root / "saved")
    return f"hf:{root / 'saved'}"


@fault("images of train in hf:")
def hugging_face_row_without_a_label(root):
    return saved(root, [0, 1, 0, 1, 0, 1, 0, 1, -1])


@fault("such as train[8] with the label -1")
def hugging_face_label_of_none(root):
    return saved(root, [0, 1, 0, 1, 0, 1, 0, 1, None])


@fault("The labels of test are not public; it was not used.")
def hugging_face_hidden_labels(root):
    return saved(root, [0, 1, 0, 1, 0, 1], test=[-1, -1, -1])


# Splits and groups


def split_file(rows):
    def write(root):
        (root / "split.csv").write_text("\n".join(rows))
        return root / "split.csv"

    return write


def listed(**splits):
    usual = ["train"] * 6 + ["val"] * 2
    return [f"{k}/{i}.png,{splits.get(f'{k}{i}', usual[i])}" for k in ("cat", "dog") for i in range(8)]


for name, says, rows in (
    ("names_an_image_that_is_missing", "names 1 images that", ["image,split", *listed(), "cat/99.png,val"]),
    ("has_an_unknown_split", 'into the split "holdout"', ["image,split", *listed(cat3="holdout")]),
    ("names_an_image_twice", "names cat/0.png 2 times", ["image,split", *listed(), "cat/0.png,val"]),
    ("has_other_labels", "labels of the data set", ["image,split,label", *(f"{row},cat" for row in listed())]),
    (
        "leaves_train_empty",
        "does not name any training image",
        ["image,split", *(row.replace("train", "test") for row in listed())],
    ),
    ("leaves_images_out", "1 images that", ["image,split", *listed()[:-1]]),
    (
        "tears_groups",
        "groups of val are also",
        ["image,split,group", *(f"{row},{row[4]}" for row in listed(dog0="val"))],
    ),
    ("has_no_column_split", "does not have the column split", ["image,part", *listed()]),
):
    FAULTS[f"split_file_{name}"] = classes, says, "class", {"split_file": split_file(rows)}
for name, says, options in (
    ("that_leave_images_out", "images without a group, such as", {"group_by": "(cat)"}),
    ("that_are_one", "Images to evaluate on are missing", {"group_by": "png"}),
    ("that_are_no_expression", "is not a valid regular expression", {"group_by": "("}),
    ("fewer_than_folds", "Too few images, or groups", {"group_by": "^[a-z]+", "fold": (0, 9)}),
):  # fmt: skip
    FAULTS[f"groups_{name}"] = classes, says, "class", options


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused_or_reported(name, tmp_path):
    plant, says, target, options = FAULTS[name]
    (tmp_path / "set").mkdir()
    spec = plant(tmp_path / "set")
    spec = spec if isinstance(spec, str) else str(tmp_path / "set")
    views = {"joint": VIEWS[target]().joint, "joint_view": VIEWS[target]().joint_view} if target in VIEWS else {}
    options = {key: value(tmp_path / "set") if callable(value) else value for key, value in options.items()}
    try:
        if target == "tokens":
            loaded = load_sequences(spec, img_size=(1, 16), in_chans=16, **options)
        else:
            loaded = data.load(
                spec, img_size=SIZE, augment=small_detection().augment, target=target, **views, **options
            )
        text = "\n".join(loaded.summary()["warnings"])
    except UserError as error:
        text = str(error)
    assert says in text


def test_the_faults_are_of_every_kind_of_data_set():
    assert len(FAULTS) >= 105
