"""Evaluation sets for models of ImageNet-1k's classes: V2, R, C and the ReaL labels.

Each has one split, test, and nothing to train on. Where a set has some of the classes, class_map says which.
"""

import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitmods.data.records import Source, printable
from vitmods.data.sources import SOURCES, Spec, data_source
from vitmods.data.sources.folder import class_folders
from vitmods.data.sources.imagenet import ORIGIN, val_readers
from vitmods.data.sources.imagenet_labels import number_of, present, titles, wnids
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user
from vitmods.util.limits import parse_json, read_bytes

V2_VARIANTS = ("matched-frequency", "threshold0.7", "top-images")
SEVERITIES = (1, 2, 3, 4, 5)
ARCHIVES = {  # of ImageNet-C, and the corruptions in each
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}


@data_source(
    "imagenet-v2",
    "imagenet-v2:FOLDER",
    "ImageNet-V2",
    options=("variant",),
    layout=("imagenetv2-matched-frequency-format-val/0/*.jpeg to 999/*.jpeg (and the other two variants' folders)",),
    origin="Recht et al. 2019 (huggingface.co/datasets/vaishaal/ImageNetV2)",
    classes=1000,
    counts={"test": 10_000},
    used_in="Three Things, Tables 1-3, 5, 7",
    terms="MIT",
)
def v2(spec: Spec) -> Source:
    """ImageNet-V2 (Recht et al., ICML 2019). variant: one of V2_VARIANTS, matched-frequency unless said otherwise.

    Its folders are class numbers without leading zeros, so their order is not that of their names.
    """
    root, variant = spec.folder, spec.options.get("variant", V2_VARIANTS[0])
    if variant not in V2_VARIANTS:
        raise UserError(f'ImageNet-V2 has no variant "{variant}". {nearest(variant, V2_VARIANTS)}')
    names = (f"imagenetv2-{variant}-format-val", f"imagenetv2-{variant}", variant)
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None and "variant" in spec.options:
        raise spec.kind.missing(root, f"there is no folder {names[0]}")
    folder = folder or root
    if not (folder / "0").is_dir():
        raise spec.kind.missing(root, f"there is no class folder 0 in {printable(str(folder))}")
    numbers = tuple(str(i) for i in range(len(wnids())))
    variant = next((one for one in V2_VARIANTS if one in folder.resolve().name), variant)  # the folder's own name wins
    return _evaluation_set(f"ImageNet-V2 {variant}", root, folder, numbers)


@data_source(
    "imagenet-r",
    "imagenet-r:FOLDER",
    "ImageNet-R",
    layout=("imagenet-r/n01443537/*.jpg, 200 folders",),
    origin="Hendrycks et al. 2021 (github.com/hendrycks/imagenet-r)",
    classes=200,
    counts={"test": 30_000},
    used_in="DTN, appendix B.2",
)
def renditions(spec: Spec) -> Source:
    """ImageNet-R (Hendrycks et al., ICCV 2021): 200 of the classes, as art, cartoons, toys, ..."""
    root = spec.folder
    folder = root / "imagenet-r" if (root / "imagenet-r").is_dir() else root
    if not any(path.name in wnids() for path in folder.iterdir()):
        raise spec.kind.missing(root, "there are no class folders such as n01443537")
    return _evaluation_set("ImageNet-R", root, folder, wnids())


@data_source(
    "imagenet-c",
    "imagenet-c:FOLDER?corruption=fog&severity=3",
    "ImageNet-C",
    options=("corruption", "severity"),
    layout=(
        "fog/3/n01440764/*.JPEG, for each corruption and severities 1 to 5",
        "weather/fog/3/n01440764/*.JPEG, below the names of the five archives",
    ),
    origin="Hendrycks and Dietterich 2019 (zenodo.org, record 2235448)",
    classes=1000,
    counts={"test": 50_000},
    used_in="DTN, Table 6",
    terms="CC BY 4.0",
)
def corrupted(spec: Spec) -> Source:
    """One corruption at one severity of ImageNet-C (Hendrycks and Dietterich, ICLR 2019)."""
    corruption, severity = spec.options.get("corruption", ""), spec.options.get("severity", "")
    usage = f"write {spec.kind.usage}"
    names = [name for group in ARCHIVES.values() for name in group]
    if corruption not in names:
        raise UserError(f'ImageNet-C needs a corruption, not "{corruption}": {usage}. {nearest(corruption, names)}')
    if severity not in map(str, SEVERITIES):
        raise UserError(f'ImageNet-C needs a severity from 1 to 5, not "{severity}": {usage}.')
    folder = _corruption_folder(spec.folder, corruption)
    if folder is None or not (folder / severity).is_dir():
        raise spec.kind.missing(spec.folder, f"there is no folder {corruption}/{severity}")
    return _evaluation_set(f"ImageNet-C {corruption} {severity}", spec.folder, folder / severity, wnids())


def corruption_specs(root: Path | str, *, extra: bool = False) -> Iterator[tuple[str, int, str]]:
    """(corruption, severity, spec) of ImageNet-C's 15 corruptions at 5 severities, with extra of all 19.

    Raises UserError before the first if a folder is missing, naming all that are.
    """
    root = expand_user(root)
    names = [name for archive, group in ARCHIVES.items() if extra or archive != "extra" for name in group]
    folders = {name: _corruption_folder(root, name) or root / name for name in names}
    missing = [f"{n}/{s}" for n, folder in folders.items() for s in SEVERITIES if not (folder / str(s)).is_dir()]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise SOURCES["imagenet-c"].missing(root, f"there are no folders {shown}")
    return ((n, s, f"imagenet-c:{root}?corruption={n}&severity={s}") for n in names for s in SEVERITIES)


@data_source(
    "imagenet-real",
    "imagenet-real:FOLDER",
    "ImageNet-ReaL",
    options=("labels",),
    layout=(
        "val in any layout of imagenet; the labels come with timm",
        "val in any layout of imagenet, and real.json with the labels",
    ),
    origin=f"{ORIGIN}; the labels from Beyer et al. 2020 (github.com/google-research/reassessed-imagenet)",
    classes=1000,
    counts={"test": 46_837},
    used_in="none; labels without the known errors of ImageNet's",
    terms="labels: Apache-2.0",
)
def real(spec: Spec) -> Source:
    """ImageNet's validation images with the ReaL labels (Beyer et al. 2020, "Are we done with ImageNet?").

    A prediction is correct if it is among an image's labels; images that have none are left out, as they are there.
    labels: real.json, by default the one in the folder, or else the copy that comes with timm.
    """
    root = spec.folder
    readers = val_readers(root, None)
    if not readers:
        raise spec.kind.missing(root, "there are no validation images")
    records, warnings = next(iter(readers.values()))()
    label_sets, origin = _real_labels(root, spec.options.get("labels"))
    numbers = [number_of(name) for name in records.ids]
    if unknown := [name for name, n in zip(records.ids, numbers, strict=True) if n is None or n > len(label_sets)]:
        raise UserError(
            f"{len(unknown)} validation images are not called ILSVRC2012_val_00000001.JPEG, ... (such as "
            f"{printable(unknown[0])}): the labels go by those names. Give them back their names."
        )
    sets = tuple(label_sets[n - 1] for n in numbers if n is not None)
    labeled = np.flatnonzero([bool(labels) for labels in sets])
    source = Source("ImageNet-ReaL", titles(), {"test": replace(records, label_sets=sets).take(labeled)})
    out = len(sets) - len(labeled)
    source.warnings = [*warnings, f"Labels from {origin}; {out:,} images without a ReaL label are left out."]
    return source


def _real_labels(root: Path, chosen: str | None) -> tuple[list[tuple[int, ...]], str]:
    path = expand_user(chosen) if chosen else root / "real.json"
    if not path.is_file():
        if chosen:
            raise UserError(f"There is no file {printable(chosen)}: correct labels=, or leave it out for timm's copy.")
        text, origin = pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"), "timm's copy of real.json"
        assert text is not None, "it is part of timm"
    else:
        text, origin = read_bytes(path, "JSON"), printable(str(path))
    try:
        lists = [tuple(int(label) for label in labels) for labels in parse_json(text)]
    except (ValueError, TypeError) as error:
        raise UserError(f"{origin} is not a JSON list of lists of class numbers: {error}. Fetch it again.") from error
    if any(not 0 <= label < len(wnids()) for labels in lists for label in labels):
        raise UserError(f"{origin} has class numbers outside 0 to 999: it is not real.json.")
    return lists, origin


def _evaluation_set(name: str, root: Path, folder: Path, order: tuple[str, ...]) -> Source:
    _, splits, warnings = class_folders(root, {"test": folder}, order)
    return present(Source(name, (), splits, warnings), titles())


def _corruption_folder(root: Path, corruption: str) -> Path | None:
    archive = next(name for name, group in ARCHIVES.items() if corruption in group)
    return next((path for path in (root / corruption, root / archive / corruption) if path.is_dir()), None)
