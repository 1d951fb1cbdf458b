import pytest
import torch

from vitmods.layers import Attention, AttentionPool, AttentionSlots, LayerNorm, Mlp, RMSNorm


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


@pytest.mark.parametrize("qk_norm", [None, RMSNorm])
@pytest.mark.parametrize("norm", [None, LayerNorm])
@pytest.mark.parametrize("head_scale", [False, True])
def test_equation(qk_norm, norm, head_scale):
    torch.manual_seed(0)
    attention = Attention(12, 3, AttentionSlots(qk_norm, head_scale=head_scale), norm=norm and norm(12)).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(attention(x), slow_attention(attention, x), atol=1e-10, rtol=0)


class OnlyItself(torch.nn.Module):
    """Each token reads itself alone."""

    def forward(self, q, k, attn_mask):
        own = torch.eye(q.shape[2], dtype=torch.bool)
        return own if attn_mask is None else own & attn_mask


def test_the_slot_for_masks_sees_queries_and_keys_and_the_callers_mask():
    torch.manual_seed(0)
    attention = Attention(8, 2, AttentionSlots(mask=OnlyItself())).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    values = attention.qkv(x).chunk(3, -1)[2]
    torch.testing.assert_close(attention(x), attention.proj(values), atol=1e-12, rtol=0)
    everything = torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(attention(x, attn_mask=everything), attention.proj(values), atol=1e-12, rtol=0)


def test_masked_tokens_are_not_read():
    attention = Attention(8, 2).double().eval()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True]).expand(4, 4)
    changed = x.clone()
    changed[:, 2] += 1
    seen = [attention(tokens, attn_mask=mask)[:, [0, 1, 3]] for tokens in (x, changed)]
    torch.testing.assert_close(*seen, atol=0, rtol=0)
    assert not torch.allclose(attention(x)[:, 0], attention(changed)[:, 0])


def test_dropout_acts_in_training_alone():
    attention = Attention(8, 2, attn_drop=0.5, proj_drop=0.5)
    x = torch.randn(2, 4, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_width_must_be_a_multiple_of_the_heads():
    with pytest.raises(ValueError, match=r"10.*heads 3"):
        Attention(10, 3)


def test_attention_pool_equation():
    torch.manual_seed(0)
    pool = AttentionPool(8, 2, Mlp(8, 16), LayerNorm(8)).double()
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
