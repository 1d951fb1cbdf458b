"""Training without labels, then with few; and texts for the trained images. Images are drawn here. A minute on a CPU.

Two ways to train without labels, DINO and BeiT, on the same arms; fine-tuning of each arm from its own weights; and
text towers for the fine-tuned image towers (LiT).
"""

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

import vitmods as vm

SIDE = 32
COLORS = {"red": (200, 60, 60), "green": (60, 170, 80), "blue": (70, 90, 210), "gray": (190, 190, 190)}
SHAPES = ("disc", "square")


def draw(rng: np.random.Generator, color: str, shape: str) -> Image.Image:
    """A shape of this color at a random place, in noise."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    (top, left), radius = rng.integers(8, SIDE - 8, 2), rng.integers(5, 9)
    down, right = rows - top, columns - left
    distance = np.hypot(down, right) if shape == "disc" else np.maximum(abs(down), abs(right))
    image = rng.normal(110, 25, (SIDE, SIDE, 3))
    image[distance < radius] += np.array(COLORS[color]) - 110
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def write_images(folder: Path, count: int, seed: int) -> None:
    """Class folders of `count` images of each color and shape, and captions.jsonl, what `pairs:FILE` reads."""
    rng, lines = np.random.default_rng(seed), []
    for color, shape, number in product(COLORS, SHAPES, range(count)):
        path = f"images/{color}/{shape}-{number:02}.png"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        draw(rng, color, shape).save(folder / path)
        lines.append({"image": path, "captions": [f"a {color} {shape}", f"{shape}, {color}"]})
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)))


def main(out: Path) -> None:
    """Write images, train three stages, and print the answer of each."""
    write_images(out / "shapes", count=12, seed=0)
    write_images(out / "others", count=4, seed=1)
    images, few = str(out / "shapes/images"), {"seeds": 2, "img_size": SIDE}
    recipes = {
        "dino": vm.recipes.dino_small(epochs=4, batch_size=32).with_(local_crops=2, prototypes=64, head_width=64),
        "beit": vm.recipes.beit_small(epochs=4, batch_size=32).with_(codes=32),
    }
    for task, recipe in recipes.items():
        study = vm.Study("mu2/8", ["dpn"], images, recipe, task=task, **few)
        print(f"{task}: k-NN without labels in training\n{study.run(out / task, cost_seconds=0)}\n")

    recipe = vm.recipes.plain(epochs=8).with_(batch_size=32, lr=3e-3)
    tuned = vm.Study(None, (), images, recipe, start=out / "dino", **few)  # each arm and seed from its own weights
    print(f"fine-tuned from dino\n{tuned.run(out / 'tuned', cost_seconds=0)}\n")

    tower = {"text_width": 32, "text_depth": 1, "text_heads": 2, "text_mlp": 64, "vocabulary": 300}
    recipe = vm.recipes.small_lit(epochs=20, batch_size=32).with_(**tower, prompts=("a {} disc", "a {} square"))
    pairs = f"pairs:{out / 'shapes/captions.jsonl'}?zero_shot={out / 'others/images'}"  # tested on names of colors
    lit = vm.Study(None, (), pairs, recipe, task="lit", start=out / "tuned", metric="zero_shot", **few)
    result = lit.run(out / "lit", cost_seconds=0)
    print(f"texts for the fine-tuned image towers\n{result}\nReport: {result.report()}")


if __name__ == "__main__":  # a study starts processes, which import this file
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pretraining"))
