"""Corrupted images a second on one thread, and how many times those of the plain form, image by image in NumPy,
SciPy and Pillow, that the tests compare with (in glass_blur and spatter that is loops over pixels in Python).

    OMP_NUM_THREADS=1 python benchmarks/corruptions.py [--textures FOLDER] [--out benchmarks/results]

Severity 3. Without textures frost is left out.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from paired import one_thread, paired, report
from sklearn.datasets import load_sample_images

from vitmods.papers.corruptions import CORRUPTIONS, EXTRA, corrupt, strength
from vitmods.papers.corruptions.functions import FILES

TESTS = Path(__file__).parents[1] / "tests" / "data" / "corruptions"
BATCH = {224: 4, 32: 64}
SEVERITY = 3


class Random:
    """Random numbers of NumPy."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.poisson = generator.poisson
        self.normal = lambda *shape: generator.standard_normal(shape)
        self.uniform = lambda *shape, low=0.0, high=1.0: generator.uniform(low, high, shape)
        self.integers = lambda low, high, *shape: generator.integers(low, high, shape)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def pair(name: str, images: torch.Tensor, textures: Path | None) -> dict[str, Callable[[], Any]]:
    plain = module("plain_corruptions")
    numbers, draw, each = strength(name, SEVERITY, min(images.shape[2:])), Random(0), images.numpy()
    form = getattr(plain, name)
    if name == "frost" and textures is not None:
        step = round(1 / numbers[2])
        opened = [plain.from_pil(plain.Image.open(textures / file).convert("RGB")) for file in FILES]
        form = functools.partial(form, textures=[t[:, step // 2 :: step, step // 2 :: step] for t in opened])
    index = np.arange(len(images))
    return {
        "plain": lambda: [form(image, numbers, draw) for image in each],
        "ours": lambda: corrupt(images, name, SEVERITY, seed=0, index=index, textures=textures),
    }


def photographs(side: int) -> torch.Tensor:
    """uint8 (2, 3, side, side): two photographs of scikit-learn, thinned out and cut."""
    step = max(1, 352 // side)
    thin = [photograph[::step, ::step].transpose(2, 0, 1) for photograph in load_sample_images().images]
    middles = [image[:, (image.shape[1] - side) // 2 :, (image.shape[2] - side) // 2 :] for image in thin]
    return torch.from_numpy(np.stack([image[:, :side, :side] for image in middles]))


def measure(side: int, rounds: int, textures: Path | None) -> dict[str, Any]:
    images = photographs(side).repeat(BATCH[side] // 2, 1, 1, 1)
    rows = {}
    for name in CORRUPTIONS + EXTRA:
        if name == "frost" and textures is None:
            continue
        found = paired(pair(name, images, textures), "ours", rounds)
        rates = {form: len(images) / row["seconds"] for form, row in found.items()}
        low, middle, high = (found["plain"][k] for k in ("ratio_low", "ratio", "ratio_high"))
        rows[name] = {"images_per_s": rates["ours"], "plain_per_s": rates["plain"], "factor": middle}
        rows[name] |= {"factor_low": low, "factor_high": high}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--textures", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    one_thread()
    report("corruptions", {f"{s} px": measure(s, options.rounds, options.textures) for s in BATCH}, options.out)


if __name__ == "__main__":
    main()
