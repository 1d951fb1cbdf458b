"""Studies whose arms begin with trained weights of their own: a study's folder, or one of several checkpoints."""

import pytest
import torch

import vitmods as vm
from vitmods.adapters import open_checkpoint
from vitmods.cli import main
from vitmods.recipes import plain
from vitmods.study import Study
from vitmods.study.arms import Arm
from vitmods.study.checkpoints import open_trial
from vitmods.study.run import python_call
from vitmods.study.trial import base_config, build_model
from vitmods.util.errors import UserError

RECIPE = plain(epochs=1).with_(batch_size=64)
IMAGES = {"data": "digits", "recipe": RECIPE, "limit_train": 128}
RUN = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained")
    Study("mu2/4", ["dpn", "post=placement(attn=post,mlp=post)"], seeds=2, **IMAGES).run(out, **RUN)
    return out


@pytest.fixture
def folder(tmp_path):
    for name, size in (("base", "mu2/4"), ("wide", "mu3/4")):
        torch.manual_seed(0)
        vm.adapters.save(vm.vit(size, img_size=8, in_chans=1, num_classes=10), tmp_path / f"{name}.safetensors")
    return tmp_path


def model_of(study, name, seed=0):
    settings = study.settings
    return build_model(base_config(settings, 10), settings.arm(name), seed, settings.fixed["start"])


def body(model):
    return {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}


@pytest.mark.parametrize("arm", ["base", "dpn", "post"])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_arm_and_seed_begins_with_its_own_weights(pretrained, arm, seed):
    study = Study(start=pretrained, seeds=2, **IMAGES)
    assert [arm.name for arm in study.settings.arms] == ["dpn", "post"]
    trained = open_trial(pretrained / "trials" / arm / f"seed{seed}")
    begun = model_of(study, arm, seed)
    assert begun.vit_config == trained.vit_config
    for name, value in body(trained).items():
        assert torch.equal(body(begun)[name], value)
    assert not torch.equal(begun.head.weight, trained.head.weight)


def test_changes_that_the_folder_lacks_begin_with_base(pretrained):
    study = Study(start=pretrained, arms=["dpn", "normformer", "dpn+train(attention)", "attention"], **IMAGES, seeds=2)
    starts = {arm.name: arm.start and arm.start.rsplit("/", 1)[-1] for arm in study.settings.arms}
    assert starts == {"dpn": "dpn", "normformer": None, "dpn+train(attention)": "dpn", "attention": None}
    assert study.settings.arm("dpn+train(attention)").recipe == {"train": "attention"}
    base = open_trial(pretrained / "trials/base/seed1")
    assert torch.equal(body(model_of(study, "normformer", 1))["pos_embed"], base.pos_embed)


def test_a_study_of_transfer_runs_to_its_report(pretrained, tmp_path):
    study = Study(start=pretrained, seeds=1, **IMAGES)
    result = study.run(tmp_path, **RUN)
    assert result.complete
    assert "Starts from its own trained weights" in result.report().read_text()
    assert study.run(tmp_path, **RUN).to_dict() == result.to_dict()
    names = {}
    call = python_call(study.settings, "out")
    exec(call.replace("vm.Study(", "study = vm.Study(").removesuffix(".run('out')"), names)
    assert names["study"].settings.to_dict() == study.settings.to_dict()


def test_a_folder_of_files(folder):
    study = Study(start=folder, **IMAGES)
    assert study.settings.arms == (Arm("wide", start=str(folder / "wide.safetensors")),)
    assert study.settings.arms[0].text == "from wide.safetensors"
    wide = open_checkpoint(str(folder / "wide.safetensors"))
    for seed in (0, 3):
        assert torch.equal(model_of(study, "wide", seed).pos_embed, wide.pos_embed)


def test_the_shell_takes_the_arms_of_the_folder(folder, capsys):
    assert main(["compare", "--from", str(folder), "--limit-train", "128", "--epochs", "1", "--dry-run"]) == 0
    assert "wide" in capsys.readouterr().out


def test_a_seed_that_was_not_trained_is_named(pretrained, tmp_path):
    with pytest.raises(UserError, match=r"does not hold seed2, but seed0, seed1"):
        Study(start=pretrained, seeds=[2], **IMAGES).run(tmp_path, **RUN)


def test_a_folder_without_base_is_refused(folder):
    (folder / "base.safetensors").unlink()
    with pytest.raises(UserError, match="holds the checkpoints wide, and none is named base"):
        Study(start=folder, **IMAGES)


def test_one_fine_tuning_takes_one_checkpoint(folder, capsys):
    assert main(["finetune", "--model", str(folder)]) == 2
    assert "holds several checkpoints: base, wide" in " ".join(capsys.readouterr().err.split())
