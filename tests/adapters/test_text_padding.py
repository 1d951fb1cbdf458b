"""Norms in Hugging Face's models of text leave out what the attention mask of the call marks as padding."""

import copy

import pytest
import torch
import transformers as hf

import vitmods as vm
from vitmods.ops.padding import padded
from vitmods.study.bases import make_base
from vitmods.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from")
BERT = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
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
    return torch.randint(1, 20, (3, count))


def bert(change):
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**BERT, **NO_DROPOUT), add_pooling_layer=False).double()
    return vm.replace_norms(model, change).model


@pytest.mark.parametrize("name", CHANGES)
def test_a_text_is_as_if_it_stood_alone(name):
    model, ids = bert(CHANGES[name]).eval(), tokens()
    for actual in (model(ids, MASK).last_hidden_state, model(ids, attention_mask=MASK).last_hidden_state):
        assert actual.isfinite().all()
        for i, length in enumerate(LENGTHS):
            alone = model(ids[i : i + 1, :length]).last_hidden_state
            torch.testing.assert_close(actual[i : i + 1, :length], alone)


def test_a_copy_of_the_model_knows_it_too_and_a_call_without_mask_has_no_padding():
    model, ids = bert(CHANGES["group"]).eval(), tokens()
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


def gradients(model, out):
    loss = (out * MASK[..., None].repeat(1, 1, out.shape[-1])).sin().sum()
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_reversible_layers_run_again_with_the_same_padding():
    torch.manual_seed(0)
    options = {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 32}
    none = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    config = hf.ReformerConfig(vocab_size=20, max_position_embeddings=12, **options, **sizes, **none)
    model = vm.replace_norms(hf.ReformerModel(config).double(), CHANGES["dtn"]).model.train()
    actual = gradients(model, model(tokens(), attention_mask=MASK).last_hidden_state)
    with padded(MASK == 0, behind=True):  # what the layers compute, differentiated by autograd
        first = second = model.embeddings(tokens())
        for layer in model.encoder.layers:
            first = first + layer.attention(second, attention_mask=MASK.bool()).hidden_states
            second = second + layer.feed_forward(first)
        out = model.encoder.layer_norm(torch.cat([first, second], dim=-1))
    torch.testing.assert_close(actual, gradients(model, out))


def test_what_blocks_are_filled_up_with_is_padding_too():
    torch.manual_seed(0)
    config = hf.BigBirdConfig(**BERT, **NO_DROPOUT, block_size=4, num_random_blocks=1, max_position_embeddings=64)
    model = hf.BigBirdModel(config, add_pooling_layer=False).double()
    model = vm.replace_norms(model, CHANGES["group"]).model.eval()
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
