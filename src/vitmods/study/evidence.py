"""What finished studies say about each change together: its effect by data set, and on data sets like these."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size

from vitmods.data.sources import SOURCES
from vitmods.data.splits import limited
from vitmods.stats.across import ALPHA, ENOUGH_SETS, Interval, OtherSets, across_studies, other_sets
from vitmods.stats.tables import interval, signed
from vitmods.stats.verdict import FRACTION, Effect, Verdict, verdict_of
from vitmods.study.answer import VIEWS, Answer
from vitmods.study.arms import BASE, Arm
from vitmods.study.store import StudyFolder
from vitmods.util.address import address_of, named, place
from vitmods.util.errors import UserError, nearest
from vitmods.util.latex import tabular, tex
from vitmods.util.text import Printed, listing, plural

SHARED = 0.1  # of the images of the smaller of two studies, if they are of one data set


@dataclass(frozen=True)
class Finding:
    """The effect of a change in one study, arm minus base; images are those of the training.

    change: the changes of an arm in their short form, with its settings of the recipe
    pixels, length: of the images and of the training, as `32 px` and `20 epochs`
    design: `factorial` and the like; empty where each arm is compared with base
    """

    change: str
    metric: str
    unit: str
    higher_is_better: bool
    margin: float
    study: str
    data: str
    images: int
    model: str
    seeds: int
    effect: float
    low: float
    high: float
    pixels: str = ""
    length: str = ""
    design: str = ""
    verdict: Verdict = Verdict.OPEN

    @property
    def conditions(self) -> str:
        """`mu3/4 at 32 px, 20 epochs, 1,200 images, 5 seeds, factorial`."""
        model = f"{self.model} at {self.pixels}" if self.pixels else self.model
        counts = f"{self.images:,} images", plural(self.seeds, "seed")
        return ", ".join(filter(None, (model, self.length, *counts, self.design)))


COMPARED = {"model": "base", "pixels": "image size", "length": "length of training", "design": "design"}
"""what studies of one change may differ in, beside the data"""


@dataclass(frozen=True)
class OfChange:
    """What the studies of a change found.

    sets: data set -> its studies
    other: what data sets like these show; None with fewer than three
    verdict: of the mean over such data sets; `open` without it
    """

    change: str
    metric: str
    unit: str
    sets: Mapping[str, tuple[Finding, ...]]
    other: OtherSets | None
    verdict: Verdict

    @property
    def findings(self) -> list[Finding]:
        return [one for studies in self.sets.values() for one in studies]

    @property
    def studies(self) -> int:
        return len(self.findings)

    @property
    def title(self) -> str:
        """The change, the metric, and its unit."""
        return f"{self.change} ({self.metric if self.unit == 'points' else f'{self.metric}, {self.unit}'})"

    @property
    def differ_in(self) -> list[str]:
        """Which of base, image size, length of training and design are not the same in all studies."""
        return [word for name, word in COMPARED.items() if len({getattr(one, name) for one in self.findings}) > 1]

    def on(self, data: str) -> tuple[float, float, float]:
        """The effect on a data set and its interval, over its studies."""
        return across_studies([[(found.effect, found.low, found.high) for found in self.sets[data]]])

    @property
    def effects(self) -> list[Effect]:
        """The effect on each data set, with the verdict that all its studies have; with three sets or more also the
        mean over data sets like these, and what a study of a further one measures."""
        each = {name: {one.verdict for one in studies} for name, studies in self.sets.items()}
        found = [
            self._effect(name, self.on(name), given.pop() if len(given) == 1 else Verdict.OPEN)
            for name, given in each.items()
        ]
        return [*found, *self.on_others]

    @property
    def on_others(self) -> tuple[Effect, ...]:
        """The mean over data sets like these, and what a study of a further one measures; empty for fewer than three
        data sets."""
        if not (other := self.other):
            return ()
        mean, further = other[:3], (other.effect, other.next_low, other.next_high)
        ends = further[1:] if self.findings[0].higher_is_better else (-further[2], -further[1])
        margin = min(one.margin for one in self.findings)
        return (
            self._effect(LIKE_THESE, mean, self.verdict, mean[1:]),
            self._effect(FURTHER, further, verdict_of(*ends, margin)),
        )

    def _effect(
        self, name: str, interval: Interval, verdict: Verdict, thick: tuple[float, float] = (math.nan, math.nan)
    ) -> Effect:
        """As tables and plots take it; `thick` is the thick interval of a plot."""
        margin, unit = min(one.margin for one in self.findings), FRACTION if self.unit == "points" else self.unit
        unknown = (math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan)
        return Effect(
            name, *interval, *thick, verdict, 0, *unknown, 0, 0, margin, 1, ALPHA, unit,
            higher_is_better=self.findings[0].higher_is_better,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Evidence(Printed):
    """Several studies, change by change; prints as a table. `left_out`: studies and arms that do not count, and why."""

    changes: tuple[OfChange, ...]
    left_out: tuple[str, ...]

    def __getitem__(self, change: str) -> OfChange:
        """Of the change with this short form; the first metric. KeyError, with the nearest, for another."""
        for found in self.changes:
            if found.change == change:
                return found
        known = dict.fromkeys(found.change for found in self.changes)
        raise KeyError(f"No study here has the change {change!r}. {nearest(change, known)}")

    @property
    def caption(self) -> str:
        """What the rows of the table are."""
        claims = [bool(found.other) for found in self.changes]
        few = f" Fewer than {ENOUGH_SETS} data sets: no claim on others." * (not all(claims))
        return (CLAIMS if any(claims) else EFFECTS) + few

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        more = [{"other": one.other and one.other._asdict(), "differ_in": one.differ_in} for one in self.changes]
        changes = [asdict(found) | facts for found, facts in zip(self.changes, more, strict=True)]
        return {"changes": changes, "left_out": list(self.left_out)}

    def to_markdown(self) -> str:
        """A pipe table, and its caption."""
        rows = [_COLUMNS, ("---",) * len(_COLUMNS), *self._rows("**{}**", "{}")]
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in rows]
        return "\n".join([*lines, "", self.caption])

    def to_latex(self) -> str:
        """A `table` for a paper."""
        table = tabular(_COLUMNS, list(self._rows("{}", "{}")))
        return f"\\begin{{table}}\n\\centering\n\\caption{{{tex(self.caption)}}}\n{table}\n\\end{{table}}"

    def report(self, out: str | Path) -> Path:
        """Write one self-contained HTML page: each change with its plot and its studies; returns its path. Raises
        UserError for another ending, and if it cannot be written."""
        if place(out).suffix.lower() != ".html":
            raise UserError(f"The page {out} must end with .html.")
        written: Path = VIEWS["evidence"](self, out)
        return written

    def __repr__(self) -> str:
        width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
        parts = [_aligned([_COLUMNS, *self._rows("{}", "  {}")], width), textwrap.fill(self.caption, width)]
        return "\n\n".join([*parts, *([f"Left out: {'; '.join(self.left_out)}."] if self.left_out else [])])

    def _rows(self, of_change: str, of_set: str) -> Iterator[tuple[str, ...]]:
        for found in self.changes:
            differ = f"studies differ in {listing(found.differ_in)}" * bool(found.differ_in)
            yield of_change.format(found.title), "", differ
            for effect in found.effects:
                shown = f"{signed(effect.effect, effect.digits)} {interval(effect)}"
                counts = Counter(one.conditions for one in found.sets.get(effect.arm, ()))
                about = "; ".join(f"{count} studies of {one}" if count > 1 else one for one, count in counts.items())
                if effect.arm == LIKE_THESE:
                    about = str(found.verdict)
                elif found.other and effect.arm == FURTHER:
                    about = f"true effects differ by {found.other.spread:.{effect.digits}f} (sd)"
                yield of_set.format(effect.arm), shown, about


_COLUMNS = ("change, data set", "effect, 95 % interval", "model and training")
LIKE_THESE, FURTHER = "data sets like these", "a further data set"
EFFECTS = "Effects are arm minus base, with 95 % intervals."
CLAIMS = (
    f"{EFFECTS} {LIKE_THESE.capitalize()}: the mean effect over such sets, with intervals that hold together over the "
    f"changes; {FURTHER}: what a study of the same kind measures there, its own error included. Both are for one look "
    "at data sets that were named before."
)
NARROWEST, WIDEST = 60, 120  # columns of the printed table


def _aligned(rows: Sequence[Sequence[str]], width: int) -> str:
    """Columns, of which the last one has several lines where it must, and headings across them."""
    first, second = (max(cell_len(row[i]) for row in rows if row[1]) + 2 for i in (0, 1))
    room, lines = max(width - first - second, 24), list[str]()
    for name, shown, about in rows:
        if not shown:
            lines += textwrap.wrap(f"{name}: {about}" if about else name, width, subsequent_indent="    ")
            continue
        start = set_cell_size(name, first) + set_cell_size(shown, second)
        if ", " in about:  # a line ends after a comma, and after a study
            about = ", ".join(part.replace(" ", "\xa0") for part in about.split(", "))
        for each in about.split(";\xa0"):
            for line in textwrap.wrap(each, room, break_long_words=False):
                lines.append((start + line).replace("\xa0", " "))
                start = " " * (first + second)
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def evidence(folders: str | Path | Iterable[str | Path]) -> Evidence:
    """Read the studies in these folders, or in one, and in folders up to two levels below; put them together by change.

    Studies of one data set may share trials, so they count as one effect. With three data sets or more, the mean has an
    interval for data sets like these (`vitmods.stats.across`). Effects are arm minus base, in the unit of the metric.
    What a study has chosen and confirmed on fresh seeds counts as confirmed.

    Raises:
        UserError: a folder without a study, or no finished study with an interval; studies that cannot be read are left
            out, unless there is no other.
    """
    given = [folders] if isinstance(folders, str | Path) or not isinstance(folders, Iterable) else list(folders)
    if odd := [folder for folder in given if not isinstance(folder, str | Path)]:
        raise UserError(f"Evidence is read from the folders of studies, each a path, not {odd[0]!r:.60}.")
    findings: list[Finding] = []
    left_out: list[str] = []
    answers: dict[Path, Answer] = {}
    confirmed: set[tuple[Path | None, str]] = set()
    for path in dict.fromkeys(path for folder in given for path in _studies(folder)):
        try:
            answer = Answer.load(path)
        except UserError as error:
            reason = str(error).partition(". ")[0].rstrip(".")  # without a remedy for its own command
            left_out.append(f"{named(path)} cannot be read ({reason})")
            continue
        if lost := {"spec", "fingerprint", "name", "splits"} - answer.data.keys():
            left_out.append(f"{named(path)} cannot be read (study.json lacks {listing(sorted(lost))} of its data)")
            continue
        if (above := StudyFolder(path).confirmed_study) is not None:  # of the arm that was chosen, finished or not
            confirmed |= {(above, name) for name in answer.settings["arms"]}
        if not answer.complete:
            left_out.append(f"{named(path)} is not finished")
            continue
        if not answer.headline.effects:
            left_out.append(f"{named(path)} has base alone")
        answers[path] = answer
    for path, data in _names_of_sets(answers).items():
        answer = answers[path]
        if not all(effect.base_learned for effect in answer.headline.effects.values()):
            left_out.append(f"base has not learned in {named(path)}")
            continue
        for name, effect in answer.headline.effects.items():
            if why := "was chosen in it to be confirmed" if (path, name) in confirmed else _why_not(effect):
                left_out.append(f"{name} in {named(path)} {why}")
                continue
            try:
                one = _finding(path, name, data, answer, effect)
            except (KeyError, TypeError, ValueError) as error:
                left_out.append(f"{name} in {named(path)} cannot be read ({error!r})")
                continue
            if copy := next((other for other in findings if replace(other, study=one.study) == one), None):
                left_out.append(f"{name} in {named(path)} repeats {named(Path(copy.study))}")
            else:
                findings.append(one)
    if not findings:
        why = f": {'; '.join(left_out)}" if left_out else ""
        raise UserError(f"These folders have no finished study with an interval{why}. Give folders of studies.")
    return together(findings, left_out)


def together(findings: Iterable[Finding], left_out: Iterable[str] = ()) -> Evidence:
    """Put the findings of studies together by change."""
    found: dict[tuple[str, str, str], dict[str, list[Finding]]] = {}
    for one in findings:
        found.setdefault((one.change, one.metric, one.unit), {}).setdefault(one.data, []).append(one)
    family = sum(len(sets) >= ENOUGH_SETS for sets in found.values())
    changes = [_of_change(key, sets, family) for key, sets in found.items()]
    return Evidence(tuple(sorted(changes, key=lambda one: (-len(one.sets), -one.studies))), tuple(left_out))


def _studies(folder: str | Path) -> list[Path]:
    """The folder, if it is a study's or an address, or the studies below it, with what they have confirmed."""
    path = place(folder)
    if address_of(path):
        return [path]
    found = [path] if (path / "study.json").is_file() else []
    found = found or sorted(each.parent for depth in ("*", "*/*") for each in path.glob(f"{depth}/study.json"))
    if not found:
        why = "has no study, and neither have the folders in it" if path.is_dir() else "is not a folder"
        raise UserError(f"{named(Path(folder))} {why}. Give what --out named.")
    return [each for study in found for each in (study, *StudyFolder(study).confirmations)]


def _why_not(effect: Effect) -> str:
    """Why an effect does not count; empty where it does."""
    if effect.provisional:
        return "is provisional"
    return "has too few seeds for an interval" if math.isnan(effect.interval[0]) else ""


def _set_of(spec: str, study: Path) -> str:
    """The spec of a study's data set with its place: the same relative path in two projects names two sets."""
    kind, colon, rest = spec.rpartition(":")
    part = rest.partition("?")[0]
    if address_of(study) or (not colon and part in SOURCES):
        return spec
    parents = study.resolve().parents
    root = next((parent for parent in parents if (parent / part).exists()), None if colon else parents[0])
    return spec if root is None else f"{kind}{colon}{root / rest}"


def _names_of_sets(answers: Mapping[Path, Answer]) -> dict[Path, str]:
    """Name the data set of each study, whatever the order of the studies. Studies that share images are of one set,
    in any place and any splits; where images are not known, studies of one place are. Another set of a name has a
    number."""
    sets: list[tuple[dict[Path, str], dict[str, NDArray[Any] | None]]] = []  # place by study, images by fingerprint
    for path in sorted(answers):
        data, images = answers[path].data, StudyFolder(path).images.read()
        studies = {path: _set_of(str(data["spec"]), path)}
        contents = {str(data["fingerprint"]): None if images is None else images["contents"]}
        for one in [one for one in sets if _is_one_set(one, (studies, contents))]:
            sets.remove(one)
            studies |= one[0]
            contents |= {key: value for key, value in one[1].items() if contents.get(key) is None}
        sets.append((studies, contents))
    names, counts = dict[Path, str](), dict[str, int]()
    for studies, _ in sorted(sets, key=lambda one: min(one[0])):
        name = str(answers[min(studies)].data["name"])
        counts[name] = counts.get(name, 0) + 1
        names |= dict.fromkeys(studies, f"{name} ({counts[name]})" if counts[name] > 1 else name)
    return {path: names[path] for path in answers}


def _is_one_set(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (places, images), (other_places, others) = one, other
    if not images.keys().isdisjoint(others):
        return True
    known = [(a, b) for a in images.values() for b in others.values() if a is not None and b is not None]
    if not known:
        return not set(places.values()).isdisjoint(other_places.values())
    return any(np.isin(a, b).sum() > SHARED * min(len(a), len(b)) for a, b in known)


def _finding(path: Path, name: str, data: str, answer: Answer, effect: Effect) -> Finding:
    shown_by = answer.headline.shown_by.get(name)
    change = (shown_by and shown_by[1]) or Arm.from_identity(name, answer.settings["arms"][name]).text or BASE
    change += ", from trained weights" * bool(answer.settings.get("start"))
    sweep = answer.settings.get("sweep", {})
    of_train = answer.data["splits"]["train"]["count"]
    sizes = [limited(most, of_train) for most in sweep.get("limit_train", [None])]
    others = [
        f"{name} {listing([f'{size:,}' for size in sizes], 'or')}" if name == "limit_train" else name
        for name in sweep
        if name not in ("base", "epochs", "steps")
    ]
    design = answer.settings.get("design", {}).get("kind", "") or f"average over {listing(others)}" * bool(others)
    return Finding(
        change, answer.metric.title, effect.shown_unit, effect.higher_is_better, effect.margin, str(path), data,
        max(sizes),
        listing(answer.bases),
        effect.n, effect.effect, *effect.interval,
        pixels=f"{' x '.join(dict.fromkeys(map(str, answer.settings['img_size'])))} px", length=answer.length,
        design=design, verdict=effect.verdict,
    )  # fmt: skip


def _of_change(key: tuple[str, str, str], sets: Mapping[str, Sequence[Finding]], family: int) -> OfChange:
    other, verdict = None, Verdict.OPEN
    if len(sets) >= ENOUGH_SETS:
        other = other_sets([[(one.effect, one.low, one.high) for one in studies] for studies in sets.values()], family)
        every = [one for studies in sets.values() for one in studies]
        verdict = other.verdict(every[0].higher_is_better, min(one.margin for one in every))
    return OfChange(*key, {name: tuple(studies) for name, studies in sets.items()}, other, verdict)
