"""Scores of the gallery, and the script that makes intervals from them with numpy and scipy alone."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vitmods.cli import main
from vitmods.papers.claims import STUDIES, GalleryStudy
from vitmods.report.page import summary
from vitmods.stats.criteria import Criteria
from vitmods.stats.decide import decide_table
from vitmods.stats.gains import gains_of
from vitmods.stats.read import Table
from vitmods.study import Answer
from vitmods.study.arms import BASE
from vitmods.study.questions import looks
from vitmods.study.tables import decision_against, over_settings_at

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
NAMES = [path.stem for path in sorted((GALLERY / "scores").glob("*.json"))]


@pytest.fixture(scope="module")
def gallery(load):
    return load("docs/gallery/add.py")


@pytest.fixture(scope="module")
def script(gallery):
    return gallery.scores


@pytest.fixture(scope="module")
def played(load):
    return load("tests/study/test_schedule.py").Played


def right(rates, seeds=4, images=200, missing=(), spread=0.05, noisy=(), seed=0):
    """Which images trials are right on: arms with these rates; `missing`: trials that have not ended; `noisy`: arms
    that vary from seed to seed."""
    rng = np.random.default_rng(seed)
    scores = {}
    for i, rate in enumerate(rates):
        arm, ease = f"arm{i}" if i else "base", np.sort(rng.normal(size=images)) + spread * rng.normal(size=images)
        shifts = (1 if f"arm{i}" in noisy else spread) * rng.normal(size=seeds)
        trials = {s: ease + shifts[s] + spread * rng.normal(size=images) for s in range(seeds)}
        limit = np.quantile(ease, rate)
        scores[arm] = {s: (trial < limit) * 1.0 for s, trial in trials.items() if (arm, s) not in missing}
    return scores


CASES = {  # scores, criteria, facts of the table
    "one arm": (right((0.6, 0.7)), {}, {}),
    "three arms": (right((0.6, 0.7, 0.5, 0.6), 3), {}, {}),
    "missing trials": (right((0.6, 0.7, 0.5), 5, missing=[("arm1", 3), ("arm1", 4), ("base", 0)]), {}, {}),
    "a look": (right((0.6, 0.7, 0.5), 5, missing=[("arm2", 4)]), {"most_seeds": 8}, {}),
    "an arm that follows base": (right((0.6, 0.7, 0.5), 8, noisy=["arm1"]), {}, {}),
    "nearly all right": (right((0.97, 0.99, 0.965), 5, 1000, spread=0.02), {}, {"chance": 0.1}),
    "few images differ": (right((0.98, 0.983), 5, 1000, spread=0.001), {}, {}),
    "no spread": (right((0.6, 0.7), spread=1e-9), {}, {}),
    "groups": (right((0.6, 0.7, 0.5)), {}, {"groups": np.arange(200) % 8}),
    "these images": (right((0.6, 0.7, 0.5)), {"generalize": "seeds"}, {}),
    "all pairs": (right((0.6, 0.7, 0.5)), {"family": "pairs"}, {}),
    "an arm that failed": (right((0.8, 0.7, 0.02, 0.8)), {}, {"chance": 0.1}),
    "losses": ({a: {s: 1 + x for s, x in t.items()} for a, t in right((0.6, 0.7, 0.5)).items()},
               {"unit": "nats", "higher_is_better": False}, {}),
    "one score a trial": ({a: {s: x.mean() for s, x in t.items()} for a, t in right((0.6, 0.7, 0.5)).items()}, {}, {}),
}  # fmt: skip


def as_stored(script, scores, table, criteria, decision):
    """What scores.py writes for a table."""
    gains, effects = gains_of(table, criteria), decision.effects
    is_bits = table.images is not None and np.isin(table.images[np.isfinite(table.images)], (0, 1)).all()
    return {
        "scale": criteria.sign * (100 if criteria.is_fraction else 1),
        "kind": "bits" if is_bits else "numbers",
        "images": 1 if table.images is None else table.images.shape[-1],
        "other_images": criteria.generalize == "images" and table.images is not None,
        "groups": None if table.groups is None else table.groups.tolist(),
        "readings": [{
            "effects": {arm: arm for arm in effects}, "against": "base", "settings": {"": 1.0},
            "arms": list(table.arms), "seeds": table.seeds[: 4 if decision.look else None],
            "alpha": decision.alpha, "family": decision.family, "pairs": criteria.family == "pairs",
            "outside": [arm for arm, pooled in zip(table.arms, gains.pooled, strict=True) if not pooled],
        }],
        "scores": {"": {arm: {str(seed): script.packed(score, is_bits) for seed, score in trials.items()}
                        for arm, trials in scores.items()}},
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_script_makes_the_intervals_of_the_package(script, name):
    scores, settled, facts = CASES[name]
    table, criteria = Table.of(scores, **facts), Criteria(**settled)
    decision = decide_table(table, criteria)
    stored = as_stored(script, scores, table, criteria, decision)
    found = script.recompute.effects(json.loads(json.dumps(stored)))
    for arm, effect in decision.effects.items():
        assert found[arm] == pytest.approx((effect.effect, *effect.interval), abs=1e-3), arm


def answered(state, effects, looks=(), each=None):
    arms = [SimpleNamespace(name=arm.name) for arm in state.settings.every_arm]
    sweep = [SimpleNamespace(name=name) for name in each or ()]
    return SimpleNamespace(
        headline=SimpleNamespace(effects=effects), looks=looks, each=each or {"": effects}, sweep=sweep, every_arm=arms
    )


def recomputed(script, state, answers):
    """What is stored of a study, and the effects that are shown, which are recomputed from it."""
    stored = json.loads(json.dumps(script.scores_of(state, {"name": "digits", "fingerprint": "f"}, answers, 2)))
    shown, found = {}, script.recompute.effects(stored)
    for reference, answer in answers.items():
        shown |= script.effects_of(answer, reference)
    for name, effect in shown.items():
        assert found[name] == pytest.approx((effect.effect, *effect.interval), abs=1e-3), name
    return stored, shown


def test_scores_of_a_study_until_decided_have_its_looks_and_other_references(script, played, tmp_path):
    play = played(tmp_path, {"base": 0.5, "dpn": 0.9, "rms": 0.55, "layerscale": 0.5}, seeds=6)
    play.run()
    state = play.state()
    taken = looks(state)
    assert "dpn" in taken[0].stopped
    assert len(taken) > 1
    against = decision_against(state, "rms", {arm for look in taken for arm in look.stopped})
    answers = {BASE: answered(state, taken[-1].decision.effects, taken), "rms": answered(state, against.effects, taken)}
    stored, shown = recomputed(script, state, answers)
    assert len(stored["readings"]) >= 3
    assert shown.keys() >= {"dpn", "rms", "layerscale", "base against rms"}


def test_scores_of_a_sweep_have_the_average_and_each_setting(script, played, tmp_path):
    means, sweep = {"base": 0.5, "dpn": 0.6, "rms": 0.45}, {"lr": [1e-3, 2e-3]}
    play = played(tmp_path, means, seeds=3, until_decided=False, sweep=sweep)
    play.run()
    state = play.state()
    over = over_settings_at(state)
    names = [str(point) for point in state.settings.sweep.points]
    each = {name: {arm: effects[name] for arm, effects in over.each.items()} for name in names}
    assert len(recomputed(script, state, {BASE: answered(state, over.decision.effects, each=each)})[1]) == 6


@pytest.fixture(scope="module")
def factorial(load):
    return load("tests/study/test_schedule.py").Factorial


GAINS = {"dpn": 0.1, "rms": -0.05, "layerscale": 0.15}
FIXED = {"until_decided": False}
PLAYED = {  # what changes add, seeds, options, other means (None diverges); the runs left out, the seeds that count
    "all runs": (GAINS, 2, FIXED, {}, [], 2),
    "a fraction of them": (GAINS | {"qknorm": 0.0}, 3, FIXED, {}, [], 3),
    "two exclude each other": ({"rms": 0.1, "levit": 0.2, "hmlp": 0.1}, 2, FIXED, {}, [], 2),
    "a look": (GAINS, 8, {"sd": 0.03}, {}, [], 4),
    "a run that failed": (GAINS, 3, FIXED, {("dpn+rms", 1): None}, ["dpn+rms"], 3),
    "base failed once": (GAINS, 3, FIXED, {("base", 1): None}, [], 2),
    "base varies": (GAINS, 2, FIXED, {("base", 1): 0.7}, [], 2),
    "nearly all right": (GAINS, 2, FIXED | {"sd": 0.0}, {"all": 0.998}, [], 2),
    "these images": (GAINS, 2, FIXED | {"generalize": "seeds"}, {}, [], 2),
}


@pytest.mark.parametrize("name", PLAYED)
def test_scores_of_a_factorial_study_have_the_effects_of_its_changes(script, factorial, name, tmp_path):
    gains, seeds, options, others, left_out, count = PLAYED[name]
    play = factorial(tmp_path, gains, seeds, **options)
    train, means = play.train, dict(play.means)

    def train_others(trial):
        arm = trial.arm.name
        play.means[arm] = others.get((arm, trial.seed), others.get("all", means[arm]))
        train(trial)

    play.train = train_others
    play.run()
    state = play.state()
    taken = looks(state)
    _, questions = state.settings.design.questions(state, taken, BASE)
    effects = questions["changes"].effects
    stored, shown = recomputed(script, state, {BASE: answered(state, effects, taken)})
    (reading,) = stored["readings"]
    assert (reading["outside"], len(reading["seeds"])) == (left_out, count)
    assert shown.keys() == gains.keys()
    assert bool(state.settings.design.runs.conflicts) == ("levit" in gains)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A factorial study of three changes, two of which exclude each other."""
    out = tmp_path_factory.mktemp("trained") / "study"
    options = "--base mu/4 --arms rms levit hmlp --design factorial --seeds 2 --epochs 4 --limit-train 512"
    machine = ["--batch-size", "64", "--cost-seconds", "0.05", "--workers", "1", "--device", "cpu", "--out", str(out)]
    assert main(["compare", "--data", "digits", *options.split(), *machine]) == 0
    return out


def test_an_entry_of_a_factorial_study_has_the_effects_of_its_changes(gallery, load, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "HERE", tmp_path / "gallery")
    (tmp_path / "gallery").mkdir()
    gallery.main([str(trained), "together", "--title", "Together", "--says", "What came out."])
    stored = json.loads((tmp_path / "gallery" / "scores" / "together.json").read_text())
    (reading,) = stored["readings"]
    assert reading["runs"] == {
        "base": "000", "rms": "100", "levit": "010", "rms+levit": "110", "hmlp": "001", "rms+hmlp": "101",
    }  # fmt: skip
    answer, found = Answer.load(trained), gallery.scores.recompute.effects(stored)
    assert found.keys() == {"rms", "levit", "hmlp"}
    for change, effect in answer.headline.effects.items():
        assert found[change] == pytest.approx((effect.effect, *effect.interval), abs=1e-3)
    assert (tmp_path / "gallery" / "together-narrow.svg").read_text().startswith("<svg")
    assert (tmp_path / "gallery" / "together.tar.xz").stat().st_size > 1000
    page = (tmp_path / "gallery.md").read_text()
    for part in ("## Together\n\nWhat came out.\n", "(gallery/together.svg)", "<!-- report: together -->"):
        assert part in page
    assert "--out" not in page.partition("```console")[2]
    assert gallery.public("vitmods compare --data /home/me/pets --out /tmp/x") == "vitmods compare --data path/to/pets"
    assert ". 12 trials, 20" in page
    assert "*No run can have levit with hmlp" in page
    claims = load("docs/gallery/claims.py")
    facts = claims.studies_of(tmp_path / "gallery")["together"]
    monkeypatch.setattr(claims, "studies", lambda: {"together": GalleryStudy("together", **facts)})
    ((study, arm, short),) = claims.effects_of_changes()["norm"]
    assert study.effects[arm] == pytest.approx(found["rms"], abs=0.0051)
    assert (arm, short) == ("rms", "rms")
    assert {one["change"] for one in claims.known_effects()} == {"rms", "levit", "hmlp"}
    assert claims.numbers_of([(study, arm, short)]).count(", factorial | `rms` |") == 1
    monkeypatch.setattr(claims, "replace", lambda every, changes: replace(every, changes=every.changes))
    assert claims.evidence_map().count(f"(2, factorial, {study.facts['images']} images)") == 3


def test_an_unfinished_factorial_study_is_no_entry_and_one_without_intervals_is_not_recomputed(
    gallery, trained, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (result,) = run.glob("trials/rms+hmlp/*1/result.json")
    ended = json.loads(result.read_text())
    result.write_text(json.dumps({**ended, "status": "failed", "message": "out of memory"}))
    said = r"is not finished: 11 of 12 trials finished; rms\+hmlp, seed 1: out of memory. Run its command again"
    with pytest.raises(SystemExit, match=said):
        gallery.facts_of(run, "run", "Title", "Says.", 1, [])
    for result in run.glob("trials/*levit/*/result.json"):
        result.write_text(json.dumps({**ended, "status": "diverged", "metrics": {}, "message": "nan"}))
    path = tmp_path / "scores.json"
    assert gallery.scores.store(run, {BASE: Answer.load(run)}, path, 2) == "none of its effects has an interval"
    assert not path.exists()


CHANGED = {  # what is changed -> what is said
    "nothing": "",
    "an interval": "digits: dpn is [3.1",
    "a study without scores": "photos: its scores are missing",
    "a status": "is decided on one processor",
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_number_is_found(script, what, tmp_path, monkeypatch, capsys):
    recompute, names = script.recompute, {"digits", "photos"}
    studies = {name: study for name, study in json.loads(STUDIES.read_text()).items() if name in names}
    for file in STUDIES.parent.glob("norm_choice.toml"):
        text = "\n".join(line for line in file.read_text().splitlines() if not re.match('  "', line))
        (tmp_path / file.name).write_text(text.replace('["norm-choice: post", "digits: post"]', '["digits: post"]'))
    (tmp_path / "scores").mkdir()
    for name in names if what != "a study without scores" else ["digits"]:
        (tmp_path / "scores" / f"{name}.json").write_text((GALLERY / "scores" / f"{name}.json").read_text())
    if what == "an interval":
        studies["digits"]["effects"]["dpn"][1] += 0.02
    (tmp_path / "studies.json").write_text(json.dumps(studies))
    page = tmp_path / "claims.md"
    claims = (ROOT / "docs" / "claims.md").read_text()
    if what == "a status":
        claims = re.sub(r"\*\*[a-z ]+\*\*(?= · Pre-norm is the stable choice)", "**seen here**", claims)
    page.write_text(claims)
    for name, place in {"HERE": tmp_path, "TABLES": tmp_path, "PAGE": page}.items():
        monkeypatch.setattr(recompute, name, place)
    with pytest.raises(SystemExit) as ended:
        recompute.main()
    assert bool(ended.value.code) == bool(CHANGED[what])
    assert CHANGED[what] in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_and_the_facts_have_the_numbers_of_the_scores(script, name):
    """Rounded from scores to the decimals that are shown; the picture is drawn again from them in test_site.py."""
    found = script.recompute.effects(json.loads((GALLERY / "scores" / f"{name}.json").read_text()))
    facts = json.loads((GALLERY / f"{name}.json").read_text())
    assert {*facts["effects"], *facts.get("further", {})} == found.keys()
    for effect, text in {**facts["effects"], **facts.get("further", {})}.items():
        numbers = [float(number.replace("−", "-")) for number in re.findall(r"[+−]?\d[\d.]*", text)]  # 0.00
        assert numbers == pytest.approx(found[effect], abs=0.0051), effect
    for image in (f"{name}.svg", f"{name}-narrow.svg"):
        drawn = (GALLERY / image).read_text()
        assert all(text.rpartition("]")[0] in drawn for text in facts["effects"].values())
    assert len((GALLERY / "scores" / f"{name}.json").read_text()) < 100_000


ARCHIVES = [path.name.partition(".")[0] for path in sorted(GALLERY.glob("*.tar.xz"))]


@pytest.mark.parametrize("name", ARCHIVES)
def test_scores_and_picture_are_those_of_the_stored_study(script, load, name, tmp_path, monkeypatch):
    run = tmp_path / load("docs/gallery/stored.py").unpack(GALLERY / f"{name}.tar.xz", tmp_path)
    answer, path = Answer.load(run), tmp_path / "scores" / f"{name}.json"
    drawn = (GALLERY / f"{name}.svg").read_text(), summary(answer)
    kept, again = (re.findall(r"<text[^>]*>([^<]*)", image) for image in drawn)
    assert kept == again, f"run: python docs/gallery/add.py RUN {name}"
    stored = json.loads((GALLERY / "scores" / path.name).read_text())
    assert script.store(run, {BASE: answer}, path, stored["numerics"]) == ""
    assert json.loads(path.read_text()) == stored
    path.unlink()
    monkeypatch.setattr(script.recompute, "effects", lambda study: {})
    assert "None recomputed" in script.store(run, {BASE: answer}, path, 2)
    assert not path.exists()
