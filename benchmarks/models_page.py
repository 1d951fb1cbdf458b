"""docs/models.md, from the committed table of models and changes in place.

python benchmarks/models_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STRANGERS = ROOT / "benchmarks" / "results" / "strangers.json"
TABLE, PAGE = ROOT / "benchmarks" / "results" / "in_place.json", ROOT / "docs" / "models.md"
SHORT = {"in place": "yes", "overlapping or layered stem": "stem"}
REMEDY = "Write norm(kind=rms,exact=false), which keeps the weights and alters the outputs."
INTRODUCTION = """# Models and changes

Find your model on this page, and read its row. `vm.apply(model, *changes)` reads a model exactly and returns a vitmods
ViT, which supports nearly every change ([how](foreign-models.md)), or [changes it in place](in-place.md) and keeps its
class. The tables show changes in place; `in_place=True` asks for them.

Each model was tested at reduced size, as it is when new and with random weights ({versions}). Each `yes` was
compared with the definition of the change. A name stands for all models of its structure, whose number is in brackets.

| cell | meaning |
| --- | --- |
| yes | in place: the definition of the change holds |
| has it | the model already contains the change: RMSNorm, or normalized queries and keys |
| stem | refused: the patches overlap, or the stem has several layers |
| not certified | not in place: the change would compute something else, e.g. positions also read the queries |
| not recognized | not in place: the model lacks the part, e.g. attention in Mamba, or adds it in another way |

The [reasons](#reasons) are below the tables.

`subln(rescale=false)`, `normformer` and `placement(reading=branch)` use the same branches as `layerscale`. The others
(`parallel`, `size`, `gpsa`) need a model that is read. A study with one of these arms reads base
and all arms ([any model](any-model.md)).
"""


def page(record: dict[str, Any]) -> str:
    """The page as Markdown."""
    versions = ", ".join(f"{name} {version.partition('+')[0]}" for name, version in record["versions"].items())
    parts = [INTRODUCTION.format(versions=versions)]
    for part, result in record["results"].items():
        changes = list(result["counts"])
        totals = [sum(counts.get(word, 0) for word in ("in place", "has it")) for counts in result["counts"].values()]
        names = [f"`{change.partition('(')[0]}`" if change != "another norm" else change for change in changes]
        lines = [
            f"## {part}",
            "",
            f"| model | read | {' | '.join(names)} |",
            f"| --- | --- | {' | '.join('---' for _ in names)} |",
            f"| all {result['models']} | {result['read']} | {' | '.join(map(str, totals))} |",
        ]
        of_cells: dict[tuple[str, ...], list[str]] = {}
        for name, row in result["rows"].items():
            cells = "yes" if row["read"] else "", *(SHORT.get(row[change], row[change]) for change in changes)
            of_cells.setdefault(cells, []).append(f"{name} ({row['models']})" if row["models"] > 1 else name)
        lines += grouped(of_cells)
        parts.append("\n".join(lines) + "\n")
    parts.append(strangers(json.loads(STRANGERS.read_text())))
    intro = f"The refusals of the tables; `...` stands for a module. Those of `rms` continue: {REMEDY}"
    reasons = ["## Reasons", "", intro, ""]
    of_message: dict[str, list[str]] = {}
    for result in record["results"].values():
        for message, names in result["messages"].items():
            if not message.startswith(("has it", "overlapping")):
                of_message.setdefault(message, []).extend(names)
    for message, names in of_message.items():
        reasons.append(f"- {', '.join(dict.fromkeys(names))}: {message.replace('|', '/').replace(f' {REMEDY}', '')}")
    parts.append("\n".join(reasons) + "\n")
    return "\n".join(parts)


def grouped(of_cells: dict[tuple[str, ...], list[str]]) -> list[str]:
    """A row for all models that share their cells, the one with the most names first."""
    rows = sorted(of_cells.items(), key=lambda row: -len(row[1]))
    return [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows]


def strangers(rows: dict[str, dict[str, str]]) -> str:
    """The table of models that nobody wrote for vitmods."""
    changes = list(next(iter(rows.values())))
    taken = [sum(row[change] in ("in place", "has it") for row in rows.values()) for change in changes]
    of_cells: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        of_cells.setdefault(tuple(SHORT.get(cell, cell) for cell in row.values()), []).append(name)
    lines = [
        "## Models of strangers",
        "",
        f"{len(rows)} models of vit-pytorch and x-transformers (x), without `example`. The forms in which people write",
        "a ViT themselves, and what each takes, are listed in `tests/adapters/test_own_models.py`.",
        "",
        f"| model | {' | '.join(f'`{change.partition(chr(40))[0]}`' for change in changes)} |",
        f"| --- | {' | '.join('---' for _ in changes)} |",
        f"| all {len(rows)} | {' | '.join(map(str, taken))} |",
        *grouped(of_cells),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(TABLE.read_text())))
