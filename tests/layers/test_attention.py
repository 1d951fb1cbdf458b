"""Attention, its slots and its positions against formulas; rotary positions against timm's; the published ViT-5."""

import pytest
import timm.layers
import timm.layers.pos_embed_sincos as sincos
import torch
from torch.nn import functional as F

import vitmods as vm
from vitmods import layers as vml
from vitmods.layers.position import resample, sincos2d
from vitmods.model.config import BranchConfig, NormConfig, RopeConfig


def slow_attention(attention, x):
    """softmax(q k^T / sqrt(D)) v head by head, written out."""
    dim, heads, d = x.shape[-1], attention.num_heads, attention.head_dim
    qkv = x @ attention.qkv.weight.T + attention.qkv.bias
    outputs = []
    for h in range(heads):
        q, k, v = (qkv[..., part * dim + h * d : part * dim + (h + 1) * d] for part in range(3))
        q, k = attention.q_norm(q), attention.k_norm(k)
        out = torch.softmax(q @ k.transpose(1, 2) / d**0.5, dim=-1) @ v
        outputs.append(out if attention.head_scale is None else out * attention.head_scale[h])
    return attention.norm(torch.cat(outputs, -1)) @ attention.proj.weight.T + attention.proj.bias


@pytest.mark.parametrize("qk_norm", [None, vml.RMSNorm])
@pytest.mark.parametrize("norm", [None, vml.LayerNorm])
@pytest.mark.parametrize("head_scale", [False, True])
def test_equation(qk_norm, norm, head_scale):
    torch.manual_seed(0)
    attention = vml.Attention(
        12, 3, vml.AttentionSlots(qk_norm, head_scale=head_scale), norm=norm and norm(12)
    ).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(attention(x), slow_attention(attention, x), atol=1e-10, rtol=0)


class OnlyItself(torch.nn.Module):
    """Each token reads itself alone."""

    def forward(self, q, k, attn_mask):
        diagonal = torch.eye(q.shape[2], dtype=torch.bool)
        return diagonal if attn_mask is None else diagonal & attn_mask


def test_the_slot_for_masks_sees_queries_and_keys_and_the_callers_mask():
    torch.manual_seed(0)
    attention = vml.Attention(8, 2, vml.AttentionSlots(mask=OnlyItself())).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    values = attention.qkv(x).chunk(3, -1)[2]
    torch.testing.assert_close(attention(x), attention.proj(values), atol=1e-12, rtol=0)
    everything = torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(attention(x, attn_mask=everything), attention.proj(values), atol=1e-12, rtol=0)


def test_what_does_not_fit_is_refused():
    for refused, message in (
        (lambda: vml.Attention(10, 3), r"10.*heads 3"),
        (lambda: build((2, 3))(tokens((4, 5))), r"20 tokens.*2 x 3"),
        (lambda: build((2, 2))(tokens((2, 2)), attn_mask=torch.ones(4, 4).bool()), "masks are not supported"),
        (lambda: sincos2d((2, 2), 6), "multiple of 4"),
        (
            lambda: vml.RotaryPositions(8, 2, (4, 6))(torch.zeros(1, 2, 24, 8), torch.zeros(1, 2, 25, 8)),
            "grid of 4 x 6: set grid_size",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


def test_attention_pool_equation():
    torch.manual_seed(0)
    pool = vml.AttentionPool(8, 2, vml.Mlp(8, 16), vml.LayerNorm(8)).double()
    torch.nn.init.normal_(pool.latent)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    q = pool.q(pool.latent)[0, 0]
    keys, values = pool.kv(x).chunk(2, -1)
    heads = []
    for h in (slice(0, 4), slice(4, 8)):
        weights = torch.softmax(keys[..., h] @ q[h] / 2, dim=-1)
        heads.append((weights[..., None] * values[..., h]).sum(1))
    out = pool.proj(torch.cat(heads, -1))
    torch.testing.assert_close(pool(x), out + pool.mlp(pool.norm(out)), atol=1e-12, rtol=0)


def test_resampling():
    positions = torch.randn(1, 2 + 12, 5)
    reference = timm.layers.resample_abs_pos_embed(positions, (6, 5), old_size=(3, 4), num_prefix_tokens=2)
    torch.testing.assert_close(resample(positions, (3, 4), (6, 5), prefix=2), reference, atol=1e-6, rtol=0)
    positions = torch.randn(1, 12, 5, dtype=torch.float64)
    new = resample(positions, (3, 4), (7, 9), aligned=True).view(7, 9, 5)
    old = positions.view(3, 4, 5)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        torch.testing.assert_close(new[corner], old[corner])
    positions = torch.randn(1, 4, 2, requires_grad=True)
    F.mse_loss(resample(positions, (2, 2), (3, 3)), torch.zeros(1, 9, 2)).backward()
    assert positions.grad.abs().min() > 0
    for aligned in (False, True):
        positions = torch.randn(1, 3 + 4, 5).bfloat16()
        new = resample(positions, (2, 2), (4, 4), prefix=3, aligned=aligned)
        assert (new.shape, new.dtype) == ((1, 3 + 16, 5), torch.bfloat16)
        assert torch.equal(new[:, :3], positions[:, :3])
        assert resample(positions, (2, 2), (2, 2), prefix=3) is positions


def test_sincos2d():
    table = sincos2d((2, 3), 8).view(2, 3, 8)
    omega = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    for row in range(2):
        for column in range(3):
            x, y = column * omega, row * omega
            torch.testing.assert_close(table[row, column], torch.cat([x.sin(), x.cos(), y.sin(), y.cos()]))
    table, centered = sincos2d((3, 5), 192), sincos2d((3, 5), 192, centered=True)
    assert table.mean(-1).abs().min() > 0.1
    torch.testing.assert_close(centered, table - table.mean(-1, keepdim=True))
    assert sincos2d((2, 2), 4).isfinite().all()


def build(grid, prefix=0):
    torch.manual_seed(0)
    attention = vml.Attention(12, 3, vml.AttentionSlots(positions=vml.GatedPositions(3, grid, prefix))).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention


def tokens(grid, prefix=0):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, prefix + grid[0] * grid[1], 12, generator=generator, dtype=torch.float64, requires_grad=True)


def kernel(positions, grid):
    """P as a matrix, token by token: (H, T, T)."""
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    offsets = [[(c2 - c, r2 - r) for r2, c2 in places] for r, c in places]
    d = torch.tensor(offsets, dtype=torch.float64)
    features = torch.cat([d.square().sum(-1, keepdim=True), d], dim=-1)
    return torch.einsum("ijf,hf->hij", features, positions.a).softmax(-1)


def written_out(attention, x, prefix, grid):
    """The mixture of both matrices, then the values."""
    heads, d = attention.num_heads, attention.head_dim
    q, k, v = attention.qkv(x).unflatten(-1, (3, heads, d)).permute(2, 0, 3, 1, 4)
    content = (q @ k.mT / d**0.5).softmax(-1)
    fraction = torch.sigmoid(attention.positions.gate).view(-1, 1, 1)
    place = F.pad(kernel(attention.positions, grid), (prefix, 0, prefix, 0))
    gated = F.pad(fraction.expand(-1, place.shape[-1] - prefix, 1), (0, 0, prefix, 0))
    weights = (1 - gated) * content + gated * place
    return attention.proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [(4, 4), (2, 5), (1, 6), (5, 1)], ids=str)
def test_it_is_the_matrix(grid, prefix):
    attention, x = build(grid, prefix), tokens(grid, prefix)
    expected, weights = written_out(attention, x, prefix, grid)
    actual, leaves = attention(x), [x, *attention.parameters()]
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(attention.weights(x), weights, atol=1e-12, rtol=0)
    reference = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(torch.autograd.grad(actual.sin().sum(), leaves), reference, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("queries", [1, 2, 3, 7])
def test_fewer_queries(queries):
    attention = build((2, 5), 2)
    read, v = torch.randn(2, 2, 3, 12, 4, dtype=torch.float64)
    positions = attention.positions
    torch.testing.assert_close(
        positions(read[:, :, :queries], v), positions(read, v)[:, :, :queries], atol=1e-12, rtol=0
    )


def test_another_grid_needs_no_other_parameters():
    attention, x = build((2, 3)), tokens((4, 5))
    attention.positions.grid_size = (4, 5)
    torch.testing.assert_close(attention(x), written_out(attention, x, 0, (4, 5))[0], atol=1e-12, rtol=0)


def test_no_matrix_of_tokens_times_tokens():
    """The largest tensor of forward and backward is the query-key-value projection, 3 x C numbers a token."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    attention = vml.Attention(12, 3, vml.AttentionSlots(positions=vml.GatedPositions(3, (24, 24))))
    x = torch.randn(2, 576, 12, requires_grad=True)
    with Watch():
        attention(x).sum().backward()
    assert max(sizes) <= 2 * 576 * 36 < 3 * 576 * 576


EMBEDDINGS = {
    "axial": (
        {"base": 50.0, "offset": 1.0, "columns_first": True, "reference": (7, 7)},
        lambda: sincos.RotaryEmbeddingCat(
            16, in_pixels=False, temperature=50.0, grid_offset=1.0, grid_indexing="xy", ref_feat_shape=[7, 7]
        ),
    ),
    "halved": (
        {"pairs": "halved", "base": 50.0},
        lambda: sincos.RotaryEmbeddingCat(16, in_pixels=False, temperature=50.0, rotate_half=True),
    ),
    "dinov3": (
        {"pairs": "halved", "coordinates": "centered", "offset": 0.25},
        lambda: sincos.RotaryEmbeddingDinoV3(16, grid_offset=0.25),
    ),
    "mixed": (
        {"frequencies": "mixed", "base": 10.0, "columns_first": True},
        lambda: sincos.RotaryEmbeddingMixed(48, depth=1, num_heads=3),
    ),
}


@pytest.mark.parametrize("grid", [(4, 6), (5, 5)], ids=str)
@pytest.mark.parametrize("form", EMBEDDINGS)
def test_timms_embeddings(form, grid):
    settings, make = EMBEDDINGS[form]
    reference = make()
    rope = vml.RotaryPositions(16, 3, (4, 6), 2, settings=RopeConfig(**settings))
    embedding = reference.get_embed(grid)
    if form == "mixed":
        rope.freqs.data = reference.freqs[:, 0].detach()
        embedding = embedding[0]
    rope.grid_size = grid  # as for images of another size
    q, k = torch.randn(2, 2, 3, 2 + grid[0] * grid[1], 16)
    half = settings.get("pairs") == "halved"
    for x, turned in zip((q, k), rope(q, k), strict=True):
        expected = sincos.apply_rot_embed_cat(x[:, :, 2:], embedding, half=half)
        torch.testing.assert_close(turned, torch.cat([x[:, :, :2], expected], 2), atol=1e-5, rtol=0)
    first, _ = rope(q[:, :, :1], k)
    torch.testing.assert_close(first, q[:, :, :1])
    rope.set_grid(grid)
    torch.testing.assert_close(rope(q, k)[1], turned, atol=0, rtol=0)


def test_the_mixed_start_is_the_axial_one_turned():
    rope = vml.RotaryPositions(16, 3, (4, 4), settings=RopeConfig("mixed", 10.0))
    torch.manual_seed(0)
    rope.reset_parameters()
    torch.manual_seed(0)
    expected = sincos.init_random_2d_freqs(16, 1, 3, temperature=10.0)[:, 0]
    torch.testing.assert_close(rope.freqs.detach(), expected, atol=1e-6, rtol=0)


def test_tables_are_exact_in_their_type():
    wide = vml.RotaryPositions(8, 2, (5, 5), dtype=torch.double).table
    assert torch.equal(vml.RotaryPositions(8, 2, (5, 5)).double().table, wide)


def our_name(name):
    return name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")


def test_the_published_vit_5(golden):
    """Registers come before the patches here and after them there: attention treats both alike."""
    golden = golden("vit5_tiny")
    rms = NormConfig("rms")
    branch = BranchConfig(rms)
    model = vm.vit(
        "mu2/4", img_size=12, num_classes=5, qkv_bias=False, qk_norm=rms, position_on_prefix=False, reg_tokens=4,
        attn=branch, mlp=branch, final_norm=rms, layer_scale=1e-4,
        rope=RopeConfig(base=10000.0, register_base=100.0, reference=(3, 3)),
    ).double().eval()  # fmt: skip
    model.load_state_dict({our_name(name): value for name, value in golden.group("param").items()})
    images = golden["in.x"].requires_grad_()
    logits = model(images)
    torch.testing.assert_close(logits, golden["out.y"], atol=1e-9, rtol=0)
    torch.testing.assert_close(model.forward_features(images)[:, 0], golden["out.class_token"], atol=1e-9, rtol=0)
    (logits * golden["ct.y"]).sum().backward()
    torch.testing.assert_close(images.grad, golden["grad_in.x"], atol=1e-9, rtol=0)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, expected in golden.group("grad_param").items():
        torch.testing.assert_close(
            gradients[our_name(name)], expected.view_as(gradients[our_name(name)]), atol=1e-9, rtol=0
        )
