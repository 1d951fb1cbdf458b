"""Sources of boxes: what each format says, and what is wrong with it in one error."""

import json

import numpy as np
import pytest
from PIL import Image

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.recipes import small_detection
from vitmods.tasks.detection.objects import Objects, drawn, evaluation_views, training_views
from vitmods.util.errors import UserError

from ...data.support import counts, encoded, noise, write_files

SIZE = (48, 64)  # height and width
EXACT = [10, 8, 20, 16]  # left, top, width, height


def image(path, seed, size=SIZE, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed, size).save(path, **options)


def coco(folder, change=lambda split, content: None):
    """Two splits of three images; the third has none, the second a crowd."""
    box = [10, 8, 30, 8, 30, 24, 10, 24]
    runs = {"size": list(SIZE), "counts": [0, 48, 48 * 63]}
    crowd = {"id": 9, "image_id": 1, "category_id": 3, "bbox": [0, 0, 1, 48], "iscrowd": 1, "segmentation": runs}
    common = {"bbox": EXACT, "area": 300.0, "iscrowd": 0, "segmentation": [box]}
    for split in ("train", "val"):
        write_files(folder / split, {f"{i}.png": encoded(noise(10 * len(split) + i, SIZE)) for i in range(3)})
        content = {
            "images": [{"id": i, "file_name": f"{i}.png", "height": SIZE[0], "width": SIZE[1]} for i in range(3)],
            "annotations": [{"id": i, "image_id": i, "category_id": 7 - 4 * i, **common} for i in range(2)],
            "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
        }
        content["annotations"].append(dict(crowd))
        change(split, content)
        (folder / f"{split}.json").write_text(json.dumps(content))
    return folder


def loaded(spec, **options):
    fields = {"target": "boxes", "joint": training_views, "joint_view": evaluation_views, **options}
    return data.load(str(spec), img_size=SIZE, augment=small_detection().augment, **fields)


def test_coco_has_boxes_masks_and_crowds_with_classes_in_the_order_of_their_ids(tmp_path):
    source = open_source(f"coco:{coco(tmp_path)}")
    assert (source.classes, source.target, source.broken) == (("cat", "dog"), "boxes", [])
    first, second, third = source.splits["train"].annotations
    assert source.splits["val"].label_sets == ((1,), (0,), ())
    np.testing.assert_array_equal(first.boxes, [[10, 8, 30, 24]])
    assert first.labels.tolist() == [1]
    assert second.crowd.tolist() == [False, True]
    assert second.area.tolist() == [300, 48]
    assert len(third) == 0
    expected = np.zeros(SIZE, dtype=bool)
    expected[8:24, 10:30] = True
    np.testing.assert_array_equal(first.masks()[0], expected)
    assert second.masks()[1][:, 0].all()
    assert not second.masks()[1][:, 1:].any()


def test_some_classes_or_none_are_told_apart(tmp_path):
    coco(tmp_path)
    dogs = open_source(f"coco:{tmp_path}?classes=dog")
    assert (dogs.classes, dogs.splits["train"].label_sets) == (("dog",), ((0,), (), ()))
    every = open_source(f"coco:{tmp_path}?agnostic=1")
    assert (every.classes, every.splits["train"].label_sets) == (("object",), ((0,), (0,), ()))
    with pytest.raises(UserError, match=r"unknown class 'dgo'.*dog"):
        open_source(f"coco:{tmp_path}?classes=dgo")


def test_the_layout_of_coco_itself(tmp_path):
    coco(tmp_path)
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / split).rename(tmp_path / f"{split}2017")
        (tmp_path / f"{split}.json").rename(tmp_path / "annotations" / f"instances_{split}2017.json")
    dataset = loaded(tmp_path)  # claimed without its name
    assert counts(dataset) == {"train": 3, "val": 3}
    with pytest.raises(UserError, match=r"the file .*lost.json does not exist"):
        open_source(f"coco:{tmp_path}?train=lost.json")


def first(number=0, **values):
    return lambda split, content: content["annotations"][number].update(values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (first(segmentation={"size": list(SIZE), "counts": [0, 48, 48 * 63]}), "an outline from 0, 0, 1, 48"),
        (first(1, bbox=[64, 8, 0.5, 5]), "a box of cat is empty in 64 x 48 pixels: 64, 8, 64.5, 13"),
        (first(segmentation=[[1, 2, 3]]), "has an invalid outline"),
        (first(image_id=77), "annotation 0 is of image 77, not listed"),
    ],
)
def test_what_is_wrong_is_one_error_before_training_or_left_out(tmp_path, change, reason):
    """tests/data/test_faults.py has other faults."""
    spec = f"coco:{coco(tmp_path, change)}?allow=missing"
    with pytest.raises(UserError, match=f"(?s)2 images cannot be used.*{reason}"):
        loaded(spec)
    left = loaded(spec, unreadable="skip")
    assert len(left.train) == (3 if "not listed" in reason else 2)
    assert left.summary()["left_out"] == 2


OUTLINES = [{"size": [48, 40], "counts": [0, 48, 48 * 39]}, {"size": list(SIZE)}] + [
    {"size": list(SIZE), "counts": runs}
    for runs in ([0, 48, 48], [0, 48, -48, 48 * 64], [0, 48, 48 * 64], "35<", "zz~", 3)
]


@pytest.mark.parametrize("runs", OUTLINES, ids=str)
def test_run_lengths_that_are_not_of_the_image_are_found_when_they_are_read(tmp_path, runs):
    broken = open_source(f"coco:{coco(tmp_path, first(2, segmentation=runs))}").broken
    reason = "annotation 9 has an invalid outline, or one for another image size than 64 x 48 pixels"
    assert [tuple(row) for row in broken] == [(split, f"{split}/1.png", reason) for split in ("train", "val")]


def test_an_area_that_is_not_said_is_that_of_the_outline_or_of_the_box(tmp_path):
    from faster_coco_eval.core import mask

    packed = mask.frPyObjects({"size": list(SIZE), "counts": [0, 30, 48 * 64 - 30]}, *SIZE)

    def change(split, content):
        first, second, crowd = content["annotations"]
        first.update(area=None, segmentation=[[10, 8, 30, 8, 10, 24]])
        second.update(area=None, segmentation=[])
        crowd["segmentation"] = {"size": list(SIZE), "counts": packed["counts"].decode()}

    first, second, _ = open_source(f"coco:{coco(tmp_path, change)}").splits["train"].annotations
    assert first.area.tolist() == [first.masks().sum()]
    assert 130 < first.area[0] < 190  # half of the box
    assert second.area.tolist() == [320, 30]
    triangle = open_source(f"yolo:{yolo(tmp_path / 'yolo', ['0 0.25 0.25 0.75 0.25 0.25 0.75'])}")
    np.testing.assert_allclose(triangle.splits["train"].annotations[0].at(SIZE).area, [48 * 64 / 8], rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "place", "pictures"),
    [
        ("{}.json", "annotations/instances_{}.json", "images/{}"),
        ("{}.json", "annotations/instances_{}2017.json", "images/{}2017"),
        ("train.json", "annotations/instances_default.json", "images"),
        ("train.json", "_annotations.coco.json", "."),
    ],
)
def test_layouts_that_programs_export(tmp_path, before, place, pictures):
    coco(tmp_path)
    for split in ("train", "val") if "{}" in before else ("train",):
        for old, new in ((before.format(split), place), (split, pictures)):
            (path := tmp_path / new.format(split)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / old).rename(path) if new != "." else [
                p.rename(tmp_path / p.name) for p in (tmp_path / old).iterdir()
            ]
    if "{}" not in before:
        (tmp_path / "val.json").unlink()
    source = open_source(f"coco:{tmp_path}")
    assert counts(source) == ({"train": 3, "val": 3} if "{}" in before else {"train": 3})
    assert not source.broken


@pytest.mark.parametrize("place", ["coco:{}/train.json", "yolo:{}/data.yaml"])
def test_a_file_where_its_folder_is_meant(tmp_path, place):
    yolo(coco(tmp_path))
    with pytest.raises(UserError, match=f"is a file: give its folder.*{place.partition(':')[0]}:{tmp_path}"):
        open_source(place.format(tmp_path))


def test_a_first_image_that_is_missing_loses_no_other(tmp_path):
    coco(tmp_path)
    image(tmp_path / "images" / "0.png", seed=99)  # not where most of them are
    (tmp_path / "train" / "0.png").unlink()
    dataset = loaded(f"coco:{tmp_path}?allow=missing", unreadable="skip")
    assert dataset.splits["train"].ids == ("train/1.png", "train/2.png")
    assert [row["path"] for row in dataset.summary()["unreadable"]] == ["train/0.png"]


def test_an_image_that_exif_turns_does_not_fit_boxes_of_the_unturned(tmp_path):
    coco(tmp_path, lambda split, content: content["images"][0].update(file_name="0.jpg"))
    turned = Image.Exif()
    turned[0x0112] = 6
    for split in ("train", "val"):
        image(tmp_path / split / "0.jpg", seed=len(split), exif=turned)
    with pytest.raises(UserError, match="before a rotation in its EXIF data"):
        loaded(f"coco:{tmp_path}")
    (tmp_path / "val.json").write_text("[]")
    with pytest.raises(UserError, match="not in COCO's format"):
        open_source(f"coco:{tmp_path}")


@pytest.mark.parametrize(("count", "message"), [(9, r"has boxes without masks.*"), (1, "train/0.png: has boxes .*")])
def test_a_set_without_masks_says_so_where_they_are_needed(tmp_path, count, message):
    def without_masks(split, content):
        for annotation in content["annotations"][:count]:
            del annotation["segmentation"]

    with pytest.raises(UserError, match=f"{message}--task detection"):
        loaded(f"coco:{coco(tmp_path, without_masks)}?allow=missing", target="instances")


VOC = """<annotation><size><width>64</width><height>48</height></size>
<object><name>{name}</name><difficult>{hard}</difficult>
<bndbox><xmin>11</xmin><ymin>9</ymin><xmax>30</xmax><ymax>24</ymax></bndbox></object></annotation>"""


def voc(folder):
    objects = enumerate((("cat", 0), ("dog", 1), ("cat", 0), ("dog", 0)))
    write_files(folder / "Annotations", {f"{i}.xml": VOC.format(name=name, hard=hard) for i, (name, hard) in objects})
    write_files(folder / "ImageSets" / "Main", {"train.txt": "0\n1\n", "val.txt": "2\n3\n"})
    return write_files(folder, {f"JPEGImages/{i}.jpg": encoded(noise(i, SIZE), "JPEG") for i in range(4)})


def test_voc_counts_pixels_from_1_sets_difficult_objects_aside_and_has_folders_of_any_name(tmp_path):
    source = open_source(str(voc(tmp_path)))
    easy, hard = source.splits["train"].annotations
    assert source.classes == ("cat", "dog")
    np.testing.assert_array_equal(easy.boxes, [[10, 8, 30, 24]])
    assert (easy.crowd.tolist(), hard.crowd.tolist()) == ([False], [True])
    (tmp_path / "JPEGImages").rename(tmp_path / "images")
    (tmp_path / "Annotations").rename(tmp_path / "xml")
    with pytest.raises(UserError, match=r"the folder .*Annotations.*\?images=FOLDER&annotations=FOLDER"):
        open_source(f"voc:{tmp_path}")
    named = f"voc:{tmp_path}?images=images&annotations=xml"
    assert counts(open_source(named)) == {"train": 2, "val": 2}
    assert not open_source(named).broken
    (tmp_path / "xml" / "0.xml").write_text("<annotation><size>")
    (broken,) = open_source(named).broken
    assert (broken.path, "cannot be read" in broken.reason) == ("images/0.jpg", True)


@pytest.mark.parametrize("form", ["{}.jpg", "JPEGImages/{}.jpg", "/old/VOC/JPEGImages/{}.jpg", "{} 1", "{}\r"])
def test_lists_of_voc_as_scripts_write_them(tmp_path, form):
    lists = voc(tmp_path) / "ImageSets" / "Main"
    (lists / "train.txt").write_text("".join(f"{form.format(i)}\n" for i in range(3)))
    (lists / "val.txt").unlink()
    (lists / "validation.txt").write_text(f"{form.format(3)}\n")
    (path := tmp_path / "Annotations" / "0.xml").write_text(path.read_text().replace("48<", "48.0<"))
    source = open_source(str(tmp_path))
    assert (counts(source), source.broken) == ({"train": 3, "val": 1}, [])


def yolo(folder, lines=("0 0.3125 0.33333333 0.3125 0.33333333", "1 0.1 0.1 0.5 0.1 0.5 0.5")):
    for split in ("train", "val"):
        files = {f"images/{split}/{i}.png": encoded(noise(10 * len(split) + i, SIZE)) for i in range(2)}
        write_files(folder, {**files, f"labels/{split}/0.txt": "\n".join(lines)})
    return write_files(folder, {"data.yaml": "train: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n"})


def test_yolo_gives_fractions_polygons_and_images_without_objects(tmp_path):
    source = open_source(str(yolo(tmp_path)))
    first, second = source.splits["train"].annotations
    objects = first.at(SIZE)
    np.testing.assert_allclose(objects.boxes, [[10, 8, 30, 24], [6.4, 4.8, 32, 24]], atol=1e-4)
    assert (first.size, objects.size, len(second)) == (None, SIZE, 0)
    assert objects.area[0] == pytest.approx(320, rel=1e-5)
    polygons = open_source(str(yolo(tmp_path / "polygons", ["1 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75"])))
    mask = polygons.splits["val"].annotations[0].at(SIZE).masks()[0]
    assert mask.sum() == 24 * 32


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0 1.004 0.5 0.008 0.1", "is empty in its image"),
        ("0 0.5 0.5 0.0000001 0.1", "is empty in its image"),
        ("zero 0.5 0.5 0.1 0.1", "line 1 of 0.txt is not an object"),
    ],
)
def test_lines_of_yolo_without_an_object_are_reported(tmp_path, line, reason):
    assert any(reason in row.reason for row in open_source(f"yolo:{yolo(tmp_path, [line])}").broken)


@pytest.mark.parametrize(
    ("line", "words"), [("names: [yes, no]", "put names in quotes"), ("nc: 3\nnames: [a, b]", "nc is 3")]
)
def test_settings_of_yolo_that_are_refused(tmp_path, line, words):
    write_files(yolo(tmp_path), {"data.yaml": f"train: images/train\n{line}\n"})
    with pytest.raises(UserError, match=words):
        open_source(f"yolo:{tmp_path}")


def test_boxes_of_keypoints_are_boxes_and_not_polygons(tmp_path):
    folder = yolo(tmp_path, ["0 0.3125 0.33333333 0.3125 0.33333333 0.1 0.2 2 0.5 0.4 1"])
    with (folder / "data.yaml").open("a") as file:
        file.write("kpt_shape: [2, 3]\nnc: '2'\n")
    source = open_source(f"yolo:{folder}")
    objects = source.splits["train"].annotations[0].at(SIZE)
    np.testing.assert_allclose(objects.boxes, [[10, 8, 30, 24]], atol=1e-4)
    assert "keypoints of objects (kpt_shape) are not read" in "".join(source.warnings)


def table(folder, rows):
    write_files(folder, {f"images/{i}.png": encoded(noise(i, SIZE)) for i in range(4)})
    return write_files(folder, {"boxes.csv": f"filename,split,width,height,class,xmin,ymin,xmax,ymax\n{rows}"})


def test_a_table_of_boxes_and_images_without_one(tmp_path):
    rows = "0.png,train,64,48,cat,10,8,30,24\n0.png,train,64,48,dog,0,0,5,5\n1.png,val,64,48,cat,1,1,9,9\n"
    table(tmp_path, rows)
    (tmp_path / "images.csv").write_text("image,split\n0.png,train\n2.png,train\n3.png,val\n")
    source = open_source(str(tmp_path))
    assert source.classes == ("cat", "dog")
    assert source.splits["train"].label_sets == ((0, 1), ())
    assert source.splits["val"].ids == ("images/1.png", "images/3.png")


@pytest.mark.parametrize("name", ["boxes.csv", "images.csv"])
def test_a_line_with_more_columns_is_refused_with_a_remedy(tmp_path, name):
    table(tmp_path, "0.png,train,64,48,cat,10,8,30,24\n")
    (tmp_path / "images.csv").write_text("image,split\n0.png,train\n")
    with (tmp_path / name).open("a") as file:
        file.write("1.png,train,64,48,cat,1,1,9,9,1\n")
    with pytest.raises(UserError, match=rf"Line 3 of .*{name} has more columns .* remove the extra comma, or put"):
        open_source(str(tmp_path))


def test_a_line_with_bad_numbers_takes_its_image_along(tmp_path):
    good = "0.png,train,64,48,cat,10,8,30,24\n2.png,train,64,48,cat,1,1,9,9\n1.png,val,64,48,cat,1,1,9,9\n"
    bad = "0.png,train,64,48,dog,ten,0,5,5\n3.png,val,64,,cat,1,1,9,9\n3.png,val,64,48,cat,1,1,9,9\n"
    source = open_source(f"boxes:{table(tmp_path, good + bad)}")
    assert [part.ids for part in source.splits.values()] == [("images/2.png",), ("images/1.png",)]
    assert [(row.split, row.path) for row in source.broken] == [("train", "images/0.png"), ("val", "images/3.png")]
    assert source.broken[0].reason == "line 5 of boxes.csv: could not convert string to float: 'ten'"
    assert source.broken[1].reason.startswith("line 6 of boxes.csv: ")


def test_masks_and_stamps_of_objects():
    from faster_coco_eval.core import mask

    plain = {"size": [4, 5], "counts": [3, 5, 12]}
    packed = mask.frPyObjects(plain, 4, 5)
    np.testing.assert_array_equal(drawn(plain, (4, 5)), drawn(packed, (4, 5)))
    assert drawn(plain, (4, 5)).sum() == 5

    def objects(left):
        boxes = np.array([[left, 0, 9, 9]], dtype=np.float32)
        return Objects(boxes, np.zeros(1, np.int64), np.zeros(1, bool), np.ones(1, np.float32), (10, 10))

    assert objects(0).stamp == objects(0).stamp != objects(1).stamp


def test_a_forgotten_name_of_the_source_is_told(tmp_path):
    folder = coco(tmp_path / "coco")
    for name, parts in (("camvid", ("train", "trainannot", "val", "valannot")), ("masks", ("images", "masks"))):
        for part in parts:
            image(tmp_path / name / part / "0.png", seed=1)
        with pytest.raises(UserError, match=f"It looks like {name}:"):
            loaded(tmp_path / name, target="mask")
    with pytest.raises(UserError, match=rf"It looks like coco:{folder}: write that"):
        loaded(folder)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "train.json").write_text("{}")
    with pytest.raises(UserError) as error:
        loaded(tmp_path / "alone")
    assert str(error.value).count("looks like") == 1


@pytest.mark.parametrize("spec", ["boxes:{}", "yolo:{}", "masks:{}", "{}/labels.csv"])
def test_classes_are_named_once_in_classes_txt(tmp_path, spec):
    """The same reader for all that have that file."""
    write_files(tmp_path, {f"{part}/0.png": encoded(noise(1, SIZE)) for part in ("images", "masks", "labels")})
    rows = "image,width,height,label,xmin,ymin,xmax,ymax\n0.png,64,48,cat,1,1,9,9\n"
    write_files(tmp_path, {"labels/0.txt": "", "boxes.csv": rows, "labels.csv": "file,labels\nimages/0.png,cat\n"})
    write_files(tmp_path, {"classes.txt": "\ufeffdog\n\ncat\n"})
    assert open_source(spec.format(tmp_path)).classes == ("dog", "cat")
    for content, words in (("cat\ndog\ncat\n", "names cat twice"), (b"\xff\xfecat", "cannot be read as text in UTF-8")):
        write_files(tmp_path, {"classes.txt": content})
        with pytest.raises(UserError, match=words):
            open_source(spec.format(tmp_path))


def as_floats(split, content):
    """As pandas writes a column of numbers."""
    for row in [*content["images"], *content["annotations"], *content["categories"]]:
        row |= {key: float(row[key]) for key in ("id", "image_id", "category_id", "height", "width") if key in row}


def without_sizes(split, content):
    for row in content["images"]:
        row.pop("height")
        row["width"] = None


def fewer_categories(split, content):
    if split == "val":
        content["categories"] = content["categories"][:1]
        content["annotations"] = content["annotations"][:1]


@pytest.mark.parametrize("change", [as_floats, without_sizes, fewer_categories])
def test_coco_as_programs_write_it(tmp_path, change):
    source = open_source(f"coco:{coco(tmp_path, change)}")
    assert (source.classes, source.broken) == (("cat", "dog"), [])
    assert source.splits["train"].label_sets == ((1,), (0,), ())
    assert [item.size for item in source.splits["train"].annotations] == [SIZE] * 3


def test_a_test_folder_that_is_missing_is_a_warning_and_a_train_folder_an_error(tmp_path):
    settings = "train: ../images/train\nval: ../images/val\ntest: ../test/images\nnames: [cat, dog]\n"
    write_files(yolo(tmp_path), {"data.yaml": settings})
    source = open_source(str(tmp_path))
    assert list(source.splits) == ["train", "val"]
    assert "data.yaml names ../test/images for test, which is missing: it was not used." in source.warnings
    (tmp_path / "data.yaml").write_text(settings.replace("images/train", "images/trian"))
    with pytest.raises(UserError, match=r"names \.\./images/trian, which is missing"):
        open_source(str(tmp_path))


def test_boxes_of_other_programs(tmp_path):
    table(tmp_path, "")
    rows = "0;64.0;48.0;cat;10;8;30;24\nimages\\1.png;64;48;dog;1;1;9;9\n"
    write_files(tmp_path, {"boxes.csv": f"id;width;height;class;xmin;ymin;xmax;ymax\n{rows}"})
    source = open_source(str(tmp_path))
    assert (source.splits["train"].ids, source.broken) == (("images/0.png", "images/1.png"), [])
