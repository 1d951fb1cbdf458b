"""What the pages quote of the papers is what the papers print, with all decimals and ±."""

import re
from pathlib import Path

import pytest

from vitmods.changes import REGISTRY

ROOT = Path(__file__).parents[2]

# page, heading of the table: its rows as printed in the paper, cells joined by "|"
PUBLISHED = {
    ("changes/dpn.md", "recipe|model|base|with|gain"): """
        AugReg|S/32|72.1 ± 0.07|74.0 ± 0.09|+1.9
        AugReg|Ti/16|72.5 ± 0.07|73.9 ± 0.09|+1.4
        AugReg|B/32|74.8 ± 0.06|76.2 ± 0.07|+1.4
        AugReg|S/16|78.6 ± 0.32|79.7 ± 0.2|+1.1
        tuned|S/16+|79.7 ± 0.09|80.2 ± 0.03|+0.5
        AugReg|B/16|80.4 ± 0.06|81.1 ± 0.09|+0.7
        DeiT|S/16|80.1 ± 0.03|80.4 ± 0.06|+0.3
        DeiT|B/16|81.8 ± 0.03|82.0 ± 0.05|+0.2
        AugReg, 384 px|B/32|79.0 ± 0.00|80.0 ± 0.03|+1.0
        AugReg, 384 px|B/16|82.2 ± 0.03|82.8 ± 0.00|+0.6""",
    ("changes/dpn.md", "VTAB-1k|B/32|with|B/16|with"): """
        Caltech101|87.1|87.7|86.1|86.6
        CIFAR-100|53.7|58.1|35.5|51.4
        DTD|56.0|60.7|60.1|63.1
        Flowers102|83.9|86.4|90.8|91.3
        Pets|87.2|88.0|90.9|92.1
        Sun397|32.0|35.4|33.9|32.5
        SVHN|76.8|80.3|76.7|78.3
        Camelyon|77.9|78.5|81.3|80.6
        EuroSAT|94.8|95.0|95.9|95.8
        Resisc45|78.2|81.6|81.2|83.5
        Retinopathy|71.2|70.3|74.7|73.3
        Clevr-Count|58.3|62.5|65.2|73.7
        dSpr-Loc|71.3|60.8|72.1|72.4
        dSpr-Ori|59.8|61.6|61.9|63.0
        KITTI-Dist|73.6|73.4|81.3|80.6
        sNORB-Azim|20.7|20.9|18.9|21.6
        sNORB-Elev|47.2|34.4|50.4|36.2""",
    ("changes/stem.md", "stem|norm|GELU|GFLOPs|val|v2|BeiT"): """
        linear|||17.58|82.20 ± 0.06|71.0|83.05 ± 0.08
        linear|batch||17.58|82.31|71.0|82.98
        linear||yes|17.58|81.55|70.5|83.09
        linear|batch|yes|17.58|82.38|70.7|82.99
        linear, 13 blocks|||19.04|82.35 ± 0.12|71.3|83.26 ± 0.06
        levit|batch|yes|19.07|82.57|71.0|83.04
        levit|layer|yes|19.07|82.50|70.9|83.06
        local|||19.12|82.26|70.6|82.38
        hmlp|batch|yes|17.73|82.54 ± 0.09|71.5|83.43 ± 0.10
        hmlp|layer|yes|17.73|82.50 ± 0.07|71.0|83.24 ± 0.09""",
    ("changes/parallel.md", "epochs, LayerScale|36|18 x 2"): """
        300, no|82.9|83.3
        300, yes|83.9|83.8
        400, no|83.4|83.4
        400, yes|84.1|84.1""",
    ("changes/parallel.md", "batch|S18x2, seq|S18x2, par|B18x2, seq|B18x2, par"): """
        1|44|61|42|61
        2|84|123|80|117
        4|168|245|155|187
        8|334|474|230|211
        16|569|518|266|231
        32|616|556|276|245
        64|647|575|286|248""",
    ("choosing-a-norm.md", "|LayerNorm|batch|instance|group|scale|DTN"): """
        Transformer|36.4|29.2|22.7|28.2|36.6|37.0
        BigBird|36.7|36.7|36.3|36.8|36.9|37.5
        Reformer|37.3|37.2|37.0|37.4|37.3|37.8""",
    ("finetune.md", "|AdamW|SGD|V2, AdamW|V2, SGD"): """
        ViT-S|82.7 / 82.5 / 82.2|82.6 / 82.3 / 82.0|72.5 / 72.4 / 71.6|72.5 / 72.2 / 71.1
        ViT-B|84.3 / 84.3 / 84.1|84.3 / 84.2 / 84.0|73.7 / 74.0 / 73.6|74.0 / 73.9 / 73.7
        ViT-L|85.5 / 85.5 / 85.2|85.4 / 85.3 / 85.1|75.5 / 75.4 / 75.2|75.6 / 75.1 / 75.0""",
    ("finetune.md", "|trained|iNat 2018|iNat 2019|CIFAR-10|CIFAR-100|Cars|Flowers"): """
        ViT-S|all|68.0|73.9|98.9|90.5|89.7|96.8
        ViT-S|attention|60.6|68.7|98.7|89.1|89.8|96.9
        ViT-S|ffn|64.4|72.5|98.9|90.1|88.3|96.1
        ViT-B|all|74.1|78.2|99.3|92.5|92.7|97.8
        ViT-B|attention|71.1|75.7|99.2|91.8|92.8|98.5
        ViT-B|ffn|73.3|77.3|99.3|92.1|88.9|97.5
        ViT-L|all|75.9|79.7|99.3|93.2|93.8|98.3
        ViT-L|attention|75.3|78.7|99.2|92.7|93.8|98.4
        ViT-L|ffn|75.4|79.3|99.2|93.0|93.0|97.6""",
}
NUMBER = re.compile(r"(?<![\d.])[+-]?\d+\.\d+(?: ± \d+\.\d+)?")


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
    rows = [line.strip() for line in PUBLISHED[page, heading].strip().splitlines()]
    assert tables(ROOT / "docs" / page)[heading] == rows


def numbers_of_page(name: str) -> set[str]:
    page = (ROOT / "docs" / "changes" / f"{name}.md").read_text()
    return set(NUMBER.findall(page.partition("## Published numbers")[2].partition("\n## ")[0]))


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_quoted_elsewhere_is_a_number_of_the_changes_page(name):
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if f"](docs/changes/{name}.md)" in line]
    quoted = [row for row in rows if row.startswith("|")] + [REGISTRY[name].published]
    assert len(quoted) == 2
    for text in quoted:
        assert set(NUMBER.findall(text)) <= numbers_of_page(name), text
