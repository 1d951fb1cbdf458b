"""A ViT that reads sequences of tokens."""

import numpy as np
import pytest
import torch

import vitmods as vm
from vitmods.adapters import load, save
from vitmods.layers.position import sincos1d
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.model.names import MODELS
from vitmods.util.errors import UserError

T, WORDS = 24, 16
CHANGES = (
    "", "dtn", "dtn(norms=both,blocks=1)", "norm(kind=group)", "norm(kind=instance)", "norm(kind=rms,exact=false)",
    "qknorm+layerscale", "placement(attn=post,mlp=post)", "normformer", "swiglu", "parallel",
)  # fmt: skip


def model(changes="", **settings):
    torch.manual_seed(0)
    made = vm.vit("LRA-64", img_size=(1, T), in_chans=WORDS, num_classes=10, **settings)
    torch.nn.init.normal_(made.head.weight, std=0.1)  # zero at first
    return (vm.apply(made, *vm.parse_changes(changes)) if changes else made).double()


def tokens(*lengths):
    torch.manual_seed(1)
    words = torch.randint(1, WORDS, (len(lengths), max(lengths)))
    return words.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], 0)


@pytest.mark.parametrize("changes", CHANGES)
def test_padding_makes_no_difference_to_any_change(changes):
    vit, batch = model(changes).eval(), tokens(17, 9, 20)
    expected = torch.cat([vit(row[None, row > 0]) for row in batch])
    torch.testing.assert_close(vit(batch), expected)
    more = torch.nn.functional.pad(batch, (0, T - batch.shape[1]))
    torch.testing.assert_close(vit(more), expected)


@pytest.mark.parametrize("kind", ["layer", "batch", "group"])
def test_gradient_checkpointing_gives_the_same_gradients(kind):
    batch, gradients = tokens(17, 9, 20), []
    for again in (False, True):
        vit = model("" if kind == "layer" else f"norm(kind={kind})").train()
        vit.set_grad_checkpointing(again)
        other = vit(tokens(6, 3))  # a forward between a forward and its backward
        out = vit(batch).logsumexp(1).sum()
        vit(tokens(4, 8))
        out = out + other.sum() * 0
        out.backward()
        gradients.append({name: p.grad for name, p in vit.named_parameters()})
    torch.testing.assert_close(*gradients)


def test_masks_of_the_caller_are_joined_with_padding():
    vit, batch = model().eval(), tokens(17, 9)
    all_pairs = torch.ones(18, 18, dtype=torch.bool)
    torch.testing.assert_close(vit(batch, attn_mask=all_pairs), vit(batch))
    torch.testing.assert_close(vit(batch, attn_mask=torch.zeros(18, 18).double()), vit(batch))
    band = torch.ones(18, 18, dtype=torch.bool).tril(3)
    expected = vit(batch[1:, :9], attn_mask=band[:10, :10])
    torch.testing.assert_close(vit(batch, attn_mask=band)[1:], expected)
    torch.testing.assert_close(vit(batch, is_causal=True)[1:], vit(batch[1:, :9], is_causal=True))


def test_intermediates_and_features():
    vit, batch = model("norm(kind=group)").eval(), tokens(17, 9)
    alone = vit.forward_intermediates(batch[1:, :9], output_fmt="NLC", intermediates_only=True)
    together = vit.forward_intermediates(batch, output_fmt="NLC", intermediates_only=True)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a[1:, :9], b)
    torch.testing.assert_close(vit.forward_features(batch)[1:, :10], vit.forward_features(batch[1:, :9]))


def test_compiled():
    vit, batch = model("norm(kind=group)", depth=1).eval(), tokens(17, 9)
    torch.compiler.reset()
    compiled = torch.compile(vit, backend="eager")
    torch.testing.assert_close(compiled(batch), vit(batch))
    torch.testing.assert_close(compiled(tokens(8, 8)), vit(tokens(8, 8)))


@pytest.mark.parametrize("write", [save, lambda *arguments: vm.export(*arguments) < 1e-5 or pytest.fail("differs")])
def test_saved_as_weights_and_not_as_a_graph(tmp_path, write):
    vit, batch = model("dtn").float().eval(), tokens(17, 9)
    write(vit, tmp_path / "model.safetensors")
    torch.testing.assert_close(load(tmp_path / "model.safetensors").eval()(batch), vit(batch))
    with pytest.raises(UserError, match="sequence models as safetensors"):
        vm.export(vit, tmp_path / "model.pt2")


def test_the_published_encoder():
    """Long Range Arena's: 6 layers (4 in its code), 512 wide, 8 heads, MLPs and the layer before the head 1024."""
    config = ViTConfig.from_name("LRA-512", img_size=(1, 2000), in_chans=WORDS, num_classes=10)
    vit = vm.vit(config)
    shapes = {name: tuple(p.shape) for name, p in vit.named_parameters()}
    assert shapes["patch_embed.proj.weight"] == (WORDS, 512)
    assert "blocks.0.attn.qkv.bias" not in shapes
    assert (len(vit.blocks), shapes["blocks.5.mlp.fc1.weight"]) == (6, (1024, 512))
    assert (shapes["pre_logits.weight"], shapes["head.weight"]) == ((1024, 512), (10, 1024))
    assert vit.patch_embed.proj.weight.std().item() == pytest.approx(1.0, abs=0.05)
    n = 2001
    products = 6 * (4 * n * 512**2 + 2 * n * n * 512 + 2 * n * 512 * 1024) + 512 * 1024 + 1024 * 10
    assert count_macs(config) == products


def test_positions_are_those_of_its_code():
    table = sincos1d(40, 6)[0].numpy()
    scale = -np.log(10_000.0) / (6 // 2 - 1)
    angles = np.arange(40)[:, None] * np.exp(np.arange(3) * scale)
    np.testing.assert_allclose(table, np.concatenate([np.sin(angles), np.cos(angles)], axis=1))
    learned = model(position="learn", position_on_prefix=True)
    assert learned.pos_embed.shape == (1, T + 1, 64)
    learned(tokens(5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pool": "avg", "class_token": False}, "would count the padding"),
        ({"patch_size": (1, 2)}, "Sequences are images of one row"),
        ({"stem": {"kind": "tokens"}}, "does not have a bias"),
        ({"head_hidden": 0}, "head_hidden is the width"),
        ({"embed_dim": 63, "num_heads": 1}, "multiple of 2"),
        ({"patch_drop": 0.5}, "makes patches one by one"),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    fields = {**MODELS["LRA-64"], "img_size": (1, T), "in_chans": WORDS, **settings}
    with pytest.raises(UserError, match=words):
        vm.vit(ViTConfig.from_dict(fields))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda vit: vit(torch.ones(1, 25, dtype=torch.long)), ValueError, "longer than the 24"),
        (lambda vit: vit(torch.ones(1, 5)), ValueError, "expects tokens"),
        (torch.fx.symbolic_trace, UserError, r"torch\.fx cannot trace"),
        (lambda vit: vm.apply(vit, vm.Norm("rms")), UserError, "RMSNorm cannot take LayerNorm's place exactly"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(model())
