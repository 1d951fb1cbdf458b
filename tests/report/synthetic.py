"""The answer of a made-up study, for the tests of the report and the table."""

import dataclasses
from pathlib import Path

import numpy as np

from vitmods.changes import parse_changes
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig
from vitmods.recipes import Recipe
from vitmods.stats.decide import decide
from vitmods.study.answer import Answer
from vitmods.study.questions import arms_question
from vitmods.study.results import ArmAnswer, ArmCost, BaseCost, CostRatio, PointScores, Tuning
from vitmods.study.state import Curve, TrialRecord
from vitmods.study.store import ChangeFacts, ModelFacts
from vitmods.tasks.metrics import Metric

TOP1 = Metric("top1", "top-1 accuracy", "top1")
LAYER, RMS = NormConfig(), NormConfig("rms")
BASE = ViTConfig(img_size=32, patch_size=4, embed_dim=192, num_heads=3, mlp_dim=768, num_classes=10)

PUBLISHED = {"dpn": "+0.6 points (S/16), +0.9 (B/32) of ImageNet top-1, 93k steps"}
# name, changes, edit of the config, true effect in points
ARMS = (
    ("dpn", "dpn", {"stem": {"before": LAYER, "after": LAYER}}, 1.1),
    ("dpn(after=false)", "dpn(after=false)", {"stem": {"before": LAYER}}, 0.3),
    ("rms", "rms", {"attn": {"before": RMS}, "mlp": {"before": RMS}, "final_norm": RMS}, 0.05),
    ("post", "placement(attn=post,mlp=post)",
     {"attn": {"before": None, "after": LAYER}, "mlp": {"before": None, "after": LAYER}, "final_norm": None}, -4.5),
    ("post on MLP", "placement(mlp=post)", {"mlp": {"before": None, "after": LAYER}, "final_norm": None}, -0.9),
    ("normformer", "normformer", {"attn": {"branch": LAYER}, "mlp": {"inner": LAYER}}, 0.2),
    ("subln", "subln", {"attn": {"inner": LAYER}, "mlp": {"inner": LAYER}}, 0.0),
    ("layerscale", "layerscale", {"layer_scale": 1e-4}, -0.1),
    ("dpn+rms", "dpn+rms",
     {"stem": {"before": RMS, "after": RMS}, "attn": {"before": RMS}, "mlp": {"before": RMS}, "final_norm": RMS}, 1.2),
    ("pre+post", "placement(attn=pre+post,mlp=pre+post)",
     {"attn": {"after": LAYER}, "mlp": {"after": LAYER}, "final_norm": None}, -0.3),
)  # fmt: skip


def edited(edit):
    """The base config with some slots of its parts replaced."""
    parts = {
        key: dataclasses.replace(getattr(BASE, key), **value) if isinstance(value, dict) else value
        for key, value in edit.items()
    }
    return dataclasses.asdict(BASE.with_(**parts))


def _trial(arm, seed, final, rng, speed, evaluations, status="finished"):
    """A trial whose validation scores rise with jitter, saturate and end at `final`."""
    finished = status == "finished"
    epochs = np.arange(1, 1 + (evaluations if finished else max(evaluations // 3, 1)))
    walls = 41.0 * epochs * speed * (1 + 0.02 * rng.random(len(epochs)))
    t = np.linspace(1 / evaluations, 1, evaluations)
    rise = 1 - np.exp(-5 * t) * (1 + 0.05 * rng.standard_normal(evaluations))
    scores = np.clip(final * rise / rise[-1] + 0.003 * rng.standard_normal(evaluations) * (1 - t), 0, 1)
    return TrialRecord(
        arm=arm,
        seed=seed,
        status=status,
        folder=f"trials/{arm}/seed{seed}",
        metrics={"top1": round(final, 4)} if finished else {},
        wall_s=float(walls[-1]),
        message=None if finished else "the loss is not finite at step 1,234",
        curve=Curve(tuple((90 * epochs).tolist()), tuple(walls.tolist()), tuple(scores[: len(epochs)].tolist())),
    )


def _images(scores, rng, images=1000):
    """Which images were right, for scores that hold to half an image; most are easy or hard for all trials alike."""
    ease = np.linspace(0, 1, images)
    ranks = {seed: np.argsort(ease + rng.normal(0, 0.05, images)) for seed in scores}
    return {
        seed: None if score is None else (ranks[seed].argsort() >= images * (1 - score)).astype(float)
        for seed, score in scores.items()
    }


def _spread(value, width=0.012):
    return CostRatio(value, value - width, value + width, 64)


def _tuned(arm, rng):
    """A grid of six points around the scores of an arm; the fifth is chosen, and one trial of the last diverged."""
    scores_of_arm = [v for v in arm.scores.values() if v is not None]
    points, trials = [], []
    for index, (lr, decay) in enumerate((lr, decay) for lr in (1e-4, 3e-4, 1e-3) for decay in (0.03, 0.1)):
        values = {"lr": lr, "weight_decay": decay}
        scores = {
            s: float(v - 0.01 * abs(index - 4) + 0.002 * rng.standard_normal()) for s, v in enumerate(scores_of_arm)
        }
        if index == 5:
            scores[0] = None
        kept = [v for v in scores.values() if v is not None]
        points.append(PointScores(values, scores, sum(kept) / len(kept)))
        for trial in arm.trials:
            status = "diverged" if index == 5 and trial.seed == 0 else trial.status if index == 4 else "finished"
            trials.append(dataclasses.replace(trial, point=values, status=status, counted=index == 4))
    tuning = Tuning(points[4].values, ("lr",), tuple(points))
    return dataclasses.replace(arm, tuning=tuning, trials=tuple(trials))


def make_answer(
    folder,
    arms=10,
    seeds=5,
    evaluations=30,
    classes=None,
    rename=None,
    diverge=(),
    missing=(),
    seed=3,
    tuned=False,
    per_image=True,
):
    """The answer of a made-up study that lies in `folder`.

    Args:
        rename: {index of an arm: another name}.
        diverge, missing: (index of an arm or -1 for base, seed) of trials that diverged, or have not run.
        per_image: whether intervals hold for other images too.
        tuned: every arm was trained with a grid of learning rates and weight decays.
    """
    rng = np.random.default_rng(seed)
    classes = classes or ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    luck = rng.normal(0, 0.6, seeds)

    def run(index, name, true_effect, speed, config, short=""):
        trials = []
        for s in range(seeds):
            final = (78.4 + luck[s] + true_effect + rng.normal(0, 0.15)) / 100
            if (index, s) in missing:
                trials.append(TrialRecord(name, s, "unfinished", f"trials/{name}/seed{s}"))
                continue
            status = "diverged" if (index, s) in diverge else "finished"
            trials.append(_trial(name, s, final, rng, speed, evaluations, status))
        facts = [{**change.describe(), "published": PUBLISHED.get(change.name, "")} for change in parse_changes(short)]
        model = ModelFacts("Ti/4", config, tuple(ChangeFacts(short, **change) for change in facts))
        return ArmAnswer(name, short, {}, model, {t.seed: t.score("top1") for t in trials}, {}, tuple(trials))

    base = run(-1, "base", 0.0, 1.0, dataclasses.asdict(BASE))
    rows = []
    for i in range(arms):
        name, short, edit, true_effect = ARMS[i % len(ARMS)]
        name = (rename or {}).get(i, name if i < len(ARMS) else f"{name} {i}")
        speed = 1 + 0.03 * (i % 4)
        cost = ArmCost(
            1 + 0.0004 * i, 1 + 0.002 * i, _spread(speed), _spread(speed - 0.01), _spread(speed + 0.01),
            _spread(1 + 0.01 * i, 0.0),
        )  # fmt: skip
        row = run(i, name, true_effect, speed, edited(edit), short)
        rows.append(dataclasses.replace(row, cost=cost))
    decision = decide(
        {arm.name: _images(arm.scores, rng) if per_image else arm.scores for arm in (base, *rows)},
        failed={arm.name: {t.seed: "nan" for t in arm.trials if t.status == "diverged"} for arm in (base, *rows)},
        chance=0.1,
        planned=seeds,
    )
    questions = {"arms": arms_question(decision)}
    rows = [dataclasses.replace(row, effect=decision[row.name]) for row in rows]
    warnings = [f"{t} diverged: {t.message}" for row in rows for t in row.trials if t.status == "diverged"]
    if tuned:
        base, *rows = (_tuned(arm, rng) for arm in (base, *rows))

    def split(counts):
        return {"count": sum(counts), "per_class": dict(zip(classes, counts))}

    return Answer(
        created="2025-11-20T12:00:00+00:00",
        metric=TOP1,
        splits=("test",),
        margin=0.5,
        base=base,
        arms=tuple(rows),
        decision=decision,
        questions=questions,
        complete=not missing,
        command="vitmods compare --data 'torchvision:CIFAR10?root=images' --base Ti/4 --img-size 32 --arms dpn "
        "'placement(attn=post,mlp=post)' --seeds 5 --epochs 30 --out runs/cifar10",
        data={
            "name": "cifar10", "spec": "torchvision:CIFAR10?root=images", "classes": classes,
            "splits": {
                "train": split([450 + 7 * i for i in range(len(classes))]),
                "val": split([50] * len(classes)),
                "test": split([100] * len(classes)),
            },
            "native": {"smallest": [32, 32], "median": [32, 32], "largest": [32, 32], "most_common": [32, 32],
                       "most_common_count": 600 * len(classes)},
            "unreadable": [], "left_out": 0, "warnings": [],
            "fingerprint": "3f6c" * 16, "split_origin": "found",
        },
        settings={"data": "torchvision:CIFAR10?root=images", "seeds": list(range(seeds)), "split_seed": 0,
                  "recipe": Recipe().to_dict()},
        resolved={"steps": 2700, "epochs": 30},
        environment={"python": "3.11.7", "packages": {"vitmods": "0.1.0", "torch": "2.11.0", "timm": "1.0.20"},
                     "device": "cpu", "device_name": "a processor", "cores": 2, "threads": 2},
        warnings=tuple(warnings),
        base_cost=BaseCost(5_362_762, 359_000_000, 0.412, 0.0048, 0.151, 812_000_000, 64, 64),
        tuned={"lr": [1e-4, 3e-4, 1e-3], "weight_decay": [0.03, 0.1]} if tuned else None,
        vitmods="0.1.0",
        curves=TOP1,
        path=Path(folder),
    )  # fmt: skip


def changed(answer, **fields):
    """An answer with other fields, whose headline is about the effects that its arms have."""
    answer = dataclasses.replace(answer, **fields)
    effects = {arm.name: arm.effect for arm in answer.arms if arm.effect}
    decision = dataclasses.replace(answer.decision, effects=effects, base=answer.base.name)
    return dataclasses.replace(answer, questions={"arms": arms_question(decision)})


def sample_images(names, size=32, seed=0):
    """One image per name: a colored gradient with a disc, so that tiles can be reported apart."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    dataset = []
    for name in names:
        colors, center, radius = rng.integers(30, 255, (3, 3)), rng.uniform(0.3, 0.7, 2), rng.uniform(0.15, 0.3)
        image = colors[0] * x[..., None] + colors[1] * (1 - x[..., None])
        image[(x - center[0]) ** 2 + (y - center[1]) ** 2 < radius**2] = colors[2]
        dataset.append((name, image.clip(0, 255).astype(np.uint8)))
    return dataset
