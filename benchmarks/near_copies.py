"""Near copies: how many of each kind are named, how many images are named that were not copied, and what it costs.

    python benchmarks/near_copies.py path/to/images ... [--copies 1000] [--pictures FOLDER] [--out benchmarks/results]

Each set has train and test. Evenly spaced training images are copied in one way each time, and searched for among all
training images, together with the test images. A copy counts if its own source is named. The test images alone tell how
many pairs a set has by itself: --pictures draws them, since only a look can tell what they are.
"""

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from vitmods.data.copies import look_of, near_copies
from vitmods.data.read import decode
from vitmods.data.records import Records
from vitmods.data.sources import open_source
from vitmods.data.splits import SplitOptions, make_splits

Pixels = NDArray[np.uint8]
Change = Callable[[Image.Image, np.random.Generator], Image.Image]
TILE, ROW, ROWS = 64, 16, 8  # pixels, pairs in a row, rows of a sheet


def encoded(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(io.BytesIO(file.getvalue())).convert("RGB")


def resized(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, rng: np.random.Generator, corner: bool = False) -> Image.Image:
    """95 % of each side, anywhere or from the upper left corner."""
    width, height = (round(side * 0.95) for side in image.size)
    left, top = (0, 0) if corner else (rng.integers(0, n + 1) for n in (image.width - width, image.height - height))
    return image.crop((int(left), int(top), int(left) + width, int(top) + height))


def brighter(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


KINDS: dict[str, Change] = {
    "as PNG (equal pixels)": lambda image, rng: image,
    "mirrored": lambda image, rng: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "JPEG, quality 90": lambda image, rng: encoded(image, 90),
    "JPEG, quality 50": lambda image, rng: encoded(image, 50),
    "half the size": lambda image, rng: resized(image, 0.5),
    "twice the size": lambda image, rng: resized(image, 2),
    "20 % brighter": lambda image, rng: brighter(image, 1.2),
    "20 % darker": lambda image, rng: brighter(image, 0.8),
    "cropped to 95 %, anywhere": lambda image, rng: cropped(image, rng),
    "cropped to 95 %, at a corner": lambda image, rng: cropped(image, rng, corner=True),
    "cropped, mirrored, brighter, JPEG 70": lambda image, rng: encoded(
        brighter(cropped(image, rng).transpose(Image.Transpose.FLIP_LEFT_RIGHT), 1.2), 70
    ),
}


def pixels_of(records: Records, i: int) -> Pixels:
    return decode(records.fetch(int(records.keys[i])), 3)


def picture(records: Records, i: int) -> Image.Image:
    return Image.fromarray(pixels_of(records, i).transpose(1, 2, 0))


def looks_of(records: Records) -> tuple[NDArray[np.int8], float, float]:
    """Looks, and ms an image to decode and to make them."""
    looks, decoding, making = [], 0.0, 0.0
    for i in range(len(records)):
        start = time.perf_counter()
        pixels = pixels_of(records, i)
        middle = time.perf_counter()
        looks.append(look_of(pixels))
        decoding, making = decoding + middle - start, making + time.perf_counter() - middle
    return np.stack(looks), 1e3 * decoding / len(records), 1e3 * making / len(records)


def sheets(folder: Path, test: Records, train: Records, pairs: list[tuple[int, int]]) -> None:
    """Draw each test image above the training image that it was taken for."""
    for first in range(0, len(pairs), ROW * ROWS):
        sheet = Image.new("RGB", (ROW * (TILE + 4), ROWS * (2 * TILE + 12)), "red")
        for place, (i, j) in enumerate(pairs[first : first + ROW * ROWS]):
            x, y = place % ROW * (TILE + 4), place // ROW * (2 * TILE + 12)
            sheet.paste(picture(test, i).resize((TILE, TILE)), (x, y))
            sheet.paste(picture(train, j).resize((TILE, TILE)), (x, y + TILE))
        folder.mkdir(parents=True, exist_ok=True)
        sheet.save(folder / f"{len(train)}-{first:05d}.png")


def measure(path: Path, copies: int, pictures: Path | None) -> dict[str, Any]:
    splits, _ = make_splits(open_source(path), SplitOptions(val_fraction=0.0))
    train, test = splits["train"], splits["test"]
    (known, decoding, making), (asked, *_) = looks_of(train), looks_of(test)
    start = time.perf_counter()
    found, of = near_copies(asked, known)
    result: dict[str, Any] = {
        "train": len(train),
        "test": len(test),
        "decoding_ms": round(decoding, 3),
        "look_ms": round(making, 3),
        "search_s": round(time.perf_counter() - start, 1),
        "named_of_test": len(found),
    }
    if pictures is not None:
        sheets(pictures, test, train, list(zip(found.tolist(), of.tolist(), strict=True)))
    chosen = np.linspace(0, len(train) - 1, min(copies, len(train))).astype(np.int64)
    for kind, change in KINDS.items():
        rng = np.random.default_rng(0)
        changed = [np.asarray(change(picture(train, i), rng)).transpose(2, 0, 1) for i in chosen.tolist()]
        found, of = near_copies(np.concatenate([np.stack([*map(look_of, changed)]), asked]), known)
        is_copy = found < len(chosen)
        named = float((known[of[is_copy]] == known[chosen[found[is_copy]]]).all(axis=1).sum() / len(chosen))
        result[kind] = {"named": round(100 * float(is_copy.sum()) / len(chosen), 1), "source": round(100 * named, 1)}
        print(f"{path.name}, {kind}: {result[kind]['named']} % named, {result[kind]['source']} % with their source")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {path.name: measure(path, options.copies, options.pictures) for path in options.folders}
    print(json.dumps(results, indent=1))
    if options.out:
        (options.out / "near_copies.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
