"""What is trained, by role: the released choice, other libraries' ViTs, and what cannot be meant."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from timm.optim import create_optimizer_v2

import vitmods as vm
from vitmods import fast
from vitmods.finetune import ROLES, parameter_roles, what_is_trained
from vitmods.util.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "attn_only_names.json"


def small(**overrides):
    return vm.vit("mu2/4", img_size=8, num_classes=3, **overrides)


def names(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_attention_is_the_released_choice():
    model = vm.vit("Ti2/16", img_size=32)
    vm.train_only(model, "attention")
    assert names(model) == set(json.loads(GOLDEN.read_text())["sequential_depth2"])


def test_every_branch_of_parallel_blocks_is_trained():
    """A match of '.attn.' by name would leave the second branch frozen."""
    model = VisionTransformer(img_size=16, depth=2, embed_dim=16, num_heads=2, block_fn=ParallelThingsBlock)
    vm.train_only(model, "attention")
    branches = {f"blocks.{i}.attns.{j}.attn" for i in range(2) for j in range(2)}
    parts = {
        f"{branch}.{part}.{kind}" for branch in branches for part in ("qkv", "proj") for kind in ("weight", "bias")
    }
    assert names(model) == parts | {"pos_embed", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("ffn", {"ffn", "positions", "head"}),
        ("norms", {"norms", "positions", "head"}),
        ("head", {"head"}),
        ("attention+norms", {"attention", "norms", "positions", "head"}),
        ("layer_scale + tokens", {"layer_scale", "tokens", "positions", "head"}),
        ("all", set(ROLES)),
        (lambda role: role == "norms", {"norms"}),
    ],
)
def test_what_goes_along(what, trained):
    model = small(layer_scale=1e-4)
    roles = parameter_roles(model)
    selection = vm.train_only(model, what)
    assert names(model) == {name for name, role in roles.items() if role in trained} == set(selection.names)


def test_every_parameter_of_a_vit_with_all_slots_has_its_role():
    model = small(layer_scale=1e-4, reg_tokens=1, qk_norm=vm.ViTConfig().final_norm, representation=True)
    model = vm.apply(model, *vm.parse_changes("dpn+normformer(residual_scale=true)"))
    roles = parameter_roles(model)
    assert roles.keys() == dict(model.named_parameters()).keys()
    assert "other" not in roles.values()
    expected = {
        "patch_embed.proj.weight": "stem",
        "patch_embed.norm.weight": "norms",
        "cls_token": "tokens",
        "reg_token": "tokens",
        "pos_embed": "positions",
        "blocks.0.attn.q_norm.weight": "norms",
        "blocks.1.attn.proj.bias": "attention",
        "blocks.0.mlp.norm.weight": "norms",
        "blocks.1.mlp.fc2.weight": "ffn",
        "blocks.0.ls1.gamma": "layer_scale",
        "blocks.0.residual_scale.gamma": "layer_scale",
        "norm.weight": "norms",
        "pre_logits.weight": "head",
        "head.bias": "head",
    }
    assert {name: roles[name] for name in expected} == expected


def test_attention_pooling_is_part_of_the_head():
    roles = parameter_roles(small(pool="map"))
    assert {role for name, role in roles.items() if name.startswith("attn_pool.")} == {"head", "norms"}


def foreign():
    from torchvision.models import VisionTransformer as Torchvision
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return {
        "timm": VisionTransformer(img_size=16, patch_size=8, depth=2, embed_dim=16, num_heads=2, mlp_ratio=2),
        "hugging face": ViTForImageClassification(ViTConfig(**shape, image_size=16, patch_size=8)),
        "torchvision": Torchvision(16, 8, 2, 2, 16, 32),
    }


@pytest.mark.parametrize("library", ["timm", "hugging face", "torchvision"])
@pytest.mark.parametrize("what", ["attention", "ffn", "norms", "head"])
def test_other_libraries_models_are_frozen_as_ours_is(library, what):
    theirs = foreign()[library]
    assert "other" not in parameter_roles(theirs).values()
    ours = vm.apply(theirs)
    assert vm.train_only(theirs, what).rows == vm.train_only(ours, what).rows
    assert names(vm.apply(theirs)) == names(ours)  # and importing keeps it so


def test_the_table():
    model = small()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    selection = vm.train_only(model, "attention")
    lines = str(selection).splitlines()
    assert lines[0].split() == ["trained", "frozen"]
    assert lines[-1].split()[:3] == ["all", f"{selection.trained:,}", f"{selection.frozen:,}"]
    assert selection.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert selection.trained + selection.frozen == sum(p.numel() for p in model.parameters())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert what_is_trained(model) == selection


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("atention", "Did you mean 'attention'"),
        ("attention+norm", "Did you mean 'norms'"),
        ("layer_scale", "does not have parameters with the role layer_scale; its roles are"),
        (lambda role: False, "Nothing would be trained"),
        ("", "Unknown role ''"),
        (3, "not 3"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_frozen(what, words):
    model = small()
    with pytest.raises(UserError, match=words):
        vm.train_only(model, what)
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_without_attention_is_refused():
    with pytest.raises(UserError, match="not have parameters with the role attention"):
        vm.train_only(timm.create_model("resnet10t"), "attention")


def test_layer_wise_decay_of_timm_sees_only_what_is_trained():
    model = small()
    vm.train_only(model, "attention")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    trained = dict(model.named_parameters())
    assert scales.keys() == {id(trained[name]) for name in names(model)}
    first, second = (scales[id(model.blocks[i].attn.qkv.weight)] for i in range(2))
    assert first == pytest.approx(0.5 * second)


def run_ddp(rank, address, out):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = small()
    vm.train_only(model, "attention")
    fast.recompute(model)
    fast.recompute_frozen_mlps(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)  # find_unused_parameters stays off
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):  # from the second step on, an unused parameter would be an error
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(images[2 * rank : 2 * rank + 2]), torch.tensor([0, 1])).backward()
        optimizer.step()
    torch.save(model.state_dict(), os.path.join(out, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.forks
def test_two_processes_train_as_one_without_a_search_for_unused_parameters(tmp_path):
    mp.start_processes(run_ddp, (f"file://{tmp_path}/store", str(tmp_path)), nprocs=2, start_method="fork")
    torch.manual_seed(0)
    model = small()
    vm.train_only(model, "attention")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=1e-5, rtol=1e-5)
