"""Which norms replace_norms finds and chooses, in the published models and in made-up ones; and what it refuses."""

import copy
import re

import pytest
import timm
import torch
import transformers as hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vitmods as vm
from vitmods.adapters import norm_sites
from vitmods.layers import norms
from vitmods.study.arms import parse_edits
from vitmods.util.errors import NoEffect, UserError

DTN = vm.DynamicTokenNorm()
BOTH = vm.DynamicTokenNorm(norms="both")


def pvt(depths):
    return hf.PvtForImageClassification(hf.PvtConfig(depths=depths, num_labels=1000))


PUBLISHED = {  # the model, its LayerNorm FLOPs and parameters in the paper, blocks, norms that are not in blocks
    "swin_t": (lambda: timm.create_model("swin_tiny_patch4_window7_224"), 4.51, 29, 12, 5),
    "swin_s": (lambda: timm.create_model("swin_small_patch4_window7_224"), 8.7, 50, 24, 5),
    "pvt_tiny": (lambda: pvt([2, 2, 2, 2]), 1.90, 13.2, 8, 5),
    "pvt_small": (lambda: pvt([3, 4, 6, 3]), 3.80, 24.5, 16, 5),
    "pvt_v2_b0": (lambda: timm.create_model("pvt_v2_b0"), None, 3.7, 8, 8),
    "pvt_v2_b1": (lambda: timm.create_model("pvt_v2_b1"), None, 14.0, 8, 8),
    "pvt_v2_b2": (lambda: timm.create_model("pvt_v2_b2"), None, 25.4, 16, 8),
    "pvt_v2_b3": (lambda: timm.create_model("pvt_v2_b3"), 6.9, 45.2, 28, 8),
    "levit_128s": (lambda: timm.create_model("levit_128s"), 0.305, 7.8, 9, None),
}


def giga(model):
    """Multiply-adds of the matrix products and convolutions for one image."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 224, 224, device="meta"))
    return counter.get_total_flops() / 2e9


SMALL = ("swin_t", "pvt_tiny", "pvt_v2_b0", "levit_128s")
LARGE = ("swin_s", "pvt_small", "pvt_v2_b1", "pvt_v2_b2", "pvt_v2_b3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LARGE)) for n in PUBLISHED])
def test_published_models(name):
    """On the meta device: all blocks are found, and the costs are the paper's and, of each family's smallest, the
    separable form's."""
    make, flops, params, blocks, outside = PUBLISHED[name]
    with torch.device("meta"):
        model = make().eval()
    sites = norm_sites(model)
    assert [sum(site.role == role for site in sites) for role in ("attn", "mlp")] == [blocks, blocks]
    if outside is not None:
        assert sum(site.block is None for site in sites) == outside
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(params, rel=0.03)
    plain = giga(model) if flops or name in SMALL else None
    assert flops is None or plain == pytest.approx(flops, rel=0.02)
    if name not in SMALL:
        return
    done = vm.replace_norms(model, BOTH, heads=4 if name == "levit_128s" else None)
    dtn_norms = [m for m in done.model.modules() if isinstance(m, norms.DynamicTokenNorm)]
    assert {p.device.type for p in done.model.parameters()} == {"meta"}
    gained = giga(done.model) - plain
    assert len(dtn_norms) == 2 * (blocks - (2 if name == "pvt_tiny" else 0))
    separable = sum(2 * m.grid_size[0] * m.grid_size[1] * sum(m.grid_size) * len(m.weight) for m in dtn_norms) / 1e9
    assert gained == pytest.approx(separable, rel=1e-6)


def test_pvt_keeps_what_the_paper_keeps():
    with torch.device("meta"):
        done = vm.replace_norms(pvt([1, 1, 1, 1]), BOTH)
    why = {row.site.name.removeprefix("pvt.encoder."): row.now or row.why for row in done.rows}
    assert why["block.0.0.layer_norm_1"] == "DynamicTokenNorm(heads=1)"
    assert why["block.2.0.layer_norm_2"] == "DynamicTokenNorm(heads=5)"
    assert why["block.0.0.attention.self.layer_norm"] == "inside attention"
    assert why["patch_embeddings.0.layer_norm"] == "of the embedding"
    assert why["block.3.0.layer_norm_1"] == why["block.3.0.layer_norm_2"] == "the class token's stage"
    assert why["layer_norm"] == "after the blocks"


def tiny_swin():
    sizes = {"embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=56, num_classes=5, **sizes)


def test_it_prints_as_a_table():
    lines = str(vm.replace_norms(tiny_swin(), DTN)).split("\n")
    assert [re.split(r"  +", line) for line in lines] == [
        ["norm", "role", "was", "now"],
        ["patch_embed.norm", "embed", "LayerNorm(16)", "stays: of the embedding"],
        ["layers.*.blocks.*.norm1", "attn", "LayerNorm(16)", "DynamicTokenNorm(heads=2)", "(2x)"],
        ["layers.*.blocks.*.norm2", "mlp", "LayerNorm(16)", "stays: norms='attn'", "(2x)"],
        ["layers.*.downsample.norm", "merge", "LayerNorm(64)", "stays: between stages"],
        ["layers.*.blocks.*.norm1", "attn", "LayerNorm(32)", "DynamicTokenNorm(heads=4)"],
        ["layers.*.blocks.*.norm2", "mlp", "LayerNorm(32)", "stays: norms='attn'"],
        ["norm", "final", "LayerNorm(32)", "stays: after the blocks"],
    ]
    assert {line[25:31].strip() for line in lines} == {"role", "embed", "attn", "mlp", "merge", "final"}


def replaced(model, change, where=None, **more):
    return [row.site.name for row in vm.replace_norms(model, change, where, **more).rows if row.now]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("layers.0.*", [f"layers.0.blocks.{block}.norm{i}" for block in (0, 1) for i in (1, 2)]),
        ("mlp", ["layers.0.blocks.0.norm2", "layers.0.blocks.1.norm2", "layers.1.blocks.0.norm2"]),
        (re.compile(r"layers\.1.*norm1"), ["layers.1.blocks.0.norm1"]),
        (lambda site: site.role == "merge" and site.dim == 64, ["layers.1.downsample.norm"]),
        ("final", ["norm"]),
    ],
)  # fmt: skip
def test_where_alone_decides(where, names):
    done = vm.replace_norms(tiny_swin().eval(), DTN, where)
    assert [row.site.name for row in done.rows if row.now] == names
    assert done.model(torch.randn(1, 3, 56, 56)).isfinite().all()


def test_the_change_decides_without_where():
    model = tiny_swin()
    assert replaced(model, vm.DynamicTokenNorm(blocks=1)) == ["layers.0.blocks.0.norm1"]
    one_stage = timm.create_model("vit_tiny_patch16_224", depth=12, img_size=32, embed_dim=24)
    assert replaced(one_stage, DTN) == [f"blocks.{i}.norm1" for i in range(10)]
    assert "norm" in replaced(model, vm.Norm("scale"))
    assert "norm" not in replaced(model, vm.Norm("instance"))
    assert replaced(model, vm.Norm("instance")) == replaced(model, BOTH)


def test_heads_may_be_given():
    model = tiny_swin()
    done = vm.replace_norms(model, DTN, heads=lambda site: site.dim // 8)
    dtn_norms = [m.num_heads for m in done.model.modules() if isinstance(m, norms.DynamicTokenNorm)]
    assert dtn_norms == [2, 2, 4]


class Parts(nn.Module):
    """Attention and an MLP around it, by names that say nothing."""

    def __init__(self, dim=16, heads=2, causal=False, first=None, second=None):
        super().__init__()
        self.one = first or nn.LayerNorm(dim)
        self.two = nn.Module()
        self.two.qkv, self.two.num_heads, self.two.is_causal = nn.Linear(dim, 3 * dim), heads, causal
        self.three = second or nn.LayerNorm(dim)
        self.four = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x):
        q, k, v = self.two.qkv(self.one(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.four(self.three(x))


def test_structure_tells_not_names():
    assert [(site.name, site.role, site.heads) for site in norm_sites(nn.Sequential(Parts(), Parts()))] == [
        ("0.one", "attn", 2), ("0.three", "mlp", 2), ("1.one", "attn", 2), ("1.three", "mlp", 2),
    ]  # fmt: skip
    swin = vm.replace_norms(tiny_swin(), DTN).model.layers[1].blocks[0].norm1
    text = vm.replace_norms(encoder(), DTN).model.layers[0].norm1
    torch.testing.assert_close(swin.a[:, 2].abs(), torch.ones(4))
    assert not text.a[:, 2].any()


def test_frozen_norms_stay_frozen():
    model = nn.Sequential(Parts(), Parts())
    for parameter in model[0].one.parameters():
        parameter.requires_grad = False
    model[1].one.bias.requires_grad = False
    done = vm.replace_norms(model, DTN)
    assert not any(p.requires_grad for p in done.model[0].one.parameters())
    assert {n: p.requires_grad for n, p in done.model[1].one.named_parameters()} == {
        "weight": True, "bias": False, "a": True, "omega_mean": True, "omega_var": True,
    }  # fmt: skip
    assert [row.why for row in done.rows if row.now] == ["frozen", ""]


@pytest.mark.parametrize("shared", ["module", "weight"])
def test_shared_norms_are_refused_where_they_are_chosen(shared):
    model = nn.Sequential(Parts(), Parts())
    if shared == "module":
        model[1].one = model[0].one
    else:
        model[1].one.weight = model[0].one.weight
    with pytest.raises(UserError, match=r"0\.one and 1\.one share one norm or its weights"):
        vm.replace_norms(model, DTN)
    assert replaced(model, DTN, "mlp") == ["0.three", "1.three"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_type_and_mode_are_the_old_norms(dtype):
    model = nn.Sequential(Parts(), Parts()).to(dtype).eval()
    new = vm.replace_norms(model, BOTH).model
    assert {p.dtype for p in new.parameters()} == {dtype}
    assert not any(m.training for m in new.modules())
    assert new(torch.randn(2, 9, 16, dtype=dtype)).dtype == dtype


def test_gains_of_scale_norm_are_in_its_unit():
    model = nn.Sequential(Parts())
    nn.init.normal_(model[0].one.weight)
    channel, scalar = (vm.replace_norms(model, vm.Norm("scale", gain=gain)).model for gain in ("channel", "scalar"))
    torch.testing.assert_close(channel[0].one.weight, model[0].one.weight * 4)
    torch.testing.assert_close(scalar[0].one.weight, model[0].one.weight.mean(0, keepdim=True) * 4)
    rows = vm.replace_norms(model, vm.Norm("scale")).rows
    assert {row.why for row in rows} == {"bias dropped"}


def test_models_without_gain_or_that_ran_with_gradients():
    model = nn.Sequential(Parts(first=nn.LayerNorm(16, elementwise_affine=False), second=nn.LayerNorm(16, bias=False)))
    new = vm.replace_norms(model, BOTH).model
    assert new[0].one.weight is None
    assert new[0].one.a.requires_grad
    assert not new[0].three.bias.any()
    from timm.models.levit import Levit

    model = Levit(img_size=64, embed_dim=(16, 32), key_dim=8, num_heads=(2, 4), depth=(1, 1)).eval()
    images = torch.randn(2, 3, 64, 64)
    model(images)
    assert vm.replace_norms(model, DTN, heads=2).model(images).isfinite().all()


def encoder(**fields):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, **fields)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("change", [vm.Norm("instance"), vm.Norm("rms", exact=False), DTN], ids=str)
def test_torchs_own_encoder_calls_the_new_norms_in_evaluation(change):
    """Its fused path would compute LayerNorm from their weights."""
    old, x = encoder().eval(), torch.randn(2, 9, 16)
    new = vm.replace_norms(old, change).model
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[:, 7:] = True
    with torch.no_grad():
        fast = new(x), new(x, src_key_padding_mask=padding)
        slow = new.train()(x), new(x, src_key_padding_mask=padding)
        assert not torch.allclose(new(x), old(x), atol=1e-2)
    torch.testing.assert_close(fast, slow)


def text(**fields):
    return hf.BertModel(hf.BertConfig(**WORDS | {"num_hidden_layers": 1}, **fields))


def test_cross_attention_is_attention():
    roles = {site.name: site.role for site in norm_sites(text(is_decoder=True, add_cross_attention=True))}
    assert roles == {
        "embeddings.LayerNorm": "embed",
        "encoder.layer.0.attention.output.LayerNorm": "attn",
        "encoder.layer.0.crossattention.output.LayerNorm": "attn",
        "encoder.layer.0.output.LayerNorm": "mlp",
    }


class Blind(nn.Module):
    """An image model whose block knows nothing of rows and columns: 2 x 2 tokens are merged into one before it."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 16, 4, 4), Parts()

    def forward(self, x):
        return self.block(nn.functional.avg_pool2d(self.stem(x), 2).flatten(2).mT)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {**SIZES, "vocab_size": 50}
SIGLIP = hf.SiglipVisionConfig(**SIZES, image_size=32, patch_size=8)
MODERN = hf.ModernBertConfig(**WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
RMS_MODELS = {
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**WORDS, num_key_value_heads=2)),
    "qwen3": lambda: hf.Qwen3Model(hf.Qwen3Config(**WORDS, num_key_value_heads=2, head_dim=8)),
    "gemma": lambda: hf.GemmaModel(hf.GemmaConfig(**WORDS, num_key_value_heads=2, head_dim=8)),
    "t5": lambda: hf.T5EncoderModel(hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50)),
    "torch": lambda: Parts(first=nn.RMSNorm(16), second=nn.RMSNorm(16, eps=1e-3)),
}


@pytest.mark.parametrize("name", RMS_MODELS)
def test_rms_norms_are_replaced(name):
    """ScaleNorm is RMSNorm where all channels have one gain: the outputs tell that gains and eps are read rightly."""
    torch.manual_seed(0)
    model = RMS_MODELS[name]().eval()
    sites = [site for site in norm_sites(model) if site.kind != "LayerNorm"]
    assert len(sites) >= 2
    for site in sites:
        nn.init.constant_(model.get_submodule(site.name).weight, 0.7)
    done = vm.replace_norms(model, vm.Norm("scale"))
    assert {row.site.role for row in done.rows if not row.now} <= {"inside"}
    inputs = torch.randn(2, 8, 16) if name == "torch" else torch.arange(16).view(2, 8)
    old, new = (m(inputs) if name == "torch" else m(inputs).last_hidden_state for m in (model, done.model))
    torch.testing.assert_close(old, new, rtol=2e-3, atol=2e-3)
    layers = vm.replace_norms(model, vm.Norm("layer")).model
    assert all(row.now for row in vm.replace_norms(layers, vm.Norm("rms")).rows if row.site.role != "inside")
    if name not in ("torch", "t5"):
        with pytest.raises(NoEffect, match="is so already"):
            vm.replace_norms(model, vm.Norm("rms"))
        with pytest.raises(UserError, match="is causal"):
            vm.replace_norms(model, vm.Norm("instance"))
    with torch.device("meta"):
        assert len(norm_sites(RMS_MODELS[name]())) == len(norm_sites(model))


@pytest.mark.parametrize(
    ("make", "roles"),
    [
        (lambda: hf.SiglipVisionModel(SIGLIP), ["attn", "mlp", "attn", "mlp", "final", "final"]),
        (lambda: timm.create_model("vit_base_patch16_siglip_224", embed_dim=16, depth=1, num_heads=2, img_size=32),
         ["attn", "mlp", "final", "inside"]),
        (lambda: hf.ModernBertModel(MODERN), ["embed", "mlp", "attn", "mlp", "final"]),
    ],
    ids=["siglip", "timm_siglip", "modernbert"],
)  # fmt: skip
def test_pooling_is_no_block_and_heads_may_be_in_the_config(make, roles):
    model = make().eval()
    assert [site.role for site in norm_sites(model)] == roles
    done = vm.replace_norms(model, vm.Norm("instance"))
    assert [row.site.role for row in done.rows if row.now] == [role for role in roles if role in ("attn", "mlp")]


def test_other_norms_stay():
    """Over channels of (B, C, rows, columns), over several axes at once, and what has but the name of an RMSNorm."""

    class LayerNorm2d(nn.LayerNorm):
        pass

    class MyRMSNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x).tanh()

    model = nn.Sequential(LayerNorm2d(16), nn.LayerNorm((9, 16)), Parts())
    rows = vm.replace_norms(model, vm.Norm("scale"), "*").rows
    assert [row.why for row in rows[:2]] == ["not over the channels of tokens"] * 2
    assert all(row.now for row in rows[2:])
    assert norm_sites(nn.Sequential(MyRMSNorm(16))) == ()


def test_a_norm_that_is_no_member_of_a_branch():
    block = Parts()
    block.five = nn.LayerNorm(16)
    model = nn.Sequential(copy.deepcopy(block), copy.deepcopy(block))
    assert {site.role for site in norm_sites(model)} == {"block"}
    with pytest.raises(NoEffect, match="not of a branch"):
        vm.replace_norms(model, DTN)
    assert replaced(model, DTN, "*.one") == ["0.one", "1.one"]


GPT2 = hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)
NEOX = hf.GPTNeoXConfig(**WORDS | {"num_hidden_layers": 1}, max_position_embeddings=32)


class HiddenCausality(Parts):
    """A block that does not say that it is causal."""

    def forward(self, x):
        q, k, v = self.two.qkv(self.one(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.four(self.three(x))


def crossvit():
    return timm.create_model("crossvit_9_240", depth=((1, 1, 0),), embed_dim=(32, 32), num_heads=(2, 2), num_classes=3)


def test_heads_that_are_called_heads_are_recognized():
    hiera = timm.create_model("hiera_tiny_224", embed_dim=32, num_heads=1, stages=(1, 1, 1, 1)).eval()
    assert "blocks.*.norm1" in str(vm.replace_norms(hiera, vm.Norm("batch")))


def test_the_trial_leaves_both_models_as_they_were():
    model = text().train()
    calls, state = [], torch.get_rng_state()
    new = vm.replace_norms(model, vm.Norm("batch")).model
    new.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert new.training
    assert not any(m._forward_pre_hooks for name, m in new.named_modules() if name), "the model alone sees masks"
    assert all(not buffer.any() for name, buffer in new.named_buffers() if name.endswith("running_mean"))


def test_each_stage_of_a_pyramid_pools_by_its_side():
    """As in the released code: 4, 2, 1, 1 on grids of 56, 28, 14 and 7; here half of each."""
    (edit,) = parse_edits("replace(dtn(pool=(4,2,1,1),norms=both))")
    assert str(edit) == "replace(dtn(pool=(4,2,1,1),norms=both))"
    sizes = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "window_size": 2}
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=5, **sizes)
    model = vm.replace_norms(swin, edit.change).model
    pools = [layer.blocks[0].norm1.mixing.pool for layer in model.layers]
    assert pools == [4, 2, 1, 1]
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    exact = vm.replace_norms(swin, vm.DynamicTokenNorm(norms="both")).model
    assert (model.eval()(images) - exact.eval()(images)).abs().max() > 1e-6
    with pytest.raises(UserError, match="a ViT does not have stages"):
        vm.apply(vm.vit("mu2/4", img_size=8), vm.DynamicTokenNorm(pool=(2, 1)))
    with pytest.raises(UserError, match="is 1"):
        vm.DynamicTokenNorm(pool=(2, 0))


def cait():
    return timm.create_model("cait_xxs24_224", img_size=32, depth=1)


def decoder_layer():
    return nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)


MAKE = {
    "linear": lambda: nn.Linear(2, 2),
    "our own": lambda: vm.vit("mu/4", img_size=8),
    "wrapped": lambda: nn.DataParallel(Parts()),
    "a name": lambda: "model",
    "parts": lambda: nn.Sequential(Parts()),
    "one norm": lambda: nn.Sequential(nn.LayerNorm(4)),
    "swin": tiny_swin,
    "blind": Blind,
    "causal": lambda: nn.Sequential(Parts(causal=True)),
    "text decoder": lambda: text(is_decoder=True),
    "chunks": lambda: text(chunk_size_feed_forward=4),
    "tokens first": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 1, enable_nested_tensor=False),
    "gpt2": lambda: hf.GPT2Model(GPT2),
    "neox": lambda: hf.GPTNeoXModel(NEOX).eval(),
    "decoder": lambda: nn.TransformerDecoder(decoder_layer(), 1),
    "decoder layer": lambda: nn.Sequential(decoder_layer()),
    "hidden causality": lambda: nn.Sequential(HiddenCausality(), HiddenCausality()),
    "cait": lambda: cait().eval(),
    "xcit": lambda: timm.create_model("xcit_nano_12_p16_224", img_size=64, depth=1).eval(),
    "crossvit": lambda: crossvit().eval(),
}
SCALE, RMS, INSTANCE = vm.Norm("scale"), vm.Norm("rms", exact=False), vm.Norm("instance")
TRIAL = {"example": torch.randn(1, 5, 16)}
LATER = "h.0 is causal: a token would see later ones"
UNKNOWN = "in no block whose attention is recognized.*where"
UNFIT = [
    ("linear", DTN, {}, "A Linear without LayerNorm or RMSNorm has nothing to replace"),
    ("our own", DTN, {}, "use vm.apply"),
    ("wrapped", DTN, {}, "give the model inside, model.module"),
    ("a name", DTN, {}, "takes an nn.Module"),
    ("parts", vm.DualPatchNorm(), {}, r"takes Norm\(...\) or DynamicTokenNorm"),
    ("parts", vm.Norm("layer"), {}, r"finds no norm to replace(.|\n)*is so already"),
    ("parts", DTN, {"where": "blocks.*"}, r"finds no norm to replace(.|\n)*\*\.one"),
    ("parts", BOTH, {"where": "*"}, "both choose the norms"),
    ("parts", DTN, {"where": 3}, "where is a pattern"),
    ("one norm", DTN, {"where": "*"}, "0 is not next to attention"),
    ("swin", DTN, {"heads": 3}, "layers.0.blocks.0.norm1 has 16 channels, which 3 heads do not divide"),
    ("swin", INSTANCE, {"heads": 2}, "does not have heads"),
    ("swin", vm.DynamicTokenNorm(pool=(4, 2, 1)), {}, "has 3 sides, and the model 2 stages"),
    ("blind", DTN, {"example": torch.randn(1, 3, 32, 32)}, "block got 16 tokens.*block.one"),
    # norms that mix tokens, where they must not
    ("causal", DTN, {}, "DynamicTokenNorm mixes tokens, and 0 is causal"),
    ("text decoder", INSTANCE, {}, "encoder.layer.0 is causal"),
    ("chunks", BOTH, {}, "chunk_size_feed_forward=0"),
    ("tokens first", DTN, {}, "batch_first=True"),
    *(("gpt2", vm.Norm(kind), {}, LATER) for kind in ("batch", "instance", "group", "power", "switchable")),
    ("neox", vm.Norm("batch"), {}, UNKNOWN),
    ("neox", vm.Norm("group"), {"heads": 2}, UNKNOWN),
    ("decoder", INSTANCE, {}, "a decoder's.*causal mask.*where"),
    ("decoder layer", INSTANCE, {}, "a decoder's.*causal mask.*where"),
    ("hidden causality", INSTANCE, {}, "is causal, and with these norms earlier tokens see later ones"),
    ("hidden causality", DTN, TRIAL, "is causal"),
    ("hidden causality", RMS, {"example": torch.randn(1, 5, 17)}, "does not run on the example"),
    # what would fail at the first forward
    ("cait", INSTANCE, {}, "norm2"),
    ("cait", vm.Norm("switchable"), {}, "norm2"),
    ("cait", DTN, {}, "blocks_token_only.0.norm1: The input has 5 tokens"),
    ("xcit", INSTANCE, {}, "cls_attn_blocks"),
    ("crossvit", INSTANCE, {}, "blocks.0.projs"),
    ("crossvit", DTN, {}, "is called without a tensor of tokens"),
]


@pytest.mark.parametrize(("name", "change", "options", "message"), UNFIT)
def test_what_cannot_be_done_is_an_error(name, change, options, message):
    kind = NoEffect if message.startswith("finds no norm") else UserError
    with pytest.raises(kind, match=message):
        vm.replace_norms(MAKE[name](), change, **options)


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        *((name, SCALE, None) for name in ("causal", "text decoder", "chunks", "tokens first", "decoder layer")),
        *((name, RMS, None) for name in ("hidden causality", "neox", "cait", "xcit", "crossvit")),
        ("blind", INSTANCE, None),
        ("chunks", DTN, None),
        ("neox", vm.Norm("batch"), "block"),
        ("decoder", INSTANCE, "*norm2"),
        ("hidden causality", INSTANCE, "*one*"),
        ("cait", DTN, "blocks.*.norm1"),
    ],
)
def test_what_can_be_done_with_these_models(name, change, where):
    done = vm.replace_norms(MAKE[name](), change, where)
    assert any(row.now for row in done.rows)
    if name in ("cait", "blind"):
        assert done.model(torch.randn(2, 3, 32, 32)).isfinite().all()
    if name == "neox" and change is RMS:
        words = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 9]])
        torch.testing.assert_close(*(done.model(sentence).last_hidden_state[:, :-1] for sentence in words))
