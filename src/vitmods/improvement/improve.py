"""From images to a better model: candidates are screened, the best is confirmed, trained on all images, and written.

    candidates          what other studies found promising, or ways to adapt trained weights
      -> screen         all of them against base, judged on val               OUT/screen
      -> confirmation   the best against base: fresh seeds, judged on test    OUT/screen/confirm/ARM (or base)
      -> training       the better of the two on all images                   .../retrained/ARM
      -> model          for `vitmods predict` and `export`                    OUT/model

Each stage is an ordinary study, or a trial of one, in its own folder, so that it resumes by itself. Nothing that
chooses sees test, and no trial that chose has a seed of the confirmation, so that its interval holds as if nothing had
been chosen. With a choice on the images of the confirmation it would not (benchmarks/improving.py simulates both).
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitmods.data.sources import is_same_place, open_source
from vitmods.recipes import Recipe
from vitmods.report import text
from vitmods.report.figures import Inliner, forest
from vitmods.report.hub import save_pretrained
from vitmods.report.templates import templates
from vitmods.stats.runs import NoDesign
from vitmods.stats.tables import with_unit
from vitmods.stats.verdict import Effect, Verdict
from vitmods.study.answer import Answer
from vitmods.study.arms import BASE, Arm, is_promising, make_arms
from vitmods.study.budget import ENDLESS, Budget, NotInTime, make_budget
from vitmods.study.candidates import Candidate, candidates_for, why_unfit
from vitmods.study.cells import ImageOptions
from vitmods.study.choice import LEARNING_STEPS, LEAST_BYTES
from vitmods.study.defaults import RecipeChoice
from vitmods.study.executors import StudyOptions
from vitmods.study.fixed import USUAL_IMAGES
from vitmods.study.prepare import say, workers_for
from vitmods.study.retrain import Retrained, retrain_study, uses_of
from vitmods.study.store import IMAGES_FILE, StudyFolder, read_object
from vitmods.study.study import USUAL_OPTIONS, Study, override
from vitmods.util.address import address_of, named, place
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user, write_atomically, write_json
from vitmods.util.text import Printed, listing, plural

REQUEST = "improve.json"
SCREEN, MODEL, PAGE = "screen", "model", "report.html"
MOST_CANDIDATES = 5
SCREEN_SEEDS, FEWEST_SEEDS = 3, 2
PLANNED = 0.4  # of the time, at most, for the screen
CONFIRMED = 1 / 3  # of the time, at least, for the confirmation, unless the screen needs it
CONFIRM_SEEDS, MOST_CONFIRM_SEEDS = 5, 30  # without a limit of time; with one, as many as fit
MADE_VAL, MOST_VAL = 0.2, 4_000  # of the images, where val is made: each trial of the screen is judged on it
SLOWER = 1.25  # the last training, times what it is expected to take
ADAPTING = {
    "attention": "training attention alone keeps most of what the weights know",
    "head": "training the head alone is the least that can be trained",
    "last(4)": "the first blocks suit other images too",
    "lora(rank=8)": "low-rank adapters change all blocks a little",
}
"""ways to adapt trained weights -> why; base trains all of them"""
USES = {
    "predict": "Use it",
    "finetune": "Train it on images with labels",
    "export": "Write it for other programs",
    "evaluate": "Measure it on other images",
}
"""of `uses_of` -> as pages and the terminal say it"""
FIELDS = {"lr", "mixup", "ema"}  # of the recipe


@dataclass(frozen=True, repr=False)
class Improvement(Printed):
    """What `improve` found, and the model that it wrote. Prints itself in a few lines.

    path:       the folder of everything
    candidates: what was tried, and why
    screen:     the study of all candidates, judged on val
    arm:        the best of them, together; empty: none looks better than base
    confirmed:  that against base on fresh seeds, judged on test; of base, where none looks better, base alone
    trained:    the better one, trained on all images
    model:      the folder of that model
    """

    path: Path
    candidates: tuple[Candidate, ...]
    screen: Answer
    arm: str = ""
    confirmed: Answer | None = None
    trained: Retrained | None = None
    model: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether the model is written; if not, another call goes on."""
        return self.model is not None

    @property
    def has_learned(self) -> bool:
        """Whether base learned something in the screen; if not, it chooses nothing."""
        return any(effect.verdict != Verdict.WITHHELD for effect in self.screen.headline.effects.values())

    @property
    def is_tested(self) -> bool:
        """Whether what was chosen, or base, is trained on fresh seeds."""
        return self.confirmed is not None and self.confirmed.complete

    @property
    def is_decided(self) -> bool:
        """Whether base learned where it was tested."""
        withheld = self.effect is None or self.effect.verdict == Verdict.WITHHELD
        has_score = self.confirmed is not None and self.confirmed.base_mean is not None
        return self.is_tested and has_score and not (self.arm and withheld)

    @property
    def effect(self) -> Effect | None:
        """Of `arm` against base, on fresh seeds."""
        return self.confirmed.effects.get(self.arm) if self.confirmed and self.confirmed.complete else None

    @property
    def chosen(self) -> set[str]:
        """The names of the candidates that are in `arm`."""
        return (set(self.screen.headline.together) or {self.arm}) if self.arm else set()

    @property
    def warnings(self) -> list[str]:
        """Those of all stages, each once."""
        answers = [self.screen, *filter(None, [self.confirmed])]
        return list(dict.fromkeys(warning for answer in answers for warning in answer.warnings))

    @property
    def is_better(self) -> bool:
        """Whether the model is shown to be better than base."""
        return self.effect is not None and self.effect.verdict == Verdict.HELPS

    @property
    def headline(self) -> str:
        """What came out, in a sentence."""
        metric = self.screen.metric
        if not is_enough(self.screen):
            ended = sum(trial.ended for trial in self.screen.trials)
            more = "" if ended else " No trial fitted the budget: give a longer one."
            return f"The screen of the candidates is not finished: run the same command again to resume.{more}"
        if not self.is_tested and (self.arm or self.has_learned):
            what = (
                f"The best of the candidates, {self.arm}," if self.arm else "No candidate looks better than base, which"
            )
            return f"{what} is not {'confirmed' if self.arm else 'tested'} yet: run the same command again."
        if not self.is_decided:
            remedy = "give more time (--budget, and --epochs if you set it) and another folder (--out)"
            if self.screen.settings.get("start"):
                return (
                    f"Nothing is decided, for base ends below a linear probe of the weights it starts from: {remedy}."
                )
            return (
                f"Nothing is decided, for base did not learn{self._reached} in trials as short as these: {remedy}, or "
                "trained weights (--from)."
            )
        assert self.confirmed is not None
        assert self.confirmed.base_mean is not None
        if not self.arm:
            effects = self.screen.headline.effects.items()
            lost = [name for name, effect in effects if effect.fails_more and not effect.gain > 0]
            failed = f" Trials with {listing(lost)} failed." if lost else ""
            kept = f"on val none of {plural(len(self.candidates), 'candidate')} looks better"
            reached = f"{metric.shown(self.confirmed.base_mean)} {metric.title} on test"
            return f"Base is kept: {kept}. It reaches {reached}, after {length_of(self.confirmed)}.{failed}"
        assert self.effect is not None
        base, arm = self.confirmed.base_mean, self.confirmed.arms[0].mean
        scores = "" if arm is None else f", {metric.shown(base)} before and {metric.shown(arm)} after"
        found = f"{with_unit(self.effect)} of {metric.title}{scores}"
        seeds = f"on {self.effect.n} fresh seeds and images that no choice has seen, after {length_of(self.confirmed)}"
        chosen = (
            "" if self.has_learned else " Base did not learn in the screen, so results of other studies chose the arm."
        )
        if self.is_better:
            return f"{self.arm} is better than base: {found}, {seeds}.{chosen}"
        return f"Base is kept: {self.arm} is not shown to be better ({found}, {seeds}).{chosen}"

    @property
    def _reached(self) -> str:
        """The score of base, and that of the best constant prediction; empty where they are not known."""
        answer = self.confirmed or self.screen
        metric, mean = answer.metric, answer.base_mean
        constant = answer.data.get("constant", {}).get(metric.name)
        if mean is None or constant is None:
            return ""
        return f" (it has {metric.shown(mean)} {metric.title}, the best constant prediction {metric.shown(constant)})"

    def __repr__(self) -> str:
        lines = [self.headline]
        if is_enough(self.screen):
            lines.append(f"Tried: {listing([one.change for one in self.candidates])}.")
        if self.trained and not self.trained.finished:
            lines.append(str(self.trained))
        if self.model:
            lines += [
                f"Trained on all images: {named(self.model)}",
                *(f"{what}: {line}" for what, line in _commands(self)),
            ]
        return "\n".join(lines)

    def report(self) -> Path:
        """Write the page report.html, and those of the studies; returns the path."""
        for answer in (self.screen, self.confirmed):
            if answer is not None:
                answer.report()
        return write_page(self)


def improve(
    data: str | Path,
    out: str | Path,
    *,
    budget: str | Budget | None = None,
    base: str | None = None,
    start: str | Path | None = None,
    candidates: Iterable[str] | None = None,
    without: Iterable[str] = (),
    with_recipe: bool = False,
    recipe: Recipe | RecipeChoice | str | None = None,
    task: str = "classification",
    images: ImageOptions = USUAL_IMAGES,
    command: str | None = None,
    options: StudyOptions = USUAL_OPTIONS,
    **overrides: Any,
) -> Improvement:
    """Try what is promising for these images, confirm the best against base, and train it on all images.

    Candidates are all screened together on val, by a factorial design, or from trained weights one by one; the best of
    them, or of their combinations, is compared with base on fresh seeds and on test. If it helps, it is trained on all
    images, else base is. Another call with the same folder goes on where the last one ended.

    Args:
        data: as `vitmods.Study` takes it. With train alone, val and test are made; test is seen once, at the end.
        out: the folder of everything.
        budget: a time such as "2h": it chooses model, image size, length of the training and seeds, as far as they are
            not given; a third or more is kept for the confirmation, unless the screen needs it. None: no limit, 3
            seeds to screen, 5 to confirm.
        base, start, recipe, task, images: as in `vitmods.Study`. Of `start` ways to adapt the weights are candidates.
        candidates: arms in short form, instead of those that are chosen.
        without: arms that are not to be tried.
        with_recipe: also try fields of the recipe: a higher rate, mixup, an average of weights.
        command: the shell command that pages name.
        options, overrides: those of `Study.run`, as in `improve(..., workers=2)`.

    Raises:
        UserError: something cannot be used as given; the message says what to do.
    """
    options = override(options, overrides)
    limit = make_budget(budget)
    if limit.trials is not None:
        raise UserError("The budget of improve is a time, such as 2h: its stages share it.")
    out = Path(out)
    if address_of(place(out)):
        raise UserError(f"improve needs a folder on this disk, not {out}: its stages read each other's weights.")
    if not (out / REQUEST).exists():
        if {"study.json", "config.json"} & {path.name for path in out.glob("*.json")}:
            raise UserError(f"{named(out)} is a study or a trial, and improve has a folder of its own: choose another.")
        StudyFolder(out).check_place(data)
    data, images = _held_out(str(data), images)
    request = _Request(out, data, base, start, recipe, task, images, options, command)
    excluded = (without,) if isinstance(without, str) else tuple(without)
    chosen, seeds = request.plan(candidates, excluded, with_recipe, limit)
    screen = request.screening(chosen, seeds)
    answer = _screen(screen, out / SCREEN, limit, options, command)
    found = Improvement(out, chosen, answer)
    if not is_enough(answer):
        return found
    count: int | None
    if begun := next(iter(StudyFolder(out / SCREEN).confirmations), None):  # its arm and seeds stay
        facts = StudyFolder(begun).known_facts()
        arm, count = next(iter(facts.study().arms), Arm(BASE)), facts.plan.seeds
    else:
        best = best_of(answer, screen) if found.has_learned else likely(chosen, screen, limit)
        if best is None and not found.has_learned:
            return found
        as_fit = CONFIRM_SEEDS if limit.seconds is None else None
        arm, count = best or Arm(BASE), as_fit if best else FEWEST_SEEDS
    is_base = arm.name == BASE
    what = "No candidate looks better than base. Testing base" if is_base else f"Confirming {arm.name} against base"
    say(options, f"{what}, on fresh seeds and on test.")
    sides = len({BASE, arm.name})
    left = _until(limit, _confirming_s(answer, limit, options, (count or CONFIRM_SEEDS) * sides))
    if limit.seconds is not None and not count:
        left = replace(left, trials=MOST_CONFIRM_SEEDS * sides)
    found = replace(found, arm="" if is_base else arm.name)
    how: dict[str, Any] = {"arm": arm, "longer": True, "budget": left, "command": command, "options": options}
    for seeds in dict.fromkeys((count, FEWEST_SEEDS)):
        try:
            found = replace(found, confirmed=screen.confirm(out / SCREEN, seeds, **how))
            break
        except NotInTime as error:
            say(options, f"Not confirmed with {seeds or 'several'} seeds in what is left of the time. {error}")
    if found.confirmed is None or not found.is_decided:
        return found
    path, name = found.confirmed.path, arm.name if found.is_better else BASE
    say(options, f"Training {name} on all images.")
    settings = StudyFolder(path).known_facts().study()
    trained = retrain_study(settings, path, name, 0, options)
    found = replace(found, trained=trained)
    return replace(found, model=_write(trained, path, out / MODEL)) if trained.finished else found


@dataclass(frozen=True)
class _Request:
    """What was asked of `improve`."""

    out: Path
    data: str
    base: str | None
    start: str | Path | None
    recipe: Recipe | RecipeChoice | str | None
    task: str
    images: ImageOptions
    options: StudyOptions
    command: str | None

    def study(self, arms: Any, **settings: Any) -> Study:
        return Study(
            self.base, arms, self.data, self.recipe, task=self.task, start=self.start,
            images=replace(self.images, answer_on="val"), **settings,
        )  # fmt: skip

    def screening(self, chosen: Sequence[Candidate], seeds: int | None) -> Study:
        """Return the study of all candidates: together from scratch, one by one where they exclude each other, or from
        trained weights. seeds: None, of trained weights: each candidate stops when it is decided."""
        arms = [one.change for one in chosen]
        if self.start is not None:
            return self.study(arms, until_decided=True) if seeds is None else self.study(arms, seeds=seeds)
        try:
            return self.study(arms, design="factorial", seeds=seeds)
        except NoDesign:
            return self.study(arms, seeds=seeds)

    def plan(
        self, given: Iterable[str] | None, without: Sequence[str], with_recipe: bool, limit: Budget
    ) -> tuple[tuple[Candidate, ...], int | None]:
        """Return the candidates, and how many seeds screen them, of an earlier call; or choose them and note them in
        the folder. Raises UserError where an earlier call was asked for others."""
        named_ones = [given] if isinstance(given, str) else None if given is None else list(given)
        chosen_by = {"candidates": named_ones, "without": list(without), "with_recipe": with_recipe}
        asked = {"data": self.data, "base": self.base, "from": self.start and str(self.start), "task": self.task}
        if named_ones is not None and (without or with_recipe):
            raise UserError(
                "candidates names all that is tried: drop --without and --with-recipe (in Python without= and "
                "with_recipe=)."
            )
        path, screen = self.out / REQUEST, StudyFolder(self.out / SCREEN)
        if path.exists() and any(screen.path.glob("trials/**/*.*")):
            return self._as_before(read_object(path), asked, chosen_by)
        if screen.facts() is not None:  # of a budget that no trial fitted
            with screen.lock():
                screen.settings_file.unlink()
        left_out = [_arm_of(short) for short in without if short not in FIELDS]
        chosen = [Candidate(short, None, "you named it") for short in named_ones or ()]
        if named_ones is None:
            chosen = self._choose([*left_out, *FIELDS.intersection(without)], with_recipe)
        for candidate in chosen:
            _arm_of(candidate.change)
        if len(chosen) < 2:
            raise UserError(
                f"{plural(len(chosen), 'candidate')} left, and improve tries two or more together. Name others with "
                "--candidates, or compare one change with base: vitmods compare --arms CHANGE."
            )
        make_arms([one.change for one in chosen])  # a UserError for two of one name
        seeds: int | None
        if self.start is not None:
            seeds = None if limit.seconds is None else FEWEST_SEEDS
        else:
            chosen, seeds = self._fitting(chosen, limit, can_drop=named_ones is None)
        self.out.mkdir(parents=True, exist_ok=True)
        facts = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "command": self.command}
        known = [asdict(one) for one in chosen]
        write_json(path, {"schema": 1, **facts, **asked, "asked": chosen_by, "seeds": seeds, "tried": known})
        return tuple(chosen), seeds

    def _as_before(
        self, earlier: Mapping[str, Any], asked: Mapping[str, Any], chosen_by: Mapping[str, Any]
    ) -> tuple[tuple[Candidate, ...], int | None]:
        """Return what an earlier call noted. Raises UserError where it was asked for something else."""
        try:
            tried = tuple(Candidate(**one) for one in earlier["tried"])
            before, seeds, pairs = earlier["asked"], earlier["seeds"], [(n, earlier[n], asked[n]) for n in asked]
            if begun := StudyFolder(self.out / SCREEN).facts():  # its time may have lasted for fewer or more
                seeds = None if begun.study().until_decided else begun.plan.seeds or seeds
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{named(self.out / REQUEST)} is damaged ({error!r}): choose another folder.") from error
        is_plain = chosen_by["candidates"] is None and not chosen_by["without"] and not chosen_by["with_recipe"]
        pairs += [] if is_plain else [(name, before.get(name), value) for name, value in chosen_by.items()]
        for name, was, value in pairs:
            is_path = name in ("data", "from") and None not in (was, value)
            if _sorted(was) != _sorted(value) and not (is_path and is_same_place(was, value)):
                before, now = (
                    listing(each) if isinstance(each, list) and each else f"{each or 'none'}" for each in (was, value)
                )
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{named(self.out)} tries {listing([one.change for one in tried])}, and was begun with {option} "
                    f"{before}, not {now}: choose another folder (--out)."
                )
        return tried, seeds

    def _fitting(self, chosen: list[Candidate], limit: Budget, can_drop: bool) -> tuple[list[Candidate], int]:
        """Return as many candidates and seeds as leave trials long enough to learn in their part of the time."""
        study = self.screening(chosen, SCREEN_SEEDS)
        if limit.seconds is None or "epochs" not in study.settings.open:
            return chosen, SCREEN_SEEDS
        say(self.options, f"How long trials may be, if all {len(chosen)} candidates are tried:")
        planned: Any = study.dry_run(
            self.out / SCREEN,
            budget=replace(_until(limit, _share(study) * limit.seconds), seeds_follow=False),  # fewer may fit
            command=self.command,
            options=self.options,
        )
        steps, count = min(planned.steps.values()), len(study.settings.every_arm) * SCREEN_SEEDS
        most = count * steps / LEARNING_STEPS  # trials that are long enough
        smaller = [
            (len(chosen), SCREEN_SEEDS),
            *((k, FEWEST_SEEDS) for k in range(len(chosen), 1, -1) if can_drop or k == len(chosen)),
        ]
        for k, seeds in smaller:
            if len(self.screening(chosen[:k], seeds).settings.every_arm) * seeds <= most:
                break
        if dropped := [one.change for one in chosen[k:]]:
            say(self.options, f"Not tried, as trials would be too short to learn: {listing(dropped)}.")
        return chosen[:k], seeds

    def _choose(self, without: Sequence[Arm | str], with_recipe: bool) -> list[Candidate]:
        """Choose the most promising candidates that suit base, but for some arms and fields of the recipe; of a slot
        the two best."""
        study = self.study(None, seeds=1)
        cell = study.settings.cell(BASE)
        if self.start is not None:
            ways = [Candidate(way, None, why) for way, why in ADAPTING.items()]
            has_peft = importlib.util.find_spec("peft") is not None
            ways = [one for one in ways if has_peft or "lora" not in one.change]
            ways = [one for one in ways if _arm_of(one.change) not in without]
            unfit = {one.change: reason for one in ways if (reason := why_unfit(cell, one))}
            chosen = [one for one in ways if one.change not in unfit]
            for change, reason in unfit.items():
                say(self.options, f"Not tried: {change} ({reason.rstrip('.')}).")
        else:
            changes = [arm.short for arm in without if isinstance(arm, Arm)]
            chosen, refused = candidates_for(cell, study.training_images, MOST_CANDIDATES, changes, seconds=1)
            for line in refused:
                say(self.options, f"Not tried: {line}.")
        if with_recipe:
            chosen += _of_recipe(cell.recipe, without)
        for candidate in chosen:
            say(self.options, f"To try: {candidate.change}, {candidate.why}.")
        return chosen


def _sorted(value: Any) -> Any:
    """A value, of which the order does not matter if it is a list."""
    return sorted(value) if isinstance(value, list) else value


def _arm_of(short: str) -> Arm:
    """Read a candidate. Raises UserError for one that is unknown, or stands for several arms."""
    if short.strip() == BASE:
        raise UserError("Candidates are compared with base: leave base out of them.")
    arms = () if is_promising(short) else make_arms([short])
    if len(arms) != 1:
        raise UserError(f"'{short}' stands for several arms: name each candidate.")
    return arms[0]


def _of_recipe(recipe: Recipe, without: Sequence[Arm | str]) -> list[Candidate]:
    """Fields of the recipe that matter as much as changes."""
    settings = recipe.settings()
    found = [Candidate(f"lr({2 * settings['lr']:g})", None, "twice the rate of the recipe")]
    if not settings["mixup"]:
        found.append(Candidate("mixup(0.2)", None, "mixed images keep small sets from being learned by heart"))
    if settings["ema"] is None:
        found.append(Candidate("ema(0.99)", None, "an average of the weights over steps"))
    return [one for one in found if _arm_of(one.change) not in without and one.change.partition("(")[0] not in without]


def _held_out(data: str, images: ImageOptions) -> tuple[str, ImageOptions]:
    """Make sure of a val split, to choose on, and a test split, to confirm on. Raises UserError without them."""
    if images.fold is not None:
        raise UserError("improve chooses on val and confirms on test: leave fold out (--fold).")
    if images.split_file is not None:
        return data, images
    counts = {name: len(records) for name, records in open_source(data).splits.items()}
    splits, folder = set(counts), expand_user(data)
    if splits == {"train", "val"} and (folder / "val").is_dir() and (folder / "train").is_dir():
        return _held_out(f"{data}?splits=train:train,val:test", images)
    if "test" not in splits and splits != {"train"}:
        raise UserError(
            f"improve chooses on val and confirms on test, and {data} has {listing(sorted(splits))}: call the images "
            'to confirm on test, as in --data "path?splits=train:train,val:test" (val is then made from train).'
        )
    if "val" not in splits and images.val_fraction is None and images.limit_val is None:
        images = replace(images, val_fraction=min(MADE_VAL, MOST_VAL / (counts.get("train") or 1)))
    return data, images


def _screen(study: Study, out: Path, limit: Budget, options: StudyOptions, command: str | None) -> Answer:
    """Train the screen in its part of the time, with fewer seeds if trials are slower than expected; if it lasts for
    one alone, in all that the confirmation leaves, or else in all, so that another call can confirm. What was chosen
    by it stays."""
    if StudyFolder(out).confirmations:
        return Answer.load(out)
    how: dict[str, Any] = {"command": command, "options": replace(options, cost_seconds=0)}
    whole_s = limit.seconds or 0.0
    answer = study.run(out, budget=_until(limit, _share(study) * whole_s), **how)
    for kept in (CONFIRMED + 0.1, 0.0):
        spare_s = limit.left_s - kept * whole_s
        if not is_enough(answer) and not answer.failed and limit.seconds is not None and spare_s > 0:
            answer = study.run(out, budget=_until(limit, spare_s), **how)
    return answer


def is_enough(screen: Answer) -> bool:
    """Whether a candidate can be chosen: the screen is finished, or its time was over after two seeds of every arm."""
    effects = screen.headline.effects.values() if screen.headline.against else ()
    return screen.complete or (bool(effects) and all(effect.n >= 2 or effect.failures for effect in effects))


def _share(study: Study) -> float:
    """The part of the time for a screen: with few trials less, since those of the confirmation are no shorter."""
    trials = len(study.settings.every_arm) * len(study.settings.seeds)
    return min(PLANNED, 0.8 * trials / (trials + 2 * CONFIRM_SEEDS + 2))


def _until(limit: Budget, seconds: float) -> Budget:
    """A part of the time that begins now, which seeds follow; without a limit, no limit."""
    return ENDLESS if limit.seconds is None else Budget(seconds=max(seconds, 1.0), seeds_follow=True)


def _confirming_s(answer: Answer, limit: Budget, options: StudyOptions, trials: int) -> float:
    """Seconds for the confirmation: what is left, but for a training on all images that is as long as its trials."""
    sizes = {name: split["count"] for name, split in answer.data["splits"].items()}
    last = SLOWER * sum(sizes.values()) / max(1, sizes["train"])  # trainings
    each = trials / workers_for(options, trials, LEAST_BYTES)
    return limit.left_s * each / (each + last)


def likely(candidates: Iterable[Candidate], study: Study, limit: Budget) -> Arm | None:
    """The candidate of which most is expected, where base did not learn in trainings as short as a limit leaves for all
    of them: those of two may be long enough. None: nothing is expected of any, or without a limit."""
    expected = sorted((one for one in candidates if one.expected), key=lambda one: -(one.expected or 0.0))
    shorts = [one.change for one in expected if limit.seconds is not None and "epochs" in study.settings.open]
    return next((arm for short in shorts for arm in study.settings.factors if arm.short == short), None)


def best_of(answer: Answer, study: Study) -> Arm | None:
    """The combination that a screen predicts to be best, or the arm with the largest gain; None: base is."""
    if not answer.headline.against:  # its effects are of changes, not of arms
        names = answer.headline.together
        return study.settings.continuing(answer.settings).design.combination(names) if names else None
    gains = {name: effect.gain for name, effect in answer.effects.items() if not effect.failures and effect.gain > 0}
    return study.settings.arm(max(gains, key=lambda name: gains[name])) if gains else None


def _write(trained: Retrained, study: Path, out: Path) -> Path:
    """Write the model with its card, and the list of the images that it has seen, by which later studies are warned."""
    folder = save_pretrained(trained.folder, out, study=study)
    shutil.copyfile(trained.folder / IMAGES_FILE, folder / IMAGES_FILE)
    return folder


def length_of(answer: Answer) -> str:
    """`12 epochs`: how long its trials are."""
    recipe = answer.settings["recipe"]
    return plural(recipe["steps"], "step") if recipe["steps"] else plural(recipe["epochs"], "epoch")


def write_page(found: Improvement) -> Path:
    """Write report.html in the folder of an improvement; returns its path."""
    answer = found.confirmed or found.screen
    confirmed = found.confirmed if found.effect else None
    cost, inline = confirmed.arms[0].cost if confirmed else None, Inliner()
    page = templates("vitmods.improvement").get_template("page.html").render(
        found=found, answer=answer, confirmed=confirmed, cost=cost, metric=answer.metric,
        confirmed_plot=_plots(confirmed, inline) if confirmed else (),
        screened_plot=_plots(found.screen, inline) if is_enough(found.screen) else (),
        trials=sum(trial.ended for _, study in _studies(found) for trial in study.trials),
        length=length_of(found.screen),
        pages=[(title, _beside(found, study)) for title, study in _studies(found)],
        tried=[(one, {arm.name for arm in make_arms([one.change])} <= found.chosen) for one in found.candidates],
        commands=_commands(found), command=found.screen.command,
    )  # fmt: skip
    path = found.path / PAGE
    write_atomically(path, lambda file: file.write(page.encode()))
    return path


def _plots(answer: Answer, inline: Inliner) -> list[str]:
    """For wide and for narrow screens."""
    effects = text.plotted_effects(answer)
    return [forest(effects, answer.margin, answer.metric, inline, narrow) for narrow in (False, True)]


def _studies(found: Improvement) -> list[tuple[str, Answer]]:
    screen = [("The screen: every candidate, judged on val", found.screen)]
    return screen + [("The confirmation: fresh seeds, judged on test", found.confirmed)] * bool(found.confirmed)  # type: ignore[list-item]


def _beside(found: Improvement, answer: Answer) -> str:
    return (answer.path / PAGE).relative_to(found.path).as_posix()


def _commands(found: Improvement) -> list[tuple[str, str]]:
    if found.model is None:
        return []
    assert found.trained is not None
    uses = uses_of(found.trained.folder, found.model)
    return [(title, uses[use]) for use, title in USES.items() if use in uses]
