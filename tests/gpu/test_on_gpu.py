"""On a real GPU: the same numbers as on a CPU, up to rounding, and the ways of running that only a GPU has.

Where there is none, all but torch.compile runs on the pretend one."""

import dataclasses

import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.data.batch import for_device
from vitmods.recipes import Augment, Recipe
from vitmods.tasks import Classification
from vitmods.train import RunOptions, train_trial

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CHANGES = ["dtn(norms=both)", "batchnorm", "", "dpn", "rms", "parallel", "normformer", "hmlp", "qknorm", "swiglu"]
CHANGES = CHANGES if torch.cuda.is_available() else CHANGES[:2]  # test_steps.py has all on the pretend GPU


def make(changes):
    torch.manual_seed(0)
    model = vm.vit("mu2/4", img_size=16, num_classes=5)
    return vm.apply(model, *vm.parse_changes(changes)), torch.randn(8, 3, 16, 16)


@pytest.mark.parametrize("changes", CHANGES)
def test_outputs_and_gradients_are_those_of_a_cpu(changes):
    model, images = make(changes)
    tensors = {}
    for device in ("cpu", "cuda"):
        model = model.to(device)
        model.zero_grad(set_to_none=True)
        out = model(images.to(device))
        out.square().mean().backward()
        # Copies: a model that is moved takes the tensors of its gradients along.
        tensors[device] = [x.detach().cpu().clone() for x in (out, *(p.grad for p in model.parameters()))]
    for expected, other in zip(tensors["cpu"], tensors["cuda"], strict=True):
        torch.testing.assert_close(other, expected, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(changes, dtype):
    model, images = make(changes)
    model, images = model.to(CUDA).eval(), images.to(CUDA)
    with torch.autocast("cuda", dtype):
        half = model(images).float()
    half.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    torch.testing.assert_close(half, model(images), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("fields", [{"erasing": 0.8, "mixup": 0.8}, {"cutmix": 1.0}, {}], ids=str)
@pytest.mark.parametrize("channels", [1, 3])  # of 3, with one number as the mean of all
def test_images_that_are_made_ready_on_the_gpu_are_those_of_the_cpu(fields, channels):
    images = data.load("digits", img_size=(8, 8), in_chans=channels, augment=Augment(**fields), limit_train=96)
    options = {"seed": 3, "epoch": 1, "batch_size": 24}
    pairs = zip(images.train_batches(**options), for_device(images, CUDA).train_batches(**options), strict=True)
    for ready, raw in pairs:
        assert raw.inputs.dtype == torch.uint8
        moved = raw.pinned().to(CUDA)
        assert moved.inputs.device.type == "cuda"
        torch.testing.assert_close(moved.inputs.cpu(), ready.inputs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "ways"),
    [
        ({}, {}),
        pytest.param(
            {"precision": "bf16-mixed", "ema": 0.9},
            {"compile": True},
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
        ({}, {"tf32": True, "checkpointing": True}),
    ],
    ids=str,
)
def test_a_trial_learns_as_on_a_cpu(tmp_path, fields, ways):
    recipe = Recipe().with_(epochs=2, batch_size=64, lr=2e-3, crop="pad", eval_crop=1.0, **fields)
    few = {"limit_train": 320, "limit_val": 64, "test_fraction": 0.05}
    images = data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment, **few)
    loss = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(7)
        model = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10)
        options = RunOptions(device, tensorboard=False, progress=False, **(ways if device == "cuda" else {}))
        dataset = dataclasses.replace(images, workers=2 if device == "cuda" else 0)
        result = train_trial(
            model, Classification.from_recipe(recipe), dataset, recipe, out=tmp_path / device, options=options
        )
        loss[device] = result["metrics"]["loss"]
    assert loss["cuda"] == pytest.approx(loss["cpu"], abs=0.05)


def test_a_step_reads_no_number():
    """What waits for the device raises while it is made."""
    model = vm.vit("mu2/4", img_size=16, num_classes=5, patch_drop=0.5).to(CUDA).train()
    images = torch.randn(8, 3, 16, 16, device=CUDA)
    model(images).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(images).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
