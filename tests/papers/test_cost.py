"""Costs at the papers' scale: the arithmetic against numbers that are worked out by hand."""

import pytest

from vitmods.cli import main
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.papers import TABLES
from vitmods.papers.cost import PEAK, FullScale, full_scale, training_flops


def test_costs_worked_out_by_hand():
    assert training_flops(count_macs(ViTConfig.from_name("B/16")), 1) == pytest.approx(6 * 17.56e9, rel=2e-3)
    low, high = FullScale(1, 3600 * PEAK).gpu_hours(utilization=(0.25, 0.5))
    assert (low, high) == (2, 4)
    cost = full_scale(TABLES["dpn-table1"])
    views = 300 * (1_268_355 // 4096) * 4096
    macs = {"S/32": 1.14e9, "Ti/16": 1.25e9, "B/32": 4.41e9, "S/16": 4.60e9, "B/16": 17.56e9}
    assert cost.trials == 2 * 3 * 5
    assert cost.flops == pytest.approx(2 * 3 * 6 * views * sum(macs.values()), rel=0.01)
    cost = full_scale(TABLES["dpn-table1-21k"])
    assert cost.trials == 2 * 5 * 2
    assert cost.flops == pytest.approx(2 * 6 * (93_000 + 930_000) * 4096 * 28.96e9, rel=0.01)


def test_the_shell_shows_it_and_says_that_it_was_not_run(capsys):
    assert main(["paper", "show", "dpn-table1"]) == 0
    printed = capsys.readouterr().out
    assert "30 trials, 4e+20 FLOPs: about 280 to 560 GPU hours at 20 to 40 % of 989 TFLOP/s" in printed
    assert "not run by us" in printed
