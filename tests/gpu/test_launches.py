"""Operations of a training step that start a kernel or a copy on a GPU: a small model's step takes as long as these."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.data.augment import Mixing, mix_targets
from vitmods.data.batch import Batch, DeferredTransforms
from vitmods.recipes import Recipe
from vitmods.tasks import Classification

RECIPE = Recipe().with_(epochs=2, batch_size=2, clip_norm=1.0, ema=0.999)
BUDGETS = {
    "": 700, "rms": 760, "layerscale": 760, "dtn": 1300, "groupnorm": 1200, "powernorm": 1200,
}  # fmt: skip


def launches(run_on_gpu, gpu, changes):
    """Of the second step of S/16 at 224 px in bfloat16, with mixup, clipping and a moving average."""
    config = vm.ViTConfig.from_name("S/16", img_size=224, num_classes=10)
    model = vm.ViT(edit(config, vm.parse_changes(changes)) if changes else config)
    mixing, labels = Mixing(0.8), torch.tensor([3, 5])
    deferred = DeferredTransforms(torch.zeros(3, 1, 1), torch.ones(3, 1, 1), mixing=mixing)
    images = torch.zeros(2, 3, 224, 224, dtype=torch.uint8)
    batch = Batch(images, mix_targets(mixing, labels, 10), torch.arange(2), deferred=deferred)
    with gpu.launching():
        trial = run_on_gpu(model, Classification.from_recipe(RECIPE), RECIPE, batch, ("bf16-mixed",))
        with gpu.launching() as counts:
            trial._train_step(batch)
    return counts


@pytest.mark.parametrize("changes", BUDGETS)
def test_a_step_keeps_its_budget(run_on_gpu, gpu, changes):
    counts = launches(run_on_gpu, gpu, changes)
    print(changes, counts.total(), dict(counts))
    assert counts.total() <= BUDGETS[changes], counts.most_common(12)
