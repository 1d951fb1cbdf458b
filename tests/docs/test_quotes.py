"""What pages and code quote of the papers is what the papers print, with all decimals and ±."""

import re
from functools import cache
from pathlib import Path

import pytest

from vitmods.changes import REGISTRY
from vitmods.layers import NORMS
from vitmods.papers import PAPERS, TABLES
from vitmods.recipes import RECIPES, evidence

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\d.])[+-]?\d+\.\d{1,2}(?: ± \d+\.\d+)?(?!\.?\d|[MGk])")


def cells(table, row, columns, sep="|"):
    return sep.join(TABLES[table].shown(row, column) for column in columns)


def difference(table, row, base, arm):
    numbers = TABLES[table]
    return f"{round(numbers[row, arm].value - numbers[row, base].value, 1):+.1f}".replace("+0.0", "0.0").replace(
        "-0.0", "0.0"
    )


def two(row):
    """The last part of a row's name is a cell of its own."""
    return row.rpartition(", ")[0] + "|" + row.rpartition(", ")[2]


STEMS = {
    "linear||": "Linear B12, -, -",
    "linear|batch|": "Linear B12, BN, -",
    "linear||yes": "Linear B12, -, GELU",
    "linear|batch|yes": "Linear B12, BN, GELU",
    "linear, 13 blocks||": "Linear B13, -, -",
    "levit|batch|yes": "Conv LeViT, BN, GELU",
    "levit|layer|yes": "Conv LeViT, LN, GELU",
    "local||": "Local, -, -",
    "hmlp|batch|yes": "hMLP, BN, GELU",
    "hmlp|layer|yes": "hMLP, LN, GELU",
}
KINDS = ("BN", "IN", "GN", "SN", "ScaleNorm", "PowerNorm", "DTN")
SIZES = {"T*/16": "ViT-T*", "S/16": "ViT-S", "S*/16": "ViT-S*", "B/16": "ViT-B", "B*/16": "ViT-B*"}
SPEEDS = [f"{model} {what}" for model in ("S18x2", "B18x2") for what in ("seq", "par")]


def row_of_dtn(size):
    """A row of docs/changes/dtn.md."""
    table, model = TABLES["dtn-table1"], SIZES[size]
    base, arm = (table.shown(f"{model}, {norm}", "top-1") for norm in ("LN", "DTN"))
    heads, flops = (table.shown(f"{model}, DTN", column) for column in ("heads", "FLOPs"))
    return f"{size}|{heads}|{flops} G|{base}|{arm}|{float(arm) - float(base):+.1f}"


# page, heading of the table: its rows, cells joined by "|"
PUBLISHED = {
    ("changes/dpn.md", "recipe|model|base|with|gain"): [
        f"{two(row)}|{cells('dpn-table1', row, ('base', 'DPN'))}|{difference('dpn-table1', row, 'base', 'DPN')}"
        for row in TABLES["dpn-table1"].rows
    ],
    ("changes/dpn.md", "variant|B/16|S/16|B/32|S/32|Ti/16"): [
        f"{row}|{cells('dpn-table6', row, TABLES['dpn-table6'].columns)}" for row in TABLES["dpn-table6"].rows
    ],
    ("changes/dtn.md", "model|heads|FLOPs with DTN|LN|DTN|gain"): [row_of_dtn(size) for size in SIZES],
    ("changes/stem.md", "stem|norm|GELU|GFLOPs|val|v2|BeiT"): [
        f"{stem}|{cells('tt-table7', row, TABLES['tt-table7'].columns)}" for stem, row in STEMS.items()
    ],
    ("changes/parallel.md", "epochs, LayerScale|36|18 x 2"): [
        f"{part}|{cells('tt-table2', f'B36x1, {part}', ['val'])}|{cells('tt-table2', f'B18x2, {part}', ['val'])}"
        for part in ("300, no", "300, yes", "400, no", "400, yes")
    ],
    ("changes/parallel.md", "batch|S18x2, seq|S18x2, par|B18x2, seq|B18x2, par"): [
        f"{row}|{cells('tt-table4', row, SPEEDS)}" for row in TABLES["tt-table4"].rows
    ],
    ("changes/norm.md", "|layer|batch|instance|group|switchable|scale|power|DTN"): [
        line
        for row in TABLES["dtn-table3"].rows
        for line in (
            f"{row}|{cells('dtn-table3', row, TABLES['dtn-table3'].columns)}",
            "against LayerNorm||" + "|".join(difference("dtn-table3", row, "LN", kind) for kind in KINDS),
        )
    ],
    ("choosing-a-norm.md", "|LayerNorm|batch|instance|group|switchable|scale|power|DTN"): [
        f"{size}|{TABLES['dtn-table3'].shown(SIZES[size], 'LN')}|"
        + "|".join(difference("dtn-table3", SIZES[size], "LN", kind) for kind in KINDS)
        for size in ("S/16", "S*/16")
    ],
    ("choosing-a-norm.md", "|LayerNorm|batch|instance|group|scale|DTN"): [
        f"{row}|{cells('dtn-table4', row, TABLES['dtn-table4'].columns)}" for row in TABLES["dtn-table4"].rows
    ],
}


def tables(page: Path) -> dict[str, list[str]]:
    """Rows of each table of a page by its heading, cells joined by "|"."""
    found: dict[str, list[str]] = {}
    rows: list[str] | None = None
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            rows = None
            continue
        row = "|".join(cell.strip(" `") for cell in line.strip()[1:-1].split("|"))
        if rows is None:
            rows = found.setdefault(row, [])
        elif set(row) - set("-|"):
            rows.append(row)
    return found


@pytest.mark.parametrize(("page", "heading"), PUBLISHED, ids=[f"{page}, {heading}" for page, heading in PUBLISHED])
def test_a_table_is_the_papers(page, heading):
    assert tables(ROOT / "docs" / page)[heading] == PUBLISHED[page, heading]


# Of papers whose tables are not here: where a number is quoted -> the numbers, with the paper that says so.
OTHERS = {
    "better_plain": ("76.5", "80.0"),  # Beyer et al., 2022
    "dyt": ("82.3", "82.5", "83.1", "83.6"),  # Zhu et al., 2025
    "rope": ("80.4", "80.9", "80.7", "83.4", "83.6", "83.8", "83.7", "79.4", "80.0", "81.8"),  # Heo et al., code
    "valueresidual": ("16.11", "20.3"),  # Zhou et al., 2025
    "derf": ("82.3", "82.5", "82.8"),  # Chen et al., 2025
}
PAPER_OF = {"Dual PatchNorm": "dpn", "LayerScale": "tt"}
NAMES = {part for table in TABLES.values() for name in table.rows for part in name.split(", ")}
SETS = {name for name in NAMES if re.match("PVT|Swin|LeViT-|T2T|BigBird|Reformer", name)} | {
    *TABLES["tt-table6"].columns,
    *PAPER_OF,
}
SETS |= {row.partition(", ")[2] for row in TABLES["dpn-table3"].rows}
MODEL = r"ViT-(?:Ti|[SBLT])\*?(?!\w)|[TSB]\*/16|(?:Ti|[SBL])/(?:16|32)\+?"
LABEL = re.compile(f"(?<![\\w/-])(?:{MODEL}|{'|'.join(map(re.escape, sorted(SETS, key=len, reverse=True)))})")
BEFORE = re.compile(rf"({NUMBER.pattern}) (?:on |\()({LABEL.pattern})")


def is_of(label, names):
    """Whether a row or a column, by the parts of its name, is of a set, or of a model as any paper writes it."""
    short = label.removeprefix("ViT-").removesuffix("/16")
    forms = () if "/32" in label else ("{}/16", "ViT-{}", "ViT-{}/16")
    sizes = {form.format(size) for form in forms for size in (short, "T" if short == "Ti" else short)}
    deep = re.compile(rf"{re.escape(short)}\d+(x\d+)?")  # B36x1
    return bool({label, *sizes} & names) or any(deep.fullmatch(name) for name in names)


@cache
def printed(label):
    """Every number that is printed in a row or a column of a label, or claimed of it, and the differences of two in a
    row or a column; of the empty label, of any."""
    found = {"0.0", "+0.0"}
    for table in TABLES.values():
        whole = not label or PAPER_OF.get(label) == table.paper.name
        whole |= table.name == "tt-table7" and label in ("ViT-B", "B/16")
        for (row, column), number in table.numbers.items():
            if number.certain and (whole or is_of(label, {*row.split(", "), *column.split(" ")})):
                beside = [table.numbers.get((row, other)) for other in table.columns]
                beside += [table.numbers.get((other, column)) for other in table.rows]
                found |= {number.text, number.text.lstrip("+-")}
                found |= {f"{round(number.value - one.value, 1):+.1f}" for one in beside if one and one.certain}
    for claim in (claim for paper in PAPERS.values() for claim in paper.claims):
        if not label or is_of(label, set(re.findall(r"[\w*/+-]+", claim.says + claim.slip))):
            found |= set(NUMBER.findall(f"{claim.says} {claim.slip}"))
    return found


def misquoted(text, others=()):
    """Numbers of a text that no table has, or not in a row or column of the models or sets named before them."""
    text = BEFORE.sub(r"\2 \1", text.replace("\\*", "*"))
    text = re.sub(r"iNat(?:uralist)? 20(1[89])", r"INAT-\1", text)
    wrong = []
    for paragraph in text.split("\n\n"):
        labels, open_ = ("",), False
        for found in re.finditer(f"(?P<label>{LABEL.pattern})|(?P<number>{NUMBER.pattern})", paragraph):
            if found["label"]:
                labels, open_ = ((*labels, found["label"]) if open_ else (found["label"],)), True
            else:
                open_ = False
                numbers = found["number"] in others or any(found["number"] in printed(label) for label in labels)
                wrong += [] if numbers else [(labels, found["number"])]
    return wrong


SECTION = re.compile(r"^## (?:Published numbers|What is published)\n(.*?)(?=^## |\Z)", re.M | re.S)
PAGES = sorted(path for path in (ROOT / "docs").glob("**/*.md") if SECTION.search(path.read_text()))


def prose(text):
    """Without tables, which are compared whole, and the numbers of sections and versions."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    return re.sub(r"(?:[Ss]ections?|part|arXiv:) ?[\d.]+(?: and [\d.]+)?|\(https?:\S+\)", "", text)


def test_a_misquote_is_found():
    assert misquoted("B/16, linear 82.3 ± 0.06") == [(("B/16",), "82.3 ± 0.06")]
    assert misquoted("S/16 78.6 to 79.7 ± 0.2") == [(("S/16",), "78.6")]  # without its ±
    assert misquoted("S/16 81.1 ± 0.09") == [(("S/16",), "81.1 ± 0.09")]  # of B/16
    assert misquoted("PVT-Tiny has 35.1") == [(("PVT-Tiny",), "35.1")]  # not sure
    assert misquoted("none: 12.3") == [(("",), "12.3")]
    assert not misquoted("S/16 78.6 ± 0.32 to 79.7 ± 0.2, B/16 80.4 ± 0.06")


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_change_says_is_published(name):
    rows = [line for line in (ROOT / "docs/changes.md").read_text().splitlines() if f"](changes/{name}.md)" in line]
    quoted = [row for row in rows if row.startswith("|")] + [REGISTRY[name].published]
    assert len(quoted) == 2, f"write a row for {name} in docs/changes.md"
    for text in quoted:
        assert not misquoted(text, OTHERS.get(name, ())), text


@pytest.mark.parametrize("kind", NORMS.values(), ids=lambda kind: kind.name)
def test_what_a_norm_says_is_published(kind):
    assert not misquoted(kind.published, OTHERS.get({"derf": "derf"}.get(kind.name, "dyt"), ())), kind.published


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_expects_is_published(name):
    if evidence(name).paper or "none published" in evidence(name).expected:
        assert not misquoted(prose(evidence(name).expected), OTHERS.get(name, ())), evidence(name).expected
    page = (ROOT / "docs" / "recipes.md").read_text()
    for row in [line for line in page.splitlines() if line.startswith(f"| `{name}` |") and line.count(" | ") == 3]:
        assert not misquoted(row.rpartition(" | ")[2], OTHERS.get(name, ())), row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_is_published(page):
    for section in SECTION.findall(page.read_text()):
        assert not misquoted(prose(section), OTHERS.get(page.stem, ())), page
