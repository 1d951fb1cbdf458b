"""Task deltas: only what differs is kept, only the base that was fine-tuned gives the model back, and several tasks on
one backbone are the separate models with one copy of what they share."""

import copy
import json

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitmods as vm
from vitmods.finetune.delta import fingerprint
from vitmods.util.errors import UserError


def small(**overrides):
    torch.manual_seed(0)
    return vm.vit("mu2/4", img_size=16, num_classes=3, **overrides).eval()


def tuned(base, what="attention", img_size=24, classes=5):
    """A model that took a step of training at another resolution."""
    model = copy.deepcopy(base)
    model.set_input_size(img_size)
    model.reset_classifier(classes)
    vm.train_only(model, what)
    model(torch.randn(2, 3, *model.vit_config.img_size)).square().sum().backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01).step()
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    base = small()
    model = tuned(base)
    path = tmp_path / "pets.safetensors"
    return base, model, path, vm.save_delta(model, base, path)


def test_the_file_holds_what_was_trained_and_the_model_comes_back(saved):
    base, model, path, delta = saved
    before = {name: value.clone() for name, value in base.state_dict().items()}
    assert load_file(path).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    back = vm.load_delta(base, path)
    images = torch.randn(2, 3, 24, 24)
    expected = model(images)
    assert torch.equal(back(images), expected)
    assert back.vit_config == model.vit_config
    assert not back.training
    with torch.no_grad():
        model.head.weight.add_(1)
        for p in back.parameters():
            p.add_(1)
    assert all(torch.equal(base.state_dict()[name], value) for name, value in before.items())  # copies
    assert torch.equal(delta.weights["head.weight"], load_file(path)["head.weight"])
    base.reset_classifier(11)  # a head that nobody trained
    assert torch.equal(vm.load_delta(base, path)(images), expected)


def test_running_statistics_are_part_of_it(tmp_path):
    base = vm.apply(small(), *vm.parse_changes("batchnorm")).eval()
    model = copy.deepcopy(base).train()
    vm.train_only(model, "head")
    model(torch.randn(9, 3, 16, 16)).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    vm.save_delta(model.eval(), base, tmp_path / "x.safetensors")
    assert any("running" in name for name in load_file(tmp_path / "x.safetensors"))
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(vm.load_delta(base, tmp_path / "x.safetensors")(images), model(images))


def test_other_libraries_models(tmp_path):
    base = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_classes=4).eval()
    model = copy.deepcopy(base)
    vm.train_only(model, "attention")
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.01)
    vm.save_delta(model, base, tmp_path / "x.safetensors")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(vm.load_delta(base, tmp_path / "x.safetensors")(images), model(images))
    assert fingerprint(base) == fingerprint(vm.apply(base))


def test_another_base_is_refused_and_named(saved):
    base, _, path, delta = saved
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.blocks[1].mlp.fc1.weight[0, 0] += 1e-6
    with pytest.raises(UserError, match=r"belongs to another base: blocks\.1\.mlp\.fc1\.weight") as record:
        vm.load_delta(other, path)
    assert delta.base == fingerprint(base)
    assert delta.base in str(record.value)
    assert fingerprint(other) in str(record.value)
    with pytest.raises(UserError, match=r"another base|neither in it nor in the base"):
        vm.load_delta(vm.vit("mu1/4", img_size=16), path)


def rewritten(tensors=lambda t: t, metadata=lambda m: m):
    def rewrite(path):
        with safe_open(path, framework="pt") as file:
            before = file.metadata()
        save_file(tensors(load_file(path)), path, metadata(before))

    return rewrite


def config(**fields):
    return rewritten(metadata=lambda m: m | {"config": json.dumps(json.loads(m["config"]) | fields)})


def cut(end):
    return lambda path: path.write_bytes(path.read_bytes()[:end])


class Hostile:
    def __reduce__(self):
        return (print, ("this must never run",))


DAMAGED = "not a safetensors file, or is damaged"
LIES = {
    "without a tensor": (
        rewritten(lambda t: {name: value for name, value in t.items() if name != "blocks.0.attn.qkv.weight"}),
        r"incomplete: it lacks blocks\.0\.attn\.qkv\.weight",
    ),
    "another tensor": (
        rewritten(lambda t: {name: value + (name == "head.bias") for name, value in t.items()}),
        r"damaged: head\.bias differs from its digest",
    ),
    "no metadata": (rewritten(metadata=lambda m: {}), "not a delta of this version"),
    "no list of digests": (rewritten(metadata=lambda m: m | {"digests": "[1, 2"}), "damaged: its metadata"),
    "no list of tensors": (rewritten(metadata=lambda m: m | {"own": "7"}), "damaged: its metadata"),
    "no config": (rewritten(metadata=lambda m: {k: v for k, v in m.items() if k != "config"}), "damaged"),
    "unknown setting": (config(color=3), "damaged: its metadata.*not have a setting 'color'"),
    "huge depth": (config(depth=10**9), "does not fit its own config"),
    "huge width": (config(mlp_dim=10**9), "does not fit its own config"),
    "more classes": (config(num_classes=6), r"does not fit its own config: head\.weight"),
    "empty": (cut(0), DAMAGED),
    "cut early": (cut(100), DAMAGED),
    "cut late": (cut(-1), DAMAGED),
    "pickle": (lambda path: torch.save({"head.weight": Hostile()}, path), DAMAGED),
    "absent": (lambda path: path.unlink(), "does not exist"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused(saved, lie, capsys):
    spoil, words = LIES[lie]
    base, _, path, _ = saved
    spoil(path)
    with pytest.raises(UserError, match=words):
        vm.load_delta(base, path)
    assert capsys.readouterr().out == ""


def test_what_cannot_be_saved(saved, tmp_path):
    base, model, _, _ = saved
    for tuned_model, name, words in (
        (model, "pets.pth", r"a delta is a \.safetensors file"),
        (base, "pets.safetensors", "equals its base"),
        (model, "none/a.safetensors", "folder does not exist"),
    ):
        with pytest.raises(UserError, match=words):
            vm.save_delta(tuned_model, base, tmp_path / name)


# ---- several tasks on one backbone

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


def storages(model):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}


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


def delta_bytes(model, base):
    """Of the tensors that differ."""
    state, there = model.state_dict(), base.state_dict()
    return sum(t.nbytes for n, t in state.items() if n not in there or not torch.equal(t, there[n]))


def test_what_is_shared_is_in_memory_once_is_the_bases_and_stays_shared_when_moved(served):
    base, models, multi = served
    shared = storages(base).keys() & storages(multi).keys()
    own = sum(delta_bytes(model, base) for model in models.values())
    assert multi.nbytes == sum(storages(base)[key] for key in shared) + own
    assert multi.nbytes < 0.75 * sum(sum(storages(model).values()) for model in models.values())
    mlp = {multi[name].blocks[0].mlp.fc2.weight.data_ptr() for name in ("cars", "birds")}
    assert mlp == {base.blocks[0].mlp.fc2.weight.data_ptr()}
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
