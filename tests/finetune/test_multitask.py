"""Several tasks on one backbone: the separate models' outputs, one copy of what they share."""

import copy

import pytest
import torch

import vitmods as vm
from vitmods.util.errors import UserError


def small(**overrides):
    torch.manual_seed(0)
    return vm.vit("mu3/4", img_size=16, num_classes=3, **overrides).eval()


def tuned(base, what, img_size, classes):
    model = copy.deepcopy(base)
    model.set_input_size(img_size)
    model.reset_classifier(classes)
    chosen = set(vm.train_only(model, what).names)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in chosen:
                p.add_(0.05 * torch.randn_like(p))
    return model.eval()


TASKS = {"pets.v2": ("attention", 16, 5), "cars": ("attention", 24, 7), "birds": ("head", (16, 32), 2)}


@pytest.fixture(params=[{}, {"position": "sincos2d", "position_on_prefix": False}], ids=["learned", "fixed"])
def served(request, tmp_path):
    base = small(**request.param)
    models = {name: tuned(base, *settings) for name, settings in TASKS.items()}
    deltas = {}
    for number, (name, model) in enumerate(models.items()):
        path = tmp_path / f"{number}.safetensors"
        delta = vm.save_delta(model, base, path)
        deltas[name] = path if number else delta
    return base, models, vm.MultiTask(base, deltas)


def test_outputs_are_those_of_the_separate_models_bit_for_bit(served):
    base, models, multi = served
    assert multi.tasks == tuple(TASKS)
    assert not any(p.requires_grad for p in multi.parameters())
    assert not any(module.training for module in multi.modules())
    for name in [*TASKS, *TASKS]:  # going back and forth changes nothing
        images = torch.randn(2, 3, *models[name].vit_config.img_size)
        with torch.inference_mode():
            assert torch.equal(multi(images, name), models[name](images))
            assert torch.equal(multi[name].forward_features(images), models[name].forward_features(images))
    alone, images = vm.MultiTask(base, {"base": None}), torch.randn(2, 3, 16, 16)  # the base is a task for nothing
    assert alone.nbytes == sum(storages(base).values())
    assert torch.equal(alone(images, "base"), base(images))
    assert all(p.requires_grad for p in base.parameters())


def storages(model):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}


def test_what_is_shared_is_in_memory_once_and_is_the_bases(served):
    base, models, multi = served
    delta_size = sum(delta_bytes(models[name], base) for name in TASKS)
    shared = storages(base).keys() & storages(multi).keys()
    assert multi.nbytes == sum(storages(base)[key] for key in shared) + delta_size
    assert multi.nbytes < 0.75 * sum(sum(storages(model).values()) for model in models.values())
    mlp = {multi[name].blocks[0].mlp.fc1.weight.data_ptr() for name in TASKS}
    assert mlp == {base.blocks[0].mlp.fc1.weight.data_ptr()}


def delta_bytes(model, base):
    there = base.state_dict()
    differ = (t for n, t in model.state_dict().items() if n not in there or not same(t, there[n]))
    return sum(t.nbytes for t in differ)


def same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


def test_moving_keeps_it_shared(served):
    _, models, multi = served
    before = multi.nbytes
    multi.double()
    assert multi.nbytes == 2 * before
    images = torch.randn(2, 3, 24, 24).double()
    torch.testing.assert_close(multi(images, "cars"), models["cars"].double()(images))


def test_the_table_and_the_errors(served):
    base, _, multi = served
    rows = str(multi).splitlines()
    assert [row.split()[0] for row in rows] == ["task", *TASKS, "together"]
    assert rows[2].split()[1:3] == ["24x24", "7"]
    with pytest.raises(UserError, match="Did you mean 'cars'"):
        multi(torch.randn(1, 3, 24, 24), "car")
    with pytest.raises(UserError, match="at least one task"):
        vm.MultiTask(base, {})
