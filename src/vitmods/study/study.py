"""A study as users write it: arms times seeds on one data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitmods.model.config import ViTConfig
from vitmods.model.names import MODELS, parse_name
from vitmods.recipes import RECIPES, Recipe
from vitmods.study.arms import BASE, FunctionSpec, base_function, is_foreign, make_arms
from vitmods.study.checkpoints import arms_in, use_trained_arms
from vitmods.study.defaults import defaults_for
from vitmods.study.executors import StudyOptions
from vitmods.study.factors import make_plan
from vitmods.study.plan import (
    IMAGE_OPTIONS,
    MARGINS,
    MOST_SEEDS,
    ImageOptions,
    Measure,
    Settings,
    check_plan,
    make_grid,
    make_measure,
    make_seeds,
    make_sweep,
    measure_of,
)
from vitmods.util.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn

    from vitmods.model.vit import Resampling
    from vitmods.study.answer import Answer
    from vitmods.study.estimate import Estimate
    from vitmods.study.retrain import Retrained


SEEDS, MOST = {None: 5, "factorial": 3}, {None: 16, "factorial": 8}
"""By default, for each design: of a fixed study, and at most of one that runs until it is decided."""
FRESH = 5_000  # the first seed with which a best combination is confirmed


class Study:
    """Compares arms with base on the same seeds.

    Args:
        base: a size name (`S/16`), a timm name or a ViTConfig; any other model as `timm:NAME`, `torchvision:NAME`,
            `hf:FOLDER`, or a function (num_classes, img_size, in_chans) -> nn.Module (docs/any-model.md); None: a ViT
            that fits the images.
        start: trained weights that every arm begins with (docs/finetune.md); they say what base is. A folder of several
            checkpoints, as a study's, is one for each arm. None: new ones.
        arms: name -> changes (or their short form) or a function model -> model, or a list of short forms, each
            `CHANGES` or `NAME=CHANGES`. Of a folder of checkpoints, their names; none: all.
        data: `digits`, a folder, `torchvision:NAME?root=...` or `hf:NAME`.
        recipe: how every trial is trained; None: one that fits the images.
        seeds: how many, or which; None: 5 (with more folds, as many as those), or at most 16 of a study that runs until
            it is decided; 3, or at most 8, of a factorial one.
        until_decided: look after 4, 5, 6, 8, ... seeds, and train an arm no longer once it is decided or hopeless
            (docs/verdicts.md).
        task: what is trained and measured, a name of `vitmods.tasks.TASKS`: one class an image, or several labels
            (docs/tasks.md).
        metric: what is compared, a name of `vitmods.evals.metrics()` (docs/tuning.md), or a `Measure` with options of
            its protocol; None: the task's first.
        margin: how much worse an arm may be and count as no worse, in points where the metric is a fraction; None: 0.5
            points, or 0.01 where it is none.
        generalize: what verdicts are about: other "images" from the same source and new trainings, or new "seeds" on
            these images alone, as for a benchmark with a fixed test set.
        family: how many arms the study will have, those that are added when scores are known included: intervals hold
            together over so many from the start. None: these arms.
        design: "factorial": the arms are switched on and off together, which tells the effect of each on average over
            the others with fewer trials (docs/factorial.md). None: each arm is compared with base.
        runs: how many combinations a factorial study trains, base included; None: 8 of 3 and 4 arms, 16 of more.
        folds: of images that are not split yet: seed s of every arm is tested on part s mod `folds` of them and trained
            on the rest. Verdicts are then about other training sets too (docs/verdicts.md).
        sweep: field of the recipe, `base` or `limit_train` -> values: base and every arm are trained under each
            setting, which gives an effect for each and their average (docs/sweeps.md).
        tune: field of the recipe -> values. Every arm is trained with each, or with each combination of several fields;
            the best on validation counts, and is evaluated on test (docs/tuning.md).
        tune_on: the split that the values are chosen on: "val".
        tuning_seeds: with how many trials of each value; the chosen one is trained on fresh seeds.
        same_seeds: report the very trials that the values were chosen by, which makes all scores too good.
        images: `img_size`, `in_chans`, `unreadable`, and how they are split (`split_seed`, `val_fraction`, `group_by`,
            ...), each as `ImageOptions` says.

    Raises:
        UserError: anything that cannot be used as given; the message says what to do.
    """

    def __init__(
        self,
        base: str | ViTConfig | Callable[..., nn.Module] | None = None,
        arms: Mapping[str, Any] | Iterable[Any] = (),
        data: str | Path = "digits",
        recipe: Recipe | None = None,
        seeds: int | Iterable[int] | None = None,
        *,
        task: str = "classification",
        start: str | Path | None = None,
        metric: str | Measure | None = None,
        margin: float | None = None,
        until_decided: bool = False,
        generalize: Literal["images", "seeds"] = "images",
        family: int | None = None,
        design: Literal["factorial"] | None = None,
        runs: int | None = None,
        folds: int | None = None,
        sweep: Mapping[str, Any] | None = None,
        tune: Mapping[str, Any] | None = None,
        tune_on: str | None = None,
        tuning_seeds: int = 1,
        same_seeds: bool = False,
        **images: Any,
    ):
        asked = metric if isinstance(metric, Measure) else Measure(metric or measure_of(task).name)
        measure = make_measure(asked.name, asked.options)
        if margin is None:
            margin = MARGINS[measure.metric.unit]
        if not margin >= 0:
            raise UserError(f"margin is how much worse an arm may be, 0 or more, not {margin}.")
        found = {} if start is None else arms_in(str(start))
        begun = found[BASE].start if found else start
        # Arms are made before the images, which may be many, are listed.
        chosen = make_arms(use_trained_arms(arms, found) if found else arms)
        fixed = fixed_settings(base, data, recipe, task=task, start=begun, **images)
        fixed |= {} if folds is None else {"folds": int(folds)}
        self._seeds_given = seeds is not None
        usual = max((MOST if until_decided else SEEDS)[design], folds or 0)
        chosen_seeds = make_seeds(usual if seeds is None else seeds)
        if runs is not None and design is None:
            raise UserError('runs belongs to a factorial study: say design="factorial" (--design factorial).')
        plan = make_plan(chosen, fixed, runs) if design else None
        self.settings = Settings(
            fixed,
            plan.arms if plan else chosen,
            chosen_seeds,
            until_decided,
            margin,
            measure=measure,
            generalize=generalize,
            family=family or 0,
            sweep=make_sweep(sweep or {}, fixed),
            design=plan,
            **_tuning(tune or {}, tune_on, tuning_seeds, chosen_seeds if same_seeds else None),
        )
        if family is not None and family < len(self.settings.arms):
            raise UserError(f"family counts all arms of the study, {len(self.settings.arms)} or more, not {family}.")
        check_plan(self.settings)
        for arm in self.settings.arms:
            if not arm.changes and arm.start is None and self.settings.recipe_of(arm) == self.settings.recipe:
                raise UserError(f"Arm {arm.name} ({arm.text}) is base itself, part of every study: leave it out.")

    def __repr__(self) -> str:
        fixed = self.settings.fixed
        base = fixed["base"] if isinstance(fixed["base"], str) else "ViTConfig(...)"
        base = fixed["start"]["source"] if "start" in fixed else base
        names = ", ".join(arm.name for arm in self.settings.factors)
        return f"Study({base} against {names} on {fixed['data']}, {self.settings.planned} trials)"

    def run(
        self,
        out: str | Path,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = StudyOptions(),  # noqa: B008, frozen
        **overrides: Any,
    ) -> Answer:
        """Run what is missing in the folder `out` and return the answer; results.json and results.csv lie there too.

        Calling it again after an end of any kind finishes the study and changes nothing that is finished. Nothing but
        `out` is part of the study, so the other arguments may differ from call to call.

        Args:
            out: the study's folder, made if needed.
            budget: how much this run may take: "2h", "30m" (no trial begins that is expected to end later), or a number
                of trials; None: no end. Without `seeds` as many are planned as fit, at least 3; a study that is in
                `out` keeps its own.
            command: the shell command that the report names; None: the Python call.
            options: device, workers, memory, loggers, cluster: see `vitmods.study.StudyOptions`.
            overrides: fields of `options`, as in `run(out, device="cpu", workers=2)`.

        Raises:
            UserError: another run holds the folder, it holds another study, or something cannot be used as given.
            KeyboardInterrupt: a signal came; what was trained is saved.
        """
        from vitmods.study.run import python_call, run_study
        from vitmods.study.schedule import make_budget

        called = command or python_call(self.settings, str(out))
        return run_study(
            self.settings, Path(out), _checked(options, overrides), called, make_budget(budget), self._seeds_given
        )

    def confirm(self, out: str | Path, seeds: int = SEEDS[None], **options: Any) -> Answer:
        """Train the best combination that a factorial study in `out` predicts against base, on seeds that it never saw.

        It is a study of its own, in a folder below `out`; `Answer.confirmed` of the factorial one tells its effect.

        Args:
            out: the factorial study's folder.
            seeds: how many.
            options: those of `run`.

        Raises:
            UserError: the study is not factorial or not finished, or no change is predicted to help.
        """
        from vitmods.study.answer import Answer
        from vitmods.study.store import StudyFolder

        found, plan = Answer.load(out), self.settings.design
        if plan is None or found.factorial is None:
            raise UserError('Only the best combination of a factorial study is confirmed: design="factorial".')
        if not found.complete:
            raise UserError(f"{out} is not finished: run it first, so that the best combination is known.")
        if not found.factorial.best:
            raise UserError("No change is predicted to help: there is no combination to confirm.")
        arm = plan.run(found.factorial.best)
        fresh = make_seeds(range(FRESH, FRESH + seeds))
        study = copy(self)
        study._seeds_given = True
        study.settings = replace(self.settings, arms=(arm,), seeds=fresh, until_decided=False, design=None)
        return study.run(StudyFolder(out).confirmation(arm.name).path, **options)

    def retrain(
        self,
        out: str | Path,
        arm: str = "best",
        seed: int = 0,
        options: StudyOptions = StudyOptions(),  # noqa: B008, frozen
        **overrides: Any,
    ) -> Retrained:
        """After the study in `out` has ended, train one arm on all images, those of val and test too, to deploy it.

        It lies in `out`/retrained/ARM and goes on where an earlier call was stopped. How good it is cannot be measured
        on images that it was trained on: the study's own number is the estimate.

        Args:
            out: the study's folder.
            arm: which, at its chosen point where the study was tuned. "best": the cheapest of the arms that help and
                may be best, or base where none helps.
            seed: of this training.

        The others are those of `run`. Raises UserError where the study is not finished, or is another one.
        """
        from vitmods.study.retrain import retrain_study

        return retrain_study(self.settings, Path(out), arm, seed, _checked(options, overrides))

    def dry_run(
        self,
        out: str | Path | None = None,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = StudyOptions(),  # noqa: B008, frozen
        **overrides: Any,
    ) -> Estimate:
        """Arms, trials, sizes, the time (by a few timed steps) and disk that `run` would take, and what it could find.

        Trials that are finished in `out` are not counted; the spread is known from them, or from studies beside `out`.
        With a budget it is of the study that `run` would plan for it. `command`, of the shell, is what a smaller study
        is proposed as. Writes no file. Raises UserError as `run` does, but `out` may be any folder.
        """
        from vitmods.study.run import dry_run
        from vitmods.study.schedule import make_budget

        path = None if out is None else Path(out)
        return dry_run(
            self.settings, path, _checked(options, overrides), command, make_budget(budget), self._seeds_given
        )

    def pilot(
        self,
        out: str | Path,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = StudyOptions(),  # noqa: B008, frozen
        **overrides: Any,
    ) -> Estimate:
        """Train base alone on the first four seeds, which count as trials of the study; then what `dry_run` gives, with
        the spread that is now known. Arguments as in `run` and `dry_run`. Raises as `run` does."""
        from vitmods.study.run import python_call, run_pilot
        from vitmods.study.schedule import make_budget

        called, own = command or python_call(self.settings, str(out)), _checked(options, overrides)
        return run_pilot(self.settings, Path(out), own, called, make_budget(budget), self._seeds_given, command)


def _checked(options: StudyOptions, overrides: Mapping[str, Any]) -> StudyOptions:
    names = StudyOptions.__dataclass_fields__
    for name in overrides:
        if name not in names:
            raise TypeError(f"{name!r} is not an option of a run. {nearest(name, names)}")
    options = replace(options, **overrides)
    options.check_here()
    return options


def _tuning(tune: Mapping[str, Any], tune_on: str | None, count: int, same: tuple[int, ...] | None) -> dict[str, Any]:
    grid = make_grid(tune, tune_on)
    if not grid and (count != 1 or same):
        raise UserError("There is nothing to tune: name values too, as --tune lr=1e-4,3e-4,1e-3.")
    if count < 1:
        raise UserError(f"tuning_seeds must be at least 1, not {count}.")
    seeds = same or tuple(range(MOST_SEEDS, MOST_SEEDS + count))
    return {"grid": grid, "tuning_seeds": seeds if grid else ()}


def fixed_settings(
    base: str | ViTConfig | Callable[..., nn.Module] | None,
    data: str | Path,
    recipe: Recipe | None,
    *,
    task: str = "classification",
    start: str | Path | None = None,
    positions: Resampling = "bicubic",
    **images: Any,
) -> dict[str, Any]:
    """What every trial of a study has in common, as JSON gives it back; None becomes what fits the images."""
    for name in images:
        if name not in IMAGE_OPTIONS:
            raise TypeError(f"{name!r} is not an option of a study or its images. {nearest(name, IMAGE_OPTIONS)}")
    ImageOptions(**images)  # a UserError for impossible values, before the images are listed
    if not isinstance(base, str | ViTConfig | None):
        base = _from_function(base)
    if function := base_function(base):
        function.load()
    if not isinstance(recipe, Recipe | None):
        raise UserError(f"recipe is a Recipe, as vm.recipes.default() gives it, not {recipe!r}.")
    from vitmods.tasks.base import TASKS, make_task

    kind = TASKS[task]
    if recipe is not None:
        make_task(task, recipe)  # a UserError where it does not suit the task, before the images are listed
    if isinstance(base, str) and not is_foreign(base) and base not in MODELS:
        parse_name(base)
    defaults, begun = defaults_for(str(data)), {}
    if start is not None:
        if base is not None:
            raise UserError("The checkpoint that training starts from says what base is: leave base out.")
        from vitmods.study.checkpoints import Start  # torch, which the shell's help does without

        checkpoint, base = Start.of(str(start), positions)
        begun["start"] = asdict(checkpoint)
        defaults = replace(defaults, img_size=base.img_size, in_chans=base.in_chans)
    base = defaults.base if base is None else base
    if recipe is None:
        recipe = kind.fitted(RECIPES[kind.usual_recipe]() if kind.usual_recipe else defaults.recipe)
    fitting: dict[str, Any] = {"img_size": defaults.img_size, "in_chans": defaults.in_chans}
    usual = {**fitting, "split_seed": 0, "limit_train": None, "limit_val": None, "unreadable": "stop"}
    chosen = {**usual, **{name: value for name, value in images.items() if value is not None}}
    make_task(task, recipe).check_size(_sides(chosen["img_size"]))  # a UserError where they do not suit the task
    return {
        "task": task,
        "data": str(data),
        **json.loads(json.dumps(chosen, default=str)),
        "img_size": list(_sides(chosen["img_size"])),
        **begun,
        "base": base if isinstance(base, str) else json.loads(base.to_json()),
        "recipe": json.loads(json.dumps(recipe.to_dict())),
    }


def _from_function(base: Any) -> str:
    """What is recorded of a function. UserError for anything else, as a model that is built already."""
    from torch import nn

    if isinstance(base, nn.Module) or not callable(base):
        raise UserError(
            f"base is a ViT's name, a ViTConfig, or a function (num_classes, img_size, in_chans) -> nn.Module that "
            f"makes new models, not a {type(base).__name__}: every trial begins with weights of its own seed."
        )
    return FunctionSpec.of(base)


def _sides(size: int | tuple[int, ...]) -> tuple[int, int]:
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"img_size is one side or two (rows, columns) in pixels, not {size}.")
    return sides[0], sides[-1]
