"""The verdict table at several widths, with and without a terminal."""

import io
import re

import pytest
from rich.console import Console

from vitmods.study.table import print_results, render


@pytest.fixture(scope="module")
def results(synthetic, tmp_path_factory):
    return synthetic.read_results(
        synthetic.make_study(
            tmp_path_factory.mktemp("table") / "study",
            diverge=[(4, 1)],
            rename={1: "[red]x[/red]", 2: "naïve \x1b[2J 腕"},
        )
    )


def printed(results, **options):
    console = Console(**options)
    print_results(results, console)
    return console.file


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut_off(results, width):
    text = render(results, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for heading in ("arm", "effect", "p", "seeds", "train", "infer", "memory", "params"):
        assert re.search(rf"\b{heading}\b", text.splitlines()[2])
    for arm in results["arms"]:
        effect = arm["effect"]
        assert f"{effect['mean']:+.2f}".replace("-", "−") in text
        assert f"[{effect['low']:+.2f}, {effect['high']:+.2f}]".replace("-", "−") in text


def test_the_best_arm_comes_first_and_the_worst_last(results):
    text = render(results)
    assert text.startswith("Of 10 arms, 2 help, ")
    assert text.index("dpn+rms") < text.index("normformer") < text.index("post on MLP")
    assert "1 diverged" in text


def test_names_are_neither_markup_nor_commands_to_the_terminal(results):
    text = printed(results, file=io.StringIO(), width=140, force_terminal=True).getvalue()
    assert "[red]x[/red]" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b[2J" not in text
    assert "naïve" in text


def test_colors_on_a_terminal_only(results, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in printed(results, file=io.StringIO(), width=120, force_terminal=True).getvalue()
    assert "\x1b[" not in printed(results, file=io.StringIO(), width=120).getvalue()


def test_an_output_without_unicode_gets_plain_signs(results):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    printed(results, file=file, width=80).flush()
    text = file.buffer.getvalue().decode("ascii")
    assert "^ helps" in text
    assert "\\u8155" in text


def test_an_unfinished_study_says_so(synthetic, tmp_path):
    missing = [(0, seed) for seed in range(5)] + [(1, 0)]
    text = render(synthetic.read_results(synthetic.make_study(tmp_path / "s", arms=2, missing=missing)), 80)
    assert "cannot tell" in text
    assert "not complete" in text
