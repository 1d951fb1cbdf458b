"""Finished trials of other studies: which ones are reused, which never, and what they leave out."""

import importlib
import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from vitmods.changes import DualPatchNorm
from vitmods.cli import main
from vitmods.recipes import RECIPES, plain
from vitmods.stats.sequential import INTERIM_LEVEL, LAST_LEVEL
from vitmods.study import Answer, Study
from vitmods.study.arms import BASE, Arm
from vitmods.study.cells import Trial
from vitmods.study.dependencies import _checksums, code_of
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import open_study
from vitmods.study.reuse import Pool
from vitmods.study.run import python_call
from vitmods.study.store import StudyFolder
from vitmods.tasks.base import TASKS
from vitmods.train import checkpoint
from vitmods.train import trial as train_trial
from vitmods.util import lease
from vitmods.util.errors import UserError
from vitmods.util.files import checksum

pytestmark = pytest.mark.usefixtures("short_clocks")
RECIPE = plain(epochs=2).with_(batch_size=16)
OPTIONS = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


@pytest.fixture(autouse=True)
def search_beside(monkeypatch):
    monkeypatch.delenv("VITMODS_REUSE", raising=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory, draw_images):
    return draw_images(tmp_path_factory.mktemp("images") / "pets", ["train"], count=30)


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    """A folder with one study: base and dpn, three seeds."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("VITMODS_REUSE", raising=False)
        study(images, seeds=3).run(root / "first", **OPTIONS)
    return root


@pytest.fixture
def runs(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "runs"))


def study(images, arms=("dpn",), seeds=2, base="mu/4", **options):
    return Study(base, arms, images, **{"recipe": RECIPE, "seeds": seeds, **options})


def reused(answer):
    return [f"{trial.arm}{trial.seed}" for trial in answer.trials if trial.reused]


def scores(answer):
    return {arm.name: (arm.scores, arm.other_metrics, [t.curve.score for t in arm.trials]) for arm in answer.every_arm}


def test_a_study_that_reuses_trials_is_the_study_that_trains_all(images, runs):
    arms, first = ["again=dpn", "rms"], runs / "first"
    answer = study(images, arms, seeds=3).run(runs / "second", **OPTIONS)
    assert reused(answer) == ["base0", "base1", "base2", "again0", "again1", "again2"]
    trained = study(images, arms, seeds=3, no_reuse=True).run(runs / "all", **OPTIONS)
    assert not reused(trained)
    assert scores(answer) == scores(trained)
    assert answer.decision.to_dict() == trained.decision.to_dict()
    for trial in ("base/seed0", "base/seed2"):
        weights = (folder / "trials" / trial / "model.safetensors" for folder in (first, runs / "all"))
        assert len({path.read_bytes() for path in weights}) == 1
    assert not list((runs / "second").glob("trials/base/**/*.safetensors"))
    text = f"6 of 9 trials were trained in {first}."
    assert text in repr(answer)
    assert text in answer.report().read_text()
    assert "correlated" in repr(answer)
    assert Answer.load(runs / "second").to_dict() == answer.to_dict()
    study(images, arms, seeds=3).run(runs / "second", **OPTIONS)


def test_more_seeds_in_a_new_folder_are_a_second_look_as_in_the_old_one(images, runs):
    answer = study(images, ["again=dpn"], seeds=4).run(runs / "second", **OPTIONS)
    assert len(reused(answer)) == 6
    assert any("Trials of these arms were shown before" in doubt for doubt in answer.doubts)
    extended = study(images, seeds=4).run(runs / "first", **OPTIONS)
    assert answer["again"].interval == extended["dpn"].interval
    assert answer.decision.alpha == extended.decision.alpha < 0.05
    study(images).pilot(runs / "piloted", **OPTIONS)
    piloted = study(images, seeds=4).run(runs / "piloted", **OPTIONS)
    assert piloted.decision.alpha == extended.decision.alpha
    other = study(images, ["rms"], seeds=4).run(runs / "third", **OPTIONS)
    assert other.decision.alpha == 0.05, "trials of base alone do not tell about arms"


def test_a_study_until_decided_that_was_analyzed_before_has_the_level_of_an_extension(images, runs):
    new = study(images, seeds=4, until_decided=True).run(runs / "second", **OPTIONS)
    extended = study(images, seeds=4, until_decided=True).run(runs / "first", **OPTIONS)
    for answer in (new, extended):
        assert answer.decision.alpha == INTERIM_LEVEL / 4
        assert any("Trials of these arms were shown before" in doubt for doubt in answer.doubts)
    shutil.rmtree(runs / "first")
    first_look = study(images, seeds=4, until_decided=True, no_reuse=True).run(runs / "first", **OPTIONS)
    assert first_look.decision.alpha == LAST_LEVEL
    shutil.rmtree(runs / "second")
    same_looks = study(images, seeds=4, until_decided=True).run(runs / "second", **OPTIONS)
    assert same_looks.decision.alpha == LAST_LEVEL


def test_a_sweep_runs_next_to_studies_with_trials_also_of_another_version(images, runs):
    rewrite(Path(shutil.copytree(runs / "first", runs / "older")) / "study.json", schema=2)
    assert study(images, seeds=1, sweep={"lr": [1e-3, 2e-3]}).run(runs / "second", **OPTIONS).complete


def test_what_was_reused_is_reused_again_and_known_by_where_it_was_found(images, runs):
    study(images).run(runs / "second", **OPTIONS)
    shutil.move(runs / "first", runs.parent / "first")
    answer = study(images, seeds=1).run(runs / "third", **OPTIONS)
    assert reused(answer)[:2] == ["base0", "base1"]
    assert {trial.reused for trial in answer.trials} == {str(runs / "second")}


def test_seeds_of_base_that_are_known_count(images, runs, capsys):
    answer = study(images, ["rms"], seeds=1).run(runs / "second", **OPTIONS)
    assert answer.settings["known"] == 3
    assert list(answer.base.scores) == [0, 1, 2]
    assert list(answer.arms[0].scores) == [0]
    assert answer.complete
    answer.report()
    shutil.rmtree(runs / "second" / "trials" / "base" / "seed1")  # as in a run that was killed while it copied
    (runs / "second" / "trials" / "base" / "seed1.tmp").mkdir()
    again = study(images, ["rms"], seeds=1).run(runs / "second", **OPTIONS)
    assert scores(again) == scores(answer)
    assert reused(again) == ["base0", "base1", "base2"]
    study(images, ["rms"], seeds=1, margin=1.0).run(runs / "all", **OPTIONS)


def test_the_reference_is_trained_alone_and_has_no_verdicts(images, tmp_path, capsys):
    place = str(tmp_path / "reference")
    command = ["base", "--data", str(images), "--base", "mu/4", "--epochs", "1", "--seeds", "2", "--out", place]
    assert main([*command, "--budget", "1trials"]) == 0
    assert capsys.readouterr().out.startswith("1 of 2 trials finished")
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.match(r"mu/4: top-1 \d+\.\d+ % over 2 seeds", printed)
    assert "On val" in printed
    answer = Answer.load(place)
    assert (answer.complete, list(answer.base.scores), answer.effects) == (True, [0, 1], {})
    assert answer.to_methods().startswith("Base is mu/4")
    assert "arms=None" in python_call(Study("mu/4", None, str(images), seeds=2).settings, place)
    with pytest.raises(UserError, match="no effects"):
        answer.to_markdown()
    assert r"\begin{tabular}{@{}lll@{}}" in answer.to_latex()  # arm, score, seeds
    with pytest.raises(UserError, match="one way"):
        Study("mu/4", None, str(images), sweep={"epochs": [1, 2]})
    assert "arms" not in answer.to_methods()
    assert "verdict" not in answer.to_csv()
    assert answer.report().exists()


def test_a_dry_run_says_what_is_reused_and_why_the_rest_is_not(images, runs):
    printed = str(study(images, ["again=dpn", "rms"], seeds=3).dry_run(runs / "second", **OPTIONS))
    assert "3 trials to run, 1 at a time" in printed
    assert f"in {runs / 'first'} (6): 6 trials, which saves about" in printed
    longer = RECIPE.with_(epochs=3)
    printed = " ".join(str(study(images, ["dpn", "rms"], recipe=longer).dry_run(runs / "second", **OPTIONS)).split())
    assert f"Not reused, base and dpn: recipe.epochs is 3 here and 2 in {runs / 'first'}." in printed
    assert not (runs / "second").exists()


def rewrite(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_unfinished_trial_is_not_reused(images, runs):
    """Nor is a damaged one: test_neighbors.py."""
    trials = runs / "first" / "trials"
    rewrite(trials / "base/seed1/result.json", status="failed")
    rewrite(trials / "dpn/seed0/config.json", id=None)
    (trials / "dpn/seed2/config.json").unlink()
    prepared = open_study(StudyFolder(runs / "second"), study(images, seeds=3).settings, StudyOptions(**OPTIONS))
    pool = Pool(prepared)
    found = pool.find(Trial(cell, seed) for cell in prepared.settings.cells for seed in range(3))
    assert sorted((trial.arm.name, trial.seed) for trial in found) == [("base", 0), ("base", 2), ("dpn", 1)]
    assert pool.with_known_base(prepared).settings.known == 1


def test_a_study_that_is_at_work_is_not_read(images, runs, monkeypatch):
    def found():
        prepared = open_study(StudyFolder(runs / "second"), study(images).settings, StudyOptions(**OPTIONS))
        return len(Pool(prepared).find([Trial(prepared.settings.cell(BASE), 0)]))

    with StudyFolder(runs / "first").lock():
        assert not found()
    assert found()
    (runs / "first" / ".lease").write_text(json.dumps({"machine": lease.machine()}))
    assert found(), "what a killed run has left does not hold the folder"
    with FileLock(runs / "first" / ".lock"):
        assert not found()
    (runs / "first" / ".lease").write_text(json.dumps({"machine": "another"}))
    assert not found()


def test_a_metric_that_training_does_not_measure_needs_the_weights(images, runs):
    first = runs / "first"
    answer = study(images, seeds=2, metric="ece").run(runs / "second", **OPTIONS)
    assert reused(answer) == ["base0", "base1", "base2", "dpn0", "dpn1"]
    assert (runs / "second/trials/base/seed0/model.safetensors").samefile(first / "trials/base/seed0/model.safetensors")
    for weights in (*first.glob("trials/**/*.safetensors"), *(runs / "second").glob("trials/**/*.safetensors")):
        weights.unlink()
    assert reused(study(images, seeds=1, metric="ece").run(runs / "third", **OPTIONS)), "it is evaluated by now"
    shutil.rmtree(runs / "second")
    shutil.rmtree(runs / "third")
    assert not reused(study(images, seeds=1, metric="ece").run(runs / "third", **OPTIONS))


def test_trials_of_renamed_images_are_evaluated_again(images, runs, tmp_path):
    renamed = shutil.copytree(images, tmp_path / "animals")
    answer = study(renamed, seeds=1, metric="ece").run(runs / "second", **OPTIONS)
    assert answer.complete
    assert "dpn0" in reused(answer)


def test_studies_at_an_address_and_in_a_folder_are_named(images, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("VITMODS_COPIES", str(tmp_path / "copies"))
    away = tmp_path / "away" / "second"
    for name in (f"file://{runs}/first", str(runs), str(runs / "first")):
        answer = study(images, seeds=1, reuse=name).run(away, **OPTIONS)
        assert reused(answer)[-1] == "dpn0", name
        shutil.rmtree(away)
    with pytest.raises(UserError, match="does not hold a study"):
        study(images, seeds=1, reuse=[tmp_path]).run(away, **OPTIONS)
    with pytest.raises(UserError, match="leave reuse out"):
        study(images, reuse=[runs], no_reuse=True)


BASE_STUDY = {"arms": [Arm("dpn", (DualPatchNorm(),))], "recipe": RECIPE, "img_size": 8, "val_fraction": 0.2}


def identities(images, folder, options=(), **changes):
    """Return the hash of seed 0 of base and of the first arm."""
    made = study(images, **{**BASE_STUDY, **changes})
    prepared = open_study(StudyFolder(folder), made.settings, StudyOptions(**{**OPTIONS, **dict(options)}))
    trials = [Trial(cell, prepared.settings.seeds[0]) for cell in prepared.settings.cells]
    return [prepared.config(trial)["id"] for trial in trials]


RECIPES_OF_OTHERS = [
    {"epochs": 3},
    {"lr": 0.01},
    {"batch_size": 8},
    {"optimizer": "sgd"},
    {"crop": "pad"},
    {"ema": 0.9},
]
RECIPES_OF_OTHERS += [{"label_smoothing": 0.2}, {"dropout": 0.1}, {"precision": "bf16-mixed"}, {"train": "head"}]
SETTINGS = [
    {"base": "mu2/4"},
    {"base": "timm:vit_tiny_patch16_224", "img_size": 16, "arms": ["replace(rms)"]},
    {"seeds": [1]},
    {"img_size": 16},
    {"in_chans": 1},
    {"val_fraction": 0.3},
    {"test_fraction": 0.3},
    {"split_seed": 1},
    {"fold": (0, 3)},
    {"limit_train": 20},
    *({"options": {way: True}} for way in ("recompute", "checkpointing", "compile")),
    *({"recipe": RECIPE.with_(**fields)} for fields in RECIPES_OF_OTHERS),
]


@pytest.fixture(scope="module")
def expected(images, tmp_path_factory):
    return identities(images, tmp_path_factory.mktemp("expected"))


def test_equal_studies_have_equal_trials(images, tmp_path, expected):
    assert identities(images, tmp_path) == expected
    moved = Path(shutil.copytree(images, tmp_path / "elsewhere" / "animals"))
    named = [Arm("other name", (DualPatchNorm(),))]
    assert identities(moved, tmp_path, arms=named, metric="ece", margin=2.0, seeds=4) == expected


@pytest.mark.parametrize("difference", SETTINGS, ids=str)
def test_other_settings_are_other_trials(images, tmp_path, expected, difference):
    assert not set(expected) & set(identities(images, tmp_path, **difference))


@pytest.mark.parametrize(
    "arm", [Arm("dpn", (DualPatchNorm(before=False),)), Arm("dpn", (DualPatchNorm(),), {"lr": 0.5}), "rms+dpn"]
)
def test_other_arms_of_one_name_are_other_trials(images, tmp_path, expected, arm):
    base, other = identities(images, tmp_path, arms=[arm])
    assert base == expected[0]
    assert other not in expected


@pytest.mark.parametrize("difference", ["image", "label", "class"])
def test_other_images_are_other_trials(images, tmp_path, expected, difference):
    copy = Path(shutil.copytree(images, tmp_path / images.name))
    if difference == "image":
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(copy / "train" / "cat" / "0.png")
    elif difference == "label":
        (copy / "train" / "cat" / "0.png").rename(copy / "train" / "dog" / "from cat.png")
    else:
        (copy / "train" / "cat").rename(copy / "train" / "bat")
    assert not set(expected) & set(identities(copy, tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vitmods.train.trial.NUMERICS", 0),
        ("torch.__version__", "1.0"),
        ("numpy.__version__", "1.0"),
        ("vitmods.train.trial.version", lambda name: "1.0"),
        ("vitmods.train.trial.device_name", lambda device: "NVIDIA H100"),
        ("torch.get_num_threads", lambda: 64),
        ("torch.backends.cpu.get_cpu_capability", lambda: "NEON"),
        ("torch.are_deterministic_algorithms_enabled", lambda: True),
        ("platform.machine", lambda: "sparc"),
        ("vitmods.train.trial.is_switched_on", lambda: None),
        ("torch.get_float32_matmul_precision", lambda: "medium"),
    ],
)
def test_other_environments_are_other_trials(images, tmp_path, expected, name, value):
    with patch(name, value):
        assert not set(expected) & set(identities(images, tmp_path))


def test_on_a_gpu_threads_do_not_count(images, tmp_path):
    config = {"task": "classification", "recipe": RECIPE.to_dict(), "split": "test", "images": {"data": "digits"}}
    environment = {"device": "NVIDIA H100", "threads": 1}
    one, more = ({**config, "environment": {**environment, "threads": threads}} for threads in (1, 8))
    assert train_trial.identify(one) == train_trial.identify(more)
    one["environment"]["device"] = more["environment"]["device"] = "cpu"
    assert train_trial.identify(one) != train_trial.identify(more)


def test_start_weights_are_known_by_their_content(images, runs, tmp_path, expected):
    first = runs / "first" / "trials" / "base"
    options = {"base": None, "arms": ["rms"], "img_size": None}
    one = identities(images, tmp_path, start=str(first / "seed0"), **options)
    other = identities(images, tmp_path, start=str(first / "seed1"), **options)
    each = identities(images, tmp_path, start=str(first), **options)
    copy = shutil.copytree(first / "seed0", tmp_path / "seed0")
    assert identities(images, tmp_path, start=str(copy), **options) == one
    assert not set(one) & set(other)
    assert each == one


def test_a_function_without_a_file_is_never_the_same(images, tmp_path):
    functions = {"arm": lambda model: model.requires_grad_(True)}
    trials = [identities(images, tmp_path, arms=functions) for _ in range(2)]
    assert trials[0][0] == trials[1][0], "base does not depend on it"
    assert trials[0][1] != trials[1][1]


EDITS = "import functools\n\nfrom {package} import factor\n\n\ndef scale(model):\n    return factor.scaled(model)\n"
FACTOR = "K = {value}\n\n\ndef scaled(model):\n    return model\n"


@pytest.fixture
def edits(tmp_path, monkeypatch):
    """A user's package: `edits.scale` is a function of the module `edits.factor`."""
    package = f"edits_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(EDITS.format(package="."))
    (tmp_path / package / "factor.py").write_text(FACTOR.format(value=1))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(package)
    for name in (package, f"{package}.factor"):
        sys.modules.pop(name, None)


def test_modules_that_a_function_s_module_imports_count(images, tmp_path, edits):
    """As they were imported: an edit of the file counts after a reload, not before."""

    def arm():
        return identities(images, tmp_path / "out", arms={"arm": edits.scale})[1]

    first, file = arm(), Path(edits.factor.__file__)
    assert arm() == first
    file.write_text(FACTOR.format(value=20))
    assert arm() == first
    importlib.invalidate_caches()
    importlib.reload(edits.factor)
    assert arm() != first
    file.write_text(FACTOR.format(value=1))
    importlib.reload(edits.factor)
    assert arm() == first


def test_packages_encodings_and_lazy_imports_count_whatever_was_imported_before(tmp_path, monkeypatch):
    """Nothing is imported for it, so that the same code has one identity at any time."""
    package = tmp_path / "own_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("import json")
    (package / "inner" / "late.py").write_text("")  # of a folder without __init__.py
    (package / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# \xe9\nimport own_module\n".encode("latin-1"))
    (tmp_path / "own_module.py").write_text("def f():\n    import own_package.inner.late, yaml.cyaml\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = {"own_package", "own_package.latin", "own_package.inner.late", "own_module"}
    before = set(sys.modules)
    assert _checksums({"PIL.Image"}) == {"PIL.Image": checksum(Path(Image.__file__))}, "an installed one, by its file"
    code = _checksums({"own_package.latin"})
    assert set(code) == names
    assert set(sys.modules) == before
    try:
        for name in sorted(names):
            importlib.import_module(name)
        assert _checksums({"own_package.latin"}) == code
        (package / "__init__.py").write_text("import csv")
        importlib.reload(sys.modules["own_package"])
        assert _checksums({"own_package.latin"}) != code
    finally:
        for name in (*names, "own_package.inner"):
            sys.modules.pop(name, None)


def test_files_that_a_recipe_names_count_with_their_content(tmp_path):
    encoder, tokenizer = tmp_path / "encoder", tmp_path / "tokenizer.json"
    encoder.mkdir()

    def code(task, recipe, **fields):
        return code_of(Arm("rms"), "mu/4", TASKS[task], RECIPES[recipe](2).with_(**fields))

    seen = []
    for content in ("one", "two", "one"):
        (encoder / "model.safetensors").write_text(content)
        tokenizer.write_text(content)
        seen += [
            (code("beit", "beit_small", code_encoder=str(encoder)), code("lit", "small_lit", tokenizer=str(tokenizer)))
        ]
    assert seen[0] == seen[2]
    assert all(one != other for one, other in zip(seen[0], seen[1], strict=True))
    assert seen[0][0]["scikit-learn"] == version("scikit-learn")
    assert "tokenizer" not in code("lit", "small_lit")


def test_the_config_of_a_hugging_face_base_counts(tmp_path):
    transformers = pytest.importorskip("transformers")

    def code(**fields):
        transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, **fields).save_pretrained(tmp_path)
        return code_of(Arm("rms"), f"hf:{tmp_path}?drop=0.1", TASKS["classification"], RECIPE)

    assert code() == code() != code(hidden_act="relu")


def test_a_trial_that_goes_on_in_another_environment_or_with_other_code_is_not_reused(images, tmp_path):
    """With other code it is that code's trial if it had failed before its first checkpoint."""

    def resumed(**changes):
        changed = {**config, **changes}
        changed["id"] = train_trial.identify(changed)
        train_trial._resume(out, changed)
        return json.loads((out / "config.json").read_text()), changed

    out = tmp_path / "out"
    out.mkdir()
    prepared = open_study(StudyFolder(out), study(images).settings, StudyOptions(**OPTIONS))
    config = prepared.config(Trial(prepared.settings.cell(BASE), 0))
    resumed(code={"mine": "broken"})
    (out / "result.json").write_text(json.dumps({"status": "failed"}))
    written, repaired = resumed(code={"mine": "right"})
    assert written == repaired
    shutil.rmtree(out)
    out.mkdir()
    assert resumed()[0]["id"] == config["id"]
    checkpoint.save(out, {"step": 1})
    for change, known in (({"processes": 2, "shard": True}, config["id"]), ({"processes": 2, "threads": 64}, None)):
        with pytest.warns(UserWarning, match="numbers may differ"):
            assert resumed(environment={**config["environment"], **change})[0]["id"] == known
    with pytest.warns(UserWarning, match="mine was .*now 'broken'"):
        assert resumed(code={"mine": "broken"})[0]["id"] is None
