"""Batches a second on one core: ours against torchvision's and timm's loaders, paired and interleaved.

    OMP_NUM_THREADS=1 python benchmarks/data_loading.py [--data FOLDER] [--out benchmarks/results]

32 px: pad and crop, flip, normalize, as CIFAR-10 is trained, from arrays in memory (and with what a recipe can add).
224 px: random resized crop, flip, normalize, from JPEG files (made ones of 375 x 500, and 96 from below FOLDER), ours
also from the store, which decodes each once. Factors are over the fastest of torchvision's and timm's loaders that read
with PIL; torchvision's own decoder is shown too, which is deprecated since 0.29.
Goals: at least 7 times torchvision's CIFAR loader, with mixing too; at 224 px as fast as the fastest from JPEG and 3.5
times that from the store; loading below 5 % of a training step.
"""

import argparse
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from paired import one_thread, paired, report
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

import vitmods as vm
from vitmods.data.dataset import ImageDataset, Split
from vitmods.data.geometry import Geometry
from vitmods.data.loading import KEPT_RATIO
from vitmods.data.read import decode
from vitmods.data.records import Records
from vitmods.data.store import open_store
from vitmods.recipes import Recipe

NORMALISE = ([0.5] * 3, [0.5] * 3)
BATCH = 128
SMALL, FILES = 50_000, 96  # images of 32 px, and JPEG files
LARGE, BATCHES = 32, 3  # images of 224 px at a time, and how often
SPACES = ("torchvision", "big_vision", "timm")


class Images(Dataset):
    """As torchvision's CIFAR10 (arrays) or ImageFolder (files): a PIL image per item, then the transform."""

    def __init__(self, raw: list[Any], transform: Callable[..., torch.Tensor]) -> None:
        self.raw, self.transform = raw, transform

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        raw = self.raw[i]
        image = Image.open(io.BytesIO(raw)).convert("RGB") if isinstance(raw, bytes) else Image.fromarray(raw)
        return self.transform(image), i % 10


def ours(raw: list[Any], recipe: Recipe, geometry: Geometry) -> ImageDataset:
    n = len(raw)
    ids = tuple(str(i) for i in range(n))
    records = Records(ids, np.arange(n) % 10, ids, raw.__getitem__, np.arange(n))
    split = Split("train", ids, records.labels, open_store(records, geometry, 3, None), geometry)
    return ImageDataset("made", tuple("0123456789"), {"train": split}, geometry.size, 3, recipe.augment, {})


def loader(raw: list[Any], transform: Callable[..., torch.Tensor], batch: int) -> DataLoader:
    return DataLoader(Images(raw, transform), batch, shuffle=True, drop_last=True, collate_fn=default_collate)


def taking(batches: Callable[[], Iterator[Any]], number: int) -> Callable[[], None]:
    def run() -> None:
        for _ in islice(batches(), number):
            pass

    return run


def epochs(images: ImageDataset, batch: int) -> Callable[[], Iterator[Any]]:
    return lambda: images.train_batches(seed=0, epoch=0, batch_size=batch)


def small(rounds: int) -> dict[str, Any]:
    """32 px from arrays."""
    raw = list(np.random.default_rng(0).integers(0, 256, (SMALL, 32, 32, 3), dtype=np.uint8))
    steps = [v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*NORMALISE)]
    tensors = [v2.ToImage(), v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    tensors += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORMALISE)]
    base = ours(raw, Recipe().with_(crop="pad"), Geometry((32, 32)))
    added = {"mixup": {"mixup": 0.2}, "cutmix": {"cutmix": 1.0}, "erasing": {"erasing": 0.25}}
    added |= {"mixup and cutmix": {"mixup": 0.2, "cutmix": 1.0}}
    added |= {f"{space}'s randaugment": {"randaugment": (2, 9), "randaugment_space": space} for space in SPACES}
    variants = {"torchvision v1": lambda: iter(loader(raw, v1.Compose(steps), BATCH))}
    randaugment = v1.Compose([*steps[:2], v1.RandAugment(2, 9), *steps[2:]])
    variants["torchvision v1, randaugment"] = lambda: iter(loader(raw, randaugment, BATCH))
    variants |= {"torchvision v2": lambda: iter(loader(raw, v2.Compose(tensors), BATCH)), "ours": epochs(base, BATCH)}
    for name, options in added.items():
        variants[f"ours, {name}"] = epochs(replace(base, augment=replace(base.augment, **options)), BATCH)
    return rates(variants, "torchvision v1", rounds, batches=8, batch=BATCH)


class Decoding:
    """A store that decodes an image whenever it is asked for it."""

    def __init__(self, raw: list[bytes]) -> None:
        self.raw = raw

    def batch(self, index: np.ndarray) -> None:
        return None

    def image(self, i: int) -> np.ndarray:
        return decode(self.raw[i], 3)


def large(raw: list[bytes], rounds: int) -> dict[str, Any]:
    """224 px; JPEG files are kept in memory so that no disk is measured."""
    normalize = [v1.ToTensor(), v1.Normalize(*NORMALISE)]
    crop = [v1.RandomResizedCrop(224, interpolation=v1.InterpolationMode.BICUBIC), v1.RandomHorizontalFlip()]
    tensors = [v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomHorizontalFlip()]
    tensors += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORMALISE)]
    peers = {
        "torchvision v1": lambda: iter(loader(raw, v1.Compose([*crop, *normalize]), LARGE)),
        "torchvision v2": lambda: iter(loader(raw, v2.Compose([v2.ToImage(), *tensors]), LARGE)),
        "timm": lambda: iter(timm_loader(raw)),
    }
    kept = Geometry((224, 224), KEPT_RATIO, whole=True)
    base = ours(raw, Recipe().with_(crop="random_resized"), kept)
    exact = ours(raw, Recipe().with_(crop="inception", resample="big_vision"), replace(kept, shrink=False))
    exact = on_demand(exact, replace(kept, resample="big_vision", shrink=False), exact.splits["train"].store)
    decoding = on_demand(base, replace(kept, shrink=False), Decoding(raw))
    variants = peers | {
        "torchvision v2, decode_jpeg": lambda: iter(DataLoader(Tensors(raw, v2.Compose(tensors)), LARGE, shuffle=True)),
        "ours from JPEG": epochs(decoding, LARGE),
        "ours from the store": epochs(base, LARGE),
        "ours as big_vision, store": epochs(exact, LARGE),
        "torchvision v1, randaugment": lambda: iter(
            loader(raw, v1.Compose([*crop, v1.RandAugment(2, 9), *normalize]), LARGE)
        ),
        "timm, randaugment": lambda: iter(timm_loader(raw, "rand-m9-inc1")),
    }
    for space in SPACES:
        augmented = replace(base, augment=replace(base.augment, randaugment=(2, 9), randaugment_space=space))
        variants[f"ours from the store, {space}"] = epochs(augmented, LARGE)
    found = rates(peers, "timm", min(rounds, 3), batches=BATCHES, batch=LARGE)
    fastest = max(peers, key=lambda name: found[name]["images_per_s"])
    return rates(variants, fastest, rounds, batches=BATCHES, batch=LARGE)


class Tensors(Images):
    """The file decoded by torchvision itself."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        file = torch.frombuffer(bytearray(self.raw[i]), dtype=torch.uint8)
        return self.transform(decode_jpeg(file, ImageReadMode.RGB)), i % 10


def timm_loader(raw: list[bytes], auto_augment: str | None = None) -> Any:
    return timm.data.create_loader(
        Images(raw, lambda image: image),
        (3, 224, 224),
        LARGE,
        is_training=True,
        color_jitter=None,
        auto_augment=auto_augment,
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )


def on_demand(images: ImageDataset, geometry: Geometry, store: Any) -> ImageDataset:
    """The same set from another store."""
    split = replace(images.splits["train"], store=store, geometry=geometry)
    return replace(images, splits={"train": split})


def files(folder: Path) -> list[bytes]:
    """JPEG files from below the folder, evenly spread."""
    found = sorted(folder.rglob("*.jpg"))
    return [found[i].read_bytes() for i in np.linspace(0, len(found) - 1, FILES).astype(int)]


def jpeg(seed: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def rates(
    variants: dict[str, Callable[[], Iterator[Any]]], reference: str, rounds: int, batches: int, batch: int
) -> dict[str, Any]:
    """paired() with images a second and the factor over the reference, which are easier to read than seconds."""
    rows = paired({name: taking(make, batches) for name, make in variants.items()}, reference, rounds)
    return {
        name: {"images_per_s": batches * batch / row["seconds"], "factor": 1 / row["ratio"]}
        | {"factor_low": 1 / row["ratio_high"], "factor_high": 1 / row["ratio_low"]}
        for name, row in rows.items()
    }


def fraction_of_a_step(rounds: int) -> dict[str, Any]:
    """Loading a batch of 64 at 32 px against forward and backward of Ti/4 and of a toy on it."""
    raw = list(np.random.default_rng(0).integers(0, 256, (SMALL, 32, 32, 3), dtype=np.uint8))
    dataset = ours(raw, Recipe().with_(crop="pad"), Geometry((32, 32)))
    images = next(dataset.train_batches(seed=0, epoch=0, batch_size=64)).inputs
    results = {}
    for name in ("Ti/4", "mu2/4"):
        model = vm.vit(name, img_size=32, num_classes=10)

        def step(model: torch.nn.Module = model) -> None:
            model(images).sum().backward()

        batches = chain.from_iterable(dataset.train_batches(seed=0, epoch=epoch, batch_size=64) for epoch in count())
        rows = paired({"step": step, "loading": lambda batches=batches: next(batches)}, "step", rounds)
        results[f"{name}, batch 64"] = {"loading_share": rows["loading"]["ratio"], "step_s": rows["step"]["seconds"]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--data", type=Path, help="folder with JPEG files, of any depth")
    options = parser.parse_args()
    one_thread()
    results = {"32 px": small(options.rounds), "224 px": large([jpeg(seed) for seed in range(FILES)], options.rounds)}
    if options.data is not None:
        results[f"224 px, {options.data.name}"] = large(files(options.data), options.rounds)
    results["fraction of a training step"] = fraction_of_a_step((options.rounds + 2) // 3)
    report("data_loading", results, options.out)


if __name__ == "__main__":
    main()
