"""What is trained, by role or by adapters: the released choice, peft's own form, other libraries' ViTs, and what cannot
be meant."""

import copy
import json
import re
import shutil
import sys
from pathlib import Path

import peft
import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
import transformers as hf
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer

import vitmods as vm
from vitmods import fast
from vitmods.finetune import ROLES, merge_adapters, parameter_roles, what_is_trained
from vitmods.finetune.adapters import SavedAdapters, save_adapters
from vitmods.finetune.roles import TrainedPart
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


@pytest.mark.parametrize("library", ["vitmods", "timm", "hugging face", "torchvision"])
def test_biases_and_the_last_blocks_of_any_model(library):
    model = small(depth=2) if library == "vitmods" else foreign(library)
    head = {name for name, role in parameter_roles(model).items() if role == "head"}
    vm.train_only(model, "biases")
    assert names(model) == head | {name for name, _ in model.named_parameters() if name.endswith("bias")}
    vm.train_only(model, "last(1)")
    block = re.compile(r"blocks\.1\.|layers?\.1\.|encoder_layer_1\.")
    final = re.compile(r"(vit\.layernorm|encoder\.ln|norm)\.(weight|bias)")
    assert names(model) == head | {n for n, _ in model.named_parameters() if block.search(n) or final.fullmatch(n)}


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
    roles = parameter_roles(small(pool="map"))
    assert {role for name, role in roles.items() if name.startswith("attn_pool.")} == {"head", "norms"}


def foreign(library):
    if library == "timm":
        return VisionTransformer(img_size=16, patch_size=8, depth=2, embed_dim=16, num_heads=2, mlp_ratio=2)
    if library == "torchvision":
        return torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return hf.ViTForImageClassification(hf.ViTConfig(**shape, image_size=16, patch_size=8))


@pytest.mark.parametrize("library", ["timm", "hugging face", "torchvision"])
def test_other_libraries_models_are_frozen_as_ours_is(library):
    theirs = foreign(library)
    assert "other" not in parameter_roles(theirs).values()
    ours = vm.apply(theirs)
    for what in ("attention", "ffn", "norms", "head"):
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
        ("last(2)", "every block"),
        ("last(0)", "as in last"),
        ("last()", "as in last"),
        ("lora(rank=0)", "rank is a whole number of at least 1"),
        ("lora(rank=two)", "a whole number of at least 1 or match, not two"),
        ("lora(rnk=2)", "does not have the setting 'rnk'. Did you mean 'rank'"),
        ("lora(on=head)", "low-rank maps are for attention and ffn"),
        ("lora(on=stem)", "does not have linear maps with this role, but with attention, ffn and head"),
        ("lora+dora", "two kinds of adapters"),
        ("lora(", "parentheses"),
        ("lorra(rank=2)", "Did you mean 'lora'"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_frozen(what, words):
    model = small()
    with pytest.raises(UserError, match=words):
        vm.train_only(model, what)
    assert all(p.requires_grad for p in model.parameters())


def test_models_without_what_is_asked_for():
    with pytest.raises(UserError, match="not have parameters with the role attention"):
        vm.train_only(timm.create_model("resnet10t"), "attention")
    with pytest.raises(UserError, match="does not have biases: train norms"):
        vm.train_only(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)), "biases")


def trained_model(rank=None):
    """After three steps on four images, of which each of two processes sees its half."""
    torch.manual_seed(0)
    model = small()
    vm.train_only(model, "attention")
    images, targets = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1])
    net = model
    if rank is not None:
        fast.recompute(model)
        fast.recompute_frozen_mlps(model)
        net = torch.nn.parallel.DistributedDataParallel(model)  # find_unused_parameters stays off
        images, targets = images[2 * rank : 2 * rank + 2], targets[:2]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):  # from the second step on, an unused parameter would be an error
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), targets).backward()
        optimizer.step()
    return model


def run_ddp(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(trained_model(rank).state_dict(), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.forks
def test_two_processes_train_as_one_without_a_search_for_unused_parameters(tmp_path):
    mp.start_processes(run_ddp, (tmp_path,), nprocs=2, start_method="fork")
    alone = trained_model().state_dict()
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(value, alone[name], atol=1e-5, rtol=1e-5)


# ---- low-rank adapters

MAPS = {  # linear maps of attention and of the MLPs, by hand
    "vitmods": r".*(attn\.(qkv|proj)|mlp\.fc[12])",
    "timm": r".*(attn\.(qkv|proj)|mlp\.fc[12])",
    "hugging face": r".*(query|key|value|[qkvo]_proj|output\.dense|intermediate\.dense|fc[12])",
    "torchvision": r".*(self_attention|mlp\.[03])",
}
SIDE = {"vitmods": 8}
CASES = [(library, kind) for library in MAPS for kind in ("lora", "dora") if (library, kind) != ("torchvision", "dora")]


def model_of(library):
    torch.manual_seed(3)
    model = small() if library == "vitmods" else foreign(library)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def outputs(model, images):
    out = model(images)
    return getattr(out, "logits", out)


def moved(model, alpha=0.2):
    """Adapters that are no longer zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=alpha)
    return model


@pytest.mark.parametrize(("library", "kind"), CASES)
def test_it_is_pefts_own_form_until_it_is_merged(library, kind, tmp_path):
    model, side = model_of(library), SIDE.get(library, 16)
    start, images = copy.deepcopy(model), torch.randn(3, 3, side, side)
    before, tensors = outputs(model, images), {*model.state_dict()}
    vm.train_only(model, f"{kind}(rank=2,alpha=6,on=attention+ffn)")
    torch.testing.assert_close(outputs(model, images), before, atol=1e-5, rtol=1e-5)

    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=MAPS[library], use_dora=kind == "dora")
    theirs = peft.inject_adapter_in_model(config, copy.deepcopy(start))
    assert {n for n in names(model) if ".lora_" in n} == {n for n, _ in theirs.named_parameters() if ".lora_" in n}
    theirs.load_state_dict(moved(model).state_dict())
    for one in (model, theirs):
        outputs(one, images).square().sum().backward()
    trained = {name: p.grad for name, p in theirs.named_parameters() if ".lora_" in name}
    for name, parameter in model.named_parameters():
        if name in trained:
            torch.testing.assert_close(parameter.grad, trained[name], atol=1e-6, rtol=1e-6)
    after = outputs(model, images)
    assert (after - before).abs().max() > 0.1

    save_adapters(model, [*names(model)], tmp_path / "adapter")
    merge_adapters(model)
    assert {*model.state_dict()} == tensors
    torch.testing.assert_close(outputs(model, images), after, atol=1e-5, rtol=1e-5)
    opened = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")
    torch.testing.assert_close(outputs(opened.eval(), images), after, atol=1e-5, rtol=1e-5)


def test_the_head_and_the_adapters_alone_are_trained():
    model = small()
    table = vm.train_only(model, "lora(rank=2)")
    rows = {role: (trained, frozen) for role, trained, frozen in table.rows}
    width, blocks = model.embed_dim, 2
    assert rows["adapters"] == (blocks * 2 * (width + 3 * width + width + width), 0)
    assert rows["attention"][0] == rows["positions"][0] == rows["norms"][0] == 0 < rows["head"][0]
    assert {name for name in names(model) if ".lora_" not in name} == {"head.weight", "head.bias"}


def test_adapters_beside_adapters_of_models_that_peft_cannot_do_and_without_peft(monkeypatch):
    model = small()
    vm.train_only(model, "lora(rank=2)")
    with pytest.raises(UserError, match="has adapters already: merge them first"):
        vm.train_only(model, "lora(rank=2)")
    merge_adapters(model)
    vm.train_only(model, "dora(rank=2)")
    with pytest.raises(UserError, match="does not support DoRA"):
        vm.train_only(model_of("torchvision"), "dora")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'vitmods\[peft\]'"):
        vm.train_only(small(), "lora")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A base, a folder with two tasks' adapters, and the models that hold them merged."""
    base, merged, folder = model_of("vitmods"), {}, tmp_path_factory.mktemp("tasks")
    for task, kind in (("a", "lora"), ("b", "dora")):
        model = copy.deepcopy(base)
        model.reset_classifier(5)
        vm.train_only(model, f"{kind}(rank=2)")
        save_adapters(moved(model), [*names(model)], folder / task)
        merge_adapters(model)
        merged[task] = model.eval()
    return base, folder, merged


def test_several_tasks_share_one_backbone(tasks):
    base, folder, merged = tasks
    multi = vm.MultiTask(base, {"a": folder / "a", "b": folder / "b", "base": None})
    images = torch.randn(2, 3, 8, 8)
    for task, model in merged.items():
        torch.testing.assert_close(multi(images, task), model(images), atol=1e-5, rtol=1e-5)
    assert torch.equal(multi(images, "base"), base(images))
    own = sum(len((folder / task / "adapter_model.safetensors").read_bytes()) for task in merged)
    assert multi.nbytes < sum(p.nbytes for p in base.parameters()) + own


UNREADABLE = "cannot be read as adapters"


@pytest.mark.parametrize(
    ("other", "file", "content", "message"),
    [
        pytest.param({}, "adapter_model.safetensors", None, UNREADABLE, id="no weights"),
        pytest.param({}, "adapter_model.safetensors", b"x" * 99, UNREADABLE, id="no safetensors"),
        pytest.param({}, "adapter_config.json", b"{}", "only adapters of LoRA and DoRA", id="another kind"),
        pytest.param({}, "adapter_config.json", b"{", UNREADABLE, id="damaged"),
        pytest.param({"img_size": 16}, "", None, "8 x 8 pixels, and the base takes 16 x 16", id="another size"),
        pytest.param({"depth": 1}, "", None, "fit", id="another depth"),
        pytest.param({"embed_dim": 64}, "", None, "fit", id="another width"),
    ],
)
def test_damaged_adapters_and_those_of_another_base_are_refused(tasks, tmp_path, other, file, content, message):
    folder = shutil.copytree(tasks[1] / "a", tmp_path / "a")
    if content is not None:
        (folder / file).write_bytes(content)
    elif file:
        (folder / file).unlink()
    with pytest.raises(UserError, match=message):
        vm.MultiTask(vm.vit("mu2/4", **{"img_size": 8, "num_classes": 3, **other}), {"a": folder})


def test_nothing_is_written_where_peft_could_not_open_it(tmp_path):
    for what in ("lora+attention", "lora+norms", "lora+biases"):
        model = small()
        vm.train_only(model, what)
        save_adapters(model, [*names(model)], tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()
    model = small()
    vm.train_only(model, "lora+head")
    save_adapters(model, [*names(model)], tmp_path / "adapter")
    assert SavedAdapters.read(tmp_path / "adapter").modules.keys() == {"head.weight", "head.bias"}
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["head"]


@pytest.mark.parametrize(("depth", "blocks"), [(2, 1), (3, 1), (6, 2), (12, 4)])
def test_a_third_of_the_blocks_is_the_last_of_any_depth(depth, blocks):
    model = small(depth=depth)
    vm.train_only(model, "last")
    trained = {int(name.split(".")[1]) for name in names(model) if name.startswith("blocks.")}
    assert trained == {*range(depth - blocks, depth)}


def test_adapters_of_a_tasks_model_are_those_of_its_backbone(tmp_path):
    backbone, images = model_of("vitmods"), torch.randn(2, 3, 8, 8)
    base = copy.deepcopy(backbone)
    model = torch.nn.Module()
    model.backbone, model.decoder, model.roles = backbone, torch.nn.Linear(3, 3), {}
    vm.train_only(model, "lora(rank=2)")
    save_adapters(moved(model), [*names(model)], tmp_path)
    opened = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(opened.eval()(images), backbone(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("what", "title"),
    [
        ("attention+norms", "Trains only attention and norms"), ("last", "Trains only the last third of the blocks"),
        ("last(2)", "Trains only the last 2 blocks"), ("biases", "Trains only the biases (BitFit)"),
        ("lora(on=ffn)", "Trains low-rank maps beside the weights (LoRA)"),
        ("lora+norms", "Trains only lora(rank=8) and norms"), ("biases+last(1)", "Trains only biases and last(1)"),
    ],
)  # fmt: skip
def test_what_is_trained_is_described(what, title):
    assert TrainedPart.of(what).way.title == title
