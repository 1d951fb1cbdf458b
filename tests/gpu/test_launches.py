"""Operations of a training step that start a kernel or a copy on a GPU: a small model's step takes as long as these."""

from pathlib import Path

import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.changes.compose import edit
from vitmods.data.augment import Mixing, mix_targets
from vitmods.data.batch import Batch, DeferredTransforms, for_device
from vitmods.recipes import Augment, Recipe
from vitmods.tasks import Classification

RECIPE = Recipe().with_(epochs=2, batch_size=2, clip_norm=1.0, ema=0.999)
BUDGETS = {"": 700, "dpn": 720, "rms": 760, "layerscale": 760, "qknorm": 860, "swiglu": 950}
BUDGETS |= {"groupnorm": 1200, "powernorm": 1200, "dtn": 1300}
"""by change; timm's step makes 699"""
PAGE = Path(__file__).parents[2] / "docs/speed.md"


def launches(run_on_gpu, gpu, changes):
    """Of the second step of S/16 in bfloat16, with mixup, clipping and a moving average. They are as many at any width
    and size of images as at 384 and 224 px."""
    config = vm.ViTConfig.from_name("S/16", img_size=32, num_classes=10, embed_dim=24, mlp_dim=96)
    model = vm.ViT(edit(config, vm.parse_changes(changes)) if changes else config)
    mixing, labels = Mixing(0.8), torch.tensor([3, 5])
    deferred = DeferredTransforms(torch.zeros(3, 1, 1), torch.ones(3, 1, 1), mixing=mixing)
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    batch = Batch(images, mix_targets(mixing, labels, 10), torch.arange(2), deferred=deferred)
    with gpu.launching():
        trial = run_on_gpu(model, Classification.from_recipe(RECIPE), RECIPE, batch, ("bf16-mixed",))
        with gpu.launching() as counts:
            trial._train_step(batch)
    return counts


@pytest.mark.parametrize("changes", BUDGETS)
def test_a_step_keeps_its_budget_and_the_page_says_its_operations(run_on_gpu, gpu, changes):
    count = launches(run_on_gpu, gpu, changes).total()
    assert count <= BUDGETS[changes]
    rows = (line.strip("|\n ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| "))
    said = {row[0].strip("`"): row[1] for row in rows if len(row) == 2}
    assert said[changes or "base"].replace(",", "") == str(count)


@pytest.mark.parametrize("parts", [1, 3])
def test_erasing_and_mixing_take_a_few_operations_whatever_the_size_of_the_batch(gpu, parts):
    augment = Augment(mixup=0.8, erasing=1.0)
    images = data.load("digits", img_size=(8, 8), in_chans=1, augment=augment, limit_train=256)
    counts, device = [], torch.device("cuda")
    for size in (8, 128):
        options = {"seed": 1, "epoch": 0, "batch_size": size}
        ready = next(images.train_batches(**options))
        moved = next(for_device(images, device).train_batches(**options)).pinned().moved(device)
        with gpu.launching() as launches, gpu.no_waits():
            made = [part.to(device).inputs for part in moved.parts(parts)]
        assert torch.equal(torch.cat(made).cpu(), ready.inputs)
        counts.append(launches.total())
    assert counts[0] == counts[1] <= (12 if parts == 1 else 16 * parts)  # parts prepare predecessors of their own
