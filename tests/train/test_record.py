"""What a training records of the inside of its model."""

import json

import pytest
import timm
import torch

import vitmods as vm
from vitmods.train.loggers import Diverged, Window, gradient_norms, lambdas_of, layers_of

BOTH = ("gradients", "lambdas")


def dtn(bench, **overrides):
    return vm.apply(bench.model(**overrides), vm.DynamicTokenNorm(blocks=1))


def test_gradients_are_those_of_each_layers_parameters():
    torch.manual_seed(0)
    model = vm.apply(vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10), vm.DualPatchNorm())
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    norms = gradient_norms(layers_of(model))
    assert list(norms) == ["gradient/stem", "gradient/blocks.0", "gradient/blocks.1", "gradient/head"]

    def norm(*beginnings):
        gradients = [p.grad.flatten() for n, p in model.named_parameters() if n.startswith(beginnings)]
        return torch.cat(gradients).norm()

    torch.testing.assert_close(norms["gradient/stem"], norm("patch_embed.proj."))  # without the norms around it
    torch.testing.assert_close(norms["gradient/blocks.1"], norm("blocks.1."))
    torch.testing.assert_close(norms["gradient/head"], norm("head."))
    assert not gradient_norms({})
    half = gradient_norms(layers_of(model), processes=2)  # a part of a sum over processes
    torch.testing.assert_close(2 * half["gradient/stem"], norms["gradient/stem"])


def test_layers_of_other_libraries_models():
    timm_model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    assert list(layers_of(timm_model)) == ["stem", "blocks.0", "blocks.1", "head"]
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=2, depths=(1, 2), num_heads=(3, 6)
    )
    assert list(layers_of(swin))[1:-1] == ["layers.0.blocks.0", "layers.1", "layers.1.blocks.0", "layers.1.blocks.1"]


def test_recording_leaves_training_alone_and_goes_on_bit_for_bit(bench, tmp_path, goes_on):
    """Also of a trial that is stopped between two rows."""
    bench.train(tmp_path / "plain", dtn(bench))
    goes_on(7, lambda: dtn(bench), record=BOTH, tensorboard=True)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "whole")]
    assert weights[0] == weights[1]
    rows = bench.rows(tmp_path / "whole")
    assert all(row["gradient/stem"] > 0 for row in rows if row["split"] == "train")
    recorded = [row for row in rows if row["split"] == "record"]
    assert [row["step"] for row in recorded] == [row["step"] for row in rows if row["split"] == "val"]
    assert len(recorded[0]["lambda"]["mean blocks.0.norm1"]) == 2


def test_it_may_be_asked_for_later_and_no_more(bench, tmp_path, monkeypatch):
    """The rows of the steps that have it all have it; a change in the middle of a row leaves it out there."""
    for out, first, then in (("on", (), BOTH), ("off", BOTH, ())):
        bench.stop(monkeypatch, tmp_path / out, at=7, record=first)
        assert bench.train(tmp_path / out, record=then)["status"] == "finished"
        has = ["gradient/stem" in row for row in bench.rows(tmp_path / out) if row["split"] == "train"]
        assert has == ([False, False, True] if then else [True, False, False])


def test_the_last_lambdas_are_those_of_the_weights(bench, tmp_path):
    model = dtn(bench)
    bench.train(tmp_path, model, bench.recipe(ema=0.9), record=("lambdas",))
    recorded = [row for row in bench.rows(tmp_path) if "lambda" in row][-1]["lambda"]
    assert recorded == lambdas_of(vm.adapters.load(str(tmp_path)))
    assert recorded != lambdas_of(model)  # it is the moving average that counts
    assert json.dumps(recorded)


def test_a_gradient_that_is_not_finite_is_an_end():
    window = Window()
    for norm in (1.0, float("inf"), 2.0):
        window.add({"loss": torch.tensor(1.0), "gradient/blocks.1": torch.tensor(norm)}, 1)
    with pytest.raises(Diverged, match="the gradient was not finite at step 9"):
        window.take(10)
