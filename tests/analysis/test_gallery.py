"""`vitmods analyse` and the report's section inside the models, of a small study."""

import csv
import json
import re

import pytest
import torch

import vitmods as vm
from vitmods.analysis import FIGURES, Examined
from vitmods.analysis.examine import examine
from vitmods.analysis.gallery import write_gallery
from vitmods.cli import main
from vitmods.recipes import RECIPES
from vitmods.study import Answer, Study
from vitmods.study.settings import Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import base_config, build_model
from vitmods.util.errors import UserError

FAST = ("attention_distance", "first_norm", "gradients", "kernels", "lambdas", "token_magnitude")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two seeds of base and of an arm that has everything, after one epoch of some digits."""
    out = tmp_path_factory.mktemp("study")
    recipe = RECIPES["digits"]().with_(epochs=2, batch_size=64, warmup_epochs=0)
    made = Study("mu2/2", arms={"both": "dtn(blocks=1)+dpn"}, data="digits", recipe=recipe, seeds=2, limit_train=128)
    made.run(out, cost_seconds=0, workers=1, progress=False, record=("gradients", "lambdas"))
    return out


def test_a_study_is_its_arms_with_what_was_recorded(study):
    base, both = examine(str(study), images=3)
    assert (base.name, both.name) == ("base", "both")
    assert base.images is both.images
    assert base.images.shape == (3, 1, 8, 8)
    assert both.score == pytest.approx(100 * sum(Answer.load(study).arms[0].scores.values()) / 2)
    assert any("lambda" in row for row in both.record)
    assert not any("lambda" in row for row in base.record)


def test_the_start_is_that_of_the_training(study):
    """What the arm adds is drawn from the seed again, bit for bit: a build of the study's own is the same."""
    both = examine(str(study))[1]
    settings = Settings.from_dict(StudyFolder(study).known_facts().settings)
    cell = settings.cells[1]
    built = build_model(base_config(cell, 10), cell.arm, 0, None, cell.recipe)
    for name in ("a", "omega_mean", "omega_var"):
        started = getattr(both.start.blocks[0].norm1, name)
        assert torch.equal(started, getattr(built.blocks[0].norm1, name))
        assert not torch.equal(started, getattr(both.vit.blocks[0].norm1, name))


def test_the_command_writes_a_page_and_files(study, tmp_path, capsys):
    assert main(["analyse", str(study), "--figures", *FAST, "branches", "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "not made: branches: both: differs from the first model in more than size and branches" in printed
    assert f"{len(FAST)} of {len(FAST) + 1} figures" in printed
    page = (tmp_path / "a" / "index.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:|#|\w+\.(?:csv|svg|pdf|png)")', page)
    assert not re.search(r"(?:stroke|fill): #", page), "every color is the page's"
    for name in FAST:
        kind = FIGURES[name]
        assert kind.title in page
        assert kind.see.partition(":")[0].replace("'", "&#39;") in page
        assert f'aria-label="{kind.title}, {kind.columns[-1]}.' in page
        with open(tmp_path / "a" / f"{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) > 1
        assert (tmp_path / "a" / f"{name}.svg").stat().st_size < 100_000
        assert (tmp_path / "a" / f"{name}.png").stat().st_size > 1000
        assert (tmp_path / "a" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert "base: no position kernels" in page
    assert main(["analyse", str(study), "--figures", *FAST, "branches", "--out", str(tmp_path / "b")]) == 0
    for name in ("index.html", "kernels.pdf"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_one_trial_and_models_that_have_nothing(study, tmp_path, capsys):
    trial = study / "trials" / "both" / "seed1"
    assert main(["analyse", str(trial), "--figures", "kernels", "lambdas", "--out", str(tmp_path)]) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert main(["analyse", "new:mu2/4", "--figures", "kernels", "gradients", "variation", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "not made: kernels: no position kernels" in printed
    assert "not made: gradients: gradients were not recorded: train with --record gradients." in printed
    assert "not made: variation: no images" in printed
    assert main(["analyse", str(study), "--figures", "kernel"]) == 2
    assert "Did you mean 'kernels'" in capsys.readouterr().err
    for options, words in (({"block": 0}, "from 1 on"), ({"data": "digits"}, "leave --data out")):
        with pytest.raises(UserError, match=words):
            examine("new:mu2/4", **options)


def test_names_of_users_are_escaped(tmp_path):
    planted = vm.apply(vm.vit("mu/4", img_size=8), vm.DualPatchNorm())
    name = "<b>$x$ & =1+1"
    write_gallery(name, [FIGURES["first_norm"]], [Examined(name, planted)], tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;$x$ &amp; =1+1" in page


def test_figures_of_other_studies_are_not_missed(tmp_path):
    """Of all figures those that compare scores appear where arms differ in these; asked for, with a reason."""
    base, dpn = (vm.apply(vm.vit("mu2/4", img_size=8), *vm.parse_changes(text)) for text in ("rms", "rms+dpn"))
    alike = [Examined(n, base, config=json.loads(base.vit_config.to_json()), score=80.0) for n in ("a", "b")]
    other = Examined("dpn", dpn, config=json.loads(dpn.vit_config.to_json()), score=81.0)
    kinds = [FIGURES[name] for name in ("stems", "branches", "kernels")]

    def named(models, **how):
        made = write_gallery("x", kinds, models, tmp_path, **how)
        return [figure.kind.name for figure in made.figures], [kind.name for kind, _ in made.missing]

    assert named(alike, every=True) == ([], ["kernels"])
    assert named(alike) == ([], ["stems", "branches", "kernels"])
    assert named([*alike, other], every=True) == (["stems"], ["kernels"])


def test_the_report_shows_the_models(study, tmp_path):
    page = Answer.load(study).report(tmp_path / "report.html").read_text()
    assert "Inside the models" in page
    inside = page[page.index('id="inside"') : page.index('id="costs"')]
    names = [kind.name for kind in FIGURES.values() if f"<strong>{kind.title}</strong>" in inside]
    assert names == ["lambdas", "first_norm", "kernels", "gradients", "stem_gradient"]
    assert len(inside) < 200_000
    assert page == Answer.load(study).report(tmp_path / "again.html").read_text()
