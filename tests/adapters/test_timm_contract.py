"""timm's model contract on our ViT, compared with timm's own model call by call; and timm's registry and optimizers."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay

import vitmods as vm
import vitmods.adapters.timm  # registers the models
from vitmods.util.errors import UserError


@pytest.fixture(params=[{}, {"reg_tokens": 2, "no_embed_class": True}], ids=str)
def pair(request):
    """(ours, timm's) with the same weights"""
    torch.manual_seed(0)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 48), depth=3, embed_dim=48, num_classes=5, **request.param
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ours = vitmods.adapters.timm.from_timm(theirs)
    return ours.eval(), theirs.eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 48)


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_features_and_head(pair, images):
    ours, theirs = pair
    features = theirs.forward_features(images)
    same(ours.forward_features(images), features)
    same(ours.forward_head(features), theirs.forward_head(features))
    same(ours.forward_head(features, pre_logits=True), theirs.forward_head(features, pre_logits=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indices": 2},
        {"indices": [0, 2]},
        {"indices": [-1]},
        {"indices": (0,), "stop_early": True, "intermediates_only": True},
        {"norm": True, "intermediates_only": True},
        {"output_fmt": "NLC"},
        {"return_prefix_tokens": True},
        {"return_prefix_tokens": True, "output_fmt": "NLC", "norm": True, "indices": 1},
    ],
    ids=str,
)
def test_intermediates(pair, images, options):
    ours, theirs = (model.forward_intermediates(images, **options) for model in pair)
    same(ours, theirs)
    assert type(ours) is type(theirs)


def test_intermediates_refuse_what_is_not_there(pair, images):
    ours, _ = pair
    for wrong in ({"output_fmt": "NHWC"}, {"indices": [3]}, {"indices": 0}, {"indices": [-4]}):
        with pytest.raises(ValueError, match=r"NCHW|3 blocks"):
            ours.forward_intermediates(images, **wrong)


def test_attributes(pair):
    ours, theirs = pair
    for name in (
        "num_classes",
        "in_chans",
        "embed_dim",
        "num_features",
        "head_hidden_size",
        "num_prefix_tokens",
        "global_pool",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [i["module"] for i in ours.feature_info] == [i["module"] for i in theirs.feature_info]
    assert ours.patch_embed.grid_size == theirs.patch_embed.grid_size
    assert ours.get_classifier() is ours.head


def test_reset_classifier(pair, images):
    for model in pair:
        model.reset_classifier(7)
    ours, theirs = pair
    assert ours(images).shape == theirs(images).shape == (2, 7)
    assert ours.num_classes == ours.vit_config.num_classes == 7
    for model in pair:
        model.reset_classifier(0, "avg")
    same(ours(images), theirs(images))
    for model in pair:
        model.reset_classifier(0, "")
    same(ours(images), theirs(images))
    assert ours.global_pool == theirs.global_pool == ""
    with pytest.raises(UserError, match="pool='map'"):
        ours.reset_classifier(3, "map")


def test_reset_classifier_draws_the_head_alone_and_keeps_type_and_mode(pair):
    ours = pair[0].double()
    before = {n: v.clone() for n, v in ours.state_dict().items() if not n.startswith("head")}
    ours.reset_classifier(9)
    assert all(torch.equal(ours.state_dict()[n], v) for n, v in before.items())
    assert ours.head.weight.dtype == torch.float64
    assert float(ours.head.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert not ours.training


def test_input_size(pair):
    for model in pair:
        model.set_input_size(img_size=(64, 32))
    ours, theirs = pair
    images = torch.randn(2, 3, 64, 32)
    same(ours(images), theirs(images))


def test_patch_size(pair):
    """Shapes alone: timm resizes the kernel bicubically, we bilinearly (FlexiViT's paper)."""
    for model in pair:
        model.set_input_size(img_size=(64, 96), patch_size=(32, 32))
    stems = [model.patch_embed for model in pair]
    assert stems[0].proj.weight.shape == stems[1].proj.weight.shape == (48, 3, 32, 32)
    assert stems[0].grid_size == stems[1].grid_size == (2, 3)
    assert pair[0](torch.randn(1, 3, 64, 96)).shape == (1, 5)


def test_gradient_checkpointing_is_used(pair, images):
    ours, _ = pair
    calls = []
    ours.blocks[0].register_forward_pre_hook(lambda *args: calls.append(1))
    ours.set_grad_checkpointing(True)
    ours(images).sum().backward()
    assert len(calls) == 2  # again in backward
    ours.set_grad_checkpointing(False)
    ours(images).sum().backward()
    assert len(calls) == 3


def test_weight_decay_and_layers_are_those_of_timm(pair):
    mine, reference = (
        {
            name: (group["lr_scale"], group["weight_decay"])
            for group in param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
            for parameter in group["params"]
            for name in [next(n for n, p in model.named_parameters() if p is parameter)]
        }
        for model in pair
    )
    assert mine == reference
    assert mine["blocks.0.attn.qkv.weight"] != mine["blocks.2.attn.qkv.weight"]
    assert mine["pos_embed"][1] == mine["cls_token"][1] == 0


@pytest.mark.parametrize(
    "changes", ["dpn", "postnorm", "normformer(head_scale=true)", "dpn(before=false,after=false,after_position=true)"]
)
def test_layer_decay_knows_where_the_parameters_of_changes_belong(pair, changes):
    model = vm.apply(pair[0], *vm.parse_changes(changes))
    groups = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    by_name = {name: scale[id(p)] for name, p in model.named_parameters()}
    assert len(by_name) == len(list(model.parameters()))
    for name, value in by_name.items():
        part, _, rest = name.partition(".")
        steps = 3 - int(rest[0]) if part == "blocks" else {"norm": 1, "head": 0}.get(part, 4)  # from the end
        assert value == pytest.approx(0.5**steps), name


def test_timms_optimizer_factory_takes_the_model(pair):
    optimizer = create_optimizer_v2(pair[0], "adamw", lr=1e-3, weight_decay=0.1, layer_decay=0.7)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(pair[0].parameters()))


@pytest.mark.parametrize(
    "name",
    [
        "tiny_patch16",
        "small_patch16",
        "small_patch32",
        "base_patch16",
        "base_patch32",
        "large_patch16",
        "large_patch32",
        "huge_patch14",
    ],
)
def test_registry(name):
    assert timm.is_model(f"vitmods_{name}_224")
    small = {"depth": 1, "num_classes": 7}
    with torch.device("meta"):
        ours, theirs = (timm.create_model(f"{kind}_{name}_224", **small) for kind in ("vitmods", "vit"))
    assert isinstance(ours, vm.ViT)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.num_classes == 7


def test_create_model_passes_timms_arguments_on():
    options = {
        "num_classes": 5, "img_size": 32, "in_chans": 1, "depth": 2, "embed_dim": 48, "global_pool": "avg",
        "drop_rate": 0.1, "drop_path_rate": 0.2, "init_values": 0.3, "reg_tokens": 2, "no_embed_class": True,
    }  # fmt: skip
    theirs = timm.create_model("vit_tiny_patch16_224", **options)
    ours = timm.create_model("vitmods_tiny_patch16_224", **options)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 1, 32, 32)
    same(ours.eval()(images), theirs.eval()(images))
    assert (ours.vit_config.head_drop, ours.vit_config.drop_path) == (0.1, 0.2)


def test_create_model_with_changes():
    model = timm.create_model("vitmods_tiny_patch16_224", img_size=32, depth=1, changes="dpn+rms")
    assert tuple(map(str, model.changes)) == ("dpn", "rms")
    data = timm.data.resolve_model_data_config(model)
    assert (data["input_size"], data["mean"]) == ((3, 32, 32), (0.5, 0.5, 0.5))


def test_create_model_ignores_nothing():
    with pytest.raises(UserError, match="'drop_path_rate'"):
        timm.create_model("vitmods_tiny_patch16_224", drop_path_rat=0.1)
    with pytest.raises(UserError, match="no pretrained weights"):
        timm.create_model("vitmods_tiny_patch16_224", pretrained=True)
