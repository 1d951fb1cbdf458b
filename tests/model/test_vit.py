import pytest
import torch

import vitmods as vm
from vitmods.util.errors import UserError

TINY = {"img_size": 8, "num_classes": 5}


def tiny(**overrides):
    torch.manual_seed(0)
    return vm.vit("mu2/4", **{**TINY, **overrides})


@pytest.mark.parametrize("img_size", [8, (8, 16), (12, 4)], ids=str)
@pytest.mark.parametrize("in_chans", [1, 3, 12])
def test_rectangles_and_channels(img_size, in_chans):
    model = tiny(img_size=img_size, in_chans=in_chans)
    rows, columns = model.vit_config.grid
    images = torch.randn(2, in_chans, *model.vit_config.img_size)
    assert model(images).shape == (2, 5)
    assert model.forward_features(images).shape == (2, 1 + rows * columns, 32)
    for patch_size in ((2, 8), (8, 1)):
        assert tiny(patch_size=patch_size)(torch.randn(1, 3, 8, 8)).shape == (1, 5)


def test_rows_come_before_columns():
    """A model whose patches are rows of the image sees a change of one row in one token alone."""
    model = tiny(patch_size=(2, 8), position="none").eval()
    images = torch.randn(1, 3, 8, 8)
    changed = images.clone()
    changed[:, :, 4:6] += 1
    moved = (model.patch_embed(images) - model.patch_embed(changed)).abs().amax((0, 2))
    assert (moved > 0).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ({"pool": "token"}, (2, 5)),
        ({"pool": "avg"}, (2, 5)),
        ({"pool": "avg", "norm_after_pool": True}, (2, 5)),
        ({"pool": "avg", "class_token": False}, (2, 5)),
        ({"pool": "map"}, (2, 5)),
        ({"pool": "map", "class_token": False}, (2, 5)),
        ({"pool": "none"}, (2, 5, 5)),
        ({"num_classes": 0}, (2, 32)),
        ({"reg_tokens": 3}, (2, 5)),
        ({"reg_tokens": 3, "position_on_prefix": False, "pool": "none"}, (2, 8, 5)),
        ({"position": "none"}, (2, 5)),
        ({"position": "sincos2d", "position_on_prefix": False}, (2, 5)),
        ({"representation": True}, (2, 5)),
        ({"layer_scale": 1e-5}, (2, 5)),
        ({"init": "big_vision"}, (2, 5)),
        ({"init": "big_vision", "pool": "map"}, (2, 5)),
    ],
    ids=str,
)
def test_every_head_and_token_option(overrides, shape):
    model = tiny(**overrides)
    torch.nn.init.normal_(getattr(model.head, "weight", torch.empty(1)))  # big_vision's starts at 0
    out = model(torch.randn(2, 3, 8, 8))
    assert out.shape == shape
    assert out.isfinite().all()
    out.square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert vm.ViTConfig.from_json(model.vit_config.to_json()) == model.vit_config
    fresh = vm.vit(model.vit_config)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(torch.ones(2, 3, 8, 8)), model.eval()(torch.ones(2, 3, 8, 8)))


def test_what_the_head_reads():
    model = tiny(pool="avg", reg_tokens=2).eval()
    features = torch.randn(2, 3 + 4, 32)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features[:, 3:].mean(1))
    torch.testing.assert_close(tiny(reg_tokens=2).forward_head(features, pre_logits=True), features[:, 0])
    model = tiny(representation=True).eval()
    features = torch.randn(2, 5, 32)
    expected = torch.tanh(features[:, 0] @ model.pre_logits.weight.T + model.pre_logits.bias)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected)


def test_stochastic_depth_rates_rise_linearly_or_are_constant():
    def rates(shape):
        blocks = tiny(depth=3, drop_path=0.2, drop_path_shape=shape).blocks
        return [[getattr(path, "rate", 0.0) for path in (b.drop_path1, b.drop_path2)] for b in blocks]

    assert rates("linear") == [[0.0, 0.0], [0.1, 0.1], [0.2, 0.2]]
    assert rates("constant") == [[0.2, 0.2]] * 3


@pytest.mark.parametrize("name", ["pos_drop", "proj_drop", "attn_drop", "head_drop", "drop_path"])
def test_every_dropout_acts_in_training_alone(name):
    model = tiny(**{name: 0.5})
    images = torch.randn(8, 3, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    assert torch.equal(model(images), tiny().eval()(images))  # and changes no weight's draw


def test_dropout_sits_in_every_place_that_flax_has_it():
    """After positions, after attention, after GELU and after the MLP; not on attention probabilities."""
    model = tiny(pos_drop=0.1, proj_drop=0.1)
    block = model.blocks[0]
    assert [m.p for m in (model.pos_drop, block.attn.proj_drop, block.mlp.drop1, block.mlp.drop2)] == [0.1] * 4
    assert block.attn.attn_drop == 0


def test_bf16_weights_give_bf16_logits_and_a_seed_the_weights():
    for overrides in ({}, {"position": "sincos2d", "position_on_prefix": False}, {"pool": "map"}):
        model = tiny(**overrides).bfloat16()
        assert model(torch.randn(1, 3, 8, 8).bfloat16()).dtype == torch.bfloat16
    for init in ("timm", "big_vision", "beit"):
        a, b = tiny(init=init).state_dict(), tiny(init=init).state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_last_maps_of_beits_blocks_start_smaller_with_depth():
    weights = vm.vit("mu4/4", img_size=32, num_classes=5, init="beit").state_dict()
    for name, weight in weights.items():
        if name.endswith(
            ("token", "pos_embed", "proj.weight", "fc1.weight", "fc2.weight", "qkv.weight", "head.weight")
        ):
            is_last = name.startswith("blocks.") and name.endswith(("proj.weight", "fc2.weight"))
            bound = 0.02 / (2 * (int(name.split(".")[1]) + 1)) ** 0.5 if is_last else 0.02
            assert 0.8 * bound < weight.abs().max() <= bound * (1 + 1e-6), name
        elif name.endswith("bias"):
            assert not weight.any(), name


def test_gradient_checkpointing_changes_nothing_but_memory():
    model = tiny(drop_path=0.3, proj_drop=0.1)
    images = torch.randn(4, 3, 8, 8)
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        model(images).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", ["pixel_values", "labels"])
def test_inputs_by_hugging_faces_names_are_refused_with_the_way_to_its_trainer(name):
    model = vm.vit("mu1/4", img_size=8)
    with pytest.raises(UserError, match=f"no {name}=.*in_place=True"):
        model(**{"x": torch.zeros(1, 3, 8, 8), name: torch.zeros(1)})
