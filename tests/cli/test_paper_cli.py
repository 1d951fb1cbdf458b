"""`vitmods paper`: the list, a table, and running one again; `--arms paper:TABLE` of compare."""

import json

import pytest

from vitmods.cli import main
from vitmods.papers import TABLES
from vitmods.study import Answer


def said(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr()


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_the_list_has_every_table_and_what_is_missing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = said(capsys, "paper").out
    assert all(f" {name} " in text for name in TABLES)
    assert max(map(len, text.splitlines())) <= 100
    assert "not yet: JFT-4B is not public" in text
    record = {one["name"]: one for one in json.loads(said(capsys, "paper", "list", "--json").out)}
    assert list(record) == list(TABLES)
    assert not record["dpn-table4"]["runs"]
    assert record["dpn-table6"]["numbers"]["Pre"]["B/32"] == "-2.6"
    assert record["dtn-table11"]["numbers"]["PVT-Tiny, LN"]["APm"] == "?"


def test_a_table_is_shown_as_printed_and_with_its_slips(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    text = said(capsys, "paper", "show", "dpn-table1").out
    for words in ("78.6 ± 0.32", "81.1 ± 0.09", "vitmods paper run dpn-table1 --data path/to/images", "1.3 on average"):
        assert words in text
    text = said(capsys, "paper", "show", "tt-table3").out
    assert "82.2 ± 0.06" in text
    for hidden in ("2077", "82.3", "82.6", "83.9 ", "3217"):
        assert hidden not in text.replace("83.9 is that of Table 2", "")
    assert json.loads(said(capsys, "paper", "show", "dpn-table6", "--json").out)["runs"]


def test_a_table_is_run_with_the_options_of_compare(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ["--limit-train", "64", "--limit-val", "30", "--epochs", "1", "--seeds", "2", "--device", "cpu"]
    said(capsys, "paper", "run", "dtn-table10", "--base", "mu2/2", *few, "--workers", "1", "--cost-seconds", "0")
    answer = Answer.load(tmp_path / "runs" / "digits-dtn-table10-mu2-2")
    assert set(answer.effects) == {"gpsa", "dtn"}


def test_arms_of_a_table_in_compare(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = said(
        capsys,
        "compare",
        "--arms",
        "paper:dpn-table6",
        "--data",
        "digits",
        "--base",
        "mu2/2",
        "--dry-run",
        "--seeds",
        2,
    )
    for words in ("post-posemb", "dpn(norm=no_learnable)", "16 trials to run"):
        assert words in found.out
    assert "Dual PatchNorm, Table 6: Ablations of Dual PatchNorm" in found.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["paper", "rum", "dpn-table6"], "paper run TABLE"),
        (["paper", "run"], "Say which table"),
        (["paper", "run", "dpn-table6", "--arms", "dpn"], "compare --arms paper:TABLE dpn"),
        (["paper", "run", "dpn-tabel6"], "Did you mean 'dpn-table6'?"),
        (["paper", "show", "dpn-tabel6"], "Did you mean 'dpn-table6'?"),
        (["paper", "run", "dpn-table2"], "JFT-4B is not public"),
        (["paper", "run", "tt-table5"], "add --from, weights trained at 224 px"),
        (["compare", "--arms", "paper:dpn-table6", "paper:dpn-table1"], "one of paper:dpn-table6 and paper:dpn-table1"),
        (["diff", "--arm", "paper:dpn-table6"], "several arms of a study"),
    ],
)
def test_mistakes_are_errors_that_say_what_to_do(capsys, arguments, says):
    assert says in refused(capsys, *arguments)


def test_a_table_fills_in_what_is_not_given(monkeypatch, capsys):
    from vitmods.cli import compare

    seen = []
    monkeypatch.setattr(compare, "_show", lambda result: 0)

    def study(options):
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_study", study)

    def filled(*arguments):
        main(["compare", *arguments])
        return seen[-1]

    assert filled("--arms", "paper:dpn-table1").base == ("S/4", "Ti/2", "B/4", "S/2", "B/2")
    assert filled("--arms", "paper:dpn-table1", "--base", "mu/2").base == ("mu/2",)
    assert "--base S/4 Ti/2" in capsys.readouterr().err
    found = filled("--arms", "paper:norm-choice", "dpn")
    assert (found.sweep, found.arms) == (("warmup_epochs=0,5",), ("paper:norm-choice", "dpn"))
    found = filled("--arms", "paper:norm-choice", "--sweep", "base=mu/2,mu2/2")
    assert (found.sweep, found.base) == (("base=mu/2,mu2/2",), ("mu3/2",))
    assert filled("--arms", "paper:dtn-table6").metric == "mean_corruption_error"
    assert filled("--arms", "paper:dtn-table6", "--metric", "top1").metric == "top1"
    assert filled("--arms", "norms").base == ("mu3/2",)
