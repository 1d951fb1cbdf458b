"""A study that can be run: its images are read, every arm's model was made once, and study.json says what it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from vitmods.data.split_file import SPLIT_FILE, write_split
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.recipes import Recipe
from vitmods.recipes.length import resolve_on
from vitmods.stats.sequential import LOOKS
from vitmods.study.answer import model_name
from vitmods.study.arms import BASE, Arm
from vitmods.study.bases import Base
from vitmods.study.describe import describe_model, environment
from vitmods.study.edits import Function, base_function, functions_of
from vitmods.study.evaluation import answer_splits, check_images
from vitmods.study.facts import Facts, ModelFacts, Plan
from vitmods.study.models import activation_bytes, take_images
from vitmods.study.plan import Settings
from vitmods.study.running import Running
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, base_config, build_model, task_of, with_modules
from vitmods.study.tuning import Point
from vitmods.study.warnings import few_images, study_warnings
from vitmods.tasks.base import DEFAULT, TASKS
from vitmods.train.optim import freeze
from vitmods.util.errors import UserError
from vitmods.util.files import write_json
from vitmods.util.registry import plugins

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

SAMPLES = 12  # images shown in the report


@dataclass(frozen=True)
class Ready:
    """What is known of a study before its first trial.

    models:      what each of them is
    notices:     what to know of the arms
    trial_bytes: that a trial takes
    """

    runner: TrialRunner
    dataset: ImageDataset
    how: Running
    models: dict[str, ModelFacts]
    notices: list[str]
    trial_bytes: int

    @property
    def settings(self) -> Settings:
        """With the content of the images."""
        return self.runner.settings

    def workers(self, trials: int) -> int:
        """Trials at a time. Functions that this process alone knows are called here, if nothing else is asked for."""
        here_alone = any(function.module is None for function in user_functions(self.settings))
        return 1 if self.how.workers is None and here_alone else self.how.workers_for(trials, self.trial_bytes)


def open_study(folder: StudyFolder, settings: Settings, how: Running) -> Ready:
    """Read the images, and make settings that name their content, so that a folder with other images is another study;
    then look through the arms."""
    folder.refuse_trial()
    facts = folder.facts()
    if facts is not None:  # before the images are read, which may take a while: all that can be known without them
        folder.check_same_study({**settings.to_dict(), "images": facts.settings["images"]})
    runner = TrialRunner(folder, settings, how.device, progress=how.progress, **how.of_trials())
    dataset = runner.dataset(settings.recipe)
    fixed = {**settings.fixed, "images": dataset.summary()["fingerprint"]}
    if facts is not None and facts.settings["images"] != fixed["images"]:
        folder.images.check_same(dataset.splits)
    runner.settings = replace(settings, fixed=fixed)
    check_images(runner.settings, dataset)
    return Ready(runner, dataset, how, *_survey(runner))


def build_arms(
    settings: Settings,
    setting: Point,
    num_classes: int,
    outlined: Callable[[Arm], bool] = lambda arm: False,
    tried: Callable[[nn.Module, Base], None] = lambda model, images: None,
) -> Iterator[tuple[Arm, nn.Module, Recipe]]:
    """Every arm's model as it is trained under a setting, base first, and its recipe; one at a time.

    outlined: of which arms shapes are enough: their models are on the meta device, where they can be.
    tried: called with each of these; where it fails, the model is built with numbers.
    """
    settings = settings.at(setting)
    config = base_config(settings, num_classes)
    for arm in settings.every_arm:
        try:
            recipe = settings.recipe_of(arm)
            build = partial(_built, settings, config, arm, recipe, num_classes)
            model = _outline(build, tried, settings, config, arm) if outlined(arm) else None
            model = build() if model is None else model
        except UserError as error:
            place = f"{setting}, arm" if setting else "Arm"
            raise type(error)(f"{place} {arm.name}: {error}") from error
        yield arm, model, recipe
        del model  # before the next one is made


def _built(settings: Settings, config: Base, arm: Arm, recipe: Recipe, num_classes: int) -> nn.Module:
    task, start = task_of(settings.fixed, recipe), settings.fixed.get("start")
    backbone = build_model(config, arm, settings.seeds[0], start, recipe, task.uses_head)
    model: nn.Module = with_modules(backbone, task, num_classes, settings.seeds[0])
    freeze(model, recipe)
    return model


def _outline(
    build: Callable[[], nn.Module],
    tried: Callable[[nn.Module, Base], None],
    settings: Settings,
    config: Base,
    arm: Arm,
) -> nn.Module | None:
    """The model on the meta device; None where only numbers tell: of other libraries' models, functions, trained
    weights, and whatever fails here."""
    if not isinstance(config, ViTConfig) or settings.fixed.get("start") or functions_of(arm.changes):
        return None
    try:
        with torch.device("meta"):
            model = build()
            tried(model, config)
    except Exception:  # of any kind: the same with numbers says what is wrong, or works
        return None
    return model


def smallest_first(settings: Settings, num_classes: int) -> list[Point]:
    """The settings of a sweep by the multiply-adds of their base; models of other libraries, which are not known, keep
    their place."""

    def macs(point: Point) -> int:
        config = base_config(settings.at(point), num_classes)
        return count_macs(config) if isinstance(config, ViTConfig) else 0

    return sorted(settings.sweep.points, key=macs)


def _survey(runner: TrialRunner) -> tuple[dict[str, ModelFacts], list[str], int]:
    """Whatever is wrong with an arm shows here, before anything is trained, under every setting of a sweep.

    Returns what each arm's model is, what to know of the arms, which the caller of `Study.run` or `Study.dry_run` is
    warned of, and the bytes that a trial takes.
    """
    facts: dict[str, ModelFacts] = {}
    sizes: list[int] = []
    notices: dict[str, list[str]] = {}
    whole, *_ = smallest_first(runner.settings, runner.dataset(runner.settings.recipe).num_classes)
    for point in runner.settings.sweep.points:
        settings = runner.settings.at(point)
        dataset = runner.dataset(settings.recipe, point)
        base = base_config(settings, dataset.num_classes)
        built = build_arms(runner.settings, point, dataset.num_classes, lambda arm: point != whole, take_images)  # noqa: B023
        found = study_warnings(_described(built, settings, point, base, facts, sizes), dataset)
        for notice in (*found, *few_images(settings, dataset)):
            notices.setdefault(notice, []).append(str(point))
    every = len(runner.settings.sweep.points)
    texts = [text if len(where) == every else f"{'; '.join(where)}: {text}" for text, where in notices.items()]
    design = runner.settings.design.design.warnings if runner.settings.design else ()  # the answer says them itself
    data = runner.dataset(runner.settings.recipe).summary()["warnings"]  # a part of the answer by itself
    for text in (*data, *design, *texts):
        warnings.warn(text, stacklevel=5)
    return facts, texts, max(sizes)


def _described(
    built: Iterable[tuple[Arm, nn.Module, Recipe]],
    settings: Settings,
    setting: Point,
    base: Base,
    facts: dict[str, ModelFacts],
    sizes: list[int],
) -> Iterator[tuple[str, nn.Module, Recipe]]:
    """Name, model and recipe of each arm, once its facts and the bytes of a trial are noted."""
    for arm, model, recipe in built:
        facts[model_name(setting, arm.name)] = describe_model(settings, arm, model, base)
        sizes.append(_trial_bytes(model, recipe, base))
        yield arm.name, model, recipe


def plan_of(settings: Settings) -> Plan:
    """What is recorded of them before any score is known."""
    family = max(settings.family, len(settings.arms))
    return Plan(len(settings.seeds), settings.until_decided, settings.generalize, settings.measure.name, family)


def _check_extension(before: Plan, settings: Settings) -> None:
    """UserError where seeds were added after scores were seen, and no level is known for so many."""
    count = len(settings.seeds)
    plain = not (settings.folds or settings.sweep or settings.design)
    if plain and count > before.seeds > 1 and not LOOKS[0] <= count <= LOOKS[-1]:
        raise UserError(
            f"This study was planned with {before.seeds} seeds, and has scores. With more it is looked at a second "
            f"time, for which {LOOKS[0]} to {LOOKS[-1]} seeds are calibrated, not {count}. Ask for so many, or choose "
            "another folder with --out."
        )


def write_facts(ready: Ready, command: str, plan: Plan) -> Facts:
    """study.json, before the first trial: from then on the study can be read, and continued, from its folder. UserError
    where a fold cannot be made, too."""
    runner, dataset, settings = ready.runner, ready.dataset, ready.settings
    folds = [runner.dataset(settings.recipe, seed=fold) for fold in range(settings.folds)]
    folder = runner.folder
    folder.check_same_study(settings.to_dict())
    before = folder.facts()
    splits = answer_splits(settings, dataset)
    records = StudyState(folder, settings, Evaluated(splits)).records.items()
    arms = [record for trial, record in records if trial.arm.name != BASE]  # base alone says nothing of arms
    seen = any(record.ended for record in arms)
    if before and before.plan.seeds and any(record.ended or record.wall_s is not None for record in arms):
        _check_extension(before.plan, settings)
        plan = before.plan
    # Of a new study, or of one with a damaged file.
    if folder.images.read() is None or not (folder.path / SPLIT_FILE).exists():
        folder.images.write(dataset.splits)
        write_split(folder.path / SPLIT_FILE, dataset, folds)
    if before is not None and before.settings == settings.to_dict() and before.plan == plan:
        return before
    margins = {**before.margins} if before else {}
    if not seen:
        margins[settings.measure.name] = settings.margin
    margins.setdefault(settings.measure.name, settings.margin)
    task = TASKS[settings.fixed.get("task", DEFAULT)]
    constant = task.constant_scores([dataset.splits[split] for split in splits], dataset.num_classes)
    facts = Facts(
        created=before.created if before else datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        splits=splits,
        settings=settings.to_dict(),
        models=ready.models,
        data={**dataset.summary(), "constant": constant},
        resolved=asdict(resolve_on(settings.recipe, dataset)),
        environment=environment(ready.how.torch_device),
        warnings=tuple(ready.notices),
        margins=margins,
        plan=plan,
        plugins=tuple(plugins()),
    )
    folder.write_samples(dataset.samples(SAMPLES))
    write_json(folder.settings_file, facts.to_dict())
    return facts


def user_functions(settings: Settings) -> list[Function]:
    """The functions that make base and alter models in arms, which workers must be able to import."""
    base = base_function(settings.fixed["base"])
    return [*([base] if base else []), *(one for arm in settings.arms for one in functions_of(arm.changes))]


def _trial_bytes(model: nn.Module, recipe: Recipe, images: Base) -> int:
    """Roughly the memory of one trial: the interpreter, weights with gradients and Adam's state, and activations."""
    activations = recipe.part_size * activation_bytes(model, images)
    return 600 * 2**20 + 16 * sum(parameter.numel() for parameter in model.parameters()) + activations
