"""What trained weights reach without training, the level for base, and the rates with which arms train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from vitmods.adapters.transfer import evaluating
from vitmods.evals.base import PROTOCOLS
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.evals.protocols import check_protocols
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.study.cells import Cell
from vitmods.study.settings import Settings
from vitmods.study.trial import TrialRunner, answer_splits, base_config
from vitmods.train.device import place
from vitmods.util.errors import UserError
from vitmods.util.text import listing, printable

LEARNERS = ("probe", "knn")
USUAL_SIDES = (98, 224, 518)
"""pixels: small photographs, most published weights, and those of DINOv2"""


def frozen_scores(model: nn.Module, runner: TrialRunner, settings: Settings, cell: Cell) -> dict[str, Any]:
    """Accuracies, on the images of the answer, of a linear probe and of nearest neighbors on the model's features; with
    folds, over the parts that seeds are tested on. A `reason` instead where the images or the model do not allow it."""
    recipe, device = cell.recipe, place(runner.options.device, cell.recipe.precision)
    seeds = {seed % (settings.folds or 1): seed for seed in settings.seeds}.values()
    right, images = dict.fromkeys(LEARNERS, 0.0), 0
    try:
        with evaluating(model.to(device.device)):
            for dataset in (runner.dataset(cell, seed) for seed in seeds):
                for split in (splits := answer_splits(settings, dataset)):
                    check_protocols(dataset, LEARNERS, split=split)
                outputs = ModelOutputs(
                    model, dataset, splits[0], recipe.part_size, device.device, Options(), autocast=device.autocast
                )
                for split in splits:
                    count = dataset.summary()["splits"][split]["count"]
                    for name in LEARNERS:
                        right[name] += count * PROTOCOLS[name].run(replace(outputs, split=split)).metrics[name]
                    images += count
    except UserError as error:
        return {"reason": str(error)}
    finally:
        model.to("cpu")
    return {name: value / images for name, value in right.items()}


def times_at_other_sizes(settings: Settings) -> str:
    """State what a step of base would take at the usual image sizes, by its multiply-adds; empty for new weights,
    smaller images, and a base without a config, whose multiply-adds at another size are not known."""
    cell = settings.cells[0]
    config = base_config(cell, 1) if "start" in settings.fixed else None
    if not isinstance(config, ViTConfig) or min(config.img_size) < min(USUAL_SIDES) / 2:
        return ""
    times = list[str]()
    for side in USUAL_SIDES:
        sides = tuple(max(1, round(side / patch)) * patch for patch in config.patch_size)
        if sides != config.img_size:
            ratio = count_macs(config.with_(img_size=sides)) / count_macs(config)
            times.append(f"{ratio:.2g} times as long at {sides[0]} px")
    return f"A step of base takes about {listing(times)}, by multiply-adds (--img-size)."


def trained_lines(settings: Settings, frozen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """State what was read of a file of weights, what these reach frozen, and the rates of the arms unless they are
    tuned or swept; nothing of a study of new weights. `frozen`: setting of a sweep, empty without one -> what
    `frozen_scores` returned."""
    if "start" not in settings.fixed:
        return
    if account := settings.fixed["start"].get("account"):
        yield printable(str(account))
    for setting, scores in frozen.items():
        under = f" with {setting}" if setting else ""
        if all(isinstance(scores.get(name), float) for name in LEARNERS):
            probe, knn = (f"{100 * scores[name]:.1f} %{under}" for name in LEARNERS)
            yield f"A linear probe of the frozen weights reaches {probe}, nearest neighbors {knn}. Base must reach it."
        else:
            reason = printable(str(scores.get("reason", "study.json is damaged.")))
            yield f"What the frozen weights reach{under} is not known: {reason}"
    cells = settings.cells_at()
    if all(cell.recipe.head_start == "probe" for cell in cells):
        yield "Heads begin as linear probes."
    if {"lr", "layer_decay"} & {*settings.tune.to_dict(), *settings.sweep.to_dict()}:
        return
    arms_at = dict[str, list[str]]()
    for cell in cells:
        recipe = cell.recipe
        rate, decay = f"{recipe.optimizer.lr * recipe.lr_scale:g}", recipe.optimizer.layer_decay
        rate += "" if decay is None else f" with layer decay {decay:g}"
        arms_at.setdefault(rate, []).append(cell.arm.name)
    yield f"Learning rates: {'; '.join(f'{rate} ({listing(arms)})' for rate, arms in arms_at.items())}."
