"""A study beside the published table that it makes again."""

import dataclasses
import html
import re
from types import SimpleNamespace

import pytest

from vitmods.papers import TABLES
from vitmods.papers.line_up import published
from vitmods.report.page import render
from vitmods.report.published import Beside, _labels, comparison, table_of


def of(synthetic, command, **options):
    return dataclasses.replace(synthetic.make_answer("study", **options), command=command)


def words_of(answer):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", render(answer))))


@pytest.mark.parametrize(
    "command", ["vitmods paper run dpn-table1 --data x", "vitmods compare --arms paper:dpn-table1"]
)
def test_the_papers_numbers_stand_beside_ours(synthetic, command):
    answer = of(synthetic, command, arms=1, seeds=16)
    found = comparison(answer)
    (row,) = found.rows
    assert found.table is TABLES["dpn-table1"]
    assert [one.text for one in row.published] == ["+1.9", "+1.4", "+1.4", "+1.1", "+0.7"]
    low, high = row.effect.interval
    within = sum(low <= one.difference <= high for one in row.published)
    assert low > 0
    assert row.agreement == f"same sign: 5 of 5; in our interval: {within} of 5"
    text = words_of(answer)
    for part in (
        "Beside the paper Dual PatchNorm , Table 1, left",
        "+1.1 (S/16: 78.6 ± 0.32 to 79.7 ± 0.2)",
        row.agreement,
    ):
        assert part in text


def test_other_studies_stand_beside_no_paper(synthetic):
    answer = synthetic.make_answer("study")
    assert comparison(answer) is None
    assert "Beside the paper" not in words_of(answer)
    assert table_of(of(synthetic, "vitmods compare --arms paper:no-such-table")) is None


def test_a_study_in_python_is_known_by_its_arms(synthetic):
    answer = synthetic.make_answer("study", arms=3)
    study = TABLES["dtn-table5"].study
    arms = [
        dataclasses.replace(
            arm, name=text.partition("=")[0], changes=text.rpartition("=")[2] if "(" not in text else changes
        )
        for arm, text, changes in zip(
            (*answer.arms, answer.arms[0]),
            study.arms.values(),
            ("dtn(trade_off=0.0,kernel=uniform)", "dtn(trade_off=0.0)", "dtn(trade_off=0.5)", "dtn"),
            strict=True,
        )
    ]
    settings = {**answer.settings, "task": "classification"}
    assert table_of(dataclasses.replace(answer, arms=tuple(arms), settings=settings)) is TABLES["dtn-table5"]
    assert table_of(dataclasses.replace(answer, arms=tuple(arms[:3]), settings=settings)) is None


def test_differences_to_another_arm_are_not_put_beside_differences_to_base(synthetic):
    answer = of(synthetic, "vitmods paper run dpn-table6", arms=2)
    found = comparison(answer)
    assert not found.rows
    assert "`vitmods report study --reference dpn`" in found.note
    assert "<code>vitmods report study --reference dpn</code>" in render(answer)


def test_a_figure_without_printed_numbers_says_so(synthetic):
    text = words_of(of(synthetic, "vitmods paper run dpn-figure1", arms=1))
    assert "Figure 1: Placements of the norms in a block" in text
    assert "No number of its arms is printed." in text


@pytest.mark.parametrize(
    ("effect", "low", "high", "unit", "says"),
    [
        (0.6, 0.1, 1.1, "%", "same sign: yes; in our interval: yes"),
        (0.006, 0.001, 0.011, "", "same sign: yes; in our interval: yes"),
        (0.6, -0.1, 1.3, "%", "our sign is open; in our interval: yes"),
        (-0.6, -1.1, -0.1, "%", "same sign: no; in our interval: no"),
        (0.6, float("nan"), float("nan"), "%", "too few seeds to compare"),
    ],
)
def test_agreement(effect, low, high, unit, says):
    (known, *_) = published(TABLES["dpn-table5"], "dpn")  # +0.7
    ours = SimpleNamespace(effect=effect, interval=(low, high), unit=unit, digits=2)
    assert Beside("dpn", "", ours, (known,)).agreement == says


def test_settings_are_the_tables_by_their_values_and_models_of_other_patches():
    table = TABLES["dpn-table1-21k"]
    sweep = [SimpleNamespace(values={"base": base, "epochs": 30}) for base in ("Ti/2", "S/4")]
    answer = SimpleNamespace(sweep=sweep)
    assert _labels(table, answer, {"base": "S/4", "epochs": 30}) == {"S/32", "930k"}
    assert _labels(table, answer, {"base": "S/4", "epochs": 31}) == set()
    assert _labels(table, answer, {"base": "mu/4"}) == set()
    fractions = TABLES["dpn-table5"]
    assert _labels(fractions, answer, {"limit_train": 1.0}) == {"1"}
    assert _labels(fractions, answer, {"limit_train": 0.0625}) == {"1/16"}
