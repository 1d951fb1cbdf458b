"""small_data against the recipes of DeiT and AugReg at equal epochs, on images of which there are few.

    python benchmarks/small_data.py --cifar10 path/to/cifar10 --clothing10 path/to/clothing10 --out benchmarks/results

Each set is a study whose base is trained by `small_data`; the arms are the same ViT trained otherwise: by the papers'
rules at this scale (DeiT's rate follows the batch size, both warm-ups keep their fraction of the training, AugReg has
the level of its smallest ViT), and by DeiT's with small_data's rate and no moving average, since its rules leave it a
tiny rate and an average over the whole run. Differences are paired by seed, on the test images. Killed at any moment,
the same command goes on.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from paired import report

import vitmods as vm
from vitmods.recipes import Recipe, augreg, deit, small_data
from vitmods.study import Arm

SETS: dict[str, dict[str, Any]] = {
    "cifar10": {"img_size": 32, "limit_train": 5000, "val_fraction": 0.02},
    "clothing10": {"img_size": 64},
}
PATCHES = {"cifar10": 4, "clothing10": 8}
WARMUPS = {"deit": 5 / 300, "augreg": 10_000 / 92_700}  # fractions of the papers' trainings


def recipes(epochs: int) -> dict[str, Recipe]:
    """base first"""
    ours = small_data(epochs)
    batch = ours.batch_size
    theirs = deit(epochs, batch_size=batch, warmup_epochs=WARMUPS["deit"] * epochs)
    smallest = augreg(model="Ti/16", epochs=epochs, batch_size=batch, warmup_epochs=WARMUPS["augreg"] * epochs)
    return {
        "small_data": ours,
        "deit": theirs,
        "deit, our rate": theirs.with_(lr=ours.lr, lr_batch=None, min_lr=0.0, ema=None),
        "augreg": smallest,
    }


def arm(name: str, recipe: Recipe, base: Recipe) -> Arm:
    """The recipe as what it has other than base's."""
    names = [field.name for field in fields(Recipe)]
    return Arm(name, (), {key: getattr(recipe, key) for key in names if getattr(recipe, key) != getattr(base, key)})


def compare(name: str, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    chosen = recipes(options.epochs)
    ours = chosen["small_data"]
    width, depth = options.width, options.depth
    settings = SETS[name]
    model = vm.ViTConfig(
        img_size=settings["img_size"],
        patch_size=PATCHES[name],
        embed_dim=width,
        depth=depth,
        num_heads=width // 32,
        mlp_dim=4 * width,
        num_classes=10,
    )
    arms = [arm(other, recipe, ours) for other, recipe in chosen.items() if other != "small_data"]
    study = vm.Study(model, arms, folder, ours, options.seeds, **settings)
    out = options.runs / f"{name}-{width}x{depth}-{options.epochs}epochs"
    result = study.run(out, workers=1, device=options.device, cost_seconds=0, progress=True)
    print(result)
    rows = {"small_data": {"top1": next(iter(result.effects.values())).base_mean}}
    for other, effect in result.effects.items():
        rows[other] = {
            "top1": effect.arm_mean,
            "difference": effect.mean,
            "low": effect.low,
            "high": effect.high,
            "seeds": effect.n,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, help="folder with train and test, of which 5,000 are trained on")
    parser.add_argument("--clothing10", type=Path, help="folder with train, validation and test")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs/small_data"), help="folder of the studies")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"clothing10": options.clothing10, "cifar10": options.cifar10}
    for name, folder in folders.items():
        if folder is not None:
            title = f"{name}, {options.width} wide, {options.depth} deep, {options.epochs} epochs"
            report(f"small_data_{name}", {title: compare(name, folder, options)}, options.out)


if __name__ == "__main__":
    main()
