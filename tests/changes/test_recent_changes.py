"""Ingredients of later ViTs: relative positions, gates and values as timm or their formula, registers, ViT-5."""

import pytest
import torch
from timm.layers import AttentionRope
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
from timm.models.beit import Beit

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.layers import Attention, AttentionSlots, RelativePositionBias
from vitmods.layers.registers import RegisterNeurons
from vitmods.study.arms import arms_from_text, find_line_up

DOUBLE = {"atol": 1e-9, "rtol": 0}


def randomize(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@pytest.fixture
def base():
    torch.manual_seed(0)
    return randomize(vm.vit("mu3/4", img_size=(8, 12), num_classes=5))


@pytest.fixture
def images():
    return torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_relative_positions_are_beits(images):
    torch.manual_seed(0)
    sizes = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    beit = Beit(**sizes, use_rel_pos_bias=True, use_abs_pos_emb=True, init_values=None, global_pool="token")
    randomize(beit)
    model = vm.vit("mu2/4", img_size=(8, 12), embed_dim=16, num_heads=2, mlp_dim=64, num_classes=5, rel_pos=True)
    weights = {}
    for name, value in beit.state_dict().items():
        if name.endswith("q_bias"):
            parts = [value, torch.zeros_like(value), beit.get_parameter(name[:-6] + "v_bias")]
            weights[name.replace("q_bias", "qkv.bias")] = torch.cat(parts)
        elif not name.endswith(("v_bias", "k_bias", "index")):
            weights[name.replace("attn.relative_position_bias_table", "attn.rel_pos.table")] = value
    model.double().eval().load_state_dict(weights)
    torch.testing.assert_close(model(images), beit(images), **DOUBLE)
    torch.testing.assert_close(model.forward_features(images), beit.forward_features(images), **DOUBLE)


@pytest.mark.parametrize("prefix", [0, 1])
def test_a_table_is_resampled_as_timms(prefix):
    bias, other = (
        RelativePositionBias(3, (4, 4), prefix).double(),
        RelativePositionBias(3, (4, 4), prefix, device="meta"),
    )
    torch.nn.init.normal_(bias.table)
    other.load_state_dict(bias.state_dict(), assign=True)
    old, q = bias.table.detach().clone(), torch.randn(1, 3, 36 + prefix, 4, dtype=torch.float64)
    assert other(q[:, :, : 16 + prefix], q[:, :, : 16 + prefix]).equal(bias(*2 * [q[:, :, : 16 + prefix]]))
    bias.grid_size = (6, 6)
    dynamic = bias(q, q)
    bias.set_grid((6, 6))
    expected = resize_rel_pos_bias_table(old, (6, 6), bias.table.shape)
    torch.testing.assert_close(bias.table.detach(), expected, rtol=0, atol=1e-6)  # timm computes in float32
    torch.testing.assert_close(bias(q, q), dynamic, **DOUBLE)
    mask = torch.ones(36 + prefix, 36 + prefix, dtype=torch.bool).tril()
    assert torch.equal(bias(q, q, mask).isinf(), ~mask.expand(1, 3, -1, -1))
    with pytest.raises(ValueError, match="set grid_size"):
        bias(q[:, :, :5], q[:, :, :5])


def test_what_attention_reads_is_what_is_looked_at(base):
    """Weights with relative positions, and values of a map that is wrapped."""
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    attention = randomize(vm.apply(base, vm.RelativePositions())).blocks[1].attn
    attention.qkv.register_forward_hook(lambda module, args, output: output + args[0].sum(-1, keepdim=True))
    read = (attention.weights(x) @ attention.values(x)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention.proj(read), attention(x), **DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_are_timms(dtype):
    torch.manual_seed(0)
    reference = AttentionRope(12, 3, gated=True, qk_norm=True, norm_layer=vm.layers.LayerNorm).to(dtype)
    attention = Attention(12, 3, AttentionSlots(vm.layers.LayerNorm, gate="channel")).to(dtype)
    attention.load_state_dict(reference.state_dict())
    x = torch.randn(2, 5, 12, dtype=dtype)
    torch.testing.assert_close(attention(x), reference(x), atol=1e-5 if dtype == torch.float32 else 1e-9, rtol=0)


def test_one_gate_for_each_head():
    attention, x = Attention(12, 3, AttentionSlots(gate="head")).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    read = (attention.weights(x) @ attention.values(x)) * attention.gate(x).sigmoid().transpose(1, 2)[..., None]
    torch.testing.assert_close(attention(x), attention.proj(read.transpose(1, 2).flatten(2)), **DOUBLE)


def attend_by_hand(block, x, values, scale=1.0):
    """A block of `mu`, with other values, and with a factor of its norms."""
    attention, read = block.attn, block.norm1(x) * scale
    heads = (attention.weights(read) @ values).transpose(1, 2).flatten(2)
    x = x + attention.proj(heads)
    return x + block.mlp(block.norm2(x) * scale)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_of_the_first_block(base, images, checkpointing):
    model = randomize(vm.apply(base, vm.ValueResidual()))
    model.set_grad_checkpointing(checkpointing)
    x = first = None
    tokens = model._embed(images)
    for index, block in enumerate(model.blocks):
        values = block.attn.values(block.norm1(tokens))
        first = values if first is None else first
        a, b = (0, 1) if index == 0 else block.attn.value_mix.weight
        tokens = attend_by_hand(block, tokens, a * first + b * values)
    x = model.head(model.norm(tokens)[:, 0])
    torch.testing.assert_close(model(images), x, **DOUBLE)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(x.square().sum(), parameters)
    actual = torch.autograd.grad(model(images).square().sum(), parameters)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    final, intermediates = model.forward_intermediates(images, output_fmt="NLC")
    torch.testing.assert_close(final[:, 1:], model.norm(intermediates[-1]), **DOUBLE)


def test_norms_are_scaled_by_depth(base, images):
    model = randomize(vm.apply(base, vm.LayerNormScaling()))
    tokens = model._embed(images)
    for index, block in enumerate(model.blocks):
        scale = (index + 1) ** -0.5
        tokens = attend_by_hand(block, tokens, block.attn.values(block.norm1(tokens) * scale), scale)
    torch.testing.assert_close(model(images), model.head(model.norm(tokens)[:, 0]), **DOUBLE)


@pytest.mark.parametrize(
    "text", ["layernormscaling", "gate", "gate(per=head)", "relpos+rope", "valueresidual+registers"]
)
def test_exact_rms_and_faster_inference(base, images, text):
    """What reads a norm takes up its bias: gates too, and scaled."""
    model = randomize(vm.apply(base, *vm.parse_changes(text)))
    expected = model(images)
    torch.testing.assert_close(vm.apply(model, vm.Norm("rms")).eval()(images), expected, **DOUBLE)
    torch.testing.assert_close(vm.optimize_for_inference(model)(images), expected, **DOUBLE)
    model.forms = None
    torch.testing.assert_close(model(images), expected, **DOUBLE)


@pytest.mark.parametrize("text", ["relpos", "valueresidual", "rope(frequencies=mixed)", "registers(count=2)+gate"])
def test_other_sizes(base, images, text):
    model = randomize(vm.apply(base, *vm.parse_changes(text)))
    larger = torch.randn(2, 3, 16, 20, dtype=torch.float64)
    model.set_input_size(dynamic_img_size=True)
    expected = model(larger)
    model.set_input_size((16, 20), dynamic_img_size=False)
    torch.testing.assert_close(model(larger), expected, **DOUBLE)


def test_registers_keep_the_position_of_the_class_token_and_extend_relative_positions(base, images):
    new = vm.apply(base, vm.Registers(count=2))
    assert new.reg_token.shape == (1, 2, 32)
    torch.testing.assert_close(new._embed(images)[:, 0], base._embed(images)[:, 0], **DOUBLE)
    torch.testing.assert_close(new._embed(images)[:, 3:], base._embed(images)[:, 1:], **DOUBLE)
    assert vm.apply(new, vm.Registers(count=3)).reg_token.shape == (1, 3, 32)
    base = vm.vit("mu2/4", img_size=(8, 12), class_token=False, pool="avg", rel_pos=True)
    table = randomize(base).blocks[0].attn.rel_pos.table
    new = vm.apply(base, vm.Registers(count=2)).blocks[0].attn.rel_pos.table
    assert new[: len(table)].equal(table)
    assert not new[len(table) :].any()
    assert len(new) == len(table) + 3


def test_vit_5_by_name_is_its_line_up():
    counts = {"ViT5-S/16": 22_039_144, "ViT5-B/16": 86_543_080}
    for name, count in counts.items():
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in vm.vit(name).parameters()) == count
    assert vm.ViTConfig.from_name("ViT5-S/16", img_size=32).rope.reference == (2, 2)
    arms = {arm.name: arm.changes for text in find_line_up("vit5").arms for arm in arms_from_text(text)}
    assert len(arms) == 15
    base = vm.ViTConfig.from_name("S/16")
    assert edit(base, arms["vit5"]) == vm.ViTConfig.from_name("ViT5-S/16")
    configs = [edit(base, changes) for changes in arms.values()]
    assert len({config.to_json() for config in configs}) == 15


@pytest.fixture
def with_outliers():
    """A model, images with a bright patch, and neuron 3 of block 1, which makes that patch stick out."""
    torch.manual_seed(0)
    model = vm.vit("mu3/4", img_size=16, num_classes=5).eval()
    images = 0.1 * torch.randn(6, 3, 16, 16)
    images[:, :, 4:8, 8:12] += 0.2
    fc1, fc2 = model.blocks[1].mlp.fc1, model.blocks[1].mlp.fc2
    seen = {}
    hook = fc1.register_forward_hook(lambda module, args, output: seen.update(x=args[0][:, 1:]))
    with torch.no_grad():
        model(images)
        hook.remove()
        bright = seen["x"][:, 6].mean(0)
        fc1.weight[3], fc1.bias[3] = bright / bright.norm(), -0.9 * bright.norm()
        fc2.weight[:, 3] = 40.0
    return model, images


def test_registers_that_are_not_trained_take_over_what_makes_patches_stick_out(with_outliers):
    model, images = with_outliers

    def norms(model):
        tokens = model.forward_intermediates(images, [1], intermediates_only=True, output_fmt="NLC")[0].detach()
        return tokens.norm(dim=-1) / tokens.norm(dim=-1).median(dim=1, keepdim=True).values

    assert norms(model).argmax(1).unique().tolist() == [6]
    assert norms(model).max() > 3
    change = vm.Registers(count=1, trained=False, neurons=1)
    new = vm.apply(model, change).eval()
    assert change.fit(new, images.split(4))
    assert [block.mlp.norm.neurons.nonzero().flatten().tolist() for block in new.blocks[:3]] == [[], [3], []]
    assert norms(new).max() < 2
    assert "reg_token" not in dict(new.named_parameters())
    assert not new.reg_token.any()

    hidden = torch.rand(2, 18, len(new.blocks[1].mlp.norm.neurons))
    expected = hidden.clone()
    for image in expected:
        image[1, 3] = max(image[t, 3] for t in range(2, 18))
        image[2:, 3] = 0
    assert torch.equal(new.blocks[1].mlp.norm(hidden), expected)

    again = vm.vit(new.vit_config)
    again.load_state_dict(new.state_dict())
    assert torch.equal(again.eval()(images), new(images))


def test_registers_that_are_not_trained_need_patches_that_stick_out(images, base):
    new = vm.apply(base, change := vm.Registers(trained=False))
    with pytest.warns(UserWarning, match="no patch sticks out"):
        change.fit(new, [images])
    assert not any(module.neurons.any() for module in new.modules() if isinstance(module, RegisterNeurons))
    with pytest.raises(ValueError, match="trained=false too"):
        vm.Registers(neurons=3)
    with pytest.raises(ValueError, match="without registers"):
        vm.apply(new, vm.Registers(count=2, trained=False))
