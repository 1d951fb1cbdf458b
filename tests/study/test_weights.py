"""Which weights a study keeps, and what needs those that it did not keep."""

import json

import pytest
from PIL import Image

import vitmods as vm
from vitmods.study.checkpoints import Start, open_trial
from vitmods.study.evaluate import evaluate
from vitmods.util.errors import UserError

RUN = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


def make(seeds=2, **settings):
    recipe = vm.recipes.digits(epochs=1).with_(warmup_epochs=0)
    return vm.Study("mu/4", ["dpn"], recipe=recipe, seeds=seeds, limit_train=128, **settings)


def kept(out):
    """Trials whose weights are there, as arm/.../seed."""
    return sorted(path.parent.relative_to(out / "trials").as_posix() for path in out.rglob("model.safetensors"))


def last_score(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["top1"] for row in rows if row["split"] == "val"][-1]


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    out = tmp_path_factory.mktemp("best")
    make().run(out, keep_weights="best", **RUN)
    before = kept(out)
    assert make(seeds=4).run(out, keep_weights="best", **RUN).complete  # it resumes and grows
    assert all((out / "trials" / name).exists() for name in before)
    return out


def test_the_best_seed_of_each_arm_stays(best, tmp_path):
    expected = []
    for arm in ("base", "dpn"):
        scores = {f"{arm}/seed{seed}": last_score(best / "trials" / arm / f"seed{seed}") for seed in range(4)}
        expected.append(max(scores, key=scores.get))
    assert kept(best) == expected
    assert evaluate(best / "trials" / expected[1], device="cpu")[0]["images"] == 359
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    predictions = vm.predict(best / "trials" / "dpn", tmp_path, device="cpu")  # the one seed that is there
    assert predictions == vm.predict(best / "trials" / expected[1], tmp_path, device="cpu")


def test_what_needs_other_weights_says_so(best, tmp_path):
    gone = next(name for name in ("dpn/seed0", "dpn/seed1") if name not in kept(best))
    with pytest.raises(UserError, match=r"keep-weights"):
        evaluate(best / "trials" / gone, device="cpu")
    with pytest.raises(UserError, match=r"ece has to be computed.*--keep-weights all"):
        make(seeds=4, metric="ece").run(best, **RUN)
    (tmp_path / "result.json").write_text('{"status": "diverged", "weights": {}}')
    with pytest.raises(UserError, match="does not hold a finished trial"):  # and never had weights
        open_trial(tmp_path)
    with pytest.raises(UserError, match="keep-weights"):
        Start(str(best / "trials" / "dpn"), None).build(vm.ViTConfig(), int(gone[-1]))


def test_none_stay_and_metrics_do(tmp_path):
    answer = make(seeds=1).run(tmp_path, keep_weights="none", **RUN)
    assert answer.complete
    assert kept(tmp_path) == []
    assert make(seeds=1).run(tmp_path, **RUN).complete, "nothing is trained again"
    assert kept(tmp_path) == []


@pytest.mark.parametrize(("keep", "arms"), [("best", ["base", "dpn"]), ("none", [])])
def test_a_tuned_study_keeps_those_of_the_chosen_point(keep, arms, tmp_path):
    study = make(seeds=1, tune={"lr": (1e-4, 1e-3)})
    assert study.run(tmp_path, keep_weights=keep, **RUN).complete
    assert [name.split("/")[0] for name in kept(tmp_path)] == arms
    assert all(
        json.loads((tmp_path / "trials" / name / "result.json").read_text())["split"] == "test"
        for name in kept(tmp_path)
    )
