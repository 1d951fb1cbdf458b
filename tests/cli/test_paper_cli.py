"""`vitmods paper`: the list, a table, and running one again; `--arms paper:TABLE` of compare."""

import json

import pytest

import vitmods as vm
from vitmods.cli import main
from vitmods.papers import TABLES
from vitmods.papers.cost import full_scale
from vitmods.study.arms import LineUp

pytestmark = pytest.mark.usefixtures("short_clocks")


def test_the_list_has_every_table_and_what_is_missing(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = said("paper").out
    assert all(f" {name} " in text for name in TABLES)
    assert max(map(len, text.splitlines())) <= 100
    assert "not available: JFT-4B is not public" in text
    record = {one["name"]: one for one in json.loads(said("paper list --json").out)}
    assert list(record) == list(TABLES)
    assert not record["dpn-table2"]["runs"]
    assert record["dpn-table6"]["numbers"]["Pre"]["B/32"] == "-2.6"
    assert record["dtn-table11"]["numbers"]["PVT-Tiny, LN"]["APm"] == "?"


def test_a_table_is_shown_as_printed_and_with_its_slips(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    text = said("paper show dpn-table1").out
    for words in ("78.6 ± 0.32", "81.1 ± 0.09", "vitmods paper run dpn-table1 --data path/to/images", "1.3 on average"):
        assert words in text
    text = said("paper show dtn-table12-levit").out
    assert "missing" not in text
    assert "--base timm:levit_128s" in " ".join(text.split())
    assert "2 of the table's 2 results" in text
    text = said("paper show tt-table3").out
    assert "82.2 ± 0.06" in text
    assert not any(hidden in text for hidden in ("2077", "82.3", "82.6"))
    text = said("paper show tt-table3-l24").out
    assert not any(hidden in text.replace("83.9 is that of Table 2", "") for hidden in ("83.9 ", "3217"))
    assert json.loads(said("paper show dpn-table6 --json").out)["runs"]


def test_the_cost_at_full_scale_is_counted(said):
    """DTN's ablation by hand: S* has 5.74 G multiply-adds a forward, six FLOPs a training step each."""
    cost = full_scale(TABLES["dtn-table8"])
    assert cost.trials == 18
    assert cost.flops == pytest.approx(18 * 6 * 5.74e9 * 300 * 1_281_167, rel=0.02)
    assert "Swin-S" in full_scale(TABLES["dtn-table10b"]).why
    for table in TABLES.values():
        if table.study and not table.study.start and not any(":" in base for base in table.study.bases.values()):
            assert full_scale(table).flops or "plain" in full_scale(table).why, table.name
    shown = said("paper show dtn-table8").out.replace("\n", " ")
    assert f"With 1 base (5 of the table's 5 results): {cost}." in shown


def test_a_table_of_speeds_is_run_by_bench(said, refused):
    text = said("paper run tt-table4 --img-size 16 --batch=1 --seconds 0 --models apart:mu2x2/8 fast:mu2x2/8").out
    assert "inference, batch 1\n" in text
    assert not any(words in text for words in ("batch 2", "training,"))
    assert "569" in text
    assert "not have parallel branches" in refused("bench --models apart:mu2/8 --img-size 16")


def test_arms_of_a_table_in_compare(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = said("compare --arms paper:dpn-table6 --data digits --base mu2/2 --dry-run --seeds 2")
    for words in ("post-posemb", "dpn(norm=no_learnable)", "16 trials to run"):
        assert words in found.out
    assert "Dual PatchNorm, Table 6: Ablations of Dual PatchNorm" in found.err


def test_a_table_fills_in_what_is_not_given(monkeypatch, capsys):
    """In Python as in the shell: the bases, the sweep, the task and the metric."""

    def filled(arms, data="digits", **given):
        study = vm.Study(given.pop("base", None), arms, data, **given)
        sweep = study.settings.sweep.to_dict()
        return sweep.pop("base", study.settings.fixed["base"]), sweep, study.settings.measure.name

    bases, *others = filled("paper:dpn-table1")
    assert [base.partition("?")[0] for base in bases] == ["S/4", "Ti/2", "B/4", "S/2", "B/2"]
    assert others == [{}, "top1"]
    assert filled("paper:dpn-table1", base="mu/2?") == ("mu/2", {}, "top1")
    assert filled(["paper:norm-choice", "dpn"])[1] == {"warmup_epochs": [0, 5]}
    bases = {"base": ["mu/2", "mu2/2"]}
    assert filled("paper:norm-choice", sweep=bases) == (["mu/2", "mu2/2"], {}, "top1")
    assert filled("paper:dtn-table6")[2] == "mean_corruption_error"
    assert filled("paper:dtn-table6", metric="top1")[2] == "top1"
    assert isinstance(filled("norms")[0], str)
    unlabeled = LineUp("x", "X", ("dpn",), (), task="dino")
    monkeypatch.setattr("vitmods.study.arms.find_line_up", lambda text: unlabeled if text == "x" else None)
    assert vm.Study("mu/2", "x").settings.fixed["task"] == "dino"
    assert vm.Study("mu/2", "x", task="classification").settings.fixed["task"] == "classification"
    monkeypatch.undo()
    options = ["--device", "cpu", "--workers", "1", "--dry-run", "--epochs", "9", "--limit-train", "99"]
    assert main(["compare", "--arms", "paper:norm-choice", "--base", "mu1/4", *options]) == 0
    assert "Using --sweep warmup_epochs=0,5" in capsys.readouterr().err
