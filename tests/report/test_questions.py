"""Whatever a design asks, every view of its answer shows: page, terminal, methods, results.json and the flat table."""

import html
import json
import re
import shutil

import pytest

from vitmods.report import render as terminal
from vitmods.report.page import render
from vitmods.report.text import headline, point_text
from vitmods.study import Answer

ASKED = {
    "plain": ["arms"],
    "sweep": ["arms", "settings", "departures"],
    "bases": ["arms", "settings", "departures"],
    "factorial": ["changes", "pairs", "arms"],
    "tuned": ["arms"],
    "folds": ["arms"],
    "until decided": ["arms"],
}

pytestmark = pytest.mark.usefixtures("short_clocks")


def words_of(page):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page.replace("<wbr>", ""))))


@pytest.mark.parametrize(("design", "names"), ASKED.items())
def test_every_view_shows_every_question(finished, design, names):
    answer = Answer.load(finished(design))
    assert list(answer.questions) == names
    assert answer.headline is answer.questions[names[0]]
    page, printed, methods = words_of(render(answer)), " ".join(terminal(answer).split()), answer.to_methods()
    for question in answer.questions.values():
        if not (question.is_shown or question.column_of):  # as pairs, where a run failed
            continue
        assert question.title in page
        assert question.methods in methods
        for note in question.notes if question.title else ():
            assert note in page
        for heading, effects in question.groups.items():
            assert heading in page
            assert heading in printed
            for label in effects:
                assert (f"{label} at {heading}" if heading else label) in question.effects
                assert f" {label} " in page
                assert question.is_folded or f" {label} " in printed
    assert f"Effects are {answer.headline.meaning}" in printed
    written = json.loads((answer.path / "results.json").read_text())
    assert {name: set(question["effects"]) for name, question in written["questions"].items()} == {
        name: set(question.effects) for name, question in answer.questions.items()
    }
    assert len(answer.trials_table()) == len(answer.trials) == len(answer.to_csv().splitlines()) - 1


def test_the_chosen_point_is_in_every_view(finished):
    answer = Answer.load(finished("tuned"))
    views = [words_of(render(answer)), " ".join(terminal(answer).split()), answer.to_methods()]
    for arm in answer.every_arm:
        assert all(f"{point_text(arm.tuning.chosen)}" in view for view in views), arm.name
    assert all("Chosen: " in view for view in views)


@pytest.mark.parametrize("design", ["sweep", "factorial", "tuned", "until decided"])
def test_an_unfinished_study_of_every_design_can_be_read(finished, design, tmp_path):
    out = shutil.copytree(finished(design), tmp_path / "out")
    for folder in sorted(path.parent for path in out.rglob("seed*/result.json"))[::3]:
        shutil.rmtree(folder)
    answer = Answer.load(out)
    assert not answer.complete
    assert headline(answer) in words_of(render(answer))
    assert headline(answer) in " ".join(terminal(answer, 80).split())
    assert "The study is not complete" in answer.to_methods()
