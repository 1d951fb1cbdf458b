"""Everything that trains makes a trial's whole step on the pretend GPU: no tensor is left on the CPU, and nothing waits
for the device."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.changes.compose import edit
from vitmods.data.batch import Batch
from vitmods.fast import memory
from vitmods.layers.norms import NORMS
from vitmods.layers.stems import STEMS, TokenStem
from vitmods.model.config import ViTConfig
from vitmods.recipes import RECIPES, Augment, Recipe
from vitmods.recipes.recipe import Optimizer
from vitmods.tasks import Classification
from vitmods.tasks.base import TASKS, make_task
from vitmods.tasks.features import without_head
from vitmods.train.loop import prefetch

RECIPE = Recipe().with_(epochs=2, batch_size=4, clip_norm=1.0)
HALF = ("fp16-mixed",)
"""What types of two kinds meet in; the other precisions are tried with each fast form."""


def changes_conftest():
    path = Path(__file__).parents[1] / "changes/conftest.py"
    spec = importlib.util.spec_from_file_location("changes_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGES = changes_conftest()


def train(run_on_gpu, model, recipe=RECIPE, **options):
    task = Classification.from_recipe(recipe)
    config = model.vit_config
    return run_on_gpu(model, task, recipe, task.synthetic(4, (config.in_chans, *config.img_size), 5, recipe), **options)


@pytest.mark.parametrize("changes", CHANGES.find_together(), ids=lambda changes: "+".join(map(str, changes)))
def test_every_change_makes_a_step(run_on_gpu, changes, monkeypatch):
    monkeypatch.setattr("vitmods.layers.stems.local.LOCAL_DEPTH", 1)
    model = vm.ViT(edit(CHANGES.base_config(), changes))
    if getattr(model.patch_embed, "waits_for_images", False):  # as a trial does before its first step
        config = model.vit_config
        model.patch_embed.fit(torch.rand(4, config.in_chans, *config.img_size))
    train(run_on_gpu, model, precisions=HALF)


def other_models():
    """T2T, and an exact RMSNorm model whose norm before the blocks is the only one that centers its output."""
    sizes = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "depth": 1, "img_size": (32, 32), "num_classes": 5}
    before_blocks = vm.parse_changes("dpn(before=false,after=false,after_position=true)+rms")
    return [vm.vit("T2T-14", **sizes), vm.ViT(edit(CHANGES.base_config(), before_blocks))]


@pytest.mark.parametrize("index", [0, 1])
def test_other_models_make_a_step(run_on_gpu, index):
    train(run_on_gpu, other_models()[index], precisions=HALF)


def test_every_norm_and_stem_is_among_the_changes():
    models = [vm.ViT(edit(CHANGES.base_config(), changes)) for changes in CHANGES.find_together()] + other_models()
    made = {type(module) for model in models for module in model.modules()}
    assert {kind.module for kind in NORMS.values()} - made == set()
    assert {stem for stem in STEMS.values() if stem is not TokenStem} - made == set()  # of sequences, below


FAST = {
    "plain": {"forms": None},
    "recompute": {"recompute": True},
    "checkpointing": {"checkpointing": True},
    "frozen mlps": {"train": "attention", "frozen_mlps": True},
    "parallel": {"changes": "parallel", "recompute": True},
    "mean": {"config": {"pool": "avg"}, "recompute": True},
    "drop path": {"config": {"drop_path": 0.4}},
}


@pytest.mark.parametrize("name", FAST)
def test_every_fast_form_makes_a_step(run_on_gpu, name, monkeypatch):
    options = dict(FAST[name])
    config = dataclasses.replace(CHANGES.base_config(), **options.pop("config", {}))
    model = vm.ViT(edit(config, vm.parse_changes(options.pop("changes", ""))))
    recipe = RECIPE.with_(train=options.pop("train", "all"), drop_path=config.drop_path)
    if "forms" in options:
        model.forms = options.pop("forms")
    if options.pop("frozen_mlps", False):
        vm.train_only(model, "attention")
        vm.fast.recompute_frozen_mlps(model)
    again = []
    unpack = memory._give
    monkeypatch.setattr(memory, "_give", lambda kept: again.append(1) or unpack(kept))
    train(run_on_gpu, model, recipe, **options)
    assert bool(again) == ("recompute" in name or bool(FAST[name].get("recompute")) or "frozen" in name)


OPTIMIZERS = [
    {"optimizer": "adamw", "ema": 0.9, "layer_decay": 0.8},
    {"optimizer": "adamw", "moment": "bfloat16", "accumulate": 2},
    {"optimizer": "sgd", "clip_norm": None, "decay_all": True},
    {"optimizer": "sgd", "moment": "bfloat16", "ema": 0.9, "train": "head"},
    {"optimizer": "lamb", "accumulate": 3},
]


@pytest.mark.parametrize("fields", OPTIMIZERS, ids=str)
def test_every_optimizer_makes_a_step(run_on_gpu, fields):
    recipe = RECIPE.with_(**fields)
    trial = train(run_on_gpu, vm.ViT(CHANGES.base_config()), recipe, precisions=HALF)
    states = [value for state in trial.optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    assert tensors or fields["optimizer"] == "sgd"
    assert all(tensor.device.type == "cuda" for tensor in tensors)
    names = set(get_args(get_args(get_type_hints(Optimizer, include_extras=True)["name"])[0]))
    assert {fields["optimizer"] for fields in OPTIMIZERS} == names, "every optimizer is in the list"


@pytest.mark.parametrize("name", sorted({*TASKS} - {"detection", "instance_segmentation"}))  # test_on_pretend.py
def test_every_task_makes_a_step(run_on_gpu, name):
    usual = TASKS[name].usual_recipe
    recipe = (RECIPES[usual]() if usual else RECIPE).with_(batch_size=4, accumulate=1, drop_path=0.0)
    if name == "dino":  # crops of a patch, as images have 8 px; gradients from the first step on
        recipe = recipe.with_(local_size=4, freeze_last_layer=0.0)
    task = make_task(name, TASKS[name].fitted(recipe))
    tokens = task.inputs == "tokens"
    config = (
        ViTConfig.from_name("LRA-64", img_size=(1, 32), in_chans=16, num_classes=5) if tokens else CHANGES.base_config()
    )
    backbone = vm.ViT(config)
    model = task.wrap(backbone if task.uses_head else without_head(backbone), 5)
    batch = task.synthetic(4, (config.in_chans, *config.img_size), 5, recipe)
    run_on_gpu(model, task, recipe, batch, HALF)


def test_sequences_with_padding_make_a_step(run_on_gpu):
    task = make_task("sequence_classification", RECIPES["listops"]())
    model = vm.apply(vm.vit("LRA-64", img_size=(1, 32), in_chans=16, num_classes=5), *vm.parse_changes("dtn"))
    batch = task.synthetic(4, (16, 1, 32), 5, RECIPE)
    batch.inputs[1, 20:] = 0
    run_on_gpu(model, task, RECIPE, batch, HALF)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_images_reach_the_gpu_as_bytes_and_are_made_ready_there(run_on_gpu, monkeypatch, accumulate):
    augment = Augment(mixup=0.2, cutmix=1.0, erasing=1.0)
    images = data.load("digits", img_size=(8, 8), in_chans=1, augment=augment, limit_train=64).as_uint8()
    batch = next(images.train_batches(seed=0, epoch=0, batch_size=8))
    sent, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, *given, **how: sent.append(tensor) or to(tensor, *given, **how)
    )
    model = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10)
    run_on_gpu(model, Classification(), RECIPE.with_(batch_size=8, accumulate=accumulate), batch, ("bf16-mixed",))
    images_sent = [
        tensor for tensor in sent if tensor.ndim == 4 and tensor.device.type == "cpu" and tensor.shape[0] == 8
    ]
    assert images_sent
    assert all(tensor.dtype == torch.uint8 for tensor in images_sent)


def test_batches_are_pinned_ahead_for_a_gpu_and_left_alone_on_a_cpu(monkeypatch):
    pinned = []
    monkeypatch.setattr("vitmods.data.batch.Batch.pinned", lambda batch: pinned.append(batch) or batch)
    batches = [Batch(torch.zeros(1), torch.zeros(1), torch.tensor([i])) for i in range(4)]
    stream = iter(batches)
    assert prefetch(stream, torch.device("cpu")) is stream
    assert list(prefetch(stream, torch.device("cuda"))) == batches
    assert pinned == batches


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda out: out * out.sum().item(), "a number that is read waits for the device: .*test_steps.py"),
        (lambda out: out * torch.ones(4, 1), "same device"),
        (lambda out: out * torch.tensor(2.0, device=out.device), "copy to the device that blocks"),
        (lambda out: out + out.detach().cpu().sum(), "copy to the CPU"),
        (lambda out: out[out.sum(1) == out.sum(1)], "an index by a mask"),
        (lambda out: out + len(out.nonzero()), "nonzero waits"),
        (lambda out: out * bool(out.sum() > 0), "a number that is read"),
        (lambda out: out[torch.arange(len(out))], "an index on the CPU"),
        (lambda out: torch.cuda.synchronize() or out, "synchronize"),
        (lambda out: out + torch.rand(4, 1, device=out.device, generator=torch.Generator()), "generator"),
    ],
)
def test_a_mistake_is_an_error(run_on_gpu, mistake, error):
    """What the tests of this file rest on."""
    model = vm.ViT(CHANGES.base_config())
    model.head.register_forward_hook(lambda module, args, out: mistake(out))
    with pytest.raises(RuntimeError, match=error):
        train(run_on_gpu, model)


def test_products_and_sums_have_the_types_of_autocast(gpu):
    x = torch.randn(4, 4, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        half = x @ x
        assert half.dtype == torch.nn.functional.linear(x, x).dtype == torch.bfloat16
        assert half.softmax(-1).dtype == half.sum().dtype == torch.nn.functional.layer_norm(half, (4,)).dtype
        assert half.softmax(-1).dtype == (half + x).dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert half.device.type == "cuda"
    assert half.cpu().device.type == "cpu"


def test_random_numbers_of_the_device_are_its_own(gpu):
    torch.manual_seed(3)
    first, here = torch.rand(3, device="cuda").tolist(), torch.rand(3).tolist()
    torch.manual_seed(3)
    assert torch.rand(3).tolist() == here
    assert torch.rand(3, device="cuda").tolist() == first
    state = torch.cuda.get_rng_state()
    again = torch.rand(2, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    assert torch.rand(2, device="cuda").tolist() == again


def test_masks_and_visible_patches_of_a_user_are_checked_on_the_device(gpu):
    model = vm.vit("mu1/4", img_size=8, num_classes=2).to("cuda")
    images = torch.randn(2, 3, 8, 8, device="cuda")
    with gpu.no_waits():
        model.forward_features(images, keep=torch.arange(2, device="cuda").repeat(2, 1))
    for keep in ([[0, 4], [0, 1]], [[1, 1], [0, 1]]):
        with pytest.raises(RuntimeError, match="keep names different patches of an image, of 4"):
            model.forward_features(images, keep=torch.tensor(keep, device="cuda"))
