"""A checkpoint with all that goes with it: how its images are prepared, and what its outputs are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitmods.adapters import open_checkpoint
from vitmods.recipes import Recipe
from vitmods.study.checkpoints import is_checkpoint
from vitmods.study.start import open_trial
from vitmods.study.store import read_object, slug
from vitmods.study.trial import IMAGE_SETTINGS
from vitmods.util.errors import UserError
from vitmods.util.text import printable


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode, and what it knows of its images.

    recipe:   how images are prepared (`augment`), and the precision
    name:     of a trial its arm and seed, as dpn-seed0; of others the file's; fit for the name of a file
    settings: `img_size`, `in_chans`, `task`, and of a trial its `data` and how they were split
    classes:  None where they are not named
    vocabulary: of a trial on sequences, its words by token, from 1 on
    """

    source: str
    name: str
    model: nn.Module
    recipe: Recipe
    settings: Mapping[str, Any]
    classes: tuple[str, ...] | None = None
    fingerprint: str | None = None
    vocabulary: tuple[str, ...] | None = None


def open_trained(source: str) -> Opened:
    """A trial's folder, or what `vitmods.adapters.open_checkpoint` opens. Raises UserError as that and `open_trial`."""
    folder = Path(source)
    config = read_object(folder / "config.json") if folder.is_dir() else {}
    if folder.is_dir() and not is_checkpoint(folder):
        open_trial(folder)  # says what is missing
    if "recipe" in config and "images" in config:
        try:
            settings = {name: value for name, value in config["images"].items() if name in IMAGE_SETTINGS}
            known = config["data"]
            name, recipe = slug(f"{config['arm']}-seed{config['seed']}"), Recipe.from_dict(config["recipe"])
            words = tuple(known["vocabulary"]) if known.get("vocabulary") else None
            classes, mark = tuple(map(printable, known["classes"])), known["fingerprint"]
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{folder / 'config.json'} is damaged ({error!r}): copy the folder again.") from error
        return Opened(source, name, open_trial(folder), recipe, settings, classes, mark, words)
    model = open_checkpoint(source)
    shape = model.vit_config
    return prepared_by(source, model, {**model.pretrained_cfg, "input_size": (shape.in_chans, *shape.img_size)})


def prepared_by(source: str, model: nn.Module, known: Mapping[str, Any]) -> Opened:
    """Images in the model's size and channels, normalized and cropped as `known` says under timm's names."""
    view = {"eval_crop": known.get("crop_pct"), "resample": known.get("interpolation")}
    view |= {name: tuple(known[name]) for name in ("mean", "std") if known.get(name)}
    recipe = Recipe().with_(**{name: value for name, value in view.items() if value})
    in_chans, *img_size = known["input_size"]
    settings = {"img_size": img_size, "in_chans": in_chans, **({"task": known["task"]} if known.get("task") else {})}
    classes = tuple(printable(str(name)) for name in known["label_names"]) if known.get("label_names") else None
    return Opened(source, slug(Path(source).stem), model, recipe, settings, classes)
