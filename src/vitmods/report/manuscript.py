"""The methods of a study in sentences for a paper, with its citations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from vitmods import __version__
from vitmods.report import text
from vitmods.report.citations import WORKS, References, cite
from vitmods.stats.decision import PAIRS, level_of
from vitmods.stats.verdict import Verdict
from vitmods.study.answer import VIEWS, Answer
from vitmods.study.arms import BASE
from vitmods.study.grid import show_value
from vitmods.study.results import ArmAnswer
from vitmods.study.state import shared_trials
from vitmods.tasks.base import TASKS
from vitmods.tasks.classification import Classification
from vitmods.util.shorthand import split_outside
from vitmods.util.text import listing, plural, without_place, without_places

PRECISIONS = {
    "32-true": "float32",
    "bf16-mixed": "bfloat16 with weights in float32",
    "fp16-mixed": "float16 with weights in float32 and scaled losses",
}
INITS = {
    "timm": "timm's rule: linear maps and positions normal with standard deviation 0.02, biases zero, convolutions "
    "as in PyTorch",
    "big_vision": "big_vision's rule: attention and MLP Xavier uniform, the projection of patches LeCun normal, the "
    "head zero",
    "beit": "BEiT's rule: weights normal with standard deviation 0.02, cut at one, the last maps of block l divided by "
    "the square root of 2 l",
}


def paragraphs(answer: Answer) -> list[str]:
    """Describe how a study was made, from the settings that it really has, with marks where papers are cited."""
    parts = ((_models, _images), (_training, _tuning, _trials), (_comparison,), (_software,))
    return [" ".join(sentence for part in paragraph for sentence in part(answer)) for paragraph in parts]


def references(answer: Answer) -> References:
    """Collect the papers of a study."""
    return References(answer, " ".join(paragraphs(answer)))


@VIEWS.register("methods")
def methods(answer: Answer) -> str:
    """Describe how a study was made, in one paragraph for a paper."""
    text = " ".join(paragraphs(answer))
    return references(answer).render(text, str, lambda key, citation: citation.short)


@VIEWS.register("bibtex")
def bibtex(answer: Answer) -> str:
    """Format the citations of a study and of vitmods itself as BibTeX."""
    return references(answer).bibtex(answer.vitmods or __version__, answer.created[:4])


def _models(answer: Answer) -> Iterator[str]:
    """Name base and the arms, and their initial weights."""
    name, size = without_place(answer.base.model.name), text.model_size(answer.base.model.config)
    if len(answer.bases) > 1:
        model = f"{listing(answer.bases)}: {size[size.rindex('images of') :]}"
    else:
        params = answer.base_cost.params if answer.base_cost and "modules" not in answer.base.model.config else None
        parameters = f", {text.count(params).strip()} parameters" if params else ""
        model = f"{name}{parameters}: {size}"
    arms = [arm for arm, _ in text.subjects(answer)]
    cited: set[str] = set()
    described = listing([_described(arm, cited) for arm in arms])
    against = "the unchanged model (base)" if answer.base.name == BASE else f"the arm {_described(answer.base, cited)}"
    if arms:
        yield f"We compared {plural(len(arms), answer.headline.label)} with {against}: {described}."
    yield f"{'Base is' if answer.base.name == BASE else 'The unchanged model is'} {model}"
    start, arms_of_study = answer.settings.get("start"), answer.settings.get("arms", {})
    if isinstance(start, Mapping):
        has_several = any("start" in arm for arm in arms_of_study.values() if isinstance(arm, Mapping))
        models = "Each arm started from its own trained weights, base" if has_several else "All models started"
        yield f"{models} from the trained weights {without_place(start['source'])}."
    else:
        is_published = any("pretrained=1" in base for base in (answer.base.model.name, *answer.bases))
        rule = INITS.get(str(answer.base.model.config.get("init")), "the rule of their library")
        drawn = "" if is_published else f", initialized by {rule}"
        yield f"All models {'started from published' if is_published else 'were trained from random'} weights{drawn}."


def _described(arm: ArmAnswer, cited: set[str]) -> str:
    """`dpn (Dual PatchNorm; [@Dual PatchNorm])`: an arm with the titles of its changes and papers not yet cited."""
    changes = []
    for change in arm.model.changes:
        changes.append(change.title + cite(change.paper) * (change.paper not in cited))
        cited.add(change.paper)
    if arm.changes and arm.changes != arm.name and not arm.changes.startswith("python("):
        changes.insert(0, f"`{without_places(arm.changes)}`")
    if arm.recipe:
        changes.append("with " + ", ".join(f"{name} {show_value(value)}" for name, value in arm.recipe.items()))
    return f"{arm.name} ({'; '.join(changes)})" if changes else arm.name


_SPLITS = (
    (r"found", "The splits are those of the data set."),
    (r"made, seed (\d+)", "The splits were drawn at random within each class (seed {0})."),
    (
        r"made, fold (\d+) of (\d+), seed (\d+)",
        "The test split is part {0} of {1} of a cross-validation drawn within each class (seed {2}).",
    ),
    (
        r"found; val made from train, seed (\d+)",
        "The test split is that of the data set; validation images were drawn from its training images within each "
        "class (seed {0}).",
    ),
    (r"from (.*)", "The splits were read from a file ({0})."),
)


def _images(answer: Answer) -> Iterator[str]:
    """Count the images of each split and say how the splits were made."""
    data, settings = answer.data, answer.settings
    names = {"train": "training", "val": "validation", "test": "test"}
    counts = [
        f"{split['count']:,} {names.get(name, name)} images"
        for name, split in data["splits"].items()
        if not (name == "train" and "limit_train" in answer.varied)
    ]
    classes = f" with {plural(len(data['classes']), 'class', 'classes')}" if data["classes"] else ""
    yield f"The data set is {without_place(str(data['name']))}{classes}; we used {listing(counts)}."
    if folds := settings.get("folds"):
        yield (
            f"The images were divided into {folds} folds (seed {settings.get('split_seed', 0)}): seed s of every arm "
            f"was tested on fold s mod {folds} and trained on the others."
        )
    else:
        origin = str(data["split_origin"])
        matches = ((re.fullmatch(pattern, origin), sentence) for pattern, sentence in _SPLITS)
        sentences = (sentence.format(*match.groups()) for match, sentence in matches if match)
        yield next(sentences, f"Splits: {without_places(origin)}.")
    if group := settings.get("group_by"):
        yield f"Images of one group ({without_place(str(group))}) were kept in one split and counted as one sample."
    if (limit := settings.get("limit_train")) is not None:
        share = f"{100 * limit:g} %" if isinstance(limit, float) and limit <= 1 else "a subset"
        yield f"The training images are {share} of those available, with classes in proportion."
    if data.get("left_out"):
        yield f"We left out {plural(data['left_out'], 'image')} that could not be read."


_TERMS = {
    "adamw": "AdamW",
    "bce": "binary cross-entropy",
    "cutmix": "CutMix with α",
    "clip_norm": "gradients clipped at norm",
    "drop_path": "stochastic depth",
    "ema": "an average of the weights, which was evaluated, with decay",
    "erasing": "random erasing with probability",
    "flip": "horizontal flips with probability",
    "lr": "learning rate",
    "mixup": "mixup with α",
    "pad": "random crops after padding",
    "patch_drop": "patch dropout",
    "randaugment": "RandAugment with operations and magnitude",
    "repeats": "views of each image:",
    "sigmoid": "summed binary cross-entropy",
    "softmax": "cross-entropy",
}
"""terms of the field for settings and their values whose names are others"""
_USED = {
    "augment": ("flip", "randaugment", "erasing", "mixup", "cutmix", "repeats"),
    "loss": ("label_smoothing",),
    "model": ("dropout", "drop_path", "patch_drop"),
    "optimizer": ("clip_norm",),
}
"""part of a recipe -> settings that are named where they are on"""
_PARTS = (*_USED, "schedule")


def _training(answer: Answer) -> Iterator[str]:
    """Describe the recipe, without what its task does not read."""
    recipe, resolved = answer.settings["recipe"], answer.resolved
    optimizer, schedule, crop = recipe["optimizer"], recipe["schedule"], recipe["augment"]["crop"]
    task = TASKS.get(answer.settings.get("task", "classification"))
    varied = answer.varied
    ignored = {*(task.ignored_fields() if task else ()), *varied}
    has_one_length = varied.isdisjoint({"epochs", "steps"})
    has_same_steps = has_one_length and varied.isdisjoint({"limit_train", "batch_size", "repeats"})
    classifies = task is None or issubclass(task, Classification)

    def used(*parts: str) -> list[str]:
        pairs = [(name, recipe[part][name]) for part in parts for name in _USED[part]]
        pairs = [(name, value) for name, value in pairs if value and (name, value) != ("repeats", 1)]
        return [f"{_term(name)} {show_value(value)}" for name, value in pairs if name not in ignored]

    length, steps = answer.length, resolved.get("steps")
    length += f" ({steps:,} steps)" if steps and has_same_steps and recipe["steps"] is None else ""
    besides = "Except for the values named below, every" if varied else "Every"
    purpose = f" for {task.title}" if task and not classifies else ""
    how = [f" for {length}"] * has_one_length
    how += [f" with batches of {recipe['batch_size']:,} images"] * ("batch_size" not in varied)
    yield f"{besides} model was trained{purpose}{''.join(how or [' alike'])}."
    names = ("momentum",) if optimizer["name"] == "sgd" else ("beta1", "beta2")
    values = {"lr": resolved.get("lr", optimizer["lr"]), "weight_decay": optimizer["weight_decay"]}
    values |= {name: optimizer[name] for name in (*names, "layer_decay") if optimizer.get(name) is not None}
    warmup, end = resolved.get("warmup_steps"), resolved.get("min_lr", schedule["min_lr"])
    decay = f"the {_term(schedule['name'])} schedule" + (f" down to {end:g}" if end else "")
    is_warmup_fixed = has_same_steps and not any(name.startswith("warmup") for name in varied)
    decay += f" after {plural(round(warmup), 'step')} of linear warm-up" if warmup and is_warmup_fixed else ""
    settings = ", ".join(f"{_term(name)} {show_value(value)}" for name, value in values.items() if name not in varied)
    paper = f" ({WORKS['adamw'].mark})" * (optimizer["name"] == "adamw")
    yield f"We used {_TERMS.get(optimizer['name'], optimizer['name'].upper())}{paper} with {settings} and {decay}."
    regularization = [f"the {_term(recipe['loss']['name'])} loss"] * (classifies and "loss" not in ignored)
    regularization += used("loss", "optimizer", "model")
    if recipe["ema"] and "ema" not in ignored:
        regularization.append(f"{_TERMS['ema']} {recipe['ema']:g}")
    if regularization:
        yield f"Training used {listing(regularization)}."
    crops = [_TERMS.get(crop, f"{_term(crop)} crops")] * (crop != "none" and "crop" not in ignored)
    augmentations = listing([*crops, *used("augment")])
    yield f"Images were augmented by {augmentations}." if augmentations else "Images were not augmented."
    if ignored.isdisjoint({"mean", "std"}):
        mean, std = (", ".join(f"{value:g}" for value in recipe["augment"][name]) for name in ("mean", "std"))
        yield f"Pixels from 0 to 1 were normalized with mean {mean} and standard deviation {std}."
    if recipe["train"] != "all":
        trained = listing(split_outside(recipe["train"], "+"))
        yield f"Only {trained} and the head were trained; other weights were frozen."
    for part, fields in recipe.items():
        if isinstance(fields, Mapping) and part not in _PARTS:
            yield f"Settings of {part}: {text.point_text(fields)}."


def _term(name: str) -> str:
    return _TERMS.get(name, name.replace("_", " "))


def _tuning(answer: Answer) -> Iterator[str]:
    """Describe the grid."""
    if tuned := text.tuned_text(answer):
        yield f"{tuned} These have the best mean; the test scores are of trials with fresh seeds."


def _trials(answer: Answer) -> Iterator[str]:
    """Report seeds, looks, failures and trials of other studies."""
    settings, planned, question = answer.settings, len(answer.settings["seeds"]), answer.headline
    if question.methods:
        yield question.methods
    trained = "Base and every arm were trained" if question.against else "Every combination was trained"
    trained = trained if answer.arms else "It was trained"
    if settings.get("until_decided"):
        yield f"{trained} with the same seeds, which were added until the effects were decided (at most {planned})."
        if answer.looks:
            taken = listing([str(look.seeds) for look in answer.looks])
            yield f"Results were analyzed after {taken} seeds."
        if stopped := {arm: seeds for arm, seeds in answer.stopped.items() if seeds < len(answer.seeds)}:
            yield f"Stopped early: {', '.join(f'{arm} (after {seeds} seeds)' for arm, seeds in stopped.items())}."
    else:
        yield f"{trained} with the same {plural(planned, 'seed')}."
    yield "Trials of one seed saw the same images in the same order with the same augmentation."
    if count := settings.get("known"):
        yield f"Base also has {plural(count, 'trial')} that earlier studies trained."
    elif shared := shared_trials(answer.trials):
        yield without_places(shared)
    effects = question.effects.values()
    failed = [f"{effect.arm} {effect.failures}" for effect in effects if effect.failures]
    base_failed = max((effect.base_failures for effect in effects), default=0)
    failed += [f"{answer.base.name} {base_failed}"] * bool(base_failed)
    if failed:
        yield f"Trials that diverged or learned nothing: {', '.join(failed)}. Those without a score do not count."
    if not answer.complete:
        ended = sum(trial.ended for trial in answer.trials)
        yield f"The study is not complete: {ended} of {len(answer.trials)} planned trials have ended."


def _comparison(answer: Answer) -> Iterator[str]:
    """Describe metric, effects, intervals, what they generalize to, and verdicts."""
    metric, decision, question = answer.metric, answer.decision, answer.headline
    effects = list(question.effects.values())
    names = {"val": "validation", "test": "test", "train": "training"}
    count = sum(answer.data["splits"].get(name, {"count": 0})["count"] for name in answer.splits)
    where = f"the {' and '.join(names.get(name, name) for name in answer.splits)} images"
    where += "" if answer.settings.get("folds") else f" ({count:,})"
    lower = "" if metric.higher_is_better else " (lower is better)"
    both = "; nothing was chosen on either split" * (len(answer.splits) > 1)
    if answer.is_of_chosen:
        both = "; the combination was chosen on the same images, by trainings with other seeds"
    compared = "Models are compared" if effects else "It is measured"
    yield f"{compared} by {metric.title}{lower} on {where} after the last step{both}."
    if not effects:
        return
    unit = text.points(metric)
    shared = ", over the seeds that both share" if question.against else ""
    yield f"Effects are {question.meaning}{shared}{f', in{unit}' if unit else ''}."
    level = level_of(effects)
    if not level.startswith("simultaneous"):
        yield f"We report no intervals ({level.partition(': ')[2] or level})."
        return
    family = plural(max(effect.family for effect in effects), "effect")
    yield f"Intervals are {level} for {family}{PAIRS * decision.of_pairs}."
    if answer.settings.get("until_decided"):
        yield (
            "Their levels account for repeated analyses, so that at most 5 % of studies make a false claim at any of "
            "them."
        )
    yield from _statistics(answer)
    margin = f"{answer.margin:g}{unit}"
    low, high = ("low", "high") if metric.higher_is_better else ("high", "low")
    yield (
        f"{question.one.capitalize()} helps or hurts if its interval excludes zero. Otherwise it is equivalent if the "
        f"interval is within the margin of ±{margin}, no worse if only the {low} end is (a loss above {margin} is "
        f"ruled out), brings no gain if only the {high} end is, and is open if neither is."
    )
    if any(effect.verdict == Verdict.WITHHELD for effect in effects):
        yield "Base has not learned, so that verdicts are withheld, but for arms that have and help."
    if expects := [f"{effect.arm} {effect.expects}" for effect in effects if effect.expects]:
        yield (
            "An effect that was found is on average overestimated; the mean given all estimates, with effects normal "
            f"around zero with an unknown variance, is{unit and f' (in{unit})'}: {', '.join(expects)}."
        )
    if any(effect.provisional for effect in effects):
        yield "While trials are missing, intervals are wider, as for a study that is read after each trial."
    yield from (other.methods for other in answer.questions.values() if other.methods and other is not question)


def _scope(answer: Answer) -> str:
    """Say what the intervals generalize to."""
    decision, effects = answer.decision, answer.headline.effects.values()
    if decision.overlap:
        return "The intervals hold for new seeds, other training sets and other images from the same source"
    if text.on_new_images(answer):
        unit = "groups of test images" if any(effect.grouped for effect in effects) else "test images"
        return (
            f"The intervals hold for new seeds and new images from the same source: seeds and {unit} are random samples"
        )
    why = "" if decision.generalize == "seeds" else ", since the metric does not have a score for each image"
    return f"The intervals hold for new seeds on these test images only{why}"


def _statistics(answer: Answer) -> Iterator[str]:
    """Say how intervals are computed, and what they do and do not cover."""
    dunnett, sidak, satterthwaite, nadeau = (
        WORKS[name].mark for name in ("dunnett", "sidak", "satterthwaite", "nadeau")
    )
    if max(effect.family for effect in answer.headline.effects.values()) > 1:
        yield (
            "Seeds are blocks, the variance of each arm is drawn to the common one, and critical values of Student's t "
            f"hold for all effects at once, by Dunnett's method for arms against one base ({dunnett}) and by Šidák's "
            f"inequality otherwise ({sidak})."
        )
    else:
        yield "Over seeds the interval is that of the paired t test."
    if answer.decision.overlap:
        yield f"The variance is corrected for trainings that share images ({nadeau})."
    elif text.on_new_images(answer):
        yield (
            "Test images enter by crossed random effects of seeds and images, whose degrees of freedom are approximate "
            f"({satterthwaite})."
        )
    yield f"{_scope(answer)}."
    sets = "training sets that matter more than seeds do" if answer.decision.overlap else "training sets or splits"
    tuned = ", and take the tuned values as given" * bool(answer.tuned)
    yield (
        f"They do not cover other {sets}, recipes, sizes of models and data sets, nor failures so rare that no trial "
        f"shows them{tuned}."
    )


def _software(answer: Answer) -> Iterator[str]:
    """Name the versions and the device."""
    environment, precision = answer.environment, answer.settings["recipe"]["precision"]
    packages = environment.get("packages", {})
    titles = {
        "torch": f"PyTorch {{}} ({WORKS['torch'].mark})",
        "torchvision": "torchvision {}",
        "timm": f"timm {{}} ({WORKS['timm'].mark})",
        "numpy": "NumPy {}",
    }
    versions = [title.format(packages[name]) for name, title in titles.items() if name in packages]
    versions += [f"Python {environment['python']}"] if "python" in environment else []
    yield f"We used vitmods {answer.vitmods}{f' with {listing(versions)}' if versions else ''}."
    device = environment.get("device_name") or environment.get("device")
    threads = environment.get("threads") if environment.get("device") == "cpu" else None
    place = f" on {device}" if device else ""
    place += f" with {plural(threads, 'thread')}" if threads else ""
    yield f"Models were trained in {PRECISIONS.get(precision, precision)}{place}."
