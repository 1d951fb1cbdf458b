"""Whitened patches: against NumPy, in a stem, and computed by a trial from its training images."""

import json
import warnings

import numpy as np
import pytest
import torch

import vitmods as vm
from vitmods.layers.norms.whitening import NotFittedWarning, Whitening
from vitmods.layers.stems.base import patchify
from vitmods.tasks import Classification
from vitmods.train import RunOptions, train_trial
from vitmods.util.errors import UserError


def images(count=40):
    """With neighbors that are alike, as in photographs, and a mean far from 0."""
    generator = torch.Generator().manual_seed(0)
    rough = torch.randn(count, 3, 10, 10, generator=generator)
    return 5 + torch.nn.functional.avg_pool2d(rough, 3, 1)


def test_it_is_zca_whitening():
    patches = patchify(images(), (4, 4)).double()
    norm = Whitening(48, eps=1e-9, floor=0.0).double()
    norm.fit(patches.split(7))
    rows = patches.flatten(0, 1).numpy()
    values, vectors = np.linalg.eigh(np.cov(rows.T, bias=True))
    expected = (rows - rows.mean(0)) @ (vectors / np.sqrt(values + 1e-9)) @ vectors.T
    found = norm(patches).flatten(0, 1)
    assert np.allclose(found.numpy(), expected, atol=1e-5)
    assert torch.allclose(torch.cov(found.T, correction=0), torch.eye(48).double(), atol=1e-4)
    assert torch.allclose(norm.matrix, norm.matrix.T)
    assert norm(patches.float()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(norm.float()(patches.float()).double().flatten(0, 1), found, atol=1e-2)


def test_the_floor_keeps_fine_detail_from_becoming_noise():
    patches = patchify(images(), (4, 4))
    sizes = []
    for floor in (0.0, 1e-3, 1.0):
        norm = Whitening(48, floor=floor)
        norm.fit([patches])
        sizes.append(float(norm.matrix.norm()))
    assert sizes[0] > sizes[1] > sizes[2]
    with pytest.raises(ValueError, match="two patches"):
        norm.fit([patches[:1, :1]])


def test_the_stem_says_that_it_waits_and_files_keep_what_was_computed(tmp_path):
    model = vm.apply(vm.vit("mu/4", img_size=8), vm.DualPatchNorm(before="whiten", after=False))
    with pytest.warns(NotFittedWarning, match=r"model.patch_embed.fit\(images\)"):
        model.train()(images(4))
    assert model.patch_embed.waits_for_images
    model.patch_embed.fit(images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = model.train()(images(4)), model.eval()(images(4))
    assert torch.equal(*before)
    vm.export(model, tmp_path / "model.safetensors")
    again = vm.adapters.load(tmp_path / "model.safetensors")
    assert torch.equal(again(images(4)), before[1])
    assert not again.patch_embed.waits_for_images
    with pytest.raises(UserError, match="keep the patch size"):
        again.set_input_size(patch_size=2)
    with pytest.raises(UserError, match=r"only dpn\(before=whiten\)"):
        vm.apply(vm.vit("mu/4", img_size=8), vm.DualPatchNorm()).patch_embed.fit(images())


def test_the_prototype_has_a_norm_behind():
    (change,) = vm.parse_changes("dpn(before=whiten_norm,after=false)")
    model = vm.apply(vm.vit("mu/4", img_size=8), change)
    model.patch_embed.fit(images())
    patches = model.patch_embed.norm_before(patchify(images(), (4, 4)))
    assert torch.allclose(patches.var(-1, unbiased=False), torch.ones(()), atol=1e-2)

    assert vm.parse_changes("dpn(before=false)") == (vm.DualPatchNorm(before=False),)


def test_a_trial_computes_it_once_and_goes_on_with_the_same(tmp_path):
    recipe = vm.recipes.RECIPES["plain"](epochs=1).with_(batch_size=20)
    ds = vm.data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment, limit_train=60, limit_val=20)

    def trained(folder):
        torch.manual_seed(0)
        base = vm.vit("mu/4", img_size=8, in_chans=1, num_classes=10)
        model = vm.apply(base, vm.DualPatchNorm(before="whiten"))
        train_trial(
            model, Classification.from_recipe(recipe), ds, recipe, out=tmp_path / folder, options=RunOptions("cpu")
        )
        return model

    first, second = trained("a"), trained("b")
    complete = Whitening(16)
    complete.fit(patchify(batch, (4, 4)) for batch in ds.plain_images("train", 1000, 7))
    assert torch.allclose(first.patch_embed.norm_before.matrix, complete.matrix, atol=1e-4)
    other = second.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in first.state_dict().items())
    assert json.loads((tmp_path / "a" / "config.json").read_text())["fitted_to_images"] == {"patch_embed": 60}
    found = next(ds.plain_images("train", 3, 10))
    everything = torch.cat([batch.inputs for batch in ds.eval_batches("train", 64)])
    assert torch.equal(found, everything[[0, 30, 59]])
