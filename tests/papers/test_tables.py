"""Published tables as data: all of them, as printed, and what the papers' own texts say of them."""

import re
from statistics import fmean

import pytest

from vitmods.papers import PAPERS, TABLES, Claim, Number, Paper, Table
from vitmods.papers.table import covered
from vitmods.util.errors import UserError


def value(table, row, column):
    number = TABLES[table][row, column]
    assert number.certain
    return number.value


def gains(table, rows, base="base", arm="DPN"):
    return [round(value(table, row, arm) - value(table, row, base), 2) for row in rows]


def test_every_table_is_there_with_all_its_cells():
    """Of five documents: tables, their cells, and how many of these are not sure."""
    papers = {"dpn": (11, 214, 8), "dtn": (15, 335, 5), "norm": (2, 0, 0), "tt": (12, 286, 7)}
    found = {}
    for table in TABLES.values():
        unsure = sum(not number.certain for number in table.numbers.values())
        before = found.get(table.paper.name, (0, 0, 0))
        found[table.paper.name] = (before[0] + 1, before[1] + len(table.numbers), before[2] + unsure)
    assert found == papers


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_a_table_says_what_its_numbers_are(table):
    assert PAPERS[table.paper.name] is table.paper
    assert table.name.startswith(f"{table.paper.name}-")
    assert all((table.title, table.where, table.data, table.study or table.needs or table.bench))
    assert all(len(set(names)) == len(names) for names in (table.rows, table.columns))
    assert all(table.unit_of(column) for column in table.columns)
    assert table.describe()["numbers"].keys() == set(table.rows)


def own(printed):
    return Table("x", PAPERS["dpn"], "x", "x", "x", "x", printed=printed)


def test_cells_as_printed():
    table = TABLES["tt-table7"]
    assert table.shown("Linear B12, -, -", "val") == "82.20 ± 0.06"
    assert table["Linear B12, -, -", "val"] == Number(82.2, 0.06, "82.20 ± 0.06")
    assert TABLES["dpn-table1"].shown("AugReg, S/16", "DPN") == "79.7 ± 0.2"
    assert TABLES["dpn-table6"].shown("Pre", "S/16") == "0.0"
    table = own("a | b | c (G)\nrow | - | 2.0 (MEM)")
    assert (table["row", "b"], table.shown("row", "b"), table.shown("row", "c")) == (None, "", "?")
    assert (table.unit_of("b"), table.unit_of("c")) == ("top-1, %", "G")
    with pytest.raises(ValueError, match="2 cells, the heading 3"):
        _ = own("a | b | c\nrow | 1").numbers


def test_what_is_not_sure_is_never_shown():
    table = TABLES["dtn-table11"]
    assert table["PVT-Tiny, LN", "APm"].value == 35.1
    assert not table["PVT-Tiny, LN", "APm"].certain
    assert table.shown("PVT-Tiny, LN", "APm") == str(table["PVT-Tiny, LN", "APm"]) == "?"
    for entry in TABLES.values():
        for (row, column), number in entry.numbers.items():
            assert (entry.shown(row, column) == "?") != number.certain
            assert (entry.describe()["numbers"][row][column] == number.text) == number.certain


@pytest.mark.parametrize("cell", ["", "81,1", "80.1 ±", "80.1±0.1", "80.1 +- 0.1", "about 80", "80.1 *"])
def test_a_cell_that_is_no_number_is_no_data(cell):
    with pytest.raises(ValueError, match="is not a number"):
        Number.read(cell)
    with pytest.raises(ValueError, match="is not a number"):
        _ = own(f"a | b\nrow | {cell}").numbers


def test_unknown_names_suggest_the_nearest():
    for table, cell, words in (
        ("dpn-table1-21k", ("S/17", "93k DPN"), r"a row 'S/17'. Did you mean 'S/16'"),
        ("dpn-table1", ("AugReg, S/16", "dpn"), r"a column 'dpn'. Did you mean 'DPN'"),
        ("dpn-tabel6", (), r"Did you mean 'dpn-table6'.*`vitmods paper` lists all"),
    ):
        with pytest.raises(UserError, match=words):
            TABLES[table][cell]


FIVE = [f"AugReg, {arch}" for arch in ("S/32", "Ti/16", "B/32", "S/16", "B/16")]


def claim(paper, words) -> Claim:
    (claim,) = [entry for entry in PAPERS[paper].claims if words in entry.says]
    return claim


def test_what_dual_patchnorms_text_says_of_its_tables():
    assert gains("dpn-table1", FIVE) == [1.9, 1.4, 1.4, 1.1, 0.7]
    others = ["DeiT, S/16", "DeiT, B/16", "AugReg, 384 px, B/16", "AugReg, 384 px, B/32"]
    assert gains("dpn-table1", others) == [0.3, 0.2, 0.6, 1.0]
    slip = claim("dpn", "1.4 on average").slip
    assert f"{fmean(gains('dpn-table1', FIVE)):.1f} on average" in slip
    assert f"with S/16+ {fmean(gains('dpn-table1', [*FIVE, 'tuned, S/16+'])):.1f}" in slip
    short = gains("dpn-table1-21k", TABLES["dpn-table1-21k"].rows, "93k base", "93k DPN")
    assert round(fmean(short), 1) == 1.7
    jft = gains("dpn-table2", TABLES["dpn-table2"].rows, "220k base", "220k DPN")
    assert round(fmean(jft), 1) == 0.8
    assert gains("dpn-table1-21k", ["B/16"], "930k base", "930k DPN") == [0.4]
    assert gains("dpn-table2", ["L/16", "B/16"], "1.1M base", "1.1M DPN") == [0.5, -0.3]
    assert gains("dpn-table1-21k", ["Ti/16", "S/32", "S/16"], "930k base", "930k DPN") == [0.2, 1.3, 0.0]
    assert "S/16 ties; Ti/16 and S/32 gain 0.2 and 1.3" in claim("dpn", "in three cases").slip
    assert {row.partition(",")[0] for row in TABLES["dpn-table2-finetune"].rows} == {"B/32", "L/16"}
    vtab = TABLES["dpn-table3"]
    sure = [row for row in vtab.rows if vtab[row, "B/32"].certain]
    all_gains = [gains("dpn-table3", sure, base, f"{base} DPN") for base in ("B/32", "B/16")]
    losses = [[gain for gain in of_base if gain < 0] for of_base in all_gains]
    assert [(len(entry), min(entry), len(sure)) for entry in losses] == [(4, -12.8, 17), (6, -14.2, 17)]
    for words in ("B/16 loses 0.3", "B/32 loses in 4 and B/16 in 6 of the 17", "12.8 and 14.2"):
        assert words in claim("dpn", "never hurts").slip
    (rates,) = re.findall(r"--tune lr=(\S+)", vtab.study.options)
    assert "3e-4" in rates.split(","), "the one that is printed"


def test_what_dynamic_token_norms_text_says_of_its_tables():
    def gain(table, model, column, sign=1):
        return round(sign * (value(table, f"{model}, DTN", column) - value(table, f"{model}, LN", column)), 1)

    assert [gain("dtn-table6", model, "mean", -1) for model in ("ViT-S", "ViT-S*")] == [2.2, 3.9]
    assert "2.2 for ViT-S" in claim("dtn", "ImageNet-C").slip
    top1 = [gain("dtn-table1", model, "top-1") for model in ("ViT-S", "ViT-S*", "ViT-B*", "ViT-B")]
    assert top1 == [0.7, 1.1, 0.8, 0.5]
    flops = [[value("dtn-table1", f"{m}, {norm}", "FLOPs") for norm in ("DTN", "LN")] for m in ("ViT-S*", "ViT-S")]
    more = [dtn / ln for dtn, ln in flops]
    assert [round(100 * (ratio - 1), 1) for ratio in more] == [5.4, 6.1]
    boxes = [gain("dtn-table11", model, box) for model in ("PVT-Tiny", "PVT-Small") for box in ("AP", "APb")]
    assert boxes == [1.3, 1.4, 1.4, 1.3]
    assert "1.3 and 1.4" in claim("dtn", "box AP").slip
    assert not claim("dtn", "ViT-S* gains 1.1").slip
    for model in ("ViT-S, LN", "ViT-S, DTN", "ViT-S*, DTN"):
        errors = [value("dtn-table6", model, column) for column in TABLES["dtn-table6"].columns[1:]]
        assert fmean(errors) == pytest.approx(value("dtn-table6", model, "mean"), abs=0.2)
    lists = TABLES["dtn-table4"]
    assert [round(lists[row, "DTN"].value - lists[row, "LN"].value, 1) for row in lists.rows] == [0.6, 0.8, 0.5]
    assert value("dtn-imagenet-r", "ViT-S*", "DTN") - value("dtn-imagenet-r", "ViT-S*", "LN") == pytest.approx(3.0)


def test_every_claim_is_printed_with_the_tables_that_it_is_about():
    for paper in PAPERS.values():
        for entry in paper.claims:
            assert entry.tables or "Figure" in entry.where
            assert {name for slip in entry.slips for name in slip.tables} <= set(entry.tables), entry
            assert all(entry in TABLES[f"{paper.name}-{name}"].claims for name in entry.tables), entry
    assert not any("LeViT" in str(entry) for entry in TABLES["dtn-table1"].claims), "that is about Table 10"
    text = "The text (Table 10): LeViT-128S has 76.7 with its own norm. But 76.6 in Table 12: two baselines. [not run]"
    assert text in [str(entry) for entry in TABLES["dtn-table12"].claims]


@pytest.mark.parametrize(
    ("table", "results"),
    [("dtn-table12", (2, 8)), ("dpn-table3", (76, 76)), ("dtn-table12-levit", (2, 2)),
     ("dpn-table1-21k", (20, 20)), ("dpn-table1", (10, 20)),
     ("dtn-table3", (16, 16)), ("dpn-table6", (30, 30)), ("dpn-figure1", (10, 10)), ("tt-table7", (10, 30))],
)  # fmt: skip
def test_how_much_of_a_table_its_study_covers(table, results):
    assert covered(TABLES[table]) == results


def test_what_three_things_text_says_of_its_tables():
    def lost(model, column):
        return round(value("tt-table5", f"{model}, attn", column) - value("tt-table5", f"{model}, full", column), 1)

    assert [lost("ViT-S", column) for column in TABLES["tt-table5"].columns] == [-0.2, -0.3, -0.1, -0.3]
    assert (lost("ViT-L", "SGD v2"), lost("ViT-B", "AdamW v2")) == (-0.5, 0.3)
    levit = value("tt-table7", "Conv LeViT, BN, GELU", "FLOPs") / value("tt-table7", "Linear B12, -, -", "FLOPs")
    assert f"{100 * (levit - 1):.1f} % more" in claim("tt", "convolutional stem takes").slip
    wide, deep, parallel = (value("tt-table3-l24", row, "v2") for row in ("L24x1", "B36x1", "B18x2"))
    assert f"L24x1 has {wide} on V2, the deeper B36x1 {deep} and B18x2 {parallel}" in claim("tt", "deeper models").slip
    speeds = TABLES["tt-table4"]
    for row in speeds.rows:
        for model in ("S18x2", "B18x2"):
            seq, par, best = (speeds[row, f"{model} {what}"].value for what in ("seq", "par", "best"))
            assert best == max(seq, par)
            assert 100 * (best / seq - 1) == pytest.approx(speeds[row, f"{model} gain"].value, abs=0.8)


def test_a_paper_of_ones_own():
    assert all(isinstance(paper, Paper) and paper.url.startswith("https://") for paper in PAPERS.values())
    assert [entry.where for entry in PAPERS["norm"].claims if entry.slip] == ["part 1"] * 2 + ["part 2"] * 2
