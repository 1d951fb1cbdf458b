"""Tables as people and programs write them: what is a row, and what is named instead."""

import json

import pytest

from vitmods.util.errors import UserError
from vitmods.util.tables import read_lines, read_table


@pytest.mark.parametrize(("name", "text"), [
    ("names.json", json.dumps({"a.png": "cat", "b.png": "dog"})),
    ("lists.json", json.dumps({"a.png": ["cat"], "b.png": ["dog"]})),
    ("columns.json", json.dumps({"file": ["a.png", "b.png"], "label": ["cat", "dog"]})),
    ("pandas.json", json.dumps({"file": {"0": "a.png", "1": "b.png"}, "label": {"0": "cat", "1": "dog"}})),
    ("rows.json", json.dumps([{"file": "a.png", "label": "cat"}, {"file": "b.png", "label": "dog"}])),
    ("rows.jsonl", '{"file": "a.png", "label": "cat"}\n\n{"file": "b.png", "label": "dog"}\n'),
    ("excel.csv", "sep=;\r\nfile;label\r\na.png;cat\r\nb.png;dog\r\n"),
    ("tabs.tsv", "file\tlabel\na.png\tcat\n\t\nb.png\tdog\n"),
])  # fmt: skip
def test_rows_of_every_form(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    rows = [row for _, row in read_table(tmp_path / name, ["file", "label"])]
    assert [(row["file"], row["label"]) for row in rows] == [("a.png", "cat"), ("b.png", "dog")]


@pytest.mark.parametrize(("name", "content", "says"), [
    ("book.csv", b"PK\3\4 a workbook", "it is a workbook: save it as CSV"),
    ("number.json", b"3", "it is not a list of rows"),
    ("uneven.json", b'{"file": ["a.png"], "label": ["cat", "dog"]}', "it is not a list of rows"),
    ("odd.jsonl", b'{"file": "a.png", "label": "cat"}\n[3]\n', "Line 2 of .* is not a JSON object"),
    ("broken.jsonl", b'{"file": "a.png", "label": "cat"}\n{"file": \n', "Line 2 of .* is not a JSON object"),
    ("broken.json", b"[", "cannot be read as a JSON list of rows"),
    ("empty.csv", b"", "it is empty"),
    ("other.csv", b"image,label\na.png,cat\n", "does not have the column file: its first line is"),
    ("more.csv", b"file,label\na.png,cat,dog\n", "Line 2 of .* remove the extra comma"),
])  # fmt: skip
def test_what_is_no_table_is_named_with_its_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_table(tmp_path / name, ["file", "label"])


def test_lines_of_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\n two \n".encode())
    assert read_lines(tmp_path / "a.txt") == [(1, "one"), (3, "two")]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        read_lines(tmp_path / "b.txt")
