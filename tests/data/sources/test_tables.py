"""Tables of labels as people and programs write them: all of these say the same of the same images."""

import json

import pytest

from vitmods.data import check, load
from vitmods.data.multilabel import with_target
from vitmods.data.sources import open_source
from vitmods.data.splits import SplitOptions, make_splits
from vitmods.recipes import Augment
from vitmods.stats.read import read_csv
from vitmods.util.errors import UserError
from vitmods.util.tables import Finder, read_rows, whole_number

from ..support import counts, encoded, noise, write_files

NAMES = [f"img/{c}{i}.png" for i in range(3) for c in "ab"]
CLASS = ["cat", "dog"] * 3


@pytest.fixture
def root(tmp_path):
    write_files(tmp_path, {name: encoded(noise(i)) for i, name in enumerate(NAMES)})
    return tmp_path


def lines(first, of_row, names=NAMES):
    return "\n".join([first, *(of_row(name, CLASS[i]) for i, name in enumerate(names))]) + "\n"


def stem(name):
    return name[4:-4]


def other(name):
    return name[4:-4].translate(str.maketrans("ab", "ba"))


SAME = {  # what it is of: the content, the name of the file (labels.csv), options
    "as documented": [lines("file,labels", "{},{}".format)],
    "names of images": [lines("image_id,label", lambda n, c: f"{n[4:]},{c}")],
    "without ending": [lines("id,breed", lambda n, c: f"{stem(n)},{c}")],
    "of another machine": [lines("path,class", lambda n, c: f"/home/me/data/{n},{c}")],
    "of Windows": [lines("file_name,label", lambda n, c: n.replace("/", "\\") + "," + c)],
    "semicolons": [lines("file;labels", "{};{}".format)],
    "tabs": [lines("file\tlabel", "{}\t{}".format), "all.tsv"],
    "bars": [lines("file|label", "{}|{}".format)],
    "UTF-16": [lines("file,label", "{},{}".format).encode("utf-16")],
    "UTF-16 without its mark": [lines("file,label", "{},{}".format).encode("utf-16-le")],
    "of a spreadsheet": [lines("file,label", "{},{}\r".format).encode("utf-8-sig")],
    "of Excel": ["sep=;\r\n" + lines("file;label", "{};{}\r".format)],
    "empty rows": [lines("file,label", "{},{}\n,\n".format)],
    "blanks": [lines(" file , label ", " {} , {} ".format)],
    "other case": [lines("file,label", lambda n, c: f"{n.upper()},{c}")],
    "unusual headers": [lines("what,where", lambda n, c: f"{c},{n}")],
    "named columns": [lines("a,b,label", lambda n, c: f"{n},{c},{len(c) * len(n)}"), "x.csv", "?file=A&label=b"],
    "folder and name": [lines("folder,name,label", lambda n, c: f"img,{n[4:]},{c}"), "x.csv", "?file=folder,name"],
    "with numbers of rows": [lines(",file,label", lambda n, c: f"{len(n)},{n},{c}")],
    "numbers and names": [lines("file,label,class", lambda n, c: f"{n},{c == 'dog':d},{c}")],
    "without header": [lines("", "{},{}".format).lstrip()],
    "blanks between, without header": [lines("", "{} {}".format).lstrip(), "all.tsv"],
    "names without ending and header": [lines("", lambda n, c: f"{stem(n)} {c} 1 1").lstrip(), "all.tsv", "?label=cat"],
    "a repeated cell without header": [lines("", "{0},{1},{1}".format).lstrip(), "all.csv", "?label=cat (2)"],
    "numbers of other images": [lines("id,name,label", lambda n, c: f"{other(n)},{n[4:]},{c}")],
    "numbers of other images, without header": [lines("", lambda n, c: f"{other(n)},{n[4:]},{c}").lstrip()],
    "one column a class": [lines("file,cat,dog", lambda n, c: f"{n},{c == 'cat':d},{c == 'dog':d}.0")],
    "of an attribute list": [lines("image_id,cat,dog", lambda n, c: f"{n},{'1,-1' if c == 'cat' else '-1,1'}")],
    "true and false": [lines("file,cat,dog", lambda n, c: f"{n},{'TRUE,FALSE' if c == 'cat' else 'FALSE,TRUE'}")],
    "marks": [lines("file,cat,dog", lambda n, c: f"{n},{'x,' if c == 'cat' else ',x'}")],
    "a flag of the split beside labels": [
        lines("file,cat,dog,is_test", lambda n, c: f"{n},{c == 'cat':d},{c == 'dog':d},{'2' in n:d}")],
    "lists in cells": [lines("file,labels", "{},['{}']".format)],
    "from another folder": [lines("file,label", lambda n, c: f"{n[4:]},{c}"), "tables/all.csv", "?root=../img"],
    "a JSON list": [json.dumps([{"file": name, "label": label} for name, label in zip(NAMES, CLASS)]), "all.json"],
    "a JSON object": [json.dumps(dict(zip(NAMES, CLASS))), "all.json"],
    "columns of JSON": [json.dumps({"File": NAMES, "label": CLASS}), "all.json"],
    "columns of pandas": [
        json.dumps({"path": dict(enumerate(NAMES)), "label": dict([*enumerate(CLASS)][::-1])}), "all.json"],
    "JSON Lines": [lines("", lambda n, c: json.dumps({"file_name": n, "label": c})), "all.jsonl"],
    "lists": [lines("", lambda n, c: json.dumps({"file_name": n, "labels": [c]})), "all.jsonl"],
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_tables_that_say_the_same(root, name):
    content, file, options = (*SAME[name], *["labels.csv", ""][len(SAME[name]) - 1 :])
    write_files(root, {file: content})
    source = open_source(f"{root / file}{options}")
    assert (source.classes, source.target) == (("cat", "dog"), "class")
    of_image = dict(zip(source.splits["train"].ids, source.splits["train"].labels.tolist(), strict=True))
    assert sorted(of_image.values()) == [0, 0, 0, 1, 1, 1]
    assert {name[-6] == "b" for name, label in of_image.items() if label == 1} == {True}
    if "/" not in file:
        assert sorted(of_image) == sorted(NAMES)
        option = options.replace("?", "&")
        assert counts(open_source(f"{root}?labels={file}{option}")) == {"train": 6}


def test_a_parquet_file(root):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"image": NAMES, "label": CLASS}), root / "all.parquet")
    assert open_source(root / "all.parquet").classes == ("cat", "dog")
    (root / "all.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        open_source(root / "all.parquet")


def test_lists_of_labels_by_image_in_json(root):
    (root / "x.json").write_text('{"a0.png": ["cat", "dog"], "b0.png": ["dog"], "a1.png": []}')
    source = open_source(root / "x.json")
    assert (source.target, source.classes) == ("labels", ("cat", "dog"))
    assert source.splits["train"].label_sets[:1] == ((0, 1),)


def test_hugging_faces_metadata(tmp_path):
    for split, count in (("train", 6), ("test", 2)):
        files = {f"{split}/{i}.png": encoded(noise(i)) for i in range(count)}
        rows = [json.dumps({"file_name": f"{i}.png", "label": CLASS[i]}) for i in range(count)]
        write_files(tmp_path, files | {f"{split}/metadata.jsonl": "\n".join(rows)})
    assert counts(open_source(tmp_path)) == {"train": 6, "test": 2}
    for split in ("train", "test"):
        (tmp_path / split / "metadata.jsonl").unlink()
    rows = [f"{split}/{i}.png,{CLASS[i]}" for split, count in (("train", 6), ("test", 2)) for i in range(count)]
    write_files(tmp_path, {"metadata.csv": "\n".join(["file_name,label", *rows])})
    source = open_source(tmp_path)
    assert (counts(source), source.classes) == ({"train": 6, "test": 2}, ("cat", "dog"))


def test_one_number_is_one_class_and_splits_and_groups_are_kept(root):
    rows = [f"{name},{label},{split},p{i % 3}" for i, (name, label, split) in enumerate(
        zip(NAMES, ("0", "1.0", "0.0", " 1", "0", "1"), ("train_set", "train", "train", "train", "VAL", "val"))
    )]  # fmt: skip
    write_files(root, {"labels.csv": "\n".join(["file,label,split,group", *rows]), "extra.png": encoded(noise(99))})
    source = open_source(root)
    assert (source.classes, counts(source)) == (("0", "1"), {"train": 4, "val": 2})
    assert source.splits["train"].groups == ("p0", "p2", "p1", "p0")
    assert source.warnings == [f"1 images in {root} that the table does not name were left out."]
    write_files(
        root, {"a.csv": lines("file,label", "{},{}".format, NAMES[:4]), "b.csv": "file,label\nimg/a2.png,cat\n"}
    )
    assert counts(open_source(f"{root}?labels=a.csv:train,b.csv:test")) == {"train": 4, "test": 1}


def test_a_table_of_classes_is_for_both_tasks(root):
    write_files(root, {"labels.csv": lines("file,labels", "{},{}".format)})
    options = {"img_size": 8, "augment": Augment(crop="none"), "test_fraction": 0.4, "val_fraction": 0.2}
    assert load(root, **options).target == "class"
    assert with_target(open_source(root), "labels").splits["train"].label_sets == ((0,), (0,), (0,), (1,), (1,), (1,))
    assert check(root).summary["target"] == "class"
    write_files(root, {"labels.csv": lines("file,labels", lambda n, c: f"{n},{c};{stem(n)}")})
    with pytest.raises(UserError, match="gives labels of each image, not a class"):
        load(root, **options)


@pytest.mark.parametrize(("table", "option", "words"), [
    ("file,size,color\n", "", "Which column of .* has the labels"),
    ("what,label\n", "", r"Which column of .* names the images\? Add \?file=COLUMN"),
    ("file,label\n", "?label=lable", r"does not have the column lable. Did you mean 'label'"),
    ("file,label\n", "?root=nowhere", r"the folder .*nowhere does not exist: correct root"),
    ("file,label\n1.png,cat\n", "", r"line 2: 1.png is missing"),
    ("file,label\na0,cat\nimg/a0.png,dog\n", "", r"line 3: img/a0.png is cat in one line and dog in another: leave"),
    ("file,tags\na0,cat;red\nimg/a0.png,dog\n", "", r"line 3: img/a0.png is named a second time and differs"),
    ("file,label\n/old/x.png,cat\n/old/y.png,dog\n", "", r"Images are looked for below .*: root=FOLDER names another"),
    ("file,label,split\na0,cat,train\nimg/a0.png,cat,test\n", "", r"a second time, in another split or group"),
    ("file,label,label\na0,cat,1\na1,cat,2\nb0,dog,1\nb1,dog,2\n", "", r"label \(2\) \(2 values\), label \(3\)"),
    ("file,label,class\na0,0,cat\na1,0,dog\na2,1,fox\n", "", r"class \(3 values\), label \(2 values\)"),
    ("file,label\na0,1.5\na1,2.5\n", "", "2 numbers with decimals, which are not classes"),
    ("file,tags\na0,r s\na1,s t\na2,r t\nb0,r s t\n", "", r"4 labels, or several of 3 .*\?separator=space"),
    ('file,tags\na0,"r,s"\na1,"s,t"\na2,"r,t"\nb0,r\n', "", r"4 labels, or several of 3 .*\?separator=,"),
    ('file,tags\na0,"r,s"\na1,"s,t"\na2,r\nb0,r\n', "", r"3 labels, or several of 3 .*\?separator=,"),
    ("file,age,r,s\na0,3,1,0\na1,3,0,1\na2,4,0,1\nb0,4,1,1\n", "", r"or \?label=r,s, a label each"),
    ("file,r,s\na0,1,0\na1,-1,1\n", "?label=r,s", "has 1, 0 and -1"),
    ("file,said\na0,n01 1 2 30 40\na1,n01 5 6 7 8 n02 1 2 3 4\n", "?label=said", "classes with their boxes"),
    ("file,r,s\na0,0.3,0.7\n", "?label=r,s", "has 0.3 in the column r, which is neither 1 nor 0"),
])  # fmt: skip
def test_what_is_not_clear_is_asked(root, table, option, words):
    if table.count("\n") == 1:
        table += "x,red,1\n" if table.count(",") > 1 else "x,red\n"
    write_files(root, {"x.csv": table})
    with pytest.raises(UserError, match=words):
        open_source(f"{root / 'x.csv'}{option}")


LEFT = "3 images without a label were left out."
SAID = {  # what it is of: the table, options, what is read, what is said
    "labels divided by blanks": ("file,tags\na0,r s\na1,s t\na2,r t\n", "?separator=space", "r s t: train 3", ""),
    "one label of words": (
        "file,tags\na0,r s\na1,s t\na2,r t\nb0,r\n", "?separator=none", "r r s r t s t: train 4", ""),
    "splits by another name": (
        "file,label,Usage\na0,cat,Training\nb0,dog,Training\na1,cat,PublicTest\n", "", "cat dog: test 1, train 2", ""),
    "images without labels": ("file,label\na0,cat\nb0,dog\na1,\na2,\nb1,\n", "", "cat dog: train 2", LEFT),
    "images of test without labels": (
        "file,label,split\na0,cat,train\nb0,dog,train\na1,,test\na2,,test\nb1,,test\n", "", "cat dog: train 2", LEFT),
    "numbers of splits": (
        "file,label,partition\na0,cat,0\nb0,dog,1\n", "", "cat dog: train 2", "The column partition was not used"),
    "patients": (
        "file,label,patient_id\na0,cat,4\nb0,dog,5\na1,cat,4\n", "", "cat dog: train 3", "write group=patient_id"),
    "lines twice": (
        "file,label\na0,cat\nb0,dog\nimg/a0.png,cat\n", "", "cat dog: train 2", "1 lines that repeat another"),
    "not a number": ("file,label\na0,cat\nb0,dog\na1,nan\n", "", "cat dog nan: train 3", "The label nan is a class of"),
    "labels of words, without header": ("a0 A 310\nb0 707\na1 A 310\n", "?label=A 310", "707 A 310: train 3", ""),
    "folds": ("file,label,fold\na0,cat,0\nb0,dog,1\na1,cat,2\nb1,dog,1\n", "", "cat dog: train 4", ""),
    "folds, and classes by another name": (
        "file,beast,kfold\na0,cat,0\nb0,dog,1\na1,cat,1\nb1,dog,0\n", "", "cat dog: train 4", ""),
    "scores": ("file,label,score\na0,cat,0.5\nb0,dog,0.5\na1,cat,0.5\n", "", "cat dog: train 3", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_is_read_and_what_is_said(root, name):
    table, option, meant, said = SAID[name]
    write_files(root, {"x.csv": table})
    source = open_source(f"{root / 'x.csv'}{option}")
    splits = ", ".join(f"{split} {count}" for split, count in sorted(counts(source).items()))
    assert f"{' '.join(source.classes)}: {splits}" == meant
    assert len(source.warnings) == bool(said)
    assert said in "".join(source.warnings)


@pytest.mark.parametrize(("encoding", "word"), [("gbk", "猫咪"), ("shift-jis", "ネコ科"), ("cp1251", "кошка")])
def test_labels_in_other_encodings_are_refused(root, encoding, word):
    write_files(root, {"x.csv": f"file,label\na0,{word}\nb0,dog\n".encode(encoding)})
    with pytest.raises(UserError, match="cannot be read as a CSV file in UTF-8"):
        open_source(root / "x.csv")


def test_names_that_could_be_two_images_are_asked(tmp_path):
    write_files(tmp_path, {f"{place}/1.png": encoded(noise(i)) for i, place in enumerate("ab")})
    write_files(tmp_path, {"x.csv": "file,label\n1,cat\n"})
    with pytest.raises(UserError, match=r"1 could be a/1.png or b/1.png"):
        open_source(tmp_path / "x.csv")


@pytest.mark.parametrize("place", ["/home/me/data/", "C:\\data\\old\\", "https://images.org/of/"])
def test_paths_and_addresses_of_another_machine(root, place):
    mark = "\\" if "\\" in place else "/"
    rows = [f"{place}{name.replace('/', mark)},{label}" for name, label in zip(NAMES, CLASS, strict=True)]
    write_files(root, {"x.csv": "\n".join(["file,label", *rows])})
    assert open_source(root / "x.csv").splits["train"].ids == tuple(sorted(NAMES))


def test_names_of_images():
    finder = Finder(["a/1.png", "b/1.png", "a/2.png"])
    asked = {"a/1.png": "a/1.png", "x/a/1": "a/1.png", r"b\1.png": "b/1.png", "2.0": "a/2.png", "c/1": None,
             "0002": "a/2.png", "A/2.PNG": "a/2.png", "a/1.png,cat": None}  # fmt: skip
    assert {text: finder.find(text) for text in asked} == asked
    with pytest.raises(ValueError, match="could be"):
        finder.find("1")


def test_groups_splits_and_scores_are_read_alike(root, tmp_path):
    write_files(root, {"labels.csv": lines("file,labels", "{},{}".format)})
    write_files(root, {"g.csv": lines("filename;group", lambda n, c: f"{stem(n)};{n[5]}").replace(",", ";")})
    write_files(root, {"s.csv": lines("id\tsplit", lambda n, c: f"{stem(n)}\t{'test' if '2' in n else 'train'}")})
    options = {"group_by": str(root / "g.csv"), "test_fraction": 0.3, "val_fraction": 0.0}
    splits, _ = make_splits(open_source(root), SplitOptions(**options))
    assert {name[5] for name in splits["train"].ids}.isdisjoint(name[5] for name in splits["test"].ids)
    splits, _ = make_splits(open_source(root), SplitOptions(split_file=root / "s.csv"))
    assert {name: len(part) for name, part in splits.items()} == {"train": 4, "test": 2}
    (root / "scores.csv").write_text("arm;seed;score\nbase;0.0;0.5\ndpn;0;0.7\n")
    assert read_csv(root / "scores.csv") == {"base": {0: 0.5}, "dpn": {0: 0.7}}


def test_whole_numbers():
    numbers = [3, 3.0, "3", " 3.0 ", "-2.", 1e20]
    assert [whole_number(value) for value in numbers] == [3, 3, 3, 3, -2, 10**20]
    for value in (True, None, 0.5, "0.5", "", "1e2x", float("nan"), [1]):
        with pytest.raises(ValueError, match="is not a whole number"):
            whole_number(value)


def test_delimiters_inside_of_values(tmp_path):
    (tmp_path / "x.csv").write_text('file,labels\n"a,b.png",cat;dog\n')
    assert read_rows(tmp_path / "x.csv") == (["file", "labels"], [(2, {"file": "a,b.png", "labels": "cat;dog"})])


def test_classes_that_are_written_in_two_ways_are_named(root):
    write_files(root, {"x.csv": lines("file,label", lambda n, c: f"{n},{'01' if '0' in n else '1'}{c}")})
    assert "Are they one" not in "".join(check(root / "x.csv").summary["warnings"])
    write_files(
        root, {"x.csv": lines("file,label", lambda n, c: f"{n},{('01' if '0' in n else '１') if c == 'cat' else 2}")}
    )
    assert "zeros in front: '01' = '１'. Are they one?" in "".join(check(root / "x.csv").summary["warnings"])
