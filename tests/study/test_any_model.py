"""Base and arms of models that vitmods has no config of: timm, torchvision, Hugging Face, functions."""

import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import timm
import torch
from torch import nn

import vitmods as vm
from vitmods.recipes import plain
from vitmods.study import Replace, Study, parse_edits
from vitmods.study.arms import Arm, arm_from_text
from vitmods.study.bases import macs_of, make_base
from vitmods.study.checkpoints import open_trial
from vitmods.study.evaluate import evaluate
from vitmods.study.trial import build_model
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=64)
VIT = "timm:vit_tiny_patch16_224?embed_dim=16&depth=2&num_heads=2&patch_size=4"
SWIN = "timm:swin_tiny_patch4_window7_224?embed_dim=16&depths=(1,1)&num_heads=(2,4)&patch_size=2&window_size=2"
PVT = "timm:pvt_v2_b0?embed_dims=(16,16,16,16)&depths=(1,1,1,1)&num_heads=(1,1,1,1)&mlp_ratios=(1,1,1,1)"


def swin(num_classes, img_size, in_chans):
    return make_base(SWIN, num_classes, img_size, in_chans).build()


def relu(model):
    """ReLU in place of GELU."""
    for module in model.modules():
        if hasattr(module, "mlp"):
            module.mlp.act = nn.ReLU()
    return model


@pytest.fixture(scope="module")
def torchvision_vit():
    from torchvision import models
    from torchvision.models._api import BUILTIN_MODELS, register_model

    def tiny_test_vit(*, weights=None, num_classes=1000, image_size=224):
        return models.VisionTransformer(image_size, 8, 2, 2, 32, 64, num_classes=num_classes)

    register_model()(tiny_test_vit)
    yield "torchvision:tiny_test_vit"
    BUILTIN_MODELS.pop("tiny_test_vit")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("hf")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    ViTForImageClassification(config).save_pretrained(folder)
    return f"hf:{folder}"


def study_of(base=SWIN, arms=("rms=replace(rms)",), **options):
    return Study(base, arms, "digits", **{"recipe": RECIPE, "seeds": 1, "limit_train": 128, **options})


def run(study, out, **options):
    return study.run(out, **{"workers": 1, "device": "cpu", "cost_seconds": 0.1, "progress": False, **options})


def build(base, *edits, side=8, chans=1, seed=0, recipe=None):
    spec = Study(base, ["dpn"]).settings.fixed["base"]
    return build_model(make_base(spec, 10, (side, side), chans), Arm("x", edits), seed, recipe=recipe)


@pytest.mark.parametrize(
    ("base", "chans", "side"),
    [(VIT, 1, 8), (SWIN, 1, 8), (PVT, 3, 32), ("torchvision_vit", 3, 32), ("hf_folder", 1, 8), (swin, 1, 8)],
)
def test_every_base_is_built_from_the_seed_and_its_arms_share_the_weights(base, chans, side, request):
    base = request.getfixturevalue(base) if base in ("torchvision_vit", "hf_folder") else base
    same = {"side": side, "chans": chans}
    first, other = build(base, **same), build(base, seed=1, **same)
    assert first(torch.randn(2, chans, side, side)).shape == (2, 10)
    arm = build(base, *parse_edits("replace(rms)"), **same).state_dict()
    weights, again = first.state_dict(), build(base, **same).state_dict()
    assert all(weights[name].equal(arm[name]) for name in arm)
    removed = set(weights) - set(arm)
    assert removed
    assert all(name.endswith(".bias") for name in removed)
    assert again.keys() == weights.keys()
    assert all(value.equal(weights[name]) for name, value in again.items())
    assert any(not value.equal(weights[name]) for name, value in other.state_dict().items())


def tied(model):
    block = model.layers[0].blocks[0]
    block.norm2 = block.norm1
    return model


IN_PLACE = ("qknorm", "dpn", "scalenorm")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    arms = {
        "rms": "replace(rms)",
        "dtn": "replace(dtn(norms=both))",
        "relu": relu,
        "wide": lambda model: model.double().float(),
        "tied": tied,  # has a tensor at two places
        **{name: name for name in IN_PLACE},
    }
    study, out = study_of(arms=arms, recipe=RECIPE.with_(drop_path=0.1)), tmp_path_factory.mktemp("any") / "out"
    return study, run(study, out), out


@pytest.fixture(scope="module")
def finished_vit(tmp_path_factory):
    study, out = study_of(VIT, IN_PLACE), tmp_path_factory.mktemp("vit") / "out"
    return study, run(study, out), out


def test_a_study_of_a_swin_is_complete_with_costs_counted_and_measured(finished):
    _, result, out = finished
    assert result.complete
    assert not result.failed
    assert result["wide"].effect == 0
    costs = json.loads((out / "costs.json").read_text())
    assert costs["base"]["macs"] == macs_of(build(SWIN), make_base(SWIN, 10, (8, 8), 1)) > 100_000
    assert costs["arms"]["rms"]["params"] < 1 == costs["arms"]["relu"]["params"]
    assert costs["arms"]["dtn"]["flops"] > 1 == costs["arms"]["rms"]["flops"]
    assert costs["arms"]["dtn"]["train_step"]["ratio"] > 0
    page = result.report().read_text()  # has modules in place of a drawing
    assert "Not drawn: SwinTransformer is not a vitmods ViT." in page
    assert "SwinTransformer, 18.7 k parameters, images of 8 × 8 pixels." in page
    for text in ("layers.*.blocks.*.norm1", "RMSNorm", "ReLU in place of GELU.", "those that suit this kind"):
        assert text in page
    assert 'class="drawing"' not in page


def test_costs_that_cannot_be_measured_are_a_warning_and_the_same_call_tries_again(finished, tmp_path, monkeypatch):
    study, _, out = finished
    copy = shutil.copytree(out, tmp_path / "out")
    for name in ("costs.json", "results.json"):
        (copy / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("vitmods.study.cost.measuring", Mock(side_effect=RuntimeError("the GPU is full")))
        with pytest.warns(UserWarning, match="costs of dpn, dtn.* could not be measured .*full"):
            assert run(study, copy).complete
    assert (copy / "results.json").exists()
    assert not (copy / "costs.json").exists()
    run(study, copy)
    assert (copy / "costs.json").exists()


@pytest.mark.parametrize("arm", ["base", "dtn", "relu"])
def test_a_trial_can_be_opened_again(finished, arm):
    folder = finished[2] / "trials" / arm / "seed0"
    if arm == "relu":
        sys.modules[relu.__module__].relu = relu  # a trial that names a function is opened where that is imported
    model = open_trial(folder)
    images = torch.randn(2, 1, 8, 8)
    assert not model.training
    assert model(images).equal(open_trial(folder)(images))
    assert isinstance(model, timm.models.SwinTransformer)
    with pytest.raises(UserError, match=r"open_trial\(folder\) opens it"):
        vm.adapters.load(folder)


def test_a_trial_whose_function_is_gone_says_so(finished, tmp_path):
    with pytest.raises(UserError, match="run that again"):
        open_trial(finished[2] / "trials/wide/seed0")
    folder = shutil.copytree(finished[2] / "trials/relu/seed0", tmp_path / "seed0")
    config = json.loads((folder / "config.json").read_text())
    wrong = {"antigravity": "Python's own", "not_here": "import not_here in your script, or add --plugin"}
    for module, words in wrong.items():
        config["model"]["edits"] = f"python({module}:anything)"
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=words):
            open_trial(folder)
        assert module not in sys.modules
    called = {"base": "python:numpy:save", "num_classes": str(tmp_path / "mark"), "img_size": ["a", "b"]}
    (folder / "config.json").write_text(json.dumps({**config, "model": {**config["model"], **called}}))
    with pytest.raises(UserError, match="whole numbers"):  # else it would be called with whatever the file says
        open_trial(folder)
    config["model"] |= {"edits": "", "base": f"{SWIN}&mlp_ratio=2.0"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="another model than the one that was trained"):
        open_trial(folder)


def test_the_shell_compares_and_evaluates(hf_folder, tmp_path, said):
    options = f"--base {hf_folder} --epochs 1 --limit-train 128 --device cpu --quiet"
    arms = "--arms two=replace(norm(kind=instance),where=mlp) --seeds 1 --workers 1 --cost-seconds 0"
    assert "two" in said(f"compare {options} {arms} --out {tmp_path}/study").out
    trial = tmp_path / "study/trials/two/seed0"
    said(f"evaluate {trial} --protocol top1 --device cpu")
    (evaluation,) = evaluate(trial, ["top1", "knn"], device="cpu")
    assert evaluation["metrics"]["top1"] == json.loads((trial / "result.json").read_text())["metrics"]["top1"]
    assert evaluation["metrics"]["knn"] > 0
    said(f"train {options} --arm replace(rms) --out {tmp_path}/one")


def test_trained_weights_are_loaded_when_asked_for(hf_folder):
    from transformers import ViTForImageClassification

    trained = ViTForImageClassification.from_pretrained(hf_folder.removeprefix("hf:")).state_dict()
    model = build(f"{hf_folder}?pretrained=1")
    assert all(value.equal(trained[name]) for name, value in model.state_dict().items() if "classifier" not in name)
    assert model.training
    with pytest.raises(UserError, match=r"do not fit these images: .*position_embeddings"):
        build(f"{hf_folder}?pretrained=1", side=16)


@pytest.mark.slow
def test_worker_processes_import_a_function_that_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "arms_of_a_test.py").write_text(
        "import timm\n"
        "def base(num_classes, img_size, in_chans):\n"
        "    return timm.create_model('vit_tiny_patch16_224', num_classes=num_classes, img_size=img_size,\n"
        "        in_chans=in_chans, embed_dim=16, depth=1, num_heads=2, patch_size=4)\n"
        "def frozen(model):\n"
        "    model.pos_embed.requires_grad_(False)\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    study = study_of("python:arms_of_a_test:base", ["frozen=python(arms_of_a_test:frozen)"], seeds=2)
    run(study, tmp_path / "out", budget=1, cost_seconds=0)
    result = run(study, tmp_path / "out", budget=1, workers=2, cost_seconds=0)  # for one trial, one worker
    assert not result.failed
    assert (tmp_path / "out" / "trials" / "frozen" / "seed0" / "result.json").exists()
    assert (tmp_path / "out" / "logs" / "worker0.txt").exists()
    import arms_of_a_test

    same = study_of(arms_of_a_test.base, {"frozen": arms_of_a_test.frozen}, seeds=2)
    assert same.settings.to_dict() == study.settings.to_dict()


def test_a_function_of_this_process_alone_has_one_worker(tmp_path):
    study = study_of(lambda *shape: swin(*shape), ["replace(rms)"])
    assert run(study, tmp_path / "one", workers=None, cost_seconds=0).complete
    with pytest.raises(UserError, match="worker processes cannot import"):
        run(study, tmp_path / "two", workers=2)


@pytest.mark.parametrize("study", ["finished", "finished_vit"])
def test_base_and_arms_are_models_of_one_class(study, request):
    asked, answer, out = request.getfixturevalue(study)
    assert answer.complete
    costs = json.loads((out / "costs.json").read_text())
    images = torch.randn(2, 1, 8, 8)
    for arm in ("base", *IN_PLACE):
        folder = out / "trials" / arm / "seed0"
        model = open_trial(folder)  # built without running it, and the same in every process
        assert type(model) is type(build(asked.settings.fixed["base"]))
        assert model(images).equal(open_trial(folder)(images))
        assert [str(change) for change in getattr(model, "vm_changes", ())] == ([] if arm == "base" else [arm])
        assert arm == "base" or costs["arms"][arm]["params"] < (1.1 if arm != "scalenorm" else 1)


def test_a_change_that_needs_a_model_that_can_be_read_makes_every_model_a_vitmods_vit(finished_vit, tmp_path):
    with pytest.warns(UserWarning, match="Base and all arms are built as vitmods ViTs, .* 'parallel' needs a model"):
        result = run(study_of(VIT, ["dpn", "parallel"]), tmp_path / "out")
    assert result.complete
    for arm in ("base", "dpn", "parallel"):
        assert isinstance(open_trial(tmp_path / f"out/trials/{arm}/seed0"), vm.ViT)
    assert 'class="drawing"' in result.report().read_text()
    # Base would be another model.
    with pytest.raises(UserError, match=r"models: read as vitmods ViTs, .* -> changed in place"):
        run(study_of(VIT, ["dpn"]), tmp_path / "out")
    with pytest.raises(UserError, match=r"models: changed in place -> read .* in another folder"):
        run(study_of(VIT, [*IN_PLACE, "parallel"]), finished_vit[2])
    with pytest.raises(UserError, match=r"SwinTransformer is not covered.* 'parallel' needs a model"):
        study_of(SWIN, ["parallel"]).dry_run()


def test_a_damaged_record_of_insertions_is_refused(finished_vit, tmp_path):
    folder = shutil.copytree(finished_vit[2] / "trials/dpn/seed0", tmp_path / "seed0")
    config = json.loads((folder / "config.json").read_text())
    record = config["model"]["insertions"][0]
    other = {**record, "parts": {**record["parts"], "stem": "somewhere.else"}}
    for wrong in (other, {**record, "change": "qknorm"}, {**record, "parts": {}}, {"change": "dpn"}, "dpn", 3):
        config["model"]["insertions"] = [wrong]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"do not fit|damaged|another model"):
            open_trial(folder)


def test_drop_path_reaches_models_that_know_it():
    recipe = RECIPE.with_(drop_path=0.2)
    rates = [m.drop_prob for m in build(SWIN, recipe=recipe).modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.2)
    with pytest.raises(UserError, match=r"drop_path=0\.2 .* set drop_path to None"):
        build(swin, recipe=recipe)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(SWIN, recipe=RECIPE.with_(dropout=0.1)), "The recipe sets dropout="),
        (lambda: build(SWIN, recipe=RECIPE.with_(init="timm")), "The recipe sets init="),
        (lambda: build(SWIN, recipe=RECIPE.with_(head_bias=-5.0)), "The recipe sets head_bias="),
        (lambda: build("timm:swim_tiny_patch4_window7_224"), "Did you mean 'swin_tiny_patch4_window7_224'"),
        (lambda: build(f"{SWIN}&depht=3"), "cannot be built: .*'depht'"),
        (lambda: build("torchvision:vit_b_17"), "Did you mean 'vit_b_16'"),
        (lambda: build("torchvision:vit_b_16"), "read 3 channels, not 1: set in_chans to 3"),
        (lambda: build("hf:nowhere"), "nowhere/config.json does not exist"),
        (lambda: build("timm:vit_tiny_patch16_224"), "cannot"),  # no patch of 16 in 8 pixels
        (lambda: study_of(nn.Linear(1, 1)), "that makes new models, not a Linear"),
        (lambda: study_of(3), "not a int"),
        (lambda: study_of("python:no_such_module:base"), "The plugin 'no_such_module' does not exist"),
        (lambda: arm_from_text("python(timm:wider)"), "does not define a function 'wider'"),
        (lambda: study_of(arms={"dpn": vm.DualPatchNorm}), "is not a change"),
        (lambda: arm_from_text("replace(dpn)"), "takes a kind of norm, as rms or dtn, not 'dpn'"),
        (lambda: arm_from_text("replace(rms,wheer=attn)"), "Did you mean 'where'"),
        (lambda: Replace(vm.Norm("rms"), where=lambda site: True), "give the arm as a function"),
        (lambda: build_arm(print), "has to return the model"),
        (lambda: build_arm(lambda model: nn.Sequential(model, nn.Linear(10, 7))), r"logits of shape \(2, 10\)"),
    ],
)
def test_bases_and_arms_that_cannot_be_built_say_why(call, message):
    with pytest.raises(UserError, match=message):
        call()


def build_arm(function):
    return build(SWIN, *study_of(arms={"x": function}).settings.arms[0].changes)
