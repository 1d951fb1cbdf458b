"""Every family that replace_norms is made for, small and with random weights: trained, compiled, copied; and norms of
text leave out what the attention mask of the call marks as padding."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from torch import nn

import vitmods as vm
from vitmods.layers import norms
from vitmods.ops.padding import padded
from vitmods.study.bases import make_base
from vitmods.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from")
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
REFORMER = {
    "attn_layers": ["local", "lsh"], "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8,
    "feed_forward_size": 32, "axial_pos_shape": (4, 8), "axial_pos_embds_dim": (8, 8), "vocab_size": 50,
    "num_buckets": 4, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "is_decoder": False, "hash_seed": 0,
    "local_attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """``fullgraph``: whether the library's own model compiles to one graph; ``repeats``: whether a training step can be
    repeated (BigBird draws blocks at random)."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    grids: tuple[Any, ...]
    prefix: int = 0
    heads: int | None = None
    fullgraph: bool = True
    repeats: bool = True

    def model(self):
        torch.manual_seed(0)
        model = self.make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        return model.eval()

    def inputs(self):
        torch.manual_seed(1)
        return torch.randn(self.shape) if len(self.shape) == 4 else torch.randint(4, 50, self.shape)


def read(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def swin():
    sizes = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=56, num_classes=5, **sizes)


def pvt_v2():
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    sizes = {"embed_dims": (16, 32), "num_heads": (1, 2), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)}
    return PyramidVisionTransformerV2(depths=(1, 1), num_classes=5, **sizes)


def levit():
    from timm.models.levit import Levit

    sizes = {"embed_dim": (16, 32), "key_dim": 8, "num_heads": (2, 4), "depth": (1, 1)}
    return Levit(img_size=64, num_classes=5, **sizes)


def vit():
    return timm.create_model("deit_tiny_patch16_224", img_size=(32, 48), embed_dim=16, depth=2, num_heads=2)


def hf_vit():
    sizes = {name: TEXT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = hf.ViTConfig(image_size=32, patch_size=8, intermediate_size=32, **sizes)
    return hf.ViTModel(config, add_pooling_layer=False)


def hf_pvt():
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 1], "num_attention_heads": [1, 2]}
    ratios = {"mlp_ratios": [2, 2], "patch_sizes": [4, 2], "strides": [4, 2], "sequence_reduction_ratios": [2, 1]}
    config = hf.PvtConfig(image_size=64, num_encoder_blocks=2, num_labels=5, **sizes, **ratios)
    return hf.PvtForImageClassification(config)


def bert(depth=1):
    return hf.BertModel(hf.BertConfig(**TEXT | {"num_hidden_layers": depth}), add_pooling_layer=False)


def big_bird():
    config = hf.BigBirdConfig(
        attention_type="block_sparse", block_size=4, num_random_blocks=1, **TEXT | {"num_hidden_layers": 1}
    )
    return hf.BigBirdModel(config, add_pooling_layer=False)


def reformer():
    return hf.ReformerForSequenceClassification(hf.ReformerConfig(**REFORMER))


FAMILIES = {
    "swin": Family(swin, (2, 3, 56, 56), ((14, 14), (7, 7))),
    "pvt_v2": Family(pvt_v2, (2, 3, 32, 48), ((8, 12), (4, 6))),
    "levit": Family(levit, (2, 3, 64, 64), ((4, 4), (2, 2)), heads=2),
    "vit": Family(vit, (2, 3, 32, 48), ((2, 3),), prefix=1),
    "hf_vit": Family(hf_vit, (2, 3, 32, 32), ((4, 4),), prefix=1),
    "hf_pvt": Family(hf_pvt, (2, 3, 64, 64), ((16, 16),)),
    "bert": Family(bert, (2, 20), (None,)),
    "big_bird": Family(big_bird, (2, 64), (None,), repeats=False),
    "reformer": Family(reformer, (2, 32), (None,), fullgraph=False),
}

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
IMAGES = pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.grids != (None,)])
KINDS = ("rms", "scale", "batch", "instance", "group", "power", "switchable")


def dtn_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, norms.DynamicTokenNorm)}


def with_dtn(family, model=None, **fields):
    change = vm.DynamicTokenNorm(norms="both", **fields)
    return vm.replace_norms(model or family.model(), change, heads=family.heads).model


def gradients(model, run, inputs):
    model.zero_grad()
    torch.manual_seed(2)  # BigBird and Reformer draw at random
    read(run(inputs)).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "levit"])
def test_with_layer_statistics_it_is_the_old_model(name):
    """lambda = 1 is LayerNorm: gains, biases and places are right, and the old model is as it was."""
    family = FAMILIES[name]
    old, inputs = family.model(), family.inputs()
    before = {key: value.clone() for key, value in old.state_dict().items()}
    new = with_dtn(family, old, trade_off=1.0)
    for key, norm in dtn_norms(new).items():
        norm.eps = old.get_submodule(key).eps
    results = []
    for model in (old, new):
        torch.manual_seed(2)
        results.append(read(model(inputs)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert results[0].std() > 0.01
    assert all(torch.equal(value, before[key]) for key, value in old.state_dict().items())
    assert not dtn_norms(old)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in old.modules())


def test_levit_with_batch_norm_is_levit():
    """Its own normalizer in our form, in training, where both use the batch."""
    family = FAMILIES["levit"]
    old = family.model().train()
    new = vm.replace_norms(old, vm.Norm("batch")).model
    with pytest.warns(UserWarning, match="BatchNorm takes its statistics from 2 images"):
        result = new(family.inputs())
    assert sum(isinstance(m, norms.BatchNorm) for m in new.modules()) == 4
    torch.testing.assert_close(result, old(family.inputs()), rtol=1e-4, atol=1e-5)


@EACH
def test_norms_of_an_image_learn_their_grid_and_a_step_trains_every_parameter(family):
    model = with_dtn(family).train()
    grads = gradients(model, model, family.inputs())
    new_norms = dtn_norms(model).values()
    assert tuple(dict.fromkeys(norm.grid_size for norm in new_norms)) == family.grids
    assert {norm.prefix_tokens for norm in new_norms} == {family.prefix}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0).step()
    for name, parameter in model.named_parameters():
        assert name in grads
        assert grads[name].isfinite().all()
        assert grads[name].any(), name
        assert not torch.equal(parameter, before[name]), name
    assert {"a", "omega_mean", "omega_var"} <= {name.rpartition(".")[2] for name in grads}


COMPILED = [  # of the others norms stand where those of these do, or a test below compiles them
    pytest.param(family, id=name, marks=[pytest.mark.long] * (name not in ("levit", "bert")))
    for name, family in FAMILIES.items()
]


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_it_trains_the_same(family):
    torch._dynamo.reset()
    model, inputs = with_dtn(family).train(family.repeats), family.inputs()
    expected = gradients(model, model, inputs)
    compiled = torch.compile(model, backend="eager", fullgraph=family.fullgraph)
    torch.testing.assert_close(gradients(model, compiled, inputs), expected, rtol=2e-3, atol=2e-4)


@EACH
def test_every_kind_of_norm_trains(family):
    inputs = family.inputs()
    for kind in KINDS:
        change = vm.Norm(kind, exact=False) if kind == "rms" else vm.Norm(kind)
        heads = family.heads if kind in ("group", "power") else None
        done = vm.replace_norms(family.model(), change, heads=heads)
        model = done.model.train()
        grads = gradients(model, model, inputs)
        for row in done.rows:
            if row.now:
                norm = type(model.get_submodule(row.site.name)).__name__
                assert row.now.startswith(norm)
                assert grads[f"{row.site.name}.weight"].isfinite().all()
                assert grads[f"{row.site.name}.weight"].any()


def test_grids_follow_the_size_of_the_images():
    """The same 24 tokens as 4 x 6 and as 6 x 4, which the block alone knows; compiled as well."""
    torch._dynamo.reset()
    model = with_dtn(FAMILIES["pvt_v2"])
    compiled = torch.compile(model, backend="eager", dynamic=False)
    for shape, grids in (((1, 3, 32, 48), {(8, 12), (4, 6)}), ((1, 3, 48, 32), {(12, 8), (6, 4)})):
        images = torch.randn(shape)
        torch.testing.assert_close(compiled(images), model(images))
        assert {norm.grid_size for norm in dtn_norms(model).values()} == grids


@IMAGES
def test_a_copy_learns_grids_of_its_own(name):
    family = FAMILIES[name]
    model, inputs = with_dtn(family), family.inputs()
    with torch.no_grad():
        expected = model(inputs)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for norm in dtn_norms(model).values():
                norm.grid_size = (0, 0)
            torch.testing.assert_close(read(twin(inputs)), read(expected))
            assert all(norm.grid_size == (0, 0) for norm in dtn_norms(model).values())


def test_gradient_checkpointing_and_export_of_swin():
    family = FAMILIES["swin"]
    model, inputs = with_dtn(family).train(), family.inputs()
    expected = gradients(model, model, inputs)
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(gradients(model, model, inputs), expected)
    model = with_dtn(family)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, (inputs,)).module()(inputs), model(inputs))


@pytest.mark.parametrize(("kind", "counter"), [("batch", "running_mean"), ("power", "running_phi")])
def test_reversible_layers_gather_statistics_once(kind, counter):
    family = FAMILIES["reformer"]
    model = vm.replace_norms(family.model(), vm.Norm(kind)).model.train()
    out = read(model(family.inputs()))
    states = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(counter)}
    out.sum().backward()
    assert states
    assert all(torch.equal(model.state_dict()[name], value) for name, value in states.items())


# ---- padding of text

CHANGES = {
    "dtn": vm.DynamicTokenNorm(norms="both"),
    "group": vm.Norm("group"),
    "instance": vm.Norm("instance"),
    "batch": vm.Norm("batch"),
}
LENGTHS = (12, 7, 3)
MASK = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()


def tokens(count=12):
    torch.manual_seed(1)
    return torch.randint(4, 20, (3, count))


def padded_bert(change):
    return vm.replace_norms(bert(2).double(), change).model.eval()


@pytest.mark.parametrize("name", CHANGES)
def test_a_text_is_as_if_it_stood_alone(name):
    model, ids = padded_bert(CHANGES[name]), tokens()
    for actual in (model(ids, MASK).last_hidden_state, model(ids, attention_mask=MASK).last_hidden_state):
        assert actual.isfinite().all()
        for i, length in enumerate(LENGTHS):
            alone = model(ids[i : i + 1, :length]).last_hidden_state
            torch.testing.assert_close(actual[i : i + 1, :length], alone)


def test_a_copy_of_the_model_knows_it_too_and_a_call_without_mask_has_no_padding():
    model, ids = padded_bert(CHANGES["group"]), tokens()
    expected = model(ids).last_hidden_state
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(ids, attention_mask=MASK), model(ids, attention_mask=MASK))
    assert not torch.allclose(model(ids, attention_mask=MASK).last_hidden_state[1], expected[1])
    torch.testing.assert_close(model(ids).last_hidden_state, expected)
    with pytest.raises(IndexError):
        model(ids + 100, attention_mask=MASK)
    torch.testing.assert_close(model(ids).last_hidden_state, expected)


def test_pytorchs_own_encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    old = torch.nn.TransformerEncoder(layer, 2).double()
    model, x = vm.replace_norms(old, CHANGES["group"]).model.eval(), torch.randn(3, 12, 16).double()
    actual = model(x, src_key_padding_mask=MASK == 0)
    for i, length in enumerate(LENGTHS):
        torch.testing.assert_close(actual[i : i + 1, :length], model(x[i : i + 1, :length]))


def masked_gradients(model, out):
    return gradients(model, lambda _: (out * MASK[..., None]).sin(), None)


def test_reversible_layers_run_again_with_the_same_padding():
    torch.manual_seed(0)
    options = {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 32}
    none = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    config = hf.ReformerConfig(vocab_size=20, max_position_embeddings=12, **options, **sizes, **none)
    model = vm.replace_norms(hf.ReformerModel(config).double(), CHANGES["dtn"]).model.train()
    actual = masked_gradients(model, model(tokens(), attention_mask=MASK).last_hidden_state)
    with padded(MASK == 0, behind=True):  # what the layers compute, differentiated by autograd
        first = second = model.embeddings(tokens())
        for layer in model.encoder.layers:
            first = first + layer.attention(second, attention_mask=MASK.bool()).hidden_states
            second = second + layer.feed_forward(first)
        out = model.encoder.layer_norm(torch.cat([first, second], dim=-1))
    torch.testing.assert_close(actual, masked_gradients(model, out))


def test_what_blocks_are_filled_up_with_is_padding_too():
    model = vm.replace_norms(big_bird().double(), CHANGES["group"]).model.eval()
    ids, mask = tokens(38), torch.ones(3, 38).long()
    assert model.attention_type == "block_sparse"
    actual = model(ids, attention_mask=mask).last_hidden_state
    longer = [torch.nn.functional.pad(tensor, (0, 2)) for tensor in (ids, mask)]
    torch.testing.assert_close(actual, model(longer[0], attention_mask=longer[1]).last_hidden_state[:, :38])


OPTIONS = "hidden_size=16&num_hidden_layers=1&num_attention_heads=2&intermediate_size=32"


def test_bases_of_text():
    """All are filled up to one length behind a class token, and say the same of a sequence in any batch."""
    base = make_base(f"hf-text:big_bird?{OPTIONS}&block_size=2&num_random_blocks=1", 10, (1, 29), 16)
    torch.manual_seed(0)
    model, ids = base.build().eval(), tokens(20) % 16
    assert model.config.attention_type == "block_sparse"
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (17, 30)
    state = torch.get_rng_state()
    out = model(ids).logits
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model(torch.nn.functional.pad(ids, (0, 5))).logits, out)
    with pytest.raises(UserError, match=r"longer than the model's 29"):
        model(torch.ones(1, 30, dtype=torch.long))
    torch.testing.assert_close(model(ids).logits, out)


def test_short_sequences_of_big_bird_attend_to_all_and_what_cannot_be_made():
    with pytest.warns(UserWarning, match=r"attends in blocks to more than 704 tokens; with 64 it attends to all"):
        model = make_base(f"hf-text:big_bird?{OPTIONS}", 10, (1, 29), 16).build()
    assert model.config.attention_type == "original_full"
    for wrong, words in (
        ("bigbirds", "does not have a model 'bigbirds'"),
        ("bert?hidden=3", "the config does not have 'hidden'"),
        ("bert?pretrained=1", "do not support pretrained weights"),
    ):
        with pytest.raises(UserError, match=words):
            make_base(f"hf-text:{wrong}", 10, (1, 29), 16).build()
