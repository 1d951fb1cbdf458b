"""Generate images of shapes with boxes and masks in COCO's format, and compare two detectors on them. On a CPU."""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import vitmods as vm

CLASSES = ("disc", "square")
COUNTS = {"train": 32, "val": 8}
SIDES = (72, 96)  # height and width


def write_shapes(folder: Path, counts: dict[str, int] | None = None, sides: tuple[int, int] = SIDES) -> Path:
    """`train.json`, `val.json` and images in folders of those names: one to three discs or squares on noise."""
    draw = np.random.default_rng(0)
    for split, count in (counts or COUNTS).items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for number in range(count):
            image = Image.fromarray(draw.integers(0, 90, (*sides, 3), dtype=np.uint8))
            for place in draw.permutation(3)[: draw.integers(1, 4)].tolist():
                label, side = int(draw.integers(2)), int(draw.integers(sides[1] // 4, sides[1] // 3))
                left, top = place * sides[1] // 3, int(draw.integers(sides[0] - side))
                color = tuple(draw.integers(120, 256, 3).tolist())
                shape = ImageDraw.Draw(image)
                box = (left, top, left + side - 1, top + side - 1)
                (shape.ellipse if label == 0 else shape.rectangle)(box, fill=color)
                annotations.append(annotation(len(annotations), number, label, left, top, side))
            name = f"{number:03d}.png"
            image.save(folder / split / name)
            images.append({"id": number, "file_name": name, "height": sides[0], "width": sides[1]})
        categories = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(content))
    return folder


def annotation(number: int, image: int, label: int, left: int, top: int, side: int) -> dict[str, object]:
    """An object as COCO writes it, with its outline as a polygon."""
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False) if label == 0 else np.pi / 4 * np.array([1, 3, 5, 7])
    radius = side / 2 if label == 0 else side / 2**0.5
    corners = np.stack([left + side / 2 + radius * np.cos(angles), top + side / 2 + radius * np.sin(angles)], axis=1)
    return {
        "id": number,
        "image_id": image,
        "category_id": label + 1,
        "bbox": [left, top, side, side],
        "area": side**2 * (np.pi / 4 if label == 0 else 1),
        "iscrowd": 0,
        "segmentation": [corners.ravel().round(2).tolist()],
    }


def main(out: Path) -> None:
    shapes = write_shapes(out / "shapes")
    study = vm.Study(
        base="mu3/8",
        arms={"rms": [vm.Norm("rms")]},
        task="detection",
        data=f"coco:{shapes}",
        img_size=SIDES[1],
        recipe=vm.recipes.small_detection(epochs=6).with_(fpn_channels=32),
        seeds=2,
    )
    result = study.run(out / "study", cost_seconds=0, progress=False)
    print(result)
    print(f"Report: {result.report()}")


if __name__ == "__main__":  # a study starts processes, which import this file
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/detection"))
