"""Add a study to the gallery, or rewrite its page: `python docs/gallery/add.py RUN NAME --title ... --says ...`.

An entry is an image for wide screens and one for phones, NAME.svg and NAME-narrow.svg, its facts, NAME.json, the scores
that anyone can recompute its intervals from, scores/NAME.json (see scores.py), and the results that its report is made
from when the site is built, NAME.tar.xz (see stored.py), all from the study's folder. The page, docs/gallery.md, is
made from the facts of all entries, sorted by `order`, then by name; without RUN only the page is rewritten.

A study can test claims of the papers: name it in `tests` of a claim in src/vitmods/papers/tables/*.toml, then run
`python docs/gallery/claims.py`. Its facts, such as patches, depth and data, say which claims it can test. Its data set
needs an entry in datasets.toml, from which a stranger can make it again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitmods.stats.verdict import Effect

sys.path.insert(0, str(Path(__file__).parent))

import scores
import stored

HERE = Path(__file__).resolve().parent
HEAD = """# Gallery

Our own studies, each with its command. [Results](../RESULTS.md) has the answers by question, [evidence](evidence.md)
the effects by change and data set.

<!-- Written by docs/gallery/add.py from docs/gallery/*.json. -->

| study | answer | images | seeds |
| --- | --- | --- | --- |
{rows}

Each entry has the difference of each arm to base in points, its 95 % interval and the verdict. In the images, a diamond
is the difference, the line its interval, and the band the margin; `vitmods report FOLDER --out answer.svg` draws them.
Seeds are the most that an arm has; in a factorial study those of a run, with effects averaged over its other changes.
"Older numbers" marks a study of an earlier version of vitmods: now its command may give other numbers.
"""
CHECK = """## Check it yourself

`docs/gallery/scores` has the scores of an entry, for each trial and test image: right or wrong, in packed bits.
A script of numpy and scipy alone recomputes the intervals, and the statuses of [claims](claims.md) that they decide:

```sh
python docs/gallery/recompute.py
```
"""
OLDER = "Older numbers."
DATASETS = """## Data sets

What the commands above were run on. `path/to/NAME` is a folder of the data set named NAME below.
"""


def facts_of(
    run: Path, name: str, title: str, says: str, order: int, against: Sequence[str], images: bool = True
) -> dict[str, object]:
    """Write the images and the results of a study and return the facts for the page.

    Facts that claims can be tested by, beside the effects: those against other arms than base, and those under each
    setting of a sweep.
    """
    from vitmods.papers.comparison import table_of
    from vitmods.report import text
    from vitmods.report.page import summary
    from vitmods.study import Answer
    from vitmods.study.arms import BASE

    answer = Answer.load(run)
    if not answer.complete:
        state = "; ".join([text.headline(answer), *answer.failed])
        sys.exit(f"{run} is not finished: {state}. Run its command again first.")
    if not answer.command.startswith("vitmods "):
        sys.exit(f"{run} was started from Python; the gallery shows commands: run it with `vitmods compare`.")
    environment = answer.environment
    configs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(run.rglob("config.json"))]
    table = table_of(answer)
    references = dict.fromkeys([*against, *([table.study.reference] if table and table.study.reference else [])])
    answers = {BASE: answer} | {reference: Answer.load(run, reference) for reference in references}
    facts = trial_facts(configs, answer.command)
    if problem := scores.store(run, answers, HERE / "scores" / f"{name}.json", facts["numerics"]):
        sys.exit(f"{name} cannot be recomputed: {problem}.")
    for suffix, narrow in (("", False), ("-narrow", True)):
        (HERE / f"{name}{suffix}.svg").write_text(summary(answer, narrow), encoding="utf-8")
    stored.store(run, HERE / f"{name}.tar.xz", images)
    further = {}
    for reference in references:
        effects = answers[reference].effects.items()
        further |= {f"{arm} against {reference}": shown(effect) for arm, effect in effects}
    for setting, effects in answer.each.items():
        further |= {f"{arm} at {setting}": shown(effect) for arm, effect in effects.items() if setting and effect.n}
    return {
        "title": title,
        "says": says,
        "order": order,
        "command": public(answer.command),
        "date": answer.created[:10],
        "machine": str(environment.get("device_name") or environment.get("device") or ""),
        "vitmods": answer.vitmods,
        "headline": text.headline(answer),
        "metric": answer.metric.title,
        "base": answer.metric.shown(answer.base_mean) if answer.base_mean is not None else "",
        "trials": sum(trial.ended for trial in answer.trials),
        "seeds": max((effect.n for effect in answer.headline.effects.values()), default=0),
        "facts": facts,
        "effects": {effect.arm: shown(effect) for effect in text.ranked_effects(answer)},
        **({"design": answer.settings["design"]["kind"]} if "design" in answer.settings else {}),
        **({"notes": list(answer.headline.notes)} if answer.headline.notes else {}),
        **({"further": further} if further else {}),
    }


def trial_facts(configs: Iterable[Mapping[str, Any]], command: str) -> dict[str, object]:
    """The facts that claims have conditions on, from the configs of base's trials; several values as a list.

    `numerics` is the version of the numbers of trials (NUMERICS).
    """
    found: dict[str, list[object]] = {}
    recipe = re.search(r"--recipe (\S+)", command)
    for config in configs:
        if config["arm"] != "base":
            continue
        model, schedule = config["model"], config["recipe"]["schedule"]
        patch, count = model["patch_size"][0], config["data"]["splits"]["train"]["count"]
        steps, batch = config["recipe"].get("steps"), config["recipe"]["batch_size"]
        cold = 0 in (schedule["warmup_epochs"], schedule["warmup_steps"])
        facts = {
            "data": config["data"]["name"],
            "images": count,
            "patch": patch,
            "patch_values": patch * model["patch_size"][1] * model["in_chans"],
            "depth": model["depth"] * model["parallel"],
            "width": model["embed_dim"],
            "heads": model["num_heads"],
            "recipe": recipe[1] if recipe else "default",
            "epochs": config["recipe"]["epochs"] if steps is None else round(steps * batch / count),
            "warm_up": "without" if cold else "with",
            "start": "trained" if config.get("start_weights") else "new",
            "numerics": config["environment"].get("numerics", 1),
        }
        for name, value in facts.items():
            found.setdefault(name, []).append(value)
    several = {name: list(dict.fromkeys(values)) for name, values in found.items()}
    return {name: values[0] if len(values) == 1 else values for name, values in several.items()}


def shown(effect: Effect) -> str:
    """Format an effect as `+1.46 [+0.12, +2.79] helps`."""
    from vitmods.report import text

    return f"{text.numbers(effect)} {effect.verdict}"


def public(command: str) -> str:
    """Return a command without the folders of this machine."""
    from vitmods.util.text import public_command

    return public_command(command, leave_out=("--out",))


def page(folder: Path = HERE) -> str:
    """Build docs/gallery.md from the facts."""
    from vitmods.train.trial import NUMERICS

    entries = [(json.loads(path.read_text(encoding="utf-8")), path.stem) for path in folder.glob("*.json")]
    entries.sort(key=lambda entry: (entry[0]["order"], entry[1]))
    parts = [HEAD.format(rows="\n".join(_row(facts) for facts, _ in entries))]
    for facts, name in entries:
        parts.append(f"## {facts['title']}\n\n{facts['says']}\n")
        parts.append(f"![The effects that follow](gallery/{name}.svg)\n")
        by_verdict: dict[str, list[str]] = {}
        for arm, effect in facts["effects"].items():
            numbers, bracket, verdict = effect.rpartition("]")
            by_verdict.setdefault(verdict.strip(), []).append(f"{arm} {numbers}{bracket}")
        effects = "; ".join(f"{verdict}: {', '.join(arms)}" for verdict, arms in by_verdict.items())
        is_older = facts.get("facts", {}).get("numerics", NUMERICS) != NUMERICS
        of_run = f"{facts['trials']} trials, {facts['date']}, {facts['machine']}"
        parts.append(f"{effects}. {of_run}.{f' {OLDER}' * is_older}\n")
        if notes := [note.rstrip(".") for note in facts.get("notes", ()) if not note.startswith("under ")]:  # a setting
            parts.append(f"*{'; '.join(notes)}.*\n")
        if (folder / f"{name}.tar.xz").exists():
            parts.append(f"<!-- report: {name} -->\n")
        parts.append(f"```console\n$ {facts['command']}\n```\n")
    parts.append(CHECK)
    if (folder / "datasets.toml").exists():
        parts.append(DATASETS)
        for facts in tomllib.loads((folder / "datasets.toml").read_text(encoding="utf-8")).values():
            source = f" [Source]({facts['url']})." if "url" in facts else ""
            parts.append(f"**{facts['title']}.** {facts['says']}{source}\n")
    return "\n".join(parts)


def _row(facts: Mapping[str, Any]) -> str:
    """A study in the table at the top of the page."""
    anchor = re.sub(r"[^\w -]", "", facts["title"].lower()).replace(" ", "-")
    data = facts.get("facts", {}).get("data", "")
    by_verdict: dict[str, list[str]] = {}
    for arm, text in facts["effects"].items():
        numbers, _, verdict = text.rpartition("] ")
        by_verdict.setdefault(verdict or "open", []).append(f"{arm} {numbers.partition(' ')[0]}")
    undecided = by_verdict.pop("open", [])
    answers = [f"{verdict}: {', '.join(arms)}" for verdict, arms in by_verdict.items()]
    answers += [f"{len(undecided)} open"] if undecided else []
    answer = "; ".join(answers)
    return f"| [{facts['title']}](#{anchor}) | {answer} | {data} | {facts['seeds']} |"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="the study's folder")
    parser.add_argument("name", nargs="?", help="of the entry: small letters, digits and -")
    parser.add_argument("--title", help="heading of the entry")
    parser.add_argument("--says", help="one sentence: what was asked, and what came out")
    parser.add_argument("--order", type=int, default=100, help="place in the page; smaller comes first")
    parser.add_argument("--against", nargs="*", default=[], help="arms that the others are compared with, beside base")
    parser.add_argument("--without-images", action="store_true", help="do not store images of the data set")
    options = parser.parse_args(arguments)
    if options.run is not None:
        if not (options.name and re.fullmatch(r"[a-z0-9-]+", options.name) and options.title and options.says):
            parser.error("an entry needs NAME (small letters, digits and -), --title and --says")
        texts, with_images = (options.title, options.says), not options.without_images
        facts = facts_of(options.run, options.name, *texts, options.order, options.against, with_images)
        (HERE / f"{options.name}.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (HERE.parent / "gallery.md").write_text(page(HERE), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
