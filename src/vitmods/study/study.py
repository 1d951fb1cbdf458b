"""A study as users write it: arms times seeds on one data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitmods.model.config import ViTConfig
from vitmods.recipes import Recipe
from vitmods.study.arms import BASE, make_arms
from vitmods.study.checkpoints import adopt, arms_in
from vitmods.study.defaults import defaults_for
from vitmods.study.edits import FunctionSpec, base_function
from vitmods.study.measure import MARGINS, TOP1, make_measure
from vitmods.study.plan import Settings, check_points, make_seeds
from vitmods.study.tuning import make_grid
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from vitmods.evals.options import Options
    from vitmods.model.vit import Resampling
    from vitmods.study.estimate import Estimate
    from vitmods.study.result import StudyResult


class Study:
    """Compares arms with base on the same seeds.

    Args:
        base: a size name (`S/16`), a timm name or a ViTConfig; any other model as `timm:NAME`, `torchvision:NAME`,
            `hf:FOLDER`, or a function (num_classes, img_size, in_chans) -> nn.Module (docs/any-model.md); None: a ViT
            that fits the images.
        start: trained weights that every arm begins with (docs/finetune.md); they say what base is. A folder of several
            checkpoints, as a study's, is one for each arm. None: new ones.
        arms: name -> changes (or their short form) or a function model -> model, or a list of short forms, each `CHANGES` or `NAME=CHANGES`. Of a
            folder of checkpoints, their names; none: all.
        data: `digits`, a folder, `torchvision:NAME?root=...` or `hf:NAME`.
        recipe: how every trial is trained; None: one that fits the images.
        seeds: how many, or which.
        img_size: side, or (rows, columns), in pixels; None: what fits the images.
        in_chans: channels that the model reads; None: what fits the images.
        split_seed, val_fraction, test_fraction: for images that are not split yet; None: what fits the images.
        limit_train: use only so many training images.
        limit_val: use only so many images for val, which are taken out of train where there is no val split.
        unreadable: "stop" at images that cannot be read, or "skip" them and say so in the report.
        metric: what is compared, a name of `vitmods.evals.protocols.METRICS` (docs/tuning.md).
        metric_options: of its protocol, as `vitmods.evals.options.Options`; None: those of the papers.
        margin: how much worse an arm may be and count as no worse, in points where the metric is a fraction; None: 0.5
            points, or 0.01 where it is none.
        noise_floor: also run base with other seeds, to show what a change that does nothing looks like.
        tune: field of the recipe -> values. Every arm is trained with each, or with each combination of several fields;
            the best on validation counts, and is evaluated on test (docs/tuning.md).
        tune_on: the split that the values are chosen on: "val".

    Raises:
        UserError: anything that cannot be used as given; the message says what to do.
    """

    def __init__(
        self,
        base: str | ViTConfig | Callable[..., nn.Module] | None = None,
        arms: Mapping[str, Any] | Iterable[Any] = (),
        data: str | Path = "digits",
        recipe: Recipe | None = None,
        seeds: int | Iterable[int] = 3,
        *,
        start: str | Path | None = None,
        img_size: int | tuple[int, ...] | None = None,
        in_chans: int | None = None,
        split_seed: int = 0,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        limit_train: int | None = None,
        limit_val: int | None = None,
        unreadable: Literal["stop", "skip"] = "stop",
        metric: str = TOP1,
        metric_options: Options | None = None,
        margin: float | None = None,
        noise_floor: bool = False,
        tune: Mapping[str, Any] | None = None,
        tune_on: str | None = None,
    ):
        measure = make_measure(metric, metric_options)
        if margin is None:
            margin = MARGINS[measure.metric.unit]
        if not margin >= 0:
            raise UserError(f"margin is how much worse an arm may be, 0 or more, not {margin}.")
        found = {} if start is None else arms_in(str(start))
        fixed = fixed_settings(
            base,
            data,
            recipe,
            start=found[BASE].start if found else start,
            img_size=img_size,
            in_chans=in_chans,
            split_seed=split_seed,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            limit_train=limit_train,
            limit_val=limit_val,
            unreadable=unreadable,
        )
        chosen = make_arms(adopt(arms, found) if found else arms)
        grid = make_grid(tune or {}, tune_on)
        self.settings = Settings(fixed, chosen, make_seeds(seeds), noise_floor, margin, grid, measure)
        check_points(self.settings)
        for arm in self.settings.arms:
            if not arm.changes and arm.start is None and self.settings.recipe_of(arm) == self.settings.recipe:
                raise UserError(f"Arm {arm.name} ({arm.text}) is base itself, part of every study: leave it out.")

    def __repr__(self) -> str:
        fixed = self.settings.fixed
        base = fixed["base"] if isinstance(fixed["base"], str) else "ViTConfig(...)"
        base = fixed["start"]["source"] if "start" in fixed else base
        names = ", ".join(arm.name for arm in self.settings.arms)
        return f"Study({base} against {names} on {fixed['data']}, {len(self.settings.trials())} trials)"

    def run(
        self,
        out: str | Path,
        *,
        workers: int | None = None,
        device: str = "auto",
        data_workers: int = 0,
        checkpoint_minutes: float = 5.0,
        cost_seconds: float = 30.0,
        progress: bool = True,
        command: str | None = None,
    ) -> StudyResult:
        """Run what is missing in the folder `out` and return the answer; results.json and results.csv lie there too.

        Calling it again after an end of any kind finishes the study and changes nothing that is finished. Nothing but
        `out` is part of the study, so the other arguments may differ from call to call.

        Args:
            out: the study's folder, made if needed.
            workers: trials at a time, each in its own process; None: as many as cores, memory or GPUs allow.
            device: "auto", "cpu", "cuda", "cuda:1" or "mps".
            data_workers: threads that prepare images ahead, per trial; 0: none.
            checkpoint_minutes: time between the checkpoints of a trial.
            cost_seconds: how long the measurement of costs may take, about; 0: costs are not measured.
            progress: a line a trial on stderr, and a bar if that is a terminal.
            command: the shell command that the report names; None: the Python call.

        Raises:
            UserError: another run holds the folder, it holds another study, or something cannot be used as given.
            KeyboardInterrupt: a signal came; what was trained is saved.
        """
        from vitmods.study.describe import python_call
        from vitmods.study.run import Running, run_study

        how = Running(workers, device, data_workers, checkpoint_minutes, cost_seconds, progress)
        return run_study(self.settings, Path(out), how, command or python_call(self.settings, str(out)))

    def dry_run(
        self, out: str | Path | None = None, *, workers: int | None = None, device: str = "auto", data_workers: int = 0
    ) -> Estimate:
        """Arms, trials, sizes, and the time that `run` would take, from a few timed steps. Writes no file.

        Trials that are finished in `out` are not counted. Raises UserError as `run` does.
        """
        from vitmods.study.run import Running, dry_run

        how = Running(workers, device, data_workers)
        return dry_run(self.settings, None if out is None else Path(out), how)


def fixed_settings(
    base: str | ViTConfig | Callable[..., nn.Module] | None,
    data: str | Path,
    recipe: Recipe | None,
    *,
    start: str | Path | None = None,
    positions: Resampling = "bicubic",
    img_size: int | tuple[int, ...] | None,
    in_chans: int | None,
    val_fraction: float | None,
    test_fraction: float | None,
    **others: Any,
) -> dict[str, Any]:
    """What every trial of a study has in common, as JSON gives it back; None becomes what fits the images."""
    if not isinstance(base, str | ViTConfig | None):
        base = _from_function(base)
    if function := base_function(base):
        function.load()
    if not isinstance(recipe, Recipe | None):
        raise UserError(f"recipe is a Recipe, as vm.recipes.default() gives it, not {recipe!r}.")
    defaults = defaults_for(str(data))
    if start is not None:
        if base is not None:
            raise UserError("The checkpoint that training starts from says what base is: leave base out.")
        from vitmods.study.start import Start  # torch, which the shell's help does without

        begun, base = Start.of(str(start), positions)
        others["start"] = asdict(begun)
        img_size, in_chans = img_size or base.img_size, in_chans or base.in_chans
    base = defaults.base if base is None else base
    recipe = defaults.recipe if recipe is None else recipe
    return {
        "data": str(data),
        "img_size": list(_sides(defaults.img_size if img_size is None else img_size)),
        "in_chans": defaults.in_chans if in_chans is None else in_chans,
        "val_fraction": defaults.val_fraction if val_fraction is None else val_fraction,
        "test_fraction": defaults.test_fraction if test_fraction is None else test_fraction,
        **others,
        "base": base if isinstance(base, str) else json.loads(base.to_json()),
        "recipe": json.loads(json.dumps(recipe.to_dict())),
    }


def _from_function(base: Any) -> str:
    """What is recorded of a function. UserError for anything else, as a model that is built already."""
    from torch import nn

    if isinstance(base, nn.Module) or not callable(base):
        raise UserError(
            f"base is a ViT's name, a ViTConfig, or a function (num_classes, img_size, in_chans) -> nn.Module that makes "
            f"new models, not a {type(base).__name__}: every trial begins with weights of its own seed."
        )
    return FunctionSpec.of(base)


def _sides(size: int | tuple[int, ...]) -> tuple[int, int]:
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"img_size is one side or two (rows, columns) in pixels, not {size}.")
    return sides[0], sides[-1]
