"""A model's weights on pictures, by the protocols of `vitmods.evals`: a trial's, or those of another library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitmods.adapters import open_checkpoint
from vitmods.data import load as load_set
from vitmods.errors import UserError
from vitmods.evals.options import Options
from vitmods.evals.protocols import check_protocols, protocol_named, run_protocols
from vitmods.evals.subject import Progress, silent
from vitmods.recipes import Recipe
from vitmods.study.defaults import ORDINARY
from vitmods.study.start import open_trial
from vitmods.study.store import read_json
from vitmods.study.trial import load_pictures
from vitmods.train.device import make_fabric
from vitmods.vit import ViT

if TYPE_CHECKING:
    from vitmods.data import PictureSet


def evaluate(
    checkpoint: str | Path,
    protocols: Iterable[str] = ("top1",),
    *,
    split: str | None = None,
    data: str | None = None,
    batch_size: int = 64,
    device: str = "auto",
    workers: int = 0,
    options: Options | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """What protocols find on all pictures of a split, JSON-able.

    Args:
        checkpoint: a trial's folder, of `vitmods train` or of a study; or what `vitmods.adapters.open_checkpoint`
            opens.
        protocols: keys of `vitmods.evals.protocols.PROTOCOLS`.
        split: "train", "val" or "test"; None: the split that numbers of these pictures are reported on. Training
            pictures are evaluated without augmentation.
        data: the pictures; None: the trial's own.
        batch_size: pictures at a time.
        device: where; see `vitmods.train.train_trial`.
        workers: threads that prepare pictures ahead.
        options: of the protocols.
        progress: may show how far it is.

    Returns:
        checkpoint, data, split, pictures; `metrics` and `intervals` of all protocols by the metric's name; and what
        each protocol found beside them, in `protocols`.

    Raises:
        UserError: there is no such checkpoint, the pictures have other classes, or a protocol cannot use them; always
            before anything is computed.
    """
    chosen, options = [protocol_named(name) for name in protocols], options or Options()
    if not chosen:
        raise UserError("Name at least one protocol.")
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}.")
    opened = _open(checkpoint, data, workers)
    pictures = opened.load()
    split = split or pictures.eval_split
    check_protocols(pictures, [protocol.name for protocol in chosen], split=split, options=options)
    if any(protocol.reads_logits for protocol in chosen):
        _check_classes(opened, pictures)
    if data is None and pictures.summary()["fingerprint"] != opened.fingerprint:
        warnings.warn("the pictures are no longer those that the trial was trained on.", stacklevel=2)
    fabric = make_fabric(device, opened.precision)
    findings = run_protocols(
        fabric.to_device(opened.model),
        pictures,
        [protocol.name for protocol in chosen],
        split=split,
        batch_size=batch_size,
        device=fabric.device,
        options=options,
        autocast=fabric.autocast,
        progress=progress,
    )
    return {
        "checkpoint": str(checkpoint),
        "data": pictures.name,
        "split": split,
        "pictures": pictures.summary()["splits"][split]["count"],
        "metrics": {name: value for found in findings.values() for name, value in found.metrics.items()},
        "intervals": {name: list(ends) for found in findings.values() for name, ends in found.intervals.items()},
        "protocols": {name: found.detail for name, found in findings.items()},
    }


@dataclass(frozen=True)
class _Opened:
    """A checkpoint, and how its pictures are loaded; `classes` is None where a file does not name them."""

    model: ViT
    precision: Literal["32-true", "bf16-mixed"]
    load: Callable[[], PictureSet]
    classes: tuple[str, ...] | None = None
    fingerprint: str | None = None


def _open(checkpoint: str | Path, data: str | None, workers: int) -> _Opened:
    folder = Path(checkpoint)
    config = (read_json(folder / "config.json") or {}) if folder.is_dir() else {}
    if "recipe" in config or (folder.is_dir() and data is None):
        return _open_trial(folder, config, data, workers)
    if data is None:
        raise UserError(f"{checkpoint} is no trial's folder, which names its pictures: say which with --data.")
    return _open_other(str(checkpoint), data, workers)


def _open_trial(folder: Path, config: Mapping[str, Any], data: str | None, workers: int) -> _Opened:
    model, recipe = open_trial(folder), Recipe.from_dict(config["recipe"])
    settings = config["pictures"] if data is None else {**config["pictures"], "data": data}
    load = partial(load_pictures, settings, recipe, workers)
    return _Opened(model, recipe.precision, load, tuple(config["data"]["classes"]), config["data"]["fingerprint"])


def _open_other(source: str, data: str, workers: int) -> _Opened:
    """Pictures in the model's size and channels, normalised and cropped as its library says, split as by default."""
    model = open_checkpoint(source)
    shape, seen = model.config, model.pretrained_cfg
    view = {"eval_crop": seen.get("crop_pct"), "resample": seen.get("interpolation")}
    recipe = Recipe(mean=tuple(seen["mean"]), std=tuple(seen["std"]), **{k: v for k, v in view.items() if v})
    load = partial(
        load_set,
        data,
        img_size=shape.img_size,
        in_chans=shape.in_chans,
        recipe=recipe,
        val_fraction=ORDINARY.val_fraction,
        test_fraction=ORDINARY.test_fraction,
        workers=workers,
    )
    return _Opened(model, recipe.precision, load)


def _check_classes(opened: _Opened, pictures: PictureSet) -> None:
    """As many classes are not enough: under other names, or in another order, every number would be wrong."""
    found, outputs = pictures.classes, opened.model.num_classes
    remedy = "Give pictures of the same classes, in folders of the same names; fewshot, probe and knn take any."
    if pictures.class_map is not None:
        if max(pictures.class_map) >= outputs:
            raise UserError(f"{pictures.name} is for models of more classes than {outputs}: give one of those.")
        return
    if len(found) != outputs:
        what = f"the model has {outputs} classes and {pictures.name} has {len(found)}"
        raise UserError(f"These are other classes: {what}. {remedy}")
    if opened.classes is None:
        warnings.warn(
            f"the checkpoint does not name its classes: they are taken to be those of {pictures.name}, in its order.",
            stacklevel=3,
        )
    elif found != opened.classes:
        mine, theirs = next(pair for pair in zip(opened.classes, found) if pair[0] != pair[1])
        what = f"where the model knows the class {mine!r}, {pictures.name} has {theirs!r}"
        raise UserError(f"These are other classes: {what}. {remedy}")
