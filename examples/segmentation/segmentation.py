"""Which change helps a small ViT to find shapes in noise, pixel by pixel? Images are drawn here. Seconds on a CPU."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import vitmods as vm

SIDE = 32
CLASSES = ("background", "disc", "square")


def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A noisy image (32, 32, 3) with a disc of rows and a square of columns, and its mask (32, 32) of class numbers."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    image, mask = rng.normal(110, 25, (SIDE, SIDE, 3)), np.zeros((SIDE, SIDE), np.uint8)
    for label in rng.permutation([1, 2]):
        (top, left), radius = rng.integers(6, SIDE - 6, 2), rng.integers(5, 9)
        if label == 1:
            distance, stripes = np.hypot(rows - top, columns - left), np.sin(np.pi / 2 * rows)
        else:
            distance, stripes = np.maximum(abs(rows - top), abs(columns - left)), np.sin(np.pi / 2 * columns)
        mask[distance < radius] = label
        image[distance < radius] += 60 * stripes[distance < radius, None]
    return image.clip(0, 255).astype(np.uint8), mask


def write_images(folder: Path, count: int = 160) -> None:
    """images/, masks/ and classes.txt: what `masks:FOLDER` reads."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    for number in range(count):
        image, mask = draw(rng)
        Image.fromarray(image).save(folder / "images" / f"{number:03}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number:03}.png")


def main(out: Path) -> None:
    """Write images, compare two arms, and draw what a trained model finds in some of the images."""
    write_images(out / "shapes")
    study = vm.Study(
        base="mu2/4",
        arms={"dpn": [vm.DualPatchNorm()]},
        data=f"masks:{out / 'shapes'}",
        task="segmentation",
        img_size=SIDE,
        recipe=vm.recipes.small_segmentation(epochs=8).with_(lr=1e-2, photometric=0.0),
        seeds=2,
    )
    result = study.run(out / "study", cost_seconds=0)
    print(result)
    found = vm.predict(
        out / "study/trials/dpn/seed0", sorted((out / "shapes/images").iterdir())[:4], draw=out / "drawn"
    )
    for one in found:
        parts = ", ".join(f"{name} {fraction:.0%}" for name, fraction in one["pixels"].items())
        print(f"{Path(one['image']).name}: {parts}; {one['drawn']}")
    print(f"Report: {result.report()}")


if __name__ == "__main__":  # a study starts processes, which import this file
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/segmentation"))
