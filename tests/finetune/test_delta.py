"""Task deltas: only what differs is kept, and only the base that was fine-tuned gives the model back."""

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


def tuned(base, what="attention", img_size=24, classes=5, seed=1):
    """A model that took a step of training at another resolution."""
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    model.set_input_size(img_size)
    model.reset_classifier(classes)
    vm.train_only(model, what)
    model(torch.randn(2, 3, img_size, img_size)).square().sum().backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01).step()
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    base = small()
    model = tuned(base)
    path = tmp_path / "pets.safetensors"
    return base, model, path, vm.save_delta(model, base, path)


def rewrite(path, change_tensors=lambda t: t, change_metadata=lambda m: m):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(change_tensors(load_file(path)), path, change_metadata(metadata))


def test_the_file_holds_what_was_trained_and_the_model_comes_back(saved):
    base, model, path, _ = saved
    before = {name: value.clone() for name, value in base.state_dict().items()}
    assert load_file(path).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    back = vm.load_delta(base, path)
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(back(images), model(images))
    assert back.vit_config == model.vit_config
    assert not back.training
    back(images).sum().backward()
    with torch.no_grad():
        for p in back.parameters():
            p.add_(1)
    assert all(torch.equal(base.state_dict()[name], value) for name, value in before.items())  # copies


def test_training_on_after_saving_changes_no_delta(saved):
    _, model, path, delta = saved
    with torch.no_grad():
        model.head.weight.add_(1)
    assert torch.equal(delta.weights["head.weight"], load_file(path)["head.weight"])
    assert not torch.equal(delta.weights["head.weight"], model.head.weight)


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
    base = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4).eval()
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


def test_a_base_that_differs_in_what_the_delta_has_gives_the_same_model(saved):
    base, model, path, _ = saved
    base.reset_classifier(11)  # a head that nobody trained
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(vm.load_delta(base, path)(images), model(images))


def without(tensors):
    return {name: value for name, value in tensors.items() if name != "blocks.0.attn.qkv.weight"}


def bent(tensors):
    return {name: value + (name == "head.bias") for name, value in tensors.items()}


def config(**fields):
    return lambda m: m | {"config": json.dumps(json.loads(m["config"]) | fields)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        (without, None, r"incomplete: it lacks blocks\.0\.attn\.qkv\.weight"),
        (bent, None, r"damaged: head\.bias differs from its digest"),
        (None, lambda m: {}, "not a delta of this version"),
        (None, lambda m: m | {"digests": "[1, 2"}, "damaged: its metadata"),
        (None, lambda m: m | {"own": "7"}, "damaged: its metadata"),
        (None, lambda m: {k: v for k, v in m.items() if k != "config"}, "damaged"),
        (None, config(color=3), "damaged: its metadata.*not have a setting 'color'"),
        (None, config(depth=10**9), "does not fit its own config"),
        (None, config(mlp_dim=10**9), "does not fit its own config"),
        (None, config(num_classes=6), r"does not fit its own config: head\.weight"),
    ],
)
def test_files_that_lie_are_refused(saved, tensors, metadata, words):
    base, _, path, _ = saved
    rewrite(path, tensors or (lambda t: t), metadata or (lambda m: m))
    with pytest.raises(UserError, match=words):
        vm.load_delta(base, path)


class Hostile:
    def __reduce__(self):
        return (print, ("this must never run",))


@pytest.mark.parametrize("keep", [0, 7, 100, -1, None])
def test_truncated_files_and_pickles_are_not_opened(saved, keep, capsys):
    base, _, path, _ = saved
    if keep is None:
        torch.save({"head.weight": Hostile()}, path)
    else:
        path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="not a safetensors file, or is damaged"):
        vm.load_delta(base, path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda base, model, folder: vm.load_delta(base, folder / "none.safetensors"), "does not exist"),
        (
            lambda base, model, folder: vm.save_delta(model, base, folder / "pets.pth"),
            r"a delta is a \.safetensors file",
        ),
        (lambda base, model, folder: vm.save_delta(base, base, folder / "pets.safetensors"), "equals its base"),
        (
            lambda base, model, folder: vm.save_delta(model, base, folder / "none" / "a.safetensors"),
            "folder does not exist",
        ),
    ],
)
def test_what_cannot_be_loaded_or_saved(saved, tmp_path, call, message):
    base, model, _, _ = saved
    with pytest.raises(UserError, match=message):
        call(base, model, tmp_path)
