"""A made-up study folder that obeys the schema of results.json, for the tests of the report and the table."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from vitmods.model.config import NormConfig, ViTConfig
from vitmods.stats.effects import effects, noise_floor

LAYER, RMS = NormConfig(), NormConfig("rms")
BASE = ViTConfig(img_size=32, patch_size=4, embed_dim=192, num_heads=3, mlp_dim=768, num_classes=10)

DPN = {
    "name": "dpn",
    "title": "Dual PatchNorm",
    "paper": "Kumar, Dehghani, Houlsby (2023). Dual PatchNorm. TMLR.",
    "url": "https://arxiv.org/abs/2302.01327",
    "summary": "A LayerNorm on the pixels of every patch and another on the embedded patch, before the position.",
    "preserves": "weights",
    "published": "+0.6 points (S/16), +0.9 (B/32) of ImageNet top-1, 93k steps",
    "cost": "0.01 % parameters",
}
POST = {
    "name": "placement",
    "title": "Norm placement",
    "paper": "Xiong et al. (2020). On Layer Normalization in the Transformer Architecture. ICML.",
    "url": "https://arxiv.org/abs/2002.04745",
    "summary": "The norm of a branch moves from its input to after the residual add.",
    "preserves": "nothing",
    "published": "",
    "cost": "none",
}
RMS_CHANGE = {
    "name": "norm",
    "title": "Norm kind",
    "paper": "Zhang, Sennrich (2019). Root Mean Square Layer Normalization. NeurIPS.",
    "url": "https://arxiv.org/abs/1910.07467",
    "summary": "Every norm of the blocks becomes an RMSNorm: no centering, no bias.",
    "preserves": "weights",
    "published": "equal quality at 7 to 64 % less time of the norm",
    "cost": "fewer operations",
}
SUBLN = {**RMS_CHANGE, "name": "subln", "title": "Sub-LN", "published": None, "url": None}

# name, changes, description, edit of the config, true effect in points, how it starts (1 is like base)
ARMS = (
    ("dpn", "dpn", [DPN], {"stem": {"before": LAYER, "after": LAYER}}, 1.1),
    ("dpn(after=false)", "dpn(after=false)", [DPN], {"stem": {"before": LAYER}}, 0.3),
    ("rms", "norm(rms)", [RMS_CHANGE], {"attn": {"before": RMS}, "mlp": {"before": RMS}, "final_norm": RMS}, 0.05),
    ("post", "placement(attn=post,mlp=post)", [POST],
     {"attn": {"before": None, "after": LAYER}, "mlp": {"before": None, "after": LAYER}, "final_norm": None}, -4.5),
    ("post on MLP", "placement(mlp=post)", [POST], {"mlp": {"before": None, "after": LAYER}, "final_norm": None}, -0.9),
    ("normformer", "normformer", [SUBLN], {"attn": {"branch": LAYER}, "mlp": {"inner": LAYER}}, 0.2),
    ("subln", "subln", [SUBLN], {"attn": {"inner": LAYER}, "mlp": {"inner": LAYER}}, 0.0),
    ("layerscale", "layerscale(1e-4)", [SUBLN], {"layer_scale": 1e-4}, -0.1),
    ("dpn+rms", "dpn+norm(rms)", [DPN, RMS_CHANGE],
     {"stem": {"before": RMS, "after": RMS}, "attn": {"before": RMS}, "mlp": {"before": RMS}, "final_norm": RMS}, 1.2),
    ("pre+post", "placement(attn=pre+post,mlp=pre+post)", [POST],
     {"attn": {"after": LAYER}, "mlp": {"after": LAYER}, "final_norm": None}, -0.3),
)  # fmt: skip


def edited(edit):
    """The base config with some slots of its parts replaced."""
    parts = {
        key: dataclasses.replace(getattr(BASE, key), **value) if isinstance(value, dict) else value
        for key, value in edit.items()
    }
    return dataclasses.asdict(BASE.with_(**parts))


def _curve(rng, final, steps):
    """Validation scores of one trial: a saturating rise with jitter that ends at `final`."""
    t = np.linspace(1 / steps, 1, steps)
    rise = 1 - np.exp(-5 * t) * (1 + 0.05 * rng.standard_normal(steps))
    return np.clip(final * rise / rise[-1] + 0.003 * rng.standard_normal(steps) * (1 - t), 0, 1)


def _trial(study, arm, seed, final, rng, speed, evaluations, status="finished"):
    folder = study / "trials" / f"arm{arm}" / f"seed{seed}"
    folder.mkdir(parents=True)
    kept = evaluations if status == "finished" else max(evaluations // 3, 1)
    rows = []
    for epoch, top1 in enumerate(_curve(rng, final, evaluations)[:kept], 1):
        common = {"step": 90 * epoch, "epoch": epoch, "wall_s": 41.0 * epoch * speed * (1 + 0.02 * rng.random())}
        rows.append({**common, "split": "train", "loss": 2.3 * math.exp(-epoch / 20), "lr": 1e-3, "images_per_s": 900})
        rows.append({**common, "split": "val", "loss": 1 - float(top1), "top1": float(top1)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "seed": seed,
        "status": status,
        "folder": folder.relative_to(study).as_posix(),
        "wall_s": rows[-1]["wall_s"],
        "message": None if status == "finished" else "the loss is not finite at step 1,234",
    }


def _spread(value, width=0.012):
    return {"ratio": value, "low": value - width, "high": value + width, "batch": 64}


def _tuning(arm, rng):
    """A grid of six points around the scores of an arm; the fifth is chosen, and one trial of the last diverged."""
    known = [v for v in arm["values"].values() if v is not None]
    points = []
    for index, (lr, decay) in enumerate((lr, decay) for lr in (1e-4, 3e-4, 1e-3) for decay in (0.03, 0.1)):
        scores = {s: float(v - 0.01 * abs(index - 4) + 0.002 * rng.standard_normal()) for s, v in enumerate(known)}
        trials = [{**arm["trials"][0], "seed": s, "status": "finished"} for s in scores]
        if index == 5:
            scores[0], trials[0]["status"] = None, "diverged"
        kept = [v for v in scores.values() if v is not None]
        points.append({"values": {"lr": lr, "weight_decay": decay}, "scores": {str(s): v for s, v in scores.items()},
                       "mean": sum(kept) / len(kept), "trials": trials})  # fmt: skip
    return {"chosen": points[4]["values"], "at_the_edge": ["lr"], "points": points}


def make_study(
    folder, arms=10, seeds=5, evaluations=30, classes=None, rename=None, diverge=(), missing=(), seed=3, tuned=False
):
    """Write a study folder and return its path.

    Args:
        rename: {index of an arm: another name}.
        diverge, missing: (index of an arm or -1 for base, seed) of trials that diverged, or have not run.
        tuned: every arm was trained with a grid of learning rates and weight decays.
    """
    study, rng = Path(folder), np.random.default_rng(seed)
    study.mkdir(parents=True, exist_ok=True)
    classes = classes or ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    luck = rng.normal(0, 0.6, seeds)

    def run(index, true_effect, speed):
        values, trials = {}, []
        for s in range(seeds):
            final = (78.4 + luck[s] + true_effect + rng.normal(0, 0.15)) / 100
            if (index, s) in missing:
                values[str(s)] = None
                folder_name = f"trials/arm{index}/seed{s}"
                trials.append(
                    {"seed": s, "status": "unfinished", "folder": folder_name, "wall_s": None, "message": None}
                )
                continue
            status = "diverged" if (index, s) in diverge else "finished"
            values[str(s)] = round(final, 4) if status == "finished" else None
            trials.append(_trial(study, index, s, final, rng, speed, evaluations, status))
        return {"values": values, "trials": trials}

    base = {"name": "Ti/4", "config": dataclasses.asdict(BASE), **run(-1, 0.0, 1.0)}
    known = [v for v in base["values"].values() if v is not None]
    base["mean"] = sum(known) / len(known) if known else None
    rows = []
    for i in range(arms):
        name, changes, describe, edit, true_effect = ARMS[i % len(ARMS)]
        name = (rename or {}).get(i, name if i < len(ARMS) else f"{name} {i}")
        speed = 1 + 0.03 * (i % 4)
        cost = {
            "params": 1 + 0.0004 * i, "flops": 1 + 0.002 * i, "train_step": _spread(speed),
            "infer_1": _spread(speed - 0.01), "infer_n": _spread(speed + 0.01),
            "peak_memory": _spread(1 + 0.01 * i, 0.0),
        }  # fmt: skip
        rows.append({"name": name, "changes": changes, "recipe": {}, "describe": describe, "config": edited(edit),
                     "cost": cost, **run(i, true_effect, speed)})  # fmt: skip
    lost = {row["name"]: sum(t["status"] == "diverged" for t in row["trials"]) for row in rows}
    by_seed = {row["name"]: {int(s): v for s, v in row["values"].items()} for row in rows}
    found = effects({int(s): v for s, v in base["values"].items()}, by_seed, 0.5, diverged=lost)
    for row in rows:
        row["effect"] = found[row["name"]].to_dict()

    def split(counts):
        return {"count": sum(counts), "per_class": dict(zip(classes, counts))}

    floor = noise_floor(
        {int(s): v for s, v in base["values"].items()},
        {100 + s: 0.784 + 0.006 * rng.standard_normal() for s in range(seeds)},
    )
    results = {
        "schema": 1,
        "vitmods": "0.1.0",
        "created": "2025-11-20T12:00:00+00:00",
        "metric": {"name": "top1", "unit": "points", "split": "test"},
        "margin": 0.5,
        "base": base,
        "arms": rows,
        "cost_base": {"params": 5_362_762, "macs": 359_000_000, "train_step_s": 0.412, "infer_1_s": 0.0048,
                      "infer_n_s": 0.151, "peak_memory_bytes": 812_000_000, "train_batch": 64, "infer_batch": 64},
        "data": {
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
        "recipe": {"epochs": 30, "batch_size": 64, "accumulate": 1, "optimizer": "adamw", "lr": 1e-3,
                   "weight_decay": 0.05, "warmup_epochs": 2.0, "clip_norm": 1.0, "ema": None,
                   "loss": "softmax", "crop": "pad", "flip": 0.5,
                   "randaugment": None, "mixup": 0.0, "cutmix": 0.0, "precision": "32-true", "mean": [0.5, 0.5, 0.5]},
        "settings": {"data": "torchvision:CIFAR10?root=images", "seeds": list(range(seeds)), "split_seed": 0},
        "environment": {"python": "3.11.7", "packages": {"vitmods": "0.1.0", "torch": "2.11.0", "timm": "1.0.20"},
                        "device": "cpu", "device_name": "a processor", "cores": 2, "threads": 2},
        "warnings": [f"{row['name']}, seed {t['seed']} diverged: {t['message']}" for row in rows for t in row["trials"]
                     if t["status"] == "diverged"],
        "command": "vitmods compare --data 'torchvision:CIFAR10?root=images' --base Ti/4 --img-size 32 --arms dpn "
                   "'placement(attn=post,mlp=post)' --seeds 5 --epochs 30 --out runs/cifar10",
        "noise_floor": floor.to_dict(),
        "complete": not missing,
    }  # fmt: skip
    if tuned:
        fields = {"lr": [1e-4, 3e-4, 1e-3], "weight_decay": [0.03, 0.1]}
        results["tuned"] = {"fields": fields, "on": "val"}
        for arm in (results["base"], *results["arms"]):
            arm["tuning"] = _tuning(arm, rng)
    write_results(study, results)
    return study


def read_results(study):
    return json.loads((Path(study) / "results.json").read_text())


def write_results(study, results):
    (Path(study) / "results.json").write_text(json.dumps(results, allow_nan=False))


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
