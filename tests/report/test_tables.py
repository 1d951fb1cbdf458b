"""The verdict table at several widths, with and without a terminal."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from vitmods.report import print_answer, render
from vitmods.report import text as words
from vitmods.report.page import render as page_of
from vitmods.stats.tables import signed
from vitmods.util.text import size


@pytest.fixture(scope="module")
def answer(synthetic):
    return synthetic.make_answer("study", diverge=[(4, 1)], rename={1: "[red]x[/red]", 2: "naïve \x1b[2J 腕"})


def printed(answer, **options):
    console = Console(**options)
    print_answer(answer, console)
    return console.file


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut_off(answer, width):
    text = render(answer, width)
    assert max(len(line) for line in text.splitlines() if not line.startswith("  vitmods ")) <= width
    assert text.endswith(f"\n  {answer.command} --retrain dpn+rms"), "a command is whole, to be copied"
    assert "…" not in text
    (head,) = (line for line in text.splitlines() if line.startswith("arm "))
    for heading in ("verdict", "effect", "seeds", "train", "infer", *(["memory", "params"] if width > 110 else [])):
        assert re.search(rf"\b{heading}\b", head)
    for effect in answer.effects.values():
        numbers = f"{signed(effect.effect)} [{signed(effect.low)}, {signed(effect.high)}]"
        (line,) = (line for line in text.splitlines() if numbers in line)
        verdict = f"{effect.verdict}, {effect.expects}" if effect.expects else effect.verdict
        assert f" {verdict} " in line, "one line an arm"
        assert effect.arm[:8] in line or not effect.arm.isascii()


@pytest.mark.parametrize("width", [40, 50, 60, 70])
def test_in_a_narrow_terminal_columns_go_and_names_stay(answer, width):
    text = printed(answer, file=io.StringIO(), width=width).getvalue()
    table = text[text.index("\narm ") + 1 :].partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    for effect in answer.effects.values():
        assert effect.arm[:8] in table or not effect.arm.isascii()
        assert signed(effect.effect) in table


def test_the_best_arm_comes_first_and_the_worst_last(answer):
    text = render(answer)
    assert text.startswith("dpn+rms and dpn help; ")
    assert answer["dpn"].expected < answer["dpn"].effect
    assert f"dpn {answer['dpn'].expects}" in answer.to_methods()
    table = text[text.index("\narm ") :]
    assert table.index("dpn+rms") < table.index("normformer") < table.index("post on MLP")
    assert "4 (−1)" in text, "a trial diverged"
    assert text.index("1 of 5 post on MLP trials diverged") < text.index("\narm ")


def test_names_are_neither_markup_nor_commands_to_the_terminal(answer, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = printed(answer, file=io.StringIO(), width=140, force_terminal=True).getvalue()
    assert "[red]x[/red]" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b[" in text
    assert "\x1b[2J" not in text
    assert "naïve" in text
    assert "\x1b[" not in printed(answer, file=io.StringIO(), width=120).getvalue(), "colors on a terminal only"


def test_an_output_without_unicode_gets_plain_signs(answer):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    printed(answer, file=file, width=80).flush()
    text = file.buffer.getvalue().decode("ascii")
    assert "^ helps" in text
    assert "\\u8155" in text


def test_an_unfinished_study_says_so_first(synthetic):
    missing = [(0, seed) for seed in range(1, 5)]
    text = render(synthetic.make_answer("study", arms=1, missing=missing), 80)
    assert text.startswith("6 of 10 trials finished\n")
    some = render(synthetic.make_answer("study", arms=4, missing=[(3, 4)]), 80)
    assert some.startswith("24 of 25 trials finished\nWarning: ")
    assert "Verdicts are provisional" in some
    assert "so far" in some
    assert "so far" not in render(synthetic.make_answer("study", arms=4), 80)
    (command,) = (line for line in some.splitlines() if line.startswith("  vitmods compare"))
    assert command.endswith("--out runs/cifar10"), "a command that can be copied is one line, however long"


def test_it_ends_in_the_next_step_and_its_command(answer, synthetic):
    def ending(answer):
        return " ".join(render(answer, 80).partition("\nNext: ")[2].split())

    assert ending(answer).startswith("Use dpn+rms: it helps. The report has more next steps. To deploy dpn+rms, train")
    unfinished = ending(synthetic.make_answer("study", arms=1, missing=[(0, 4)]))
    assert unfinished == f"Finish the study: re-running the command resumes it. {answer.command}"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"missing": [(3, 4)]},
        {"diverge": [(1, 2)]},
        {"rename": {1: "placement(attn=post,mlp=post)"}},
        {"missing": [(arm, seed) for arm in range(-1, 4) for seed in range(5)]},
    ],
)
def test_a_usual_study_fits_a_screen(synthetic, options):
    """With the lines of report and results, and the prompt of the shell."""
    lines = [line[i : i + 80] for line in render(synthetic.make_answer("study", arms=4, **options), 80).splitlines()
             for i in range(0, max(len(line), 1), 80)]  # fmt: skip
    assert len(lines) + 2 <= 25, "\n".join(lines)


def test_warnings_take_a_few_lines_and_the_others_are_counted(synthetic):
    doubts = tuple(f"Number {i}: {'long ' * 30}end." for i in range(4))
    answer = dataclasses.replace(synthetic.make_answer("study", arms=1), doubts=doubts)
    text = " ".join(render(answer, 80).split())
    assert text.count("Warning: ") == 1
    assert "end. The report has 3 more warnings." in text


def test_base_has_its_spread(synthetic):
    answer = synthetic.make_answer("study", arms=1, seeds=2)
    first, second = (100 * score for score in answer.base.scores.values())
    sd = f"sd {abs(first - second) / 2**0.5:.2g} over 2 seeds"
    assert f", {sd}." in " ".join(render(answer, 80).split())
    assert f"<small>{sd}</small>" in page_of(answer)
    single = synthetic.make_answer("study", arms=1, seeds=1)
    assert ", sd " not in render(single, 80)
    assert "<small>sd " not in page_of(single)


def test_what_makes_numbers_doubtful_is_printed(synthetic):
    doubts = ("The trials were not all run alike (torch 1.0 and torch 2.0): x\x1b[2J.",)
    text = render(dataclasses.replace(synthetic.make_answer("study", arms=1), doubts=doubts), 80)
    assert "Warning: The trials were not all run alike" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("write", "value", "written"),
    [
        (words.count, 999_600, "1 M"),
        (words.count, 999_400, "999 k"),
        (words.short_time, 0.9997, "1 s"),
        (words.short_time, 0.9994, "999 ms"),
        (size, 999.7e6, "1 GB"),
    ],
)
def test_a_number_is_rounded_before_its_unit_is_chosen(write, value, written):
    assert write(value) == written


def with_trained(answer, *counts):
    """The answer with the number of trained parameters of base and of its first arms, which have 5.36 M or more."""
    first, *others = counts
    costs = [dataclasses.replace(arm.cost, trained=count) for arm, count in zip(answer.arms, others, strict=False)]
    arms = [dataclasses.replace(arm, cost=cost) for arm, cost in zip(answer.arms, costs, strict=False)]
    base_cost = dataclasses.replace(answer.base_cost, trained=first)
    return dataclasses.replace(answer, arms=(*arms, *answer.arms[len(arms) :]), base_cost=base_cost)


@pytest.mark.parametrize(
    ("counts", "is_shown"),
    [((None,), False), ((5_362_762, 5_362_762, 5_364_000), False), ((5_362_762, 52_000, 5_364_000), True)],
)
def test_what_is_trained_is_shown_where_arms_train_a_part(synthetic, counts, is_shown):
    answer = with_trained(synthetic.make_answer("study", arms=2, evaluations=3), *counts)
    for width in (80, 140):
        text = render(answer, width)
        assert (" trained" in next(line for line in text.splitlines() if line.startswith("arm "))) == is_shown
        assert (" 52 k" in text) == is_shown
    page = page_of(answer)
    assert ("trained, bytes a task" in page) == is_shown
    assert ("52 k<small>208 kB</small>" in page) == is_shown
