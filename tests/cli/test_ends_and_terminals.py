"""How a command ends that is told to, what a terminal of ASCII shows, and addresses with a slip."""

import io
import itertools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmods import cli
from vitmods.data import load
from vitmods.data.splits import read_columns, write_split
from vitmods.recipes.recipe import Augment
from vitmods.util import address
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_command_that_is_told_to_end_before_its_loop_says_how_to_resume(number, code, monkeypatch, capsys):
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def work(arguments):
        try:
            signal.raise_signal(number)
        finally:
            if number != signal.SIGINT:
                signal.raise_signal(number)  # a second one, while it cleans up

    try:
        monkeypatch.setattr(cli, "find_command", lambda name: work)
        assert cli.main(["compare", "--seeds", "2"]) == code
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    finally:
        signal.signal(number, before)
    assert "to resume: vitmods compare --seeds 2" in capsys.readouterr().err


def test_sigterm_in_the_first_seconds_of_a_study_is_a_clean_end(tmp_path):
    command = ["compare", "--out", str(tmp_path / "out"), "--device", "cpu", "--workers", "1"]
    run = subprocess.Popen([sys.executable, "-P", "-m", "vitmods", *command], stderr=subprocess.PIPE, text=True)
    first = run.stderr.readline()  # before torch is imported
    assert "Comparing" in first
    run.terminate()
    assert "to resume: vitmods compare" in run.stderr.read()
    assert run.wait() == 128 + signal.SIGTERM
    run.stderr.close()
    assert not list(tmp_path.rglob("*.tmp"))


def ascii_stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)


@pytest.mark.parametrize(
    "arguments", [["changes"], ["recipes"], ["paper", "show", "dpn-table1"], ["changes", "\u00e4"]]
)
def test_a_terminal_of_ascii_shows_all_commands(arguments, monkeypatch):
    streams = [ascii_stream(), ascii_stream()]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    code = cli.main(arguments)
    texts = [stream.buffer.getvalue().decode("ascii") for stream in streams]
    assert "not foreseen" not in texts[1]
    assert code == (2 if "\u00e4" in arguments else 0)
    assert texts[code // 2]


def test_lines_of_progress_are_shown_on_any_terminal_without_what_moves_its_cursor(monkeypatch):
    stream = ascii_stream()
    monkeypatch.setattr(sys, "stderr", stream)
    log("Not reused: runs/\x1b[2J\u202e: \u00b1\nand more")
    assert stream.buffer.getvalue() == b"Not reused: runs/\\x1b[2J\\u202e: \\xb1\nand more\n"
    assert LenientStream(stream).write("\u00b1") == 1


SLIPS = {
    "s3 ://b/x": "s3://b/x",
    "s3//b/x": "s3://b/x",
    " s3://b/x": "s3://b/x",
    "s3: //b/x": "s3://b/x",
    "S3//b/x": "s3://b/x",
    "gs ://b": "gs://b",
    "sftp//host/x": "sftp://host/x",
}


@pytest.mark.parametrize("text", SLIPS)
def test_an_address_with_a_slip_is_no_folder(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"is not an address: write it as {SLIPS[text]},"):
        address.place(text)
    for words in (["--out", text], [f"--out={text}"]):
        assert cli.main(["compare", *words]) == 2
        assert SLIPS[text] in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["s3/b/x", "runs//x", "./s3//b", "C:/x", "a b//c", "https//x", "runs/s3 :/x", "12//x"])
def test_other_names_are_folders(text):
    assert address.place(text) == Path(text)


def test_names_of_images_are_escaped_in_split_csv_which_is_still_read(tmp_path):
    images, pixels = tmp_path / "images", np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "test"), ("cat", "dog"), range(4)):
        (images / split / name).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels.integers(0, 256, (8, 8, 3), np.uint8))
        image.save(images / split / name / f"{number}.png")
    for number, name in enumerate(("a\x1b[2J.png", "=b\u202e.png", "c\nd.png")):
        (images / "train" / "cat" / f"{number}.png").rename(images / "train" / "cat" / name)
    dataset = load(str(images), augment=Augment(), img_size=8)
    write_split(tmp_path / "split.csv", dataset)
    text = (tmp_path / "split.csv").read_text()
    assert not {"\x1b", "\u202e"} & set(text)
    assert len(text.splitlines()) == 17
    assert "a\\x1b[2J.png" in text
    again = load(str(images), augment=Augment(), img_size=8, split_file=tmp_path / "split.csv")
    assert [list(split.ids) for split in again.splits.values()] == [
        list(split.ids) for split in dataset.splits.values()
    ]
    grouped = load(str(images), augment=Augment(), img_size=8, group_by=tmp_path / "split.csv")
    assert len(grouped.splits["train"]) == len(dataset.splits["train"])
    assert len(read_columns(tmp_path / "split.csv", ("image", "split"))) == 16
