"""Studies whose true effects are known, run whole: how often is what they claim wrong, and how often do they find it?

A task is trained as any other, for one step of the smallest ViT, but what is measured of an image is drawn:

    image i is right  if  level + effect[arm] + u[seed] + e[arm, seed] + z[i] + w[arm, i] + noise > 0

all normal, the images anew in every study. So an arm's true accuracy over all trainings and images is
Phi((level + effect) / s), s^2 the sum of the variances. Everything between is the code that users run: `vm.Study`,
trials in folders, scores of each image, looks, decisions.

    python benchmarks/coverage.py --studies 100 --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from paired import machine
from scipy.special import ndtri

import vitmods as vm
from vitmods.data import Batch
from vitmods.recipes import plain
from vitmods.tasks import TASKS, Measured, Metric, Task
from vitmods.tasks.base import noise

BASE = 0.80  # true accuracy of base
TRUE = {"layerscale": 4.0, "rms": 0.0, "dpn": -3.0}  # points, by arm; placement below does nothing either
SD = {"seed": 0.05, "trial": 0.10, "image": 1.0, "arm_image": 0.5, "noise": 0.5}
TOTAL = math.sqrt(sum(sd**2 for sd in SD.values()))


@TASKS.register("planted")
class Planted(Task):
    """Learns to tell classes, and is measured by what `right` draws."""

    name, title = "planted", "an effect that is known"
    metrics = (Metric("planted", "planted accuracy", ""),)
    study = 0

    def begin(self, model):
        self.seed = torch.initial_seed()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets), {}

    def evaluate(self, model, batches):
        keys = np.concatenate([batch.inputs.double().sum(dim=(1, 2, 3)).numpy() for batch in batches])
        arm = str(model.changes[0]) if model.changes else "base"
        right = drawn(self.study, arm, self.seed, np.abs(keys * 1e6).astype(np.int64))
        return Measured({"planted": float(right.mean()), "loss": 0.0}, {"planted": right})

    def synthetic(self, count, shape, classes, recipe):
        return Batch(noise(count, shape), torch.arange(count) % classes, torch.arange(count))


def drawn(study: int, arm: str, seed: int, keys: np.ndarray) -> np.ndarray:
    """(n,) whether each image is right; the difficulty of an image is that of its pixels, in a study."""
    code = sum(map(ord, arm))
    effect = TRUE.get(next((name for name in TRUE if arm.startswith(name)), ""), 0.0)
    level = TOTAL * float(ndtri(BASE + effect / 100))

    def normal(sd: float, *key: int) -> float:
        return sd * float(np.random.default_rng([study, *key]).standard_normal())

    z = np.array([normal(SD["image"], 1, int(key)) for key in keys])
    w = np.array([normal(SD["arm_image"], 2, code, int(key)) for key in keys])
    each = np.random.default_rng([study, 3, code, seed]).standard_normal(len(keys)) * SD["noise"]
    return level + normal(SD["seed"], 4, seed) + normal(SD["trial"], 5, code, seed) + z + w + each > 0


def one_study(number: int, folder: Path, sequential: bool, seeds: int) -> dict[str, object]:
    """The effects of one study, and what it took."""
    Planted.study = number
    recipe = plain(epochs=1).with_(batch_size=32)  # one step
    arms = ["layerscale", "rms", "dpn", "placement(attn=post,mlp=post)"]
    study = vm.Study(
        "mu/4", arms, "digits", recipe, seeds, task="planted", until_decided=sequential, limit_train=32, margin=0.5
    )
    answer = study.run(folder / str(number), workers=1, device="cpu", cost_seconds=0, progress=False)
    rows = {}
    for arm, effect in answer.effects.items():
        true = TRUE.get(arm, 0.0)
        claims = {"helps": true <= 0, "hurts": true >= 0, "equivalent": abs(true) >= 0.5, "no worse": true <= -0.5,
                  "no gain": true >= 0.5}  # fmt: skip
        rows[arm] = {
            "true": true, "effect": effect.effect, "low": effect.low, "high": effect.high,
            "verdict": str(effect.verdict), "n": effect.n, "false": bool(claims.get(str(effect.verdict), False)),
            "covered": not effect.low > true and not effect.high < true,
        }  # fmt: skip
    return {"arms": rows, "trials": sum(trial.ended for trial in answer.trials)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--studies", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record: dict[str, object] = {"true points": TRUE, "base": BASE, "studies": options.studies}
    for name, sequential, seeds in (("fixed", False, options.seeds), ("until decided", True, options.most)):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            numbers = range(options.first, options.first + options.studies)
            found = [one_study(number, Path(folder), sequential, seeds) for number in numbers]
        every = [(arm, row) for one in found for arm, row in one["arms"].items()]
        record[name] = {
            "seeds": seeds,
            "trials a study": sum(one["trials"] for one in found) / len(found),
            "studies with a false claim": sum(any(row["false"] for row in one["arms"].values()) for one in found),
            "studies with an interval that misses": sum(
                any(not row["covered"] for row in one["arms"].values()) for one in found
            ),
            "verdicts": {
                arm: dict(Counter(row["verdict"] for other, row in every if other == arm).most_common())
                for arm in dict.fromkeys(arm for arm, _ in every)
            },
            "seconds": round(time.perf_counter() - begin),
        }
        print(name, json.dumps(record[name], indent=1), flush=True)
    if options.out:
        info = machine()
        slug = "-".join(info["cpu"].lower().replace("(r)", "").split()[:3])
        path = options.out / f"coverage-{slug}-1t.json"
        path.write_text(json.dumps({"machine": info, "results": record}, indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
