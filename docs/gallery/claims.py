"""Rewrite what follows from the claims of the papers and the studies of the gallery: `python docs/gallery/claims.py`.

- src/vitmods/papers/tables/studies.json: the numbers of the gallery's entries, for the package;
- src/vitmods/study/known_effects.json: the effects of each change, by which candidates are chosen;
- docs/claims.md: each claim with its status;
- docs/evidence.md: the effects of each change by data set, between two marks;
- on the page of each change the line of statuses of the claims about it, and the table of its effects in the gallery.

The claims are in src/vitmods/papers/tables/*.toml.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitmods.papers import PAPERS, TABLES
from vitmods.papers.claims import (
    CONDITIONS,
    STUDIES,
    Claim,
    ClaimTest,
    GalleryStudy,
    Status,
    condition_text,
    counted,
    is_met,
    studies,
)
from vitmods.stats.tables import signed
from vitmods.study.arms import Arm, arms_from_text
from vitmods.study.candidates import KNOWN
from vitmods.study.evidence import Finding, OfChange, together

DOCS = Path(__file__).resolve().parents[1]
GALLERY = DOCS / "gallery"
LINE = re.compile(r"^<!-- claims -->\n.*\n", re.M)
MAP = re.compile(r"^<!-- map -->\n.*?^<!-- end of map -->$", re.M | re.S)
NUMBERS = re.compile(r"^<!-- numbers -->\n.*?^<!-- end of numbers -->\n\n", re.M | re.S)
OURS = "\n## Our numbers\n\n"
_EFFECT = re.compile(r"([+−]?[\d.]+) \[([+−]?[\d.]+), ([+−]?[\d.]+)\] .+")
HEAD = """# Claims of the papers

{count} claims of five documents, in our words: {counted}. `vitmods paper claims` prints them. The
[gallery](gallery.md)'s studies are small: images of 8 to 64 px, models of a few blocks.

<!-- Written by docs/gallery/claims.py from src/vitmods/papers/tables. -->

| claim | answer | proof, or best study |
| --- | --- | --- |
{answers}
"""
RULES = """## How a claim gets its status

| status | when |
| --- | --- |
| proven | a test shows the claim without training |
| seen here | the interval is on the claimed side of zero; for "no gain" or "no loss": it excludes the contrary |
| not seen here | it excludes the smallest published effect |
| too wide to test | neither, or its half-width is more than twice the largest published effect |
| decided on one processor | seen or not seen, but not confirmed with other instructions of a processor |
| other conditions | every study breaks a condition of the claim |
| not run | no study tests the claim |

"For" has what a claim holds for: with a published size what its tables measured (data, patches, depth, heads, recipe),
else what its sentence says; for Dual PatchNorm also only with the patches of its paper, 16 and 32 px. A study
counts if it keeps all conditions; [anyone can recompute it](gallery.md#check-it-yourself).

The interval is that of [all studies that count](statistics.md#several-studies-of-one-effect). For a claim without a
published number, only the sign is tested; "no gain", "no loss" and "no difference" allow half a point. Effects are in
points, with simultaneous 95 % intervals. In brackets: why a study does not count.
"""
SHORT = {
    "patch": "{} px",
    "patch_values": "patches of {} values",
    "recipe": "{} recipe",
}
"""Conditions that this page says in fewer words than CONDITIONS"""


def studies_of(gallery: Path = GALLERY) -> dict[str, dict[str, Any]]:
    """Read the numbers of the gallery's entries."""
    entries = {}
    for path in sorted(gallery.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        numbers = {arm: _numbers(text) for arm, text in {**facts["effects"], **facts.get("further", {})}.items()}
        kept = {name: facts[name] for name in ("title", "command", "date", "machine", "metric", "seeds", "facts")}
        kept |= {"design": facts["design"]} if "design" in facts else {}
        again = {arm: _numbers(text) for arm, text in facts.get("again", {}).items()}
        for name, found in (("effects", numbers), ("again", again)):
            kept[name] = {arm: values for arm, values in found.items() if values}
        entries[path.stem] = kept
    return entries


def _numbers(text: str) -> list[float]:
    """Read an effect and its interval; empty for an effect without an interval."""
    match = _EFFECT.fullmatch(text)
    return [float(number.replace("−", "-")) for number in match.groups()] if match else []


def page() -> str:
    """Build docs/claims.md."""
    claims = [claim for paper in PAPERS.values() for claim in paper.claims]
    parts = [HEAD.format(count=len(claims), counted=counted(claims), answers=_answers()), RULES]
    for paper in PAPERS.values():
        parts.append(f"## {paper.title}\n\n[{paper.authors}]({paper.url}). {counted(paper.claims)}.\n")
        answered = [claim for claim in paper.claims if claim.status not in (Status.NOT_RUN, Status.PROVEN)]
        parts += ["\n".join(_entry(paper.name, claim) for claim in answered) + "\n"] if answered else []
        if not_run := [claim for claim in paper.claims if claim.status == Status.NOT_RUN]:
            parts += [f"<details>\n<summary>Not run: {len(not_run)} claims</summary>\n", *_not_run(paper.name, not_run)]
            parts.append("</details>\n")
    return "\n".join(parts)


def _not_run(paper: str, claims: Sequence[Claim]) -> list[str]:
    """The claims that nothing tests, by reason, with the conditions that all of them share."""
    by_reason: dict[str, list[Claim]] = {}
    for claim in claims:
        by_reason.setdefault(claim.why, []).append(claim)
    shared = {why: several for why, several in by_reason.items() if why and len(several) > 1}
    alone = [claim for claim in claims if claim.why not in shared]
    parts = ["\n".join(_entry(paper, claim, says_status=False) for claim in alone) + "\n"] if alone else []
    for why, several in shared.items():
        same = {
            name: wanted
            for name, wanted in several[0].holds.items()
            if all(claim.holds.get(name) == wanted for claim in several)
        }
        entries = "\n".join(_entry(paper, claim, same, says_why=False, says_status=False) for claim in several)
        parts.append(f"{_capital(why)}{f'; all for {_conditions(same)}' if same else ''}:\n\n{entries}\n")
    return parts


def _answers() -> str:
    """The table of all claims that have an answer: what studies say first, then what tests prove."""
    rows = []
    for is_proven in (False, True):
        for paper in PAPERS.values():
            for claim in paper.claims:
                if claim.status != Status.NOT_RUN and is_proven == (claim.status == Status.PROVEN):
                    says = _capital(claim.says).replace("|", r"\|")
                    where = f", {_where(paper.name, claim)}" if is_proven else ""
                    source = f"[{paper.name}](#{_anchor(paper.title)}){where}"
                    rows.append(f"| {says} ({source}) | {claim.status} | {_best(claim)} |")
    return "\n".join(rows)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _best(claim: Claim) -> str:
    """The proof, or the study with the narrowest intervals, of those that count if there are any."""
    if claim.proof:
        return f"`{claim.proof}`"
    best = min(claim.evidence, key=lambda test: (not test.counts, max(e.high - e.low for e in test.effects)))
    return f"{_link(best.study)}: {'; '.join(map(str, best.effects))}"


def _link(study: GalleryStudy) -> str:
    return f"[{study.name}](gallery.md#{study.anchor})"


def _where(paper: str, claim: Claim) -> str:
    tables = ", ".join(f"`{paper}-{name}`" for name in claim.tables if f"{paper}-{name}" in TABLES)
    return f"{claim.where}{f'; {tables}' if tables else ''}"


def _entry(
    paper: str, claim: Claim, said: Collection[str] = (), says_why: bool = True, says_status: bool = True
) -> str:
    slips = "".join(f" But {slip.says}." for slip in claim.slips)
    published = f" Published: {_ranges(claim.effect)}." if claim.points else ""
    unsaid = {name: wanted for name, wanted in claim.holds.items() if name not in said}
    holds = f" For {_conditions(unsaid)}." if unsaid else ""
    why = f" {_capital(claim.why)}." if claim.why and says_why else ""
    text = f"{_capital(claim.says)}. *{_capital(_where(paper, claim))}.*{slips}{published}{holds}{why}"
    lines = [f"- {f'**{claim.status}** · ' if says_status else ''}{text}"]
    if sum(found.counts for found in claim.evidence) > 1:
        lines.append(f"  - Together: {'; '.join(map(str, claim.together))}.")
    for found in sorted(claim.evidence, key=lambda found: not found.counts):
        again = f" With other instructions: {'; '.join(map(str, found.again))}." if found.again else ""
        mark = _mark(found, claim.holds)
        lines.append(f"  - {_link(found.study)}{mark}: {'; '.join(map(str, found.effects))}.{again}")
    return "\n".join(lines)


def _mark(found: ClaimTest, holds: Mapping[str, Any]) -> str:
    """Why a study does not count; empty if it does."""
    return "" if found.counts else f" ({_broken(found.study, holds)})"


def _broken(study: GalleryStudy, holds: Mapping[str, Any]) -> str:
    """What of a study is not as the claim holds for, as `digits, 2 px, 6 blocks`."""
    broken = [name for name, wanted in holds.items() if not is_met(wanted, study.facts[name])]
    values = [_listed(study.facts[name]) for name in broken]
    shown = [" and ".join(map(str, value)) for value in values]
    return ", ".join(_short(name).format(text) for name, text in zip(broken, shown, strict=True))


def _conditions(holds: Mapping[str, Any]) -> str:
    return _ranges(", ".join(_as_short(name, wanted) for name, wanted in holds.items()))


def _as_short(name: str, wanted: Any) -> str:
    """A condition in the words of SHORT."""
    before, after = CONDITIONS[name].split("{}")
    return _short(name).format(condition_text(name, wanted).removeprefix(before).removesuffix(after))


def _short(name: str) -> str:
    return SHORT.get(name, CONDITIONS[name])


def _ranges(text: str) -> str:
    """`0.7 to 1.9` as `0.7–1.9`."""
    return re.sub(r"([\d.]+) to ([\d.]+)", r"\1–\2", text).replace("gain of", "gain").replace("loss of", "loss")


def _capital(text: str) -> str:
    return text if text[1].isupper() else text[0].upper() + text[1:]  # hMLP


def card_lines() -> Mapping[str, str]:
    """Build the line of each change that a claim is about: its claims by status."""
    by_change: dict[str, list[Claim]] = {}
    for paper in PAPERS.values():
        for claim in paper.claims:
            for change in claim.changes:
                by_change.setdefault(change, []).append(claim)
    return {
        change: f"<!-- claims -->\n[Claims](../claims.md) about it: {counted(claims)}.\n"
        for change, claims in by_change.items()
    }


def effects_of_changes() -> Mapping[str, list[tuple[GalleryStudy, str, str]]]:
    """The effects that each change has by itself, by the name of its page: the study, the arm, and its short form. Of a
    study with the change as it is, that arm alone."""
    found: dict[str, list[tuple[GalleryStudy, str, str]]] = {}
    for study in studies().values():
        words = shlex.split(study.command)
        after = itertools.takewhile(lambda word: not word.startswith("--"), words[words.index("--arms") + 1 :])
        arms = [arm for text in after for arm in arms_from_text(text) if arm.name in study.effects]
        by_page: dict[str, list[Arm]] = {}
        for arm in arms:
            if len(arm.changes) == 1 and not arm.recipe:
                page = arm.short if (DOCS / "changes" / f"{arm.short}.md").exists() else arm.changes[0].name
                by_page.setdefault(page, []).append(arm)
        for page, of_page in by_page.items():
            chosen = [arm for arm in of_page if arm.short == page] or of_page
            found.setdefault(page, []).extend((study, arm.name, arm.short) for arm in chosen)
    return found


def numbers_of(effects: Sequence[tuple[GalleryStudy, str, str]]) -> str:
    """The table of a change's effects."""
    rows, shown = [], set[str]()
    for study, arm, short in effects:
        words = study.metric, study.design, "trained weights" if study.facts["start"] == "trained" else ""
        metric = "".join(f", {word}" for word in words if word not in ("top-1", ""))
        title = "" if study.name in shown else f"[{study.name}](../gallery.md#{study.anchor}){metric}"
        effect, low, high = (signed(number, 2) for number in study.effects[arm])
        rows.append(f"| {title} | `{short}` | {effect} [{low}, {high}] | {study.seeds} |")
        shown.add(study.name)
    return (
        "<!-- numbers -->\n"
        "| study | arm | effect [95 % interval] | seeds |\n| --- | --- | --- | --- |\n"
        f"{chr(10).join(rows)}\n\n<!-- end of numbers -->\n\n"
    )


def known_effects() -> list[dict[str, Any]]:
    """The effects on top-1 of each change in models that were trained from scratch, with warm-up as all recipes here
    have it, and what they depend on."""
    known = []
    for study, arm, short in itertools.chain.from_iterable(effects_of_changes().values()):
        facts = study.facts
        if study.metric == "top-1" and facts["start"] == "new" and facts["warm_up"] == "with":
            effect, low, high = study.effects[arm]
            values, patch = (max(_listed(facts[name])) for name in ("patch_values", "patch"))
            of_study = {"data": set_of(facts["data"]), "images": facts["images"], "channels": values // patch**2}
            of_change = {"change": short, "effect": effect, "half": round((high - low) / 2, 2)}
            known.append({**of_change, **of_study, "patch_values": values})
    return sorted(known, key=lambda one: (one["change"], one["data"], one["images"], one["effect"]))


def set_of(data: str) -> str:
    """The name under which a data set counts: photos3 has the same photographs as clothes (datasets.toml)."""
    sets = tomllib.loads((GALLERY / "datasets.toml").read_text(encoding="utf-8"))
    return str(sets.get(data, {}).get("same_as", data))


def evidence_map() -> str:
    """The effects of each change on the data sets of the gallery, and on others."""
    findings = []
    for study, arm, short in itertools.chain.from_iterable(effects_of_changes().values()):
        facts = study.facts
        if study.metric == "top-1" and facts["start"] == "new":
            model = f"{_several(facts['depth'])} blocks, patches of {_several(facts['patch'])} px"
            of_study = study.name, set_of(str(facts["data"])), facts["images"], model, study.seeds
            how = {"length": f"{_several(facts['epochs'])} epochs", "design": study.design}
            findings.append(Finding(short, "top-1", "points", True, 0.5, *of_study, *study.effects[arm], **how))
    every = together(findings)
    several = replace(every, changes=tuple(found for found in every.changes if len(found.sets) > 1))
    alone = ", ".join(_code(found.change) for found in every.changes if len(found.sets) == 1)
    rows = "\n".join(row for found in several.changes for row in _rows_of(found))
    by_facts: dict[str, list[str]] = {}
    for found in several.changes:
        by_facts.setdefault(" and ".join(found.differ_in), []).append(_code(found.change))
    everywhere = len(by_facts) == 1
    differ = " ".join(
        f"Studies of {'each change' if everywhere else ', '.join(found)} differ in {facts or 'nothing'}."
        for facts, found in by_facts.items()
    )
    return (
        "<!-- map -->\n\n| change | data set | top-1, 95 % interval | studies (seeds) |\n| --- | --- | --- | --- |\n"
        f"{rows}\n\n{differ} On one data set alone: {alone}.\n\n<!-- end of map -->"
    )


def _rows_of(found: OfChange) -> Iterator[str]:
    """The rows of a change: its effect on each data set, and what they say of others."""
    change = _code(found.change)
    effects = found.effects
    for effect in effects:
        low, high = effect.interval
        numbers = f"{signed(effect.effect, 2)} [{signed(low, 2)}, {signed(high, 2)}]"
        of_set = found.sets.get(effect.arm, ())
        about = "; ".join(
            f"[{one.study}](gallery.md#{studies()[one.study].anchor}) ("
            + (f"{one.seeds}, {one.design}, {one.images:,} images)" if one.design else f"{one.seeds})")
            for one in of_set
        )
        if not about and found.other:
            is_mean = effect is effects[-2]
            about = str(found.verdict) if is_mean else f"sd between sets {found.other.spread:.2f}"
        yield f"| {change} | {effect.arm} | {numbers} | {about} |"
        change = ""


def _code(change: str) -> str:
    return f"`{change}`"


def _several(fact: Any) -> str:
    return " and ".join(f"{value:,}" for value in _listed(fact))


def _listed(fact: Any) -> list[Any]:
    return fact if isinstance(fact, list) else [fact]


def with_numbers(text: str, numbers: str) -> str:
    """Put the table at the start of a page's own numbers, instead of an earlier one."""
    start, heading, rest = NUMBERS.sub("", text).partition(OURS)
    assert heading
    return start + heading + numbers + rest


def on_card(text: str, line: str) -> str:
    """Put the line at the end of a page's published numbers, instead of an earlier one."""
    start, heading, rest = LINE.sub("", text).partition("\n## Our numbers\n")
    assert heading
    return f"{start.rstrip()}\n\n{line}{heading}{rest}"


def cards() -> dict[Path, str]:
    """The pages of changes as they should be."""
    lines, effects, pages = card_lines(), effects_of_changes(), {}
    for path in sorted((DOCS / "changes").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        text = on_card(text, lines[path.stem]) if path.stem in lines else LINE.sub("", text)
        numbers = numbers_of(effects[path.stem]) if path.stem in effects else ""
        pages[path] = with_numbers(text, numbers)
    return pages


def main() -> None:
    STUDIES.write_text(json.dumps(studies_of(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    studies.cache_clear()
    lines = ",\n".join(map(json.dumps, known_effects()))
    KNOWN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (DOCS / "claims.md").write_text(page(), encoding="utf-8")
    evidence = DOCS / "evidence.md"
    evidence.write_text(MAP.sub(lambda _: evidence_map(), evidence.read_text(encoding="utf-8")), encoding="utf-8")
    for path, text in cards().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
