"""Names that others chose, of classes, images, arms and files, are shown and never obeyed."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import vitmods as vm
from vitmods.cli import main
from vitmods.report.evaluation import draw_evaluation
from vitmods.report.tables import print_predictions
from vitmods.report.templates import code, templates
from vitmods.tasks.detection.task import with_objects
from vitmods.train.trial import read_examples

NAMES = (
    "=cmd|' /C calc'!A0", "[red]x[/red]", "<script>alert(1)</script>", "a\x1b[2Jb", "c\nd,e", "f\u202eg", "$\\frac{$",
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    model = vm.vit("mu1/4", img_size=8, num_classes=len(NAMES)).eval()
    model.pretrained_cfg["label_names"] = NAMES
    vm.export(model, tmp_path / "m.safetensors")
    Image.new("RGB", (8, 8)).save(tmp_path / "=a\x1b[2J.png")
    return tmp_path / "m.safetensors"


def is_plain(text):
    return not any(char in text for char in ("\x1b", "\u202e", "\x07"))


def test_predictions_in_a_terminal(checkpoint):
    predictions = vm.predict(checkpoint, checkpoint.parent / "=a\x1b[2J.png", top=len(NAMES), device="cpu")
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    print_predictions(predictions, console)
    text = console.file.getvalue()
    assert is_plain(text.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", ""))
    assert "[red]x[/red]" in text


def test_predictions_as_csv_and_json(checkpoint, capsys):
    image = str(checkpoint.parent / "=a\x1b[2J.png")
    assert main(["predict", str(checkpoint), image, "--top", "9", "--format", "csv"]) == 0
    text = capsys.readouterr().out
    assert is_plain(text)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(NAMES)
    assert not any(row[column].startswith(("=", "+", "-", "@")) for row in rows for column in ("image", "class"))
    assert main(["predict", str(checkpoint), image, "--top", "9", "--format", "json"]) == 0
    text = capsys.readouterr().out
    assert is_plain(text)
    assert len(json.loads(text)[0]["probabilities"]) == len(NAMES)


def test_errors_and_warnings(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "a\x1b[2J\u202eb.safetensors")]) == 2
    assert main(["compare", "--arms", "\x1b[2Jx"]) == 2
    assert main(["\x1b]0;title\x07"]) == 2
    text = capsys.readouterr().err
    assert is_plain(text)
    assert "\\x1b[2J" in text


def test_examples_of_a_trial_bring_colors_and_no_style(tmp_path):
    (tmp_path / "examples").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "examples/0-found.png")
    legend = dict.fromkeys(NAMES, "#00ff00") | {"styled": "red;position:fixed", "no text": 3}
    record = {"schema": 1, "images": [{"id": NAMES[2], "panels": ["found"]}], "legend": legend}
    path = tmp_path / "examples/examples.json"
    path.write_text(json.dumps(record))
    assert read_examples(tmp_path).ids == ()  # of a color that is none nobody knows what else is wrong
    del legend["no text"]
    path.write_text(json.dumps(record))
    assert list(read_examples(tmp_path).legend) == list(NAMES)
    record["images"][0]["panels"] = ["../../examples/0-found"]
    path.write_text(json.dumps(record))
    assert read_examples(tmp_path).ids == ()


def test_templates_escape_whatever_they_are_given():
    folder = Path(vm.__file__).parent / "report"
    files = sorted(folder.glob("*.html"))
    assert files
    for path in files:
        assert not re.search(r"\|\s*safe\b|autoescape", path.read_text()), path
    assert [path.name for path in folder.glob("*.py") if "jinja2" in path.read_text()] == ["templates.py"]
    assert templates().autoescape is True
    assert code("`<script>` and '`'") == "<code>&lt;script&gt;</code> and &#39;`&#39;"


def test_drawings_and_figures_take_any_name(tmp_path):
    image, boxes = np.zeros((40, 40, 3), np.uint8), np.array([[1, 1, 30, 30]] * len(NAMES), np.float64)
    assert with_objects(image, boxes, np.arange(len(NAMES)), NAMES).any()
    matrix = np.eye(len(NAMES)).tolist()
    evaluation = {
        "protocols": {"confusion": {"matrix": matrix, "classes": NAMES, "images": 7}},
        "metrics": {"balanced_accuracy": 1.0},
    }
    drawn = draw_evaluation(evaluation, tmp_path / "figures")
    assert drawn
    assert all("<script>" not in path.read_text() for path in drawn if path.suffix == ".svg")
