"""The arms of published tables: what they are in the comparison, and that a model of any size can have them."""

import itertools
import shlex
from types import SimpleNamespace

import pytest
import torch

import vitmods as vm
from vitmods.cli import main
from vitmods.data.sources import each_set
from vitmods.layers.norms import NORMS
from vitmods.papers import TABLES, line_up
from vitmods.papers.comparison import _is_of
from vitmods.papers.sources.transfer import TASKS
from vitmods.papers.table import published
from vitmods.recipes.registry import parse_recipe
from vitmods.study.arms import arms_from_text, parse_edits
from vitmods.study.bases import edited
from vitmods.util.errors import UserError

RUN = [table for table in TABLES.values() if table.study]
OURS = {
    text: arm
    for table in RUN
    for text in table.study.every_arm
    for arm in arms_from_text(text)
    if not arm.recipe and "replace" not in text
}
NORM_ARMS = {arm.name: arm.changes for arm in arms_from_text("norms")}


def base(name="mu12/16", **options):
    torch.manual_seed(0)
    return vm.vit(name, img_size=32, num_classes=10, **options)


@pytest.mark.parametrize("table", RUN, ids=lambda table: table.name)
def test_the_arms_of_a_table_make_a_study(table):
    arms = arms_from_text(f"paper:{table.name}")
    assert len({arm.name for arm in arms}) == len(table.study.every_arm)
    assert line_up(f" paper:{table.name} ") is table
    if table.line_up.start:
        with pytest.raises(UserError, match="starts from trained weights: add --from"):
            vm.Study("mu/4", f"paper:{table.name}")
        return
    study = vm.Study("mu/4", f"paper:{table.name}", task="classification", metric="top1")
    assert len(study.settings.arms) == len(arms)
    swept = {name: list(values) for name, values in table.line_up.sweep.items()}
    assert study.settings.sweep.to_dict() == swept


@pytest.fixture(scope="module")
def old():
    model = base(num_heads=4)
    model.head.weight.data.normal_()  # a new head gives zeros
    return model


@pytest.mark.parametrize("text", OURS)
def test_every_arm_is_another_model(old, text):
    new = vm.apply(old, *OURS[text].changes)
    images = torch.randn(4, 3, 32, 32)
    if new.head.weight.shape != old.head.weight.shape:
        new.head.weight.data.normal_()
    kept = "only_learnable" in text or "whiten=" in text  # begin as the identity
    with torch.no_grad():
        assert ((new(images) - old(images)).abs().max() > 1e-3) != kept
    new(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in new.parameters())


def test_norms_have_the_parameters_of_the_published_comparison():
    config = vm.ViTConfig.from_name("S*/16")

    def edited(name):
        (change,) = NORM_ARMS[name]
        return change.edit(config)

    def kind(name):
        return edited(name).attn.before.kind, dict(edited(name).attn.before.options)

    for name, option, value in (("power", "warmup", 3000), ("scale", "gain", "channel"), ("switchable", "batch", True)):
        assert kind(name) == (name, {})
        assert NORMS[name].arguments[option].default == value
    for name in ("power", "batch", "instance", "group", "switchable"):
        assert edited(name).mlp.before == edited(name).attn.before
        assert edited(name).final_norm == config.final_norm
    model = vm.apply(base("mu2/8"), *NORM_ARMS["group"])
    assert model.blocks[0].norm1.groups == model.vit_config.num_heads
    dtn = edited("dtn")
    assert (dtn.first_blocks.count, dtn.prefix_from) == (10, 10)
    assert dtn.first_blocks.attn.before.kind == "dynamic_token"
    assert dtn.first_blocks.mlp == config.mlp
    assert dtn.first_blocks.attn.before.eps == 1e-5


def test_every_kind_of_norm_suits_models_of_any_size_or_is_refused_with_a_remedy():
    for size, options in (("Ti/4", {}), ("S*/8", {}), ("mu3/4", {"pool": "avg", "reg_tokens": 2})):
        config = vm.ViTConfig.from_name(size, img_size=32, num_classes=10, **options)
        assert all(change.edit(config) != config for (change,) in NORM_ARMS.values())
    single = base("mu2/32", class_token=False, pool="avg")
    for model, name, words in (
        (base("mu/8"), "dtn", r"needs a second block.*take a deeper one"),
        (single, "instance", "one token: take smaller patches"),
        (single, "switchable", "one token: take smaller patches"),
    ):
        with pytest.raises(UserError, match=words):
            vm.apply(model, *NORM_ARMS[name])


@pytest.mark.parametrize("table", RUN, ids=lambda table: table.name)
def test_every_cell_that_a_study_makes_again_is_one_of_the_table(table):
    """Each label and template leads to a row and a column, and the bases have the rows' sizes."""
    numbers = {arm: published(table, text.partition("=")[0]) for arm, text in table.study.arms.items()}
    if table.printed and table.name != "dpn-figure1":  # B12 of tt-table3: a cell that was lost
        assert {arm for arm, cells in numbers.items() if not cells} <= {"B12x1"}
        base_too = () if table.study.reference else (None,)
        labels = itertools.product(table.study.bases, (*base_too, *table.study.arms), table.study.points)
        for base, arm, point in labels:
            _ = table[table.study.cell(base, arm, **point)]  # an unknown row or column raises
    for model in table.study.bases.values():
        if ":" not in model and table.study.task == "classification":
            vm.ViTConfig.from_name(model)


def test_published_differences_have_the_papers_decimals():
    def texts(table, arm):
        return {claim.where: claim.text for claim in published(TABLES[table], arm)}

    of_table5 = zip(("1/16", "1/8", "1/4", "1/2", "1"), ("+0.7", "+1.1", "+1.1", "+1.1", "+0.5"))
    assert texts("dpn-table5", "dpn") == {f"B/16, {share}": text for share, text in of_table5}
    (hmlp,) = published(TABLES["tt-table7"], "hmlp")
    assert (hmlp.text, str(hmlp.base), str(hmlp.arm)) == ("+0.34", "82.20 ± 0.06", "82.54 ± 0.09")
    assert [*texts("dtn-table3", "scale").values()] == ["+0.1", "0.0"]
    assert texts("dpn-table6", "pre")["B/32"] == "-2.6"
    assert texts("dtn-table3", "rms") == texts("dpn-figure1", "subln") == {}
    assert [*texts("dpn-figure1", "dpn").values()] == ["+1.9", "+1.4", "+1.4", "+1.1", "+0.7"]


def test_all_tasks_of_vtab_are_one_command(tmp_path, capsys):
    table = TABLES["dpn-table3"]
    rows = table.study.sweep["data"]
    assert list(rows) == list(table.rows)
    assert each_set("vtab:*?root=x") == [f"vtab:{name}?root=x" for name in TASKS]
    assert {f"{spec}?root=x" for spec in rows.values()} == set(each_set("vtab:*?root=x"))
    assert all(TASKS[spec.partition(":")[2]].title == row.partition(", ")[2] for row, spec in rows.items())
    assert each_set("digits") == ["digits"]
    assert each_set("path/to:*") == ["path/to:*"]
    assert "data" not in table.line_up.sweep, "only where it is asked for"
    command = ["paper", "run", "dpn-table3", "--sweep", f"data=vtab:*?root={tmp_path}"]
    assert main(command) == 2
    assert "starts from trained weights: add --from" in capsys.readouterr().err


def test_a_study_of_one_data_set_is_compared_with_its_row():
    table, answer = TABLES["dpn-table3"], SimpleNamespace(settings={"data": "vtab:dtd?root=x"})
    numbers = {number.where: number.text for number in published(table, "dpn") if _is_of(table, answer, number)}
    assert numbers == {"B/32, Natural, DTD": "+4.7", "B/16, Natural, DTD": "+3.0"}


def test_line_ups_follow_the_size_of_the_images_and_have_all_placements():
    line_up = TABLES["dpn-table1"].line_up
    assert line_up.scaled() == ["S/32", "Ti/16", "B/32", "S/16", "B/16"]
    assert line_up.scaled(2) == ["S/4", "Ti/2", "B/4", "S/2", "B/2"]
    assert TABLES["dtn-table2"].line_up.scaled(2) == ["timm:swin_tiny_patch4_window7_224"]
    arms = {str(change) for arm in arms_from_text("paper:dpn-figure1") for change in arm.changes}
    places = [vm.Placement(attn=a, mlp=m) for a in ("pre", "post", "pre+post") for m in ("pre", "post", "pre+post")]
    control = str(vm.Placement(attn="post", mlp="post", keep_final=True))
    assert {str(place) for place in places[1:]} | {"normformer", "subln", "dpn", control} == arms


def test_the_commands_of_a_table_have_options_that_exist(capsys):
    assert main(["paper", "run", "--help-all"]) == 0
    options = capsys.readouterr().out
    for table in RUN:
        for command in table.study.commands(table.name):
            program, paper, run, name, *words = shlex.split(command)
            assert (program, paper, run, name) == ("vitmods", "paper", "run", table.name)
            assert [word for word in words if word.startswith("--") and word not in options] == [], command


def test_one_arm_is_for_our_models_and_for_others():
    (arm,) = parse_edits("replace(dtn)")
    old = base("mu3/8")
    new, wanted = edited(old, [arm], old.vit_config), vm.apply(old, vm.DynamicTokenNorm())
    assert new.vit_config == wanted.vit_config
    with pytest.raises(UserError, match=r"has slots: write dtn, not replace\(dtn,where=attn\)"):
        edited(old, parse_edits("replace(dtn,where=attn)"), old.vit_config)


@pytest.mark.parametrize("table", RUN, ids=lambda table: table.name)
def test_the_recipe_of_a_table_sets_what_its_models_know(table):
    """timm's models have no dropout and no initialization of a recipe."""
    others = [base for base in table.study.bases.values() if base.startswith("timm:")]
    if others and "--dropout None" not in table.study.options:
        settings = parse_recipe(table.study.recipe).model
        assert (settings.dropout, settings.init, settings.head_bias) == (None, None, None)
