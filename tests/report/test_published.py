"""A study beside the published table that it makes again."""

import dataclasses
import html
import re
from types import SimpleNamespace

import pytest

from vitmods.cli import main
from vitmods.papers import TABLES
from vitmods.papers.comparison import _labels, comparison, table_of
from vitmods.papers.figure import draw_gains
from vitmods.papers.table import ComparedArm, published
from vitmods.report import render as terminal
from vitmods.report.page import render
from vitmods.stats.verdict import Verdict


def of(synthetic, command, **options):
    return dataclasses.replace(synthetic.make_answer("study", **options), command=command)


def words_of(answer):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", render(answer))))


@pytest.mark.parametrize(
    "command", ["vitmods paper run dpn-table1 --data x", "vitmods compare --arms paper:dpn-table1"]
)
def test_the_papers_numbers_stand_beside_ours(synthetic, command):
    answer = of(synthetic, command, arms=1, seeds=16)
    compared = comparison(answer)
    (row,) = compared.rows
    assert compared.table is TABLES["dpn-table1"]
    assert [number.text for number in row.published] == ["+1.9", "+1.4", "+1.4", "+1.1", "+0.7"]
    assert row.agreement == "consistent: 1 of 5, inconsistent: 4 of 5, same sign: 5 of 5"
    text = words_of(answer)
    for part in (
        "Comparison with the paper Dual PatchNorm , Table 1, left",
        "+1.1 (S/16: 78.6 ± 0.32 to 79.7 ± 0.2)",
        "Published differences: 1 consistent, 4 inconsistent, 0 too wide to test",
        row.agreement,
    ):
        assert part in text
    table = re.sub(r"\s+", " ", terminal(answer))
    for part in ("Comparison with Dual PatchNorm, Table 1, left: 1 consistent, 4", "+1.9 (S/32)", row.ours):
        assert part in table


def test_other_studies_stand_beside_no_paper(synthetic):
    answer = synthetic.make_answer("study")
    assert comparison(answer) is None
    assert "Comparison with" not in words_of(answer) + terminal(answer)
    assert table_of(of(synthetic, "vitmods compare --arms paper:no-such-table")) is None


def test_the_first_stage_of_a_table_is_not_compared_with_it(synthetic):
    first = of(synthetic, "vitmods compare --task beit --arms paper:tt-table7-beit")
    assert table_of(first) is None
    second = dataclasses.replace(first, settings={**first.settings, "start": {"source": "runs/pretraining"}})
    assert table_of(second) is TABLES["tt-table7-beit"]


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


def test_differences_to_another_arm_are_compared_with_differences_to_that_arm(synthetic, monkeypatch):
    answer = of(synthetic, "vitmods paper run dpn-table6", arms=2, rename={1: "pre"})
    base, (dpn, pre) = answer.base, answer.arms
    effects = {name: dataclasses.replace(dpn.effect, arm=name, effect=-0.2) for name in ("base", "pre")}
    decision = dataclasses.replace(answer.decision, effects=effects)
    monkeypatch.setattr(
        "vitmods.papers.comparison.Answer.load",
        lambda path, arm: dataclasses.replace(answer, base={"dpn": dpn}[arm], arms=(base, pre), decision=decision),
    )
    (row,) = comparison(answer).rows
    assert (row.arm, row.effect.effect) == ("pre", -0.2)
    assert "Differences are to dpn." in words_of(answer)
    alone = comparison(of(synthetic, "vitmods paper run dpn-table6", arms=1, rename={0: "post"}))
    assert (alone.rows, "an arm that this study does not have" in alone.note) == ((), True)


def test_a_figure_without_printed_numbers_says_so(synthetic):
    text = words_of(of(synthetic, "vitmods paper run tt-figure1", arms=1, rename={0: "parallel"}))
    assert "Figure 1: Two, three and four branches" in text
    assert "The paper prints no number for its arms." in text


def test_published_points_and_our_intervals_are_drawn_and_missing_arms_named(synthetic):
    names = {0: "batch", 1: "instance", 2: "dtn"}
    page = render(of(synthetic, "vitmods paper run dtn-table3", arms=3, rename=names))
    drawings = re.findall(
        r"<svg class=\"(wide|narrow)\"[^>]*aria-label=\"(Published differences[^\"]*)\"(.*?)</svg>", page
    )
    assert [kind for kind, _, _ in drawings] == ["wide", "narrow"]
    for kind, label, drawing in drawings:
        words = html.unescape(re.sub(r"<[^>]+>", " ", drawing))
        for part in ("ViT-S", "ViT-S*", "ours, 95 % interval", *names.values(), "group", "scale"):
            assert part in words, (kind, part)
        assert "published -2.6, -3.4" in label
        assert "Without an interval here: group, switchable, scale, power." in label


def test_gains_by_model_are_drawn_from_a_table_and_from_a_study(synthetic, tmp_path, capsys, monkeypatch):
    table = TABLES["dpn-figure1"]
    axes = draw_gains(table).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["S/32", "Ti/16", "B/32", "S/16", "B/16"]
    placed = [list(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata()) == 5]
    assert placed == [[1.9, 1.4, 1.4, 1.1, 0.7]]
    answer = of(synthetic, "vitmods paper run dpn-figure1", arms=2, rename={0: "pre-post", 1: "dpn"})
    drawn = draw_gains(table, answer)
    legend = {text.get_text() for text in drawn.axes[0].texts}
    assert legend == {"other placements", "dpn"}
    assert "Without a number: pre-both" in " ".join(text.get_text() for text in drawn.texts)
    monkeypatch.setattr("vitmods.study.Answer.load", lambda folder, reference: answer)
    for name in ("a.svg", "b.png", "c.pdf"):
        assert main(["paper", "show", "dpn-figure1", "--out", str(tmp_path / name), "--study", "x"]) == 0
        assert (tmp_path / name).stat().st_size > 1000
    assert main(["paper", "show", "dpn-figure1", "--out", str(tmp_path / "a.bmp")]) == 2
    assert main(["paper", "show", "tt-figure1", "--out", str(tmp_path / "d.svg")]) == 2
    assert "--study FOLDER" in capsys.readouterr().err
    assert main(["paper", "show", "dpn-figure1", "--study", "x"]) == 2


@pytest.mark.parametrize(
    ("effect", "half", "unit", "says"),
    [
        (0.6, 0.5, "%", "consistent, same sign"),
        (0.006, 0.5, "", "consistent, same sign"),
        (0.6, 1.3, "%", "consistent"),
        (0.6, 1.39, "%", "too wide to test"),  # 1.39 and the paper's 0.23 make 1.41
        (-7.0, 16.0, "%", "too wide to test"),
        (-0.6, 0.5, "%", "inconsistent, other sign"),
        (20.0, 16.0, "%", "inconsistent, same sign"),
        (0.3, 0.35, "%", "consistent"),  # 0.4 apart: within 0.35 and 0.23 together
        (0.6, float("nan"), "%", "too few seeds to compare"),
    ],
)
def test_agreement_has_three_outcomes(effect, half, unit, says):
    (number, *_) = published(TABLES["dpn-table5"], "dpn")  # 27.3 ± 0.09 and 28.0 ± 0.21
    effect_of_ours = SimpleNamespace(
        verdict=Verdict.OPEN,
        effect=effect,
        interval=(effect - half * (1 if unit else 0.01), effect + half * (1 if unit else 0.01)),
        unit=unit,
    )
    assert ComparedArm("dpn", "", effect_of_ours, (number,)).agreement == says


def test_a_published_difference_of_zero_is_never_confirmed_and_nothing_compared_before_base_has_learned():
    zero, loss = published(TABLES["dtn-table3"], "scale")[1], published(TABLES["dtn-table3"], "batch")[0]
    effect_of_ours = SimpleNamespace(verdict="open", effect=0.0, interval=(-0.2, 0.2), unit="%")
    assert (
        ComparedArm("x", "", effect_of_ours, (zero, loss)).agreement == "inconsistent: 1 of 2, too wide to test: 1 of 2"
    )
    row = ComparedArm("x", "", SimpleNamespace(**{**vars(effect_of_ours), "verdict": Verdict.WITHHELD}), (loss,))
    assert (row.outcomes, row.agreement) == ((), "base has not learned")


def test_settings_are_the_tables_by_their_values_and_models_of_other_patches():
    table = TABLES["dpn-table1-21k"]
    answer = SimpleNamespace(bases=["Ti/2", "S/4"])
    assert _labels(table, answer, {"base": "S/4", "epochs": 30}) == {"S/32", "930k"}
    assert _labels(table, answer, {"base": "S/4", "epochs": 31}) == set()
    written = SimpleNamespace(bases=["Ti/2?pool=avg", "S/4?pool=avg&class_token=false"])  # the paper's network
    assert _labels(table, written, {"base": written.bases[1], "epochs": 30}) == {"S/32", "930k"}
    assert _labels(table, answer, {"base": "mu/4"}) == set()
    fractions = TABLES["dpn-table5"]
    assert _labels(fractions, answer, {"limit_train": 1.0}) == {"1"}
    assert _labels(fractions, answer, {"limit_train": 0.0625}) == {"1/16"}
