"""The claims of the papers: their data, the rule for their status, and the pages that follow from both."""

import importlib.util
import json
from pathlib import Path

import pytest

from vitmods.changes import REGISTRY
from vitmods.cli import main
from vitmods.papers import PAPERS, TABLES, Claim
from vitmods.papers.claims import STUDIES, WIDE, Direction, Status, status_of, studies

ROOT = Path(__file__).parents[2]
CLAIMS = [(paper, claim) for paper in PAPERS.values() for claim in paper.claims]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("claims_page", ROOT / "docs" / "gallery" / "claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SEEN, NOT_SEEN, TOO_WIDE = Status.SEEN, Status.NOT_SEEN, Status.TOO_WIDE
INTERVALS = {  # direction, points: interval -> status
    ("gain", (0.7, 1.9)): {(0.1, 3.0): SEEN, (-2.0, 0.6): NOT_SEEN, (-2.0, 0.8): TOO_WIDE,  # can be 0, and can be 0.7
                           (0.1, 7.8): TOO_WIDE,  # +- 3.85 for 1.9
                           (-16.1, -6.0): TOO_WIDE},
    ("gain", ()): {(0.1, 70.0): SEEN, (-0.1, 70.0): TOO_WIDE, (-70.0, -0.1): NOT_SEEN},
    ("loss", (2.6, 3.4)): {(-4.0, -1.0): SEEN, (-1.06, 1.77): NOT_SEEN, (-2.7, 1.77): TOO_WIDE},
    ("no gain", ()): {(-9.0, 0.4): SEEN, (-9.0, 0.6): TOO_WIDE, (0.6, 9.0): NOT_SEEN},
    ("no gain", (1.0,)): {(-0.9, 0.9): SEEN},
    ("no loss", ()): {(-0.4, 9.0): SEEN, (-16.1, -6.0): NOT_SEEN, (-3.2, 0.8): TOO_WIDE},
    ("no difference", (0.5,)): {(-0.4, 0.4): SEEN, (-0.6, 0.4): TOO_WIDE, (-1.6, -0.6): NOT_SEEN, (0.6, 1.6): NOT_SEEN},
    ("no difference", (0.1,)): {(-0.3, 0.3): TOO_WIDE},
}  # fmt: skip


@pytest.mark.parametrize(("direction", "points"), INTERVALS, ids=str)
def test_the_status_follows_from_the_interval(direction, points):
    expected = INTERVALS[direction, points]
    assert {interval: status_of(Direction(direction), points, *interval) for interval in expected} == expected


def test_all_arms_of_a_study_are_needed_and_one_contradiction_is_enough():
    def status(*tests):
        return Claim("x", "x", (), Direction.NO_GAIN, tests=tests).status

    assert status("dpn-figure1: normformer; subln") is Status.SEEN
    assert status("dpn-figure1: normformer; both-post") is Status.TOO_WIDE
    assert status("dpn-figure1: both-post", "dpn-figure1: normformer") is Status.SEEN
    assert status("dpn-figure1: normformer", "stems: levit") is Status.NOT_SEEN
    assert status() is Status.NOT_RUN


@pytest.mark.parametrize(
    ("direction", "fields", "words"),
    [
        (Direction.GAIN, {"tests": ("gone: dpn",)}, "no such study"),
        (Direction.GAIN, {"tests": ("demo: dnp",)}, "no arm 'dnp' there"),
        (None, {"tests": ("demo: dpn",)}, "give its direction"),
        (Direction.LOSS, {"points": (2.0, 1.0)}, "sizes"),
        (Direction.LOSS, {"points": (-1.0,)}, "sizes"),
    ],
)
def test_a_claim_cannot_have_a_status_without_a_study(direction, fields, words):
    with pytest.raises(ValueError, match=words):
        _ = Claim("x", "x", (), **({"direction": direction} if direction else {}), **fields).status


@pytest.mark.parametrize(("paper", "claim"), CLAIMS, ids=[claim.says[:40] for _, claim in CLAIMS])
def test_every_claim_has_a_source_and_a_status_that_its_studies_support(paper, claim):
    assert claim.where
    assert all(f"{paper.name}-{table}" in TABLES for table in claim.tables)
    assert set(claim.changes) <= REGISTRY.keys()
    assert bool(claim.tests) != bool(claim.why), "either studies, or the reason why there are none"
    assert (claim.status == Status.NOT_RUN) != bool(claim.tests)
    for found in claim.evidence:
        assert found.study.command.startswith("vitmods ")
        if claim.points and found.status in (Status.SEEN, Status.NOT_SEEN):
            assert all(each.high - each.low <= 2 * WIDE * claim.points[-1] for each in found.effects)


def test_five_documents_have_all_their_claims():
    assert len(CLAIMS) >= 37
    assert sum("the review" in claim.where for _, claim in CLAIMS) >= 6
    (hurts,) = [claim for _, claim in CLAIMS if "never hurts" in claim.says]
    assert hurts.status is Status.NOT_SEEN
    assert {table for slip in hurts.slips for table in slip.tables} == {"table2", "table3"}


def test_the_numbers_of_the_studies_and_the_pages_are_those_of_the_gallery(script):
    again = "run: python docs/gallery/claims.py"
    assert json.loads(STUDIES.read_text()) == script.studies_of(), again
    assert (ROOT / "docs" / "claims.md").read_text() == script.page(), again
    lines = script.card_lines()
    for name in REGISTRY:
        text = (ROOT / "docs" / "changes" / f"{name}.md").read_text()
        assert script.LINE.findall(text) == ([lines[name]] if name in lines else []), again
        if name in lines:
            assert script.on_card(text, lines[name]) == text, again
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    for study in studies().values():
        assert f"## {study.title}\n" in gallery


def test_the_shell_lists_claims_within_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["paper", "claims"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(paper.title.split()[0] in printed for paper in PAPERS.values())
    assert main(["paper", "claims", "--paper", "norm", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [entry["says"] for entry in described] == [claim.says for claim in PAPERS["norm"].claims]
    assert described[0]["tests"][0]["command"] == studies()["demo"].command
    assert main(["paper", "claims", "--paper", "dnp"]) == 2
