"""`vitmods compare`: the study."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitmods.cli.options import (
    Asked,
    DataOptions,
    asked_for,
    defaults_from,
    note,
    parse,
    readable_folder,
)
from vitmods.evals.options import Options
from vitmods.finetune.roles import ALL
from vitmods.recipes import Recipe
from vitmods.study.executors import StudyOptions
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.registry import plugin_options

if TYPE_CHECKING:
    from vitmods.study import Answer, Study
    from vitmods.study.line_ups import LineUp

FAILED = 1
COMMON = (
    "data",
    "arms",
    "base",
    "from",
    "task",
    "img-size",
    "recipe",
    "epochs",
    "seeds",
    "until-decided",
    "budget",
    "margin",
    "metric",
    "workers",
    "device",
    "out",
    "dry-run",
)
"""options that --help shows"""


@dataclass(frozen=True)
class Compare:
    """Train a base ViT and changed ones on the same seeds; report which change helps, and what it costs.

    Re-running the command resumes the study and changes nothing that is finished; arms and seeds may be added.
    The folder of --out gets results.json, results.csv and report.html. Exit code: 0; 1 if a trial failed; 2 for an
    error; 130 if stopped.

    examples:
      vitmods compare
      vitmods compare --data path/to/images --arms dpn rms dpn+rms --seeds 5
      vitmods compare --data path/to/images --arms dpn rms --until-decided --budget 2h
      vitmods compare --data path/to/images --arms norms --dry-run     (every kind of norm)
      vitmods compare --data path/to/images --arms paper:dpn-table6 --base Ti/4     (reproduce a published table)
      vitmods compare --base S/16 --img-size 224 --arms "post=placement(attn=post,mlp=post)" --dry-run
      vitmods compare --base timm:pvt_v2_b0 --img-size 64 --arms "replace(rms)" "replace(dtn)"     (any model)
      vitmods compare --from runs/digits-mu3-2-train-base-seed0 --data path/to/images --arms full attention ffn
      vitmods compare --from runs/pretrained --data path/to/images      (a study: each arm from its own weights)
      vitmods compare --arms dpn --tune lr=1e-4,3e-4,1e-3 --tune-on val     (the same budget for every arm)
      vitmods compare --arms dpn --sweep base=Ti/16,S/16     (an effect for each, and their average)
      vitmods compare --base Ti/16 S/16 --arms dpn --img-size 224     (the same, for several bases)
      vitmods compare --arms dpn rms layerscale --design factorial --confirm     (all changes in every trial)
      vitmods compare --arms dpn --metric ece
      vitmods compare --task multilabel --data path/to/labels.csv --arms dpn rms
      vitmods compare --retrain best     (train the arm to deploy on all images)
      vitmods compare --recipe plain --help-all      (every option, with the defaults of that recipe)
    """

    dataset: DataOptions
    training: Recipe
    options: StudyOptions
    protocols: Options
    arms: tuple[str, ...] = ("dpn", "rms", "placement(attn=post,mlp=post)")
    """changes to compare against base, joined by +, or NAME=CHANGES; `vitmods changes` lists them. replace(rms),
    replace(dtn): other norms in any transformer. attention, ffn, head, train(ROLES): what is trained; full: all of it.
    paper:TABLE: the arms of a published table, and its task, bases and sweep unless you set them (`vitmods paper`);
    norms: only the arms of one"""
    base: tuple[str, ...] = ("mu3/2",)
    """the model without changes, or several: then every arm is compared with each. Ti/16, S/16, B/16, S36/16 (36 deep),
    or a timm name; any other model as timm:NAME, torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION
    (docs/any-model.md)"""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """trained weights to start from, which also set base: a trial folder, a file or a timm model name. A study folder,
    or a folder of several checkpoints, starts each arm from its own weights"""
    design: Literal["factorial"] | None = None
    """factorial: arms are switched on and off together, and each effect is an average over the others
    (docs/factorial.md). None: each arm is compared with base"""
    runs: int | None = None
    """combinations that a factorial study trains, including base; None: 8 for 3 and 4 arms, 16 for more"""
    confirm: bool = False
    """then train the best combination that a factorial study predicts against base, on 5 fresh seeds"""
    seeds: int | None = None
    """trials per arm; None: 5, or one per fold if there are more folds; 3 in a factorial study; with --budget as many
    as fit"""
    until_decided: bool = False
    """look after 4, 5, 6, 8, ... seeds, and stop each arm once it is decided or futile (docs/verdicts.md)"""
    max_seeds: int | None = None
    """most trials per arm, with --until-decided; None: 16, or 8 in a factorial study; with --budget as many as fit, at
    most 32"""
    budget: str | None = None
    """how much this run may take: 2h, 30m, or 40trials; re-running the command resumes. None: no limit"""
    folds: int | None = None
    """for images without splits: test seed s of every arm on part s mod FOLDS and train on the others; verdicts then
    generalize over training sets (docs/verdicts.md)"""
    generalize: Literal["images", "seeds"] = "images"
    """what verdicts are about: also other images from the same source, or only new trainings on these test images"""
    family: int | None = None
    """number of arms the study will have, if some are added later: intervals are simultaneous over this many. None:
    these arms"""
    recipe: str = "digits"
    """recipe with the defaults of training: plain, deit, augreg(level=light1), ...; `vitmods recipes` lists them"""
    tune: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """FIELD=VALUE,VALUE,... of the recipe: train every arm with each value and report its best. Repeat for several
    fields"""
    tune_on: str | None = None
    """split on which the values are chosen: val"""
    tuning_seeds: int = 1
    """trials of each value; the chosen one is trained on fresh seeds"""
    same_seeds: bool = False
    """reuse the tuning trials in the report: less work, and optimistic scores"""
    sweep: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """FIELD=VALUE,VALUE,... of the recipe, base or limit_train: train base and every arm with each value; gives one
    effect for each, and their average. Repeat for several fields"""
    metric: str | None = None
    """metric to compare: top1, balanced_accuracy, ece, nll, fewshot10, mean_corruption_error, ... (docs/tuning.md);
    None: the first of the task, top1 of classes and map of labels"""
    margin: float | None = None
    """smallest difference that matters; None: 0.5 points, or 0.01 if the metric is not a fraction"""
    out: Path | None = None
    """folder of the study, or an address such as s3://bucket/folder (docs/clusters.md); None: runs/DATA-BASE"""
    quiet: bool = False
    """print no progress on the error stream"""
    retrain: str | None = None
    """after the study has ended: train this arm, or best, on all images, including the test set, into retrained/ARM;
    best is the cheapest of the arms that help and may be best, or base"""
    dry_run: bool = False
    """train nothing: show arms, trials, sizes, an estimate of time and disk, and the effects that each number of seeds
    can find"""
    pilot: bool = False
    """train four trials of base, which count later, and show the dry run with the variance now known"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asked = asked_for(arguments, "compare", Compare, _check_combinations)
    start = asked.start
    if not (asked.help or asked.quiet):
        print(f"Reading {asked.data or 'digits'} ...", file=sys.stderr, flush=True)
    line_up = _line_up(asked.arms)
    if line_up:
        asked = replace(asked, task=asked.task or line_up.task)
        if line_up.start and not asked.help:
            _check_start(line_up, asked.start)
    if not asked.help:  # help is given whatever else is wrong
        _check_names(asked)
    defaults, dataset, recipe_name, recipe = defaults_from(asked, start)
    default = Compare(dataset, recipe, StudyOptions(), Options(), base=(defaults.base,), recipe=recipe_name)
    if line_up:
        default = _filled(default, line_up, asked)
    elif start:
        from vitmods.study.checkpoints import arm_names  # torch, which takes seconds: what runs is said before

        default = replace(default, arms=arm_names(start) or default.arms)
    options = parse(Compare, arguments, "compare", default, COMMON)
    _check_combinations(options)
    if options.start is not None and options.base != (defaults.base,):
        raise UserError("--from says what base is: leave --base out.")
    parts = [line_up.name] if line_up else []
    if asked.base or not line_up:
        parts.append(Path(options.base[0]).name if options.start else "-".join(options.base))
    out = options.out or readable_folder(options.dataset.data, *parts)
    study = _study(options)
    if options.retrain is not None:
        return _retrain(study, options, out)
    how: dict[str, Any] = {"options": replace(options.options, progress=not options.quiet), "budget": options.budget}
    how["command"] = shlex.join(["vitmods", "compare", *arguments, *plugin_options()])
    if options.dry_run:
        if options.out:  # without it any folder may do: nothing is written
            from vitmods.study.store import StudyFolder

            StudyFolder(options.out).check_place(options.dataset.data)
        print(study.dry_run(out, **how))
        return 0
    if options.pilot:
        print(study.pilot(out, **how))
        return 0
    result = study.run(out, **how)
    if not (options.confirm and result.complete and result.factorial and result.factorial.best):
        return _show(result)
    confirmed = study.confirm(out, **how)
    confirmed.report()
    return max(_show(type(result).load(out)), FAILED if confirmed.failed else 0)


def _check_combinations(options: Compare) -> None:
    """Raise UserError for options that exclude or need each other."""
    wrong = (
        (
            options.max_seeds is not None and not options.until_decided,
            "--max-seeds needs --until-decided; --seeds sets a fixed number.",
        ),
        (options.seeds is not None and options.until_decided, "With --until-decided, set --max-seeds, not --seeds."),
        (options.confirm and options.design is None, "--confirm needs --design factorial."),
        (options.runs is not None and options.design is None, "--runs needs --design factorial."),
        (
            options.retrain is not None and (options.dry_run or options.pilot or options.budget is not None),
            "--retrain trains one arm once, after the study: drop --dry-run, --pilot and --budget.",
        ),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise UserError(message)


def _check_names(asked: Asked) -> None:
    """Raise UserError for arms, a base, a budget or a metric that do not exist, before a data set is listed."""
    from vitmods.model.names import MODELS, parse_name
    from vitmods.study.arms import BASE, is_foreign, make_arms
    from vitmods.study.plan import make_measure
    from vitmods.study.schedule import make_budget

    if arms := [arm for arm in asked.arms if arm.strip() != BASE]:
        make_arms(arms)
    if asked.base and asked.base not in MODELS and not is_foreign(asked.base):
        parse_name(asked.base)
    make_budget(asked.budget)
    if asked.metric is not None:
        make_measure(asked.metric)


def _line_up(arms: Sequence[str]) -> LineUp | None:
    """The published table that fills in what is not given, where `paper:NAME` is one of the arms. UserError for two."""
    from vitmods.study.line_ups import find_line_up

    named = [arm for arm in arms if arm.strip().startswith("paper:")]
    if len(named) > 1:
        raise UserError(f"A study has the bases and settings of one table: give one of {' and '.join(named)}.")
    return find_line_up(named[0]) if named else None


def _filled(default: Compare, line_up: LineUp, asked: Asked) -> Compare:
    """The defaults with the bases, the sweep, the task and the metric of a line-up, and a note that says so."""
    patch = default.base[0].rpartition("/")[2]
    settings = line_up.settings(int(patch) if patch.isdigit() else 16)
    sweep = settings["sweep"]
    bases = tuple(sweep.pop("base", [settings.get("base", default.base[0])]))
    if asked.start or any(one.startswith("base=") for one in asked.sweep):
        bases = default.base
    swept = () if asked.sweep else tuple(f"{name}={','.join(map(str, values))}" for name, values in sweep.items())
    dataset = replace(default.dataset, task=asked.task or line_up.task)
    if not (asked.help or asked.quiet):
        filled = [f"--task {line_up.task}"] * (line_up.task != "classification") + [f"--sweep {one}" for one in swept]
        filled += [] if asked.base or bases == default.base else [f"--base {' '.join(bases)}"]
        filled += [f"--metric {line_up.metric}"] if line_up.metric else []
        note(f"{line_up.title}.{' Using ' if filled else ''}{' '.join(filled)}")
    return replace(default, dataset=dataset, base=bases, sweep=swept, metric=line_up.metric)


def _check_start(line_up: LineUp, start: str | None) -> None:
    """Raise UserError where a line-up needs trained weights and none are given, or where an arm that changes the model
    would start from base's, which were trained without the change."""
    from vitmods.study.arms import arms_from_text
    from vitmods.study.checkpoints import arm_names

    if start is None:
        raise UserError(f"{line_up.name} starts from trained weights: add --from, {line_up.start}.")
    changed = [arm.name for text in line_up.arms for arm in arms_from_text(text) if arm.changes]
    if changed and (lacking := " ".join(name for name in changed if name not in arm_names(start))):
        raise UserError(
            f"{start} has no weights of {lacking}, and {line_up.name} compares models trained with and without "
            "the change: give --from the folder of a study with both. What the change does to trained weights of "
            f"base is another question: `vitmods compare --from {start} --arms {lacking}`."
        )


def _retrain(study: Study, options: Compare, out: Path) -> int:
    from vitmods.study import Answer

    found = study.retrain(out, options.retrain or "", options=replace(options.options, progress=not options.quiet))
    print(found)
    print(f"Report: {named(Answer.load(out).report())}")
    return 0 if found.finished else FAILED


def _show(result: Answer) -> int:
    from vitmods.report import print_answer

    report = result.report()
    print_answer(result)
    print(f"\nReport: {named(report)}")
    if result.complete:
        return 0
    for failure in result.failed:
        print(f"failed: {failure}", file=sys.stderr)
    print("The study is not complete; the same command runs what is missing.", file=sys.stderr)
    return FAILED if result.failed else 0  # a budget that ends is no failure


def _study(options: Compare) -> Study:
    from vitmods.study import Study
    from vitmods.study.arms import BASE
    from vitmods.study.plan import Measure, grid_from_text, measure_of

    base = {BASE, "full"} if options.training.train == ALL else {BASE}
    arms = [arm for arm in options.arms if arm.strip() not in base]
    for arm in sorted(base.intersection(map(str.strip, options.arms))):
        record = BASE if arm == BASE else f"{arm}, which is base here,"
        note(f"{record} is always part of a study and need not be given as an arm.")
    sweep: dict[str, Any] = grid_from_text(options.sweep, "--sweep")
    if len(options.base) > 1:
        if "base" in sweep:
            raise UserError("--base and --sweep base=... both list bases: leave one of the two out.")
        sweep = {"base": options.base, **sweep}
    metric = options.metric or measure_of(options.dataset.task).name
    return Study(
        None if options.start else options.base[0],
        arms,
        recipe=options.training,
        seeds=options.max_seeds if options.until_decided else options.seeds,
        start=options.start,
        **asdict(options.dataset),
        metric=Measure(metric, options.protocols),
        margin=options.margin,
        until_decided=options.until_decided,
        generalize=options.generalize,
        family=options.family,
        folds=options.folds,
        design=options.design,
        runs=options.runs,
        sweep=sweep,
        tune=grid_from_text(options.tune),
        tune_on=options.tune_on,
        tuning_seeds=options.tuning_seeds,
        same_seeds=options.same_seeds,
    )
