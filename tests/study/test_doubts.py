"""Warnings of a study: of its settings before it trains, and of its outcome before verdicts are acted on."""

import dataclasses
import json
import re
import warnings

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import vitmods as vm
from vitmods.stats.decide import decide
from vitmods.study.arms import make_arms
from vitmods.study.doubts import outcome_doubts
from vitmods.study.prepare import arm_warnings, few_images, join_warnings, trained_weights
from vitmods.study.state import Curve, TrialRecord
from vitmods.study.study import Study
from vitmods.study.trial import already_reported
from vitmods.tasks.metrics import Metric

TOP1, LOSS = Metric("top1", "top-1", ""), Metric("nll", "log loss", "", higher_is_better=False, unit="nats")


def study(images=None, spread=0.01, n=8, base=0.01):
    """Base and arms that vary by a point, and one by `spread`; or base and an arm whose images are 5 % their own."""
    rng = np.random.default_rng(0)
    if images is None:
        spreads = {"base": base, "a": 0.01, "b": spread, "c": 0.01}
        return decide({arm: row(0.8 + sd * rng.standard_normal(n)) for arm, sd in spreads.items()})
    scores = rng.random((2, n, images)) < 0.9
    scores[0, :, : images // 20] = scores[1, :, images // 20 : images // 10] = False
    return decide({"base": row(scores[0].astype(float)), "a": row(scores[1].astype(float))})


def row(values):
    return dict(enumerate(values))


def base(*curves):
    steps = tuple(range(10, 10 * len(curves[0]) + 1, 10)) if curves else ()
    logged = [Curve(steps, steps, tuple(scores)) for scores in curves]
    return [TrialRecord("base", seed, "finished", "", curve=curve) for seed, curve in enumerate(logged)]


def doubts(decision, trials=(), curves=TOP1):
    return list(outcome_doubts(decision, trials, curves))


def test_arms_that_vary_very_differently():
    assert doubts(study()) == []
    (doubt,) = doubts(study(spread=0.08, n=16))
    assert re.match(r"From seed to seed base varies less than some arms: b [\d.]+ times as much\.", doubt)
    (doubt,) = doubts(study(base=0.08, n=16))
    assert doubt.startswith("From seed to seed base varies more than 3 times as much as a, b and c: ")
    assert doubts(study(spread=0.08, n=3)) == [], "the decision itself says so of few seeds"


def test_test_images_that_are_too_few_for_the_margin():
    cannot = "Effects within the margin of 0.5 points cannot be resolved with 300 test images, which resolve 3.4 points"
    few = study(images=300)
    (doubt,) = doubts(few)
    more = "Beyond about 480 test images, more do not help: trials vary by 2.9 points, so 32 seeds resolve only 2.6"
    assert doubt.startswith(f"{cannot} at best. {more}")
    wild = dataclasses.replace(few["a"], sd=10.0)
    (doubt,) = doubts(dataclasses.replace(few, effects={"a": wild}))
    assert "More images do not help: trials vary by 10 points, so 32 seeds resolve only 9.1 points." in doubt
    steady = dataclasses.replace(few["a"], sd=0.2)
    (doubt,) = doubts(dataclasses.replace(few, effects={"a": steady}))
    could = "About 54,000 test images could, with up to 32 seeds. Or restrict the claim"
    assert doubt.startswith(f"{cannot} at best. {could}")
    (doubt,) = doubts(dataclasses.replace(few, effects={"a": dataclasses.replace(steady, grouped=True)}))
    assert "with 300 groups of test images" in doubt
    assert doubts(dataclasses.replace(few, generalize="seeds")) == []
    assert doubts(study(images=100_000)) == []


@pytest.mark.parametrize(
    ("curve", "metric", "said"),
    [
        (np.linspace(0.5, 0.8, 20), TOP1, "6.4 points of validation top-1 over the last fifth"),
        (np.minimum(np.linspace(0.5, 1.0, 20), 0.8), TOP1, None),
        (np.linspace(0.8, 0.5, 20), TOP1, None),
        (np.linspace(0.8, 0.5, 20), LOSS, "0.062 nats of validation log loss"),
        (np.linspace(0.5, 0.8, 4), TOP1, None),
    ],
)
def test_a_base_that_was_still_gaining(curve, metric, said):
    trials = base(curve, curve + 0.001 * np.cos(np.arange(len(curve))))
    texts = doubts(study(), trials, metric)
    assert [said in text for text in texts] == ([True] if said else [])
    assert doubts(study(), base(curve), metric) == [], "one seed has no spread"


@pytest.mark.parametrize(
    ("base", "task", "img_size", "weights"),
    [
        ("S/16", "classification", 64, "vit_small_patch16_224"),
        ("vit_base_patch16_224", "multilabel", 224, "vit_base_patch16_224"),
        ("mu3/4", "classification", 64, "vit_tiny_patch16_224"),
        ("mu6/8", "segmentation", 128, ""),
        ("S36/16", "classification", 224, ""),
        ("S/16", "classification", 100, ""),
        ("timm:pvt_v2_b0", "detection", 128, ""),
        ({"patch_size": 16}, "classification", 224, ""),
    ],
)
def test_trained_weights_are_suggested_where_they_suit(base, task, img_size, weights):
    settings = {"base": base, "task": task, "img_size": [img_size, img_size], "in_chans": 3}
    assert trained_weights(settings) == weights
    assert trained_weights({**settings, "start": {}}) == trained_weights({**settings, "in_chans": 1}) == ""


def test_few_photographs_ask_for_trained_weights(dataset, tmp_path, monkeypatch):
    """... and those that are on disk are named."""

    def advice(base="S/16", in_chans=3):
        return few_images(Study(base, ["dpn"], "digits", img_size=64, in_chans=in_chans).settings.cells[0], dataset)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    (text,) = advice()
    start = "100 training images are few to train S/16 from scratch. Start from trained weights (--from "
    assert text.startswith(start)
    assert "on this machine" not in text
    assert advice(in_chans=1) == advice("timm:swin_tiny_patch4_window7_224") == []
    model = timm.create_model("test_vit", num_classes=3)
    expected = []
    for name, config in {
        "timm--vit_small": {"architecture": "vit_small_patch16_224"},
        "facebook--dinov2": {"model_type": "dinov2"},
        "timm--resnet18": {"architecture": "resnet18"},
        "google--bert": {"model_type": "bert"},
        "someone--damaged": [],
    }.items():
        folder = tmp_path / "hub" / f"models--{name}" / "snapshots" / "1a2b"
        save_for_hf(model, str(folder), safe_serialization="both")
        (folder / "config.json").write_text(json.dumps(config))
        expected += [str(folder)] if name in ("timm--vit_small", "facebook--dinov2") else []
    (tmp_path / "torch" / "checkpoints").mkdir(parents=True)
    for name in ("deit_small_patch16_224-cd65a155.pth", "resnet50-11ad3fa6.pth", "vit_b.txt"):
        (tmp_path / "torch" / "checkpoints" / name).touch()
    expected.append(str(tmp_path / "torch" / "checkpoints" / "deit_small_patch16_224-cd65a155.pth"))
    (text,) = advice()
    assert text.endswith(f"These are on this machine already: --from {', '.join(sorted(expected))}.")
    vit = tmp_path / "hub" / "models--timm--vit_small" / "snapshots" / "1a2b"
    save_for_hf(model, str(vit), safe_serialization=True)
    assert isinstance(vm.adapters.open_checkpoint(str(vit)), vm.ViT)  # as the suggestion says


@pytest.fixture(scope="module")
def dataset():
    return vm.data.load("digits", img_size=(8, 8), in_chans=1, augment=vm.Recipe().augment, limit_train=100)


@pytest.fixture
def record(dataset):
    def warnings_of(arms, **recipe):
        base = vm.vit("mu2/4", img_size=8, in_chans=1)
        models = {"base": base} | {arm.name: vm.apply(base, *arm.changes) for arm in make_arms(arms)}
        arms = {}
        for name, model in models.items():
            for warning in arm_warnings(model, vm.Recipe().with_(**recipe), dataset):
                arms.setdefault(warning, []).append(name)
        return [*join_warnings(arms)]

    return warnings_of


def test_norms_over_small_batches_are_named_together(record):
    """What counts is the part of a batch that is computed at once."""
    kinds = ("rms", "scale", "batch", "instance", "group")
    (small,) = record([f"{kind}=norm(kind={kind})" for kind in kinds] + ["switchnorm"], batch_size=7)
    assert small.startswith("Arms batch, switchnorm: ")
    assert "batches of 7" in small
    (small,) = record(["batchnorm"], batch_size=64, accumulate=16)
    assert "batches of 4" in small
    assert record(["batchnorm"], batch_size=8) == []
    assert record(["norm(kind=switchable,batch=false)", "instancenorm"], batch_size=2) == []


def test_a_warm_up_that_outlasts_the_trial_is_reported(record, dataset):
    steps = dataset.steps_per_epoch(64)
    (long,) = record(["powernorm", "short=norm(kind=power,warmup=2)"], epochs=10)
    assert long.startswith("Arm powernorm: PowerNorm warms up for 3,000 batches, and a trial has")
    assert f"a trial has {10 * steps}." in long
    assert record([f"norm(kind=power,warmup={10 * steps - 1})"], epochs=10) == []


def test_parallel_branches_of_a_shallow_model_are_advised_against(record):
    advice, of_dpn = record(["parallel", "dpn"])
    assert of_dpn.startswith("Arm dpn: its paper has patches of 768 values and more, here are 16")
    assert record(["dpn(before=false)", "dpn(norm=only_learnable)", "dpn(before=whiten,after=false)"]) == []
    assert not vm.DualPatchNorm().advice(vm.ViTConfig.from_name("Ti/16"))
    assert advice.startswith("Arm parallel: its paper has gains in deep models")
    (renamed,) = record(["p=parallel"])
    assert renamed.startswith("Arm p (for parallel): its paper has gains in deep models")
    assert advice.endswith("Here are 2 blocks of width 32.")
    change = vm.Parallel()
    advised = {name: bool(change.advice(vm.ViTConfig.from_name(name))) for name in ("S12x2/16", "B12x2/16", "S18x2/16")}
    assert advised == {"S12x2/16": True, "B12x2/16": False, "S18x2/16": False}
    base = vm.vit("mu2/4", img_size=8)
    assert "advice" in str(vm.diff(base, vm.apply(base, change)))
    assert "advice" not in str(vm.diff(base, vm.apply(base, vm.DualPatchNorm(before=False))))


def test_the_norms_own_warning_is_not_repeated():
    norm = vm.apply(vm.vit("mu2/4", img_size=8), vm.Norm("batch"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with already_reported():
            norm(torch.zeros(2, 3, 8, 8))
    assert caught == []
    with pytest.warns(UserWarning, match="below 8"):
        vm.apply(vm.vit("mu2/4", img_size=8), vm.Norm("batch"))(torch.zeros(2, 3, 8, 8))


def test_what_is_odd_in_the_images_is_said_before_training(tmp_path, short_clocks):
    places = ("train/cat/0", "train/cow/0", "train/dog/0", "train/dog/1", "val/cat/0", "val/cow/0")
    for seed, place in enumerate(places):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"{place}.png")
    study = vm.Study("mu2/4", ["dpn"], data=tmp_path, img_size=8, recipe=vm.Recipe().with_(epochs=1, batch_size=4))
    with pytest.warns(UserWarning, match="Classes without an image in val: dog"):
        study.dry_run(workers=1, device="cpu")
