"""Several studies together: which effects count as one, and what they say of other data sets."""

import itertools
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vitmods as vm
from vitmods.cli import main
from vitmods.stats.across import across_studies, other_sets
from vitmods.stats.verdict import Verdict
from vitmods.study import Answer
from vitmods.study.evidence import FURTHER, LIKE_THESE, Finding, _finding, evidence, together
from vitmods.study.questions import Question
from vitmods.util.errors import UserError

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three stored studies: of digits, of photographs, and of pixels (two metrics)."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("digits", "photos", "segmentation"):
        with tarfile.open(GALLERY / f"{name}.tar.xz") as packed:
            packed.extractall(folder / ("below" if name == "photos" else "") / name, filter="data")
    return folder


def test_studies_below_a_folder_are_found_and_kept_apart_by_metric(runs):
    found = evidence([runs, runs / "digits"])  # named twice, counted once
    assert found["dpn"].studies == 2
    assert list(found["dpn"].sets) == ["photos3", "digits"]
    assert found["dpn"].other is None
    assert {one.metric for one in found.changes if one.change == "dpn"} == {"top-1", "mean IoU"}
    effect = Answer.load(runs / "digits")["dpn"]
    assert found["dpn"].on("digits") == (effect.effect, *effect.interval)
    (one,) = found["dpn"].sets["digits"]
    assert one.conditions == "mu6/2 at 8 px, 10 epochs, 1,259 images, 4 seeds"
    assert one.verdict == effect.verdict
    assert found["dpn"].differ_in == ["base", "image size", "length of training"]
    assert "dpn (top-1): studies differ in base, image size and length of training" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    assert "Fewer than 3 data sets: no claim on others." in " ".join(str(found).split())
    assert json.loads(json.dumps(found.to_dict()))["left_out"] == []


def test_effects_in_trained_weights_are_named_by_the_folder_of_the_weights(runs, tmp_path):
    shutil.copytree(runs / "digits", tmp_path / "digits")
    file = tmp_path / "digits" / "study.json"
    stored = json.loads(file.read_text())
    stored["settings"]["start"] = {"source": "/home/me/dinov2_small"}
    stored["models"]["base"]["name"] = "/home/me/dinov2_small"
    file.write_text(json.dumps(stored))
    (one,) = evidence(tmp_path)["dpn, from trained weights"].sets["digits"]
    assert one.conditions.startswith("dinov2_small at 8 px")


def test_equal_images_are_one_data_set_whatever_they_are_called(runs, tmp_path):
    def copied(place, **data):
        shutil.copytree(runs / "digits", tmp_path / place)
        file = tmp_path / place / "study.json"
        stored = json.loads(file.read_text())
        stored["data"] |= data
        file.write_text(json.dumps(stored))

    copied("same", spec="path/to/copy", name="copy")
    copied("other", spec="elsewhere/digits", fingerprint="0" * 64)
    sets = evidence([runs / "digits", tmp_path])["dpn"].sets
    assert {name: len(studies) for name, studies in sets.items()} == {"digits": 1, "digits (2)": 1}
    assert f"dpn in {tmp_path / 'same'} repeats {runs / 'digits'}" in evidence([runs / "digits", tmp_path]).left_out
    copied("a/runs/x", spec="photos", fingerprint="1" * 64)
    copied("b/runs/x", spec="photos", fingerprint="2" * 64)
    projects = [tmp_path / "a", tmp_path / "b"]
    assert len(evidence(projects)["dpn"].sets) == 2, "one relative path in two projects"
    (tmp_path / "photos").mkdir()
    assert len(evidence(projects)["dpn"].sets) == 1, "and in one, whose images have grown"
    copied("c/runs/x", spec="link", fingerprint="3" * 64)
    for place, images in (("a", range(90)), ("b", range(90, 180)), ("c", range(60))):
        contents = np.array(images, np.uint64)
        np.savez(tmp_path / place / "runs/x/images.npz", names=contents, contents=contents)
    for order in itertools.permutations([*projects, tmp_path / "c"]):
        sets = evidence(order)["dpn"].sets  # what they share counts, not where they lie
        assert {name: len(studies) for name, studies in sets.items()} == {"digits": 1, "digits (2)": 1}, "one is a copy"


def test_what_a_study_confirmed_counts_instead_and_trained_weights_are_another_row(runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "digits", tmp_path / "x/screen")
    shutil.copytree(runs / "digits", fresh := tmp_path / "x/screen/confirm/dpn")
    stored = json.loads((fresh / "study.json").read_text())
    stored["settings"]["arms"] = {"dpn": stored["settings"]["arms"]["dpn"]}
    (fresh / "study.json").write_text(json.dumps(stored))
    found = evidence(tmp_path / "x")
    assert [one.study for one in found["dpn"].sets["digits"]] == [str(fresh)]
    assert [one.study for one in found["rms"].sets["digits"]] == [str(tmp_path / "x/screen")]
    assert f"dpn in {tmp_path / 'x/screen'} was chosen in it to be confirmed" in found.left_out
    killed = Path(shutil.copytree(tmp_path / "x", tmp_path / "killed"))
    next((killed / "screen/confirm/dpn/trials/dpn").glob("*/result.json")).unlink()
    with pytest.raises(KeyError):  # what chose it says too much of it, however far its confirmation is
        evidence(killed)["dpn"]
    monkeypatch.chdir(tmp_path / "x/screen")
    shutil.copytree("confirm/dpn", "dpn")
    for place in (".", "dpn"):  # no folder above it is named
        assert evidence(place)["dpn"].studies == 1
    tuned = finding("digits", 1.0, 0.4, change="dpn, from trained weights")
    assert {one.change for one in together([finding("digits", 1.0, 0.4), tuned]).changes} == {"dpn", tuned.change}
    assert r"pi\|pe" in together([finding("pi|pe", 1.0, 0.4)]).to_markdown()


def test_what_does_not_count_is_named(runs, tmp_path, refused, capsys):
    shutil.copytree(runs / "digits", tmp_path / "half")
    shutil.rmtree(tmp_path / "half/trials/rms/seed3")
    found = evidence([runs / "digits", tmp_path])
    assert found.left_out == (f"{tmp_path / 'half'} is not finished",)
    assert f"Left out: {tmp_path / 'half'} is not finished." in str(found)
    assert "no finished study with an interval" in refused(f"evidence {tmp_path / 'half'}")
    alone = tmp_path / "alone"
    vm.Study("mu1/4", None, "digits", recipe=vm.recipes.plain(epochs=1), seeds=1, limit_train=64).run(
        alone, workers=1, progress=False, cost_seconds=0, device="cpu"
    )
    assert f"with an interval: {alone} has base alone." in refused(f"evidence {alone}")
    (tmp_path / "empty").mkdir()
    assert "has no study, and neither" in refused(f"evidence {runs} {tmp_path / 'empty'}")
    assert "nowhere is not a folder" in refused(f"evidence {runs} {tmp_path / 'nowhere'}")
    shutil.copytree(runs / "digits", tmp_path / "damaged")
    (tmp_path / "damaged/study.json").write_text("{")
    (reason,) = evidence([runs, tmp_path / "damaged"]).left_out
    assert reason.startswith(f"{tmp_path / 'damaged'} cannot be read (")
    assert "run the same command" not in reason
    assert main(["evidence", str(runs), str(tmp_path / "damaged"), "--latex"]) == 0
    printed = capsys.readouterr()
    assert "tabular" in printed.out
    assert "damaged cannot be read" in printed.err
    assert "json is damaged" in refused(f"evidence {tmp_path / 'damaged'}")
    assert "It holds the studies alone, damaged and half" in refused(f"report {tmp_path}")
    with pytest.raises(KeyError, match="No study here has the change 'dnp'"):
        evidence(runs)["dnp"]
    with pytest.raises(UserError, match="Give folders of studies"):
        evidence([])


def finding(data, effect, half, change="dpn", higher=True, study="one"):
    return Finding(
        change, "top-1", "points", higher, 0.5, study, data, 100, "mu3/4", 5, effect, effect - half, effect + half
    )


def test_three_data_sets_make_a_claim_and_studies_of_one_count_once():
    pairs = {"a": [(1.0, 0.4), (1.4, 0.4)], "b": [(2.0, 0.5)], "c": [(1.6, 0.3)]}
    findings = [finding(data, *pair) for data, several in pairs.items() for pair in several]
    findings += [finding("a", 1.0, 0.4, "rms"), finding("b", 9.0, 0.4, "rms")]
    found = together(findings)
    intervals = [[(e, e - h, e + h) for e, h in several] for several in pairs.values()]
    assert found["dpn"].other == other_sets(intervals)
    assert found["dpn"].on("a") == across_studies(intervals[:1])
    assert found["dpn"].on("a")[2] - found["dpn"].on("a")[1] == pytest.approx(0.8), "no narrower than one"
    assert found["dpn"].verdict == Verdict.HELPS
    assert found["rms"].verdict == Verdict.OPEN
    lines = str(found).splitlines()
    assert lines[2] == "dpn (top-1)"
    assert "2 studies of mu3/4" in lines[3]
    (mean,) = (number for number, line in enumerate(lines) if line.strip().startswith(LIKE_THESE))
    assert lines[mean].split() == [*LIKE_THESE.split(), "+1.58", "[+0.62,", "+2.54]", "helps"]
    assert FURTHER in lines[mean + 1]
    assert found.to_markdown().splitlines()[8].startswith("| **rms (top-1)** |")
    worse = together([finding(data, *pair, higher=False) for data, several in pairs.items() for pair in several])
    assert worse["dpn"].verdict == Verdict.HURTS


def test_a_sweep_over_the_number_of_images_names_all_of_them(runs, tmp_path):
    shutil.copytree(runs / "digits", tmp_path / "sweep")
    answer = Answer.load(tmp_path / "sweep")
    count = answer.data["splits"]["train"]["count"]
    answer.settings["sweep"] = {"limit_train": [20, 0.5, None]}
    found = _finding(answer.path, "dpn", "digits", answer, answer.effects["dpn"])
    assert found.design == f"average over limit_train 20, {round(count / 2):,} or {count:,}"
    answer.settings["sweep"] = {"limit_train": [10, 20]}
    assert _finding(answer.path, "dpn", "digits", answer, answer.effects["dpn"]).images == 20


def test_what_holds_no_study_is_named_and_what_cannot_be_read_is_left_out(runs, tmp_path):
    with pytest.raises(UserError, match="each a path, not 3"):
        evidence([3])
    with pytest.raises(UserError, match="is not a folder"):
        evidence(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no study, and neither have the folders in it"):
        evidence(tmp_path)
    shutil.copytree(runs / "digits", tmp_path / "sound")
    shutil.copytree(runs / "digits", lacking := tmp_path / "lacking")
    stored = json.loads((lacking / "study.json").read_text())
    del stored["data"]["name"]
    (lacking / "study.json").write_text(json.dumps(stored))
    found = evidence(tmp_path)
    assert found["dpn"].studies == 1
    assert any("lacking cannot be read" in reason for reason in found.left_out), found.left_out


def test_the_intervals_of_several_changes_hold_together():
    one = [finding(data, effect, 0.4) for data, effect in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    two = [finding(data, effect, 0.4, "rms") for data, effect in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    few = [finding("a", 1.0, 0.4, "levit")]
    alone, both = together([*one, *few])["dpn"].other, together([*one, *two])["dpn"].other
    assert both.high - both.low > 1.2 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"length": "20 epochs"}, ["length of training"]),
        ({"model": "S/16", "pixels": "64 px"}, ["base", "image size"]),
        ({"design": "factorial"}, ["design"]),
        ({"images": 9000, "seeds": 3}, []),
    ],
)
def test_what_studies_of_a_change_differ_in_is_said_in_every_form(other, differ):
    here = replace(finding("a", 1.0, 0.4), length="10 epochs", pixels="32 px")
    found = together([here, replace(here, data="b", **other)])
    assert found["dpn"].differ_in == found.to_dict()["changes"][0]["differ_in"] == differ
    remark = f"studies differ in {' and '.join(differ)}" if differ else "differ"
    for form in (str(found), found.to_markdown(), found.to_latex()):
        assert (remark in form) == bool(differ)
        assert "Effects are arm minus base" in form.replace("\n", " ")
    assert "mu3/4 at 32 px, 10 epochs, 100 images, 5 seeds" in found.to_markdown()


def test_a_study_whose_base_has_not_learned_does_not_count_even_if_its_arms_help(runs, monkeypatch):
    effects = Question.effects.fget
    helps = {"base_learned": False, "verdict": Verdict.HELPS}
    hidden = property(lambda asked: {arm: replace(one, **helps) for arm, one in effects(asked).items()})
    monkeypatch.setattr(Question, "effects", hidden)
    with pytest.raises(UserError, match="interval: base has not learned in"):
        evidence(runs / "digits")


def test_the_page_has_a_plot_and_the_studies_of_each_change_and_what_was_left_out(runs, said, refused, tmp_path):
    pairs = {"a": (1.0, 0.4), "b": (2.0, 0.5), "<c>": (1.6, 0.3)}
    several = [replace(finding(data, *pair), length="10 epochs") for data, pair in pairs.items()]
    found = together([*several, finding("a", -0.2, 9.0, "rms", study="two")], ["three is not finished"])
    page = found.report(tmp_path / "page.html").read_text()
    assert "On data sets like these, dpn helps." in page
    assert page.count('class="wide"') == page.count('class="narrow"') == 2
    assert f"{FURTHER}: +{found['dpn'].other.effect:.2f} [" in page
    for text in ("mu3/4, 10 epochs, 100 images, 5 seeds", "Three is not finished", "Shaded: the margin of 0.5 points"):
        assert text in page
    assert "&lt;c&gt;" in page
    assert "<c>" not in page
    few = together(several[:2]).report(tmp_path / "few.html").read_text()
    assert "nothing is known of other data sets" in few
    assert "Left out" not in few
    assert "Page: " in said(f"evidence {runs / 'digits'} --out {tmp_path / 'shell.html'} --json").err
    assert (tmp_path / "shell.html").exists()
    assert "must end with .html" in refused(f"evidence {runs / 'digits'} --out {tmp_path / 'page.pdf'}")


def test_the_command_prints_four_forms(runs, said):
    assert json.loads(said(f"evidence {runs} --json").out)["changes"][0]["change"] == "dpn"
    assert said(f"evidence {runs} --markdown").out.startswith("| change, data set |")
    assert "layerscale (top-1)" in said(f"evidence {runs}").out
