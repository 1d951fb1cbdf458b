"""From a trial, a study or a checkpoint to the models that figures look into (`vitmods.analysis`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import open_model
from vitmods.analysis import Examined
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT, vit
from vitmods.stats.verdict import Effect
from vitmods.study.answer import Answer
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.grid import show_value
from vitmods.study.state import read_rows
from vitmods.study.store import StudyFolder, read_object
from vitmods.study.trial import load_images
from vitmods.tasks.base import TASKS, TaskModel
from vitmods.train.device import resolve
from vitmods.util.errors import UserError

NEW = "new:"
"""before a name of a model: with new weights"""


def examine(
    target: str,
    *,
    data: str | None = None,
    images: int = 16,
    block: int = 1,
    head: bool = False,
    seconds: float = 10.0,
    device: str = "auto",
    workers: int = 0,
) -> list[Examined]:
    """The models of a target, ready for figures: those of a study's arms, base first, or a single one.

    Args:
        target: a study's folder (of every arm the first seed that has finished), a trial's, what
            `vitmods.adapters.open_checkpoint` opens, or `new:` and what `vitmods.adapters.open_model` opens.
        data: the images; None: those of the study or trial. Without any, figures that need images are not made.
        images: how many are looked at, from the beginning of the split that numbers are reported on.
        block: number of the block, from 1 on, of figures that show a single one.
        head: whether gradients include the head's.
        seconds: how long each timing may take, about.
        device: where models run; see `vitmods.train.train_trial`.
        workers: threads that prepare images.

    Raises:
        UserError: the target does not exist, or its images cannot be used.
    """
    if images < 1 or block < 1:
        raise UserError(f"images and block are counted from 1 on, got {images} and {block}.")
    place = resolve(device)
    seen: dict[str, Tensor] = {}

    def look(checkpoint: Checkpoint) -> Tensor | None:
        settings = {**checkpoint.settings, **({"data": data} if data else {})}
        if "data" not in settings or TASKS[settings.get("task", "classification")].inputs != "images":
            return None
        key = json.dumps([settings, checkpoint.recipe.to_dict()], default=str)
        if key not in seen:
            dataset = load_images(settings, checkpoint.recipe, workers)
            seen[key] = next(iter(dataset.eval_batches(dataset.eval_split, images))).inputs.to(place)
        return seen[key]

    if StudyFolder(target).settings_file.exists():
        subjects = list(arms_of(Answer.load(target), look))
    elif target.startswith(NEW):
        model = open_model(target.removeprefix(NEW)).eval()
        subjects = [Examined(target, model, config=_config_of(model))]
        if data is not None:
            raise UserError("A new model does not say how its images are prepared: leave --data out, or train it.")
    else:
        checkpoint = Checkpoint.open(target.removeprefix("hf:"))
        subject = Examined(
            checkpoint.name, checkpoint.model, images=look(checkpoint), config=_config_of(checkpoint.model)
        )
        subjects = [_with_training(subject, Path(target))]
    return [
        replace(
            subject,
            block=block - 1,
            head=head,
            seconds=seconds,
            model=_on(subject.model, place),
            start=_on(subject.start, place),
        )
        for subject in subjects
    ]


def arms_of(
    answer: Answer,
    look: Callable[[Checkpoint], Tensor | None] = lambda checkpoint: None,
    opens: Callable[[Mapping[str, Any]], bool] = lambda config: True,
) -> Iterator[Examined]:
    """A study's arms, base first, under each setting of a sweep: the first seed that has finished, with its weights if
    they are there, what its training recorded, and the mean score of all seeds with the interval of its effect.

    Args:
        look: gives the images of a trial; None: no images.
        opens: whether the weights of a model of this config are read.
    """
    metric = ", ".join(filter(None, (answer.metric.title, answer.metric.unit)))
    metric += "" if answer.metric.higher_is_better else "; lower is better"
    for arm in answer.every_arm:
        for under in answer.under:
            setting, effect = under.values, answer.each[under.name].get(arm.name)
            trials = [trial for trial in arm.counted if trial.setting == setting and trial.status == "finished"]
            if not trials:
                continue
            name = ", ".join([arm.name, *map(show_value, setting.values())])
            scores = [trial.metrics[answer.metric.name] for trial in trials if answer.metric.name in trial.metrics]
            scale = 100.0 if answer.metric.unit == "%" else 1.0
            subject = Examined(
                name,
                score=scale * sum(scores) / len(scores) if scores else None,
                metric=metric,
                interval=interval_of(effect),
            )
            folder, checkpoint = answer.path / trials[0].folder, None
            with suppress(UserError):  # not kept, or damaged, as the answer reports
                config = read_object(folder / "config.json").get("model")
                config = config if isinstance(config, dict) else {}
                subject = _with_training(replace(subject, config=config if "embed_dim" in config else {}), folder)
                checkpoint = Checkpoint.open(str(folder)) if opens(config) else None
            if checkpoint is not None:
                subject = replace(subject, model=checkpoint.model, images=look(checkpoint))
            yield subject


def interval_of(effect: Effect | None) -> tuple[float, float] | None:
    """Return the interval of an effect as scores of the arm: from base's mean. None without an interval."""
    if effect is None or math.isnan(effect.half):
        return None
    low, high = effect.interval
    return effect.base_mean + low, effect.base_mean + high


def _with_training(subject: Examined, folder: Path) -> Examined:
    """Add the rows that its training logged, and the model at step 0, from the trial's seed.

    What an arm's changes add is drawn as it was then; the other weights may be another draw. The start is None unless
    it is a vitmods ViT that was trained from scratch.
    """
    config = read_object(folder / "config.json") if folder.is_dir() else {}
    model, start = config.get("model"), None
    if isinstance(model, dict) and "embed_dim" in model and "start" not in config:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config["seed"])
            start = vit(ViTConfig.from_dict(model)).eval()
    return replace(subject, record=tuple(read_rows(folder)), start=start)


def _config_of(model: nn.Module) -> dict[str, Any]:
    backbone = model.backbone if isinstance(model, TaskModel) else model
    return json.loads(backbone.vit_config.to_json()) if isinstance(backbone, ViT) else {}


def _on(model: nn.Module | None, place: torch.device) -> nn.Module | None:
    return None if model is None else model.to(place)
