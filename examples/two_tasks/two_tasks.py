"""Train a small ViT on digits, adapt its attention to photographs, serve both from one backbone. On a CPU."""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import vitmods as vm
from vitmods import fast
from vitmods.tasks import Classification
from vitmods.train import RunOptions, train_trial

SIDE, CROP = 16, 48  # images of the second task: pieces of 48 px, 16 px small


def train(model: vm.ViT, dataset: vm.data.ImageDataset, recipe: vm.Recipe, out: Path) -> float:
    """Train a model in place; its accuracy on images that it has not seen."""
    task = Classification.from_recipe(recipe)
    result = train_trial(model, task, dataset, recipe, out=out, options=RunOptions("cpu", tensorboard=False))
    return result["metrics"]["top1"]


def write_photographs(folder: Path) -> None:
    """Pieces of scikit-learn's two photographs, a temple and a flower: to the left for training, to the right for the
    test."""
    draw = np.random.default_rng(0)
    for name, photograph in zip(("temple", "flower"), load_sample_images().images, strict=True):
        width = photograph.shape[1]
        for split, count, low, high in (("train", 120, 0, width // 2), ("test", 60, width // 2, width)):
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                top, left = draw.integers(photograph.shape[0] - CROP), draw.integers(low, high - CROP)
                piece = Image.fromarray(photograph[top : top + CROP, left : left + CROP])
                piece.resize((SIDE, SIDE)).save(place / f"{number}.png")


def main(out: Path) -> None:
    torch.manual_seed(0)
    recipe = vm.recipes.digits(epochs=15)
    digits = vm.data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment)
    base = vm.vit("mu3/2", img_size=8, in_chans=1, num_classes=10)
    print(f"digits: top-1 {train(base, digits, recipe, out / 'digits'):.3f}\n")

    if not (out / "photographs").exists():
        write_photographs(out / "photographs")
    recipe = vm.recipes.finetune(like=vm.recipes.small_images(), epochs=15).with_(lr=3e-3, batch_size=32)
    photographs = vm.data.load(str(out / "photographs"), img_size=(SIDE, SIDE), in_chans=1, augment=recipe.augment)
    model = copy.deepcopy(base)
    model.set_input_size(SIDE)  # positions of 4 x 4 patches become those of 8 x 8
    model.reset_classifier(2)
    print(vm.train_only(model, "attention"))
    fast.recompute(model)  # same gradients, less memory
    print(f"\nphotographs: top-1 {train(model, photographs, recipe, out / 'tuned'):.3f}\n")

    delta = vm.save_delta(model, base, out / "photographs.safetensors")
    print(f"The second task takes {delta.nbytes / 1e3:.0f} kB beside the base.\n")
    multi = vm.MultiTask(base, {"digits": None, "photographs": out / "photographs.safetensors"})
    print(multi)
    image = torch.randn(1, 1, SIDE, SIDE)
    assert torch.equal(multi(image, "photographs"), model.eval()(image))  # the separate model, bit for bit


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/two_tasks"))
