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
    return out


def test_the_best_seed_of_each_arm_stays(best, tmp_path):
    wanted = []
    for arm in ("base", "dpn"):
        scores = {f"{arm}/seed{seed}": last_score(best / "trials" / arm / f"seed{seed}") for seed in (0, 1)}
        wanted.append(max(scores, key=scores.get))
    assert kept(best) == wanted
    assert evaluate(best / "trials" / wanted[1], device="cpu")[0]["images"] == 359
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    found = vm.predict(best / "trials" / "dpn", tmp_path, device="cpu")  # the one seed that is there
    assert found == vm.predict(best / "trials" / wanted[1], tmp_path, device="cpu")


def test_the_study_goes_on_as_it_was(best):
    before = kept(best)
    assert make(seeds=4).run(best, keep_weights="best", **RUN).complete
    assert len(kept(best)) == 2
    assert all((best / "trials" / name).exists() for name in before)


def test_what_needs_other_weights_says_so(best):
    gone = next(one for one in ("dpn/seed0", "dpn/seed1") if one not in kept(best))
    with pytest.raises(UserError, match=r"keep-weights"):
        evaluate(best / "trials" / gone, device="cpu")
    with pytest.raises(UserError, match=r"ece has to be computed.*--keep-weights all"):
        make(seeds=4, metric="ece").run(best, **RUN)
    with pytest.raises(UserError, match="keep-weights"):
        Start(str(best / "trials" / "dpn"), None).build(vm.ViTConfig(), int(gone[-1]))


def test_none_stay_and_metrics_do(tmp_path):
    answer = make(seeds=1).run(tmp_path, keep_weights="none", **RUN)
    assert answer.complete
    assert kept(tmp_path) == []
    assert make(seeds=1).run(tmp_path, **RUN).complete, "nothing is trained again"
    assert kept(tmp_path) == []


@pytest.mark.parametrize(("keep", "arms"), [("best", ["base", "dpn"]), ("none", [])])
def test_a_tuned_study_keeps_weights_until_the_choice_is_evaluated(keep, arms, tmp_path):
    study = make(seeds=1, tune={"lr": (1e-4, 1e-3)}, tune_on="val", same_seeds=True)
    assert study.run(tmp_path, keep_weights=keep, **RUN).complete
    assert [name.split("/")[0] for name in kept(tmp_path)] == arms
    assert all((tmp_path / "trials" / name / "test.json").exists() for name in kept(tmp_path))


def test_a_trial_that_never_had_weights_is_no_trial_whose_weights_are_gone(tmp_path):
    (tmp_path / "result.json").write_text('{"status": "diverged", "weights": {}}')
    with pytest.raises(UserError, match="does not hold a finished trial"):
        open_trial(tmp_path)


def test_another_word_is_refused(tmp_path):
    with pytest.raises(UserError, match="all, best, none"):
        make().run(tmp_path, keep_weights="some", **RUN)


def test_a_damaged_byte_is_noticed(tmp_path):
    make(seeds=1).run(tmp_path, **RUN)
    path = tmp_path / "trials" / "dpn" / "seed0" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    for open_it in (lambda: evaluate(path.parent, device="cpu"), lambda: Start.of(str(path.parent))):
        with pytest.raises(UserError, match=r"dpn/seed0/model\.safetensors is damaged"):
            open_it()
