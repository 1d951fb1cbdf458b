"""BeiT against arrays of the official code, masks, codes, leaks of stems, and tiny trials."""

import random

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

import vitmods as vm
from vitmods.adapters import load, save
from vitmods.layers.stems import STEMS
from vitmods.model.config import StemConfig
from vitmods.recipes import RECIPES
from vitmods.recipes.schedule import lr_at, resolve
from vitmods.study.checkpoints import open_trial
from vitmods.study.trial import with_modules
from vitmods.tasks import TASKS
from vitmods.tasks.beit import vae
from vitmods.tasks.beit.masks import Masks, block_mask, draw_masks
from vitmods.tasks.beit.model import BeitModel, stem_leaks
from vitmods.tasks.beit.recipes import BeitPart
from vitmods.tasks.beit.vae import Vae
from vitmods.train import RunOptions, train_trial
from vitmods.train.trial import fit_to_images
from vitmods.util.errors import UserError

from ..support import on_digits

CPU = torch.device("cpu")


def test_masks_are_the_official_ones(golden):
    golden = {name: value.numpy() for name, value in golden("beit_masks").arrays.items()}
    numbers = random.Random(0)
    masks = np.array([block_mask((14, 14), 75, 16, numbers) for _ in range(2000)])
    assert (masks[:500] == golden["masks"]).all()
    counts = np.unique(masks.sum(axis=(1, 2)), return_counts=True)
    np.testing.assert_array_equal(counts, [golden["count_hist_values"], golden["count_hist_freq"]])
    np.testing.assert_allclose(masks.mean(axis=0), golden["mean_rate_map"], atol=1e-12)


def test_masks_of_own_numbers_have_the_official_distribution(golden):
    golden = {name: value.numpy() for name, value in golden("beit_masks").arrays.items()}
    seeds = np.arange(2000, dtype=np.uint64) << np.uint64(40)
    masks = draw_masks(BeitPart(), (14, 14), seeds, CPU)
    counts = masks.mask.sum(dim=1).numpy()
    assert counts.max() == 75
    assert abs((counts == 75).mean() - golden["count_hist_freq"][-1] / 2000) < 0.05
    rates = masks.mask.double().mean(dim=0).view(14, 14).numpy()
    assert np.abs(rates - golden["mean_rate_map"]).max() < 0.06  # 4 standard errors of a difference
    hidden = torch.ones(2000, 196, dtype=torch.bool).scatter(1, masks.visible, False)
    assert not (hidden & ~masks.mask).any()
    assert torch.equal(masks.masked, masks.mask.flatten().nonzero()[:, 0])


def test_the_schedule_is_the_official_one(golden):
    length = resolve(RECIPES["beit_base"](8).with_(warmup_epochs=2.0), 9 * 2048)
    rates = [lr_at(length, step) for step in range(72)]
    np.testing.assert_allclose(rates, golden("beit_schedule")["lr"], atol=1e-12, rtol=0)


def official_weights(g):
    """The official model's parameters (or gradients) under our names."""
    names = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma", "rel_pos_bias": "blocks.0.attn.rel_pos"}
    names |= {"relative_position_bias_table": "table"}
    weights = {}
    for name, value in g.group("param").items():
        if not name.endswith(("index", "q_bias", "v_bias")):
            for old, new in names.items():
                name = name.replace(old, new)
            weights[name.replace("lm_head", "head") if "lm_head" in name else f"backbone.{name}"] = value
    for i in range(2):
        q, v = (g[f"param.blocks.{i}.attn.{part}_bias"] for part in "qv")
        weights[f"backbone.blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    return weights


@pytest.fixture
def official(golden):
    """(golden, our model with its weights)"""
    g = golden("beit_mim_model")
    config = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_dim": 48}
    config |= {"num_classes": 0, "layer_scale": 0.1, "rel_pos": "shared", "position": "none"}
    config |= {"position_on_prefix": False}
    model = BeitModel(vm.vit(vm.ViTConfig(**config)), BeitPart(codes=11)).double()
    missing, unexpected = model.load_state_dict(official_weights(g), strict=False)
    assert not unexpected
    assert set(missing) == {"codes.centers", "backbone.blocks.1.attn.rel_pos.table"}
    return g, model


def test_the_model_is_the_official_one(official):
    g, model = official
    images, mask, close = g["in.x"], g["in.mask"], {"atol": 1e-10, "rtol": 0}
    logits = model(images, masks_of(mask))
    loss = F.cross_entropy(logits, g["in.labels"])
    loss.backward()
    torch.testing.assert_close(logits.detach(), g["out.masked_logits"], **close)
    torch.testing.assert_close(loss.detach(), g["out.loss"], **close)
    backbone = model.backbone
    others = {"rel_pos_bias.relative_position_bias_table": backbone.blocks[1].attn.rel_pos.table}
    others |= {f"lm_head.{name}": parameter for name, parameter in model.head.named_parameters()}
    reference = g.group("grad_param")
    assert len(reference) == 9
    for name, gradient in reference.items():
        parameter = others[name] if name in others else backbone.get_parameter(name)
        torch.testing.assert_close(parameter.grad, gradient, **close, msg=name)
    everything = model.head(backbone.forward_features(images, mask=mask)[:, 1:])
    torch.testing.assert_close(everything.detach(), g["out.all_logits"], **close)


def masks_of(mask):
    visible = mask.long().argsort(dim=1, stable=True)[:, : int((~mask).sum(dim=1).max())]
    return Masks(mask, mask.flatten().nonzero()[:, 0], visible)


def test_relative_positions_are_shared_then_each_blocks_own(official, tmp_path):
    g, model = official
    shared = model.backbone.eval()
    parameters = [name for name, _ in shared.named_parameters() if name.endswith("table")]
    assert parameters == ["blocks.0.attn.rel_pos.table"]
    own = vm.apply(shared, vm.RelativePositions()).eval()
    images = g["in.x"]
    assert torch.equal(own.forward_features(images), shared.forward_features(images))
    assert own.vit_config.rel_pos is True
    tables = [block.attn.rel_pos.table for block in own.blocks]
    assert torch.equal(*tables)
    assert tables[0] is not tables[1]
    save(shared, tmp_path / "shared.safetensors")
    again = load(tmp_path / "shared.safetensors")
    assert again.blocks[0].attn.rel_pos is again.blocks[1].attn.rel_pos
    assert torch.equal(again.forward_features(images), shared.forward_features(images))


LEAKS = {
    "base": False, "dpn(before=whiten)": False, "dpn": False, "hmlp-ln": False, "local": False, "hmlp": True,
    "stem(kind=linear,norm=batch)": True, "levit": True, "stem(kind=levit,norm=layer)": True,
    "t2t": True,
}  # fmt: skip


def with_stem(changes):
    torch.manual_seed(0)
    kind = "t2t" if changes == "t2t" else "linear"  # t2t is not a change
    backbone = vm.vit("mu2/16", img_size=64, num_classes=0, stem=StemConfig(kind=kind))
    return backbone if changes in ("base", "t2t") else vm.apply(backbone, *vm.parse_changes(changes))


def test_every_stem_of_images_is_tested_for_leaks():
    assert {with_stem(changes).vit_config.stem.kind for changes in LEAKS} == set(STEMS) - {"tokens"}


@pytest.mark.parametrize("stem", LEAKS)
def test_a_leak_is_what_masked_pixels_change(stem):
    backbone = with_stem(stem)
    model = BeitModel(backbone, BeitPart(codes=8)).double().train()
    assert model.leaks == stem_leaks(backbone) == LEAKS[stem]
    images = torch.randn(2, 3, 64, 64, dtype=torch.double)
    changed = images.clone()
    changed[0, :, 16:32, 32:48] = 0
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[:, 3], mask[0, 6], mask[1, 9:] = True, True, True
    masks = masks_of(mask)
    before, after = model(images, masks), model(changed, masks)
    assert torch.allclose(before, after, atol=1e-9, rtol=0) != LEAKS[stem]
    full = model.head(model.backbone.forward_features(images, mask=mask)[:, 1:].flatten(0, 1)[masks.masked])
    torch.testing.assert_close(before, full, atol=1e-9, rtol=0)


def with_decoder(changes="base", **options):
    backbone = with_stem(changes)
    part = BeitPart(codes=8, masked=0.7, least_block=0.1, decoder_depth=1, **options)
    model = BeitModel(backbone, part).double()
    torch.nn.init.normal_(model.decoder.mask_token)
    for name, parameter in backbone.named_parameters():
        if name.endswith("rel_pos.table"):
            torch.nn.init.normal_(parameter)
    return model, draw_masks(part, (4, 4), range(2), CPU)


@pytest.mark.parametrize("changes", ["", "hmlp-ln", "dpn", "local", "relpos", "rope", "registers"])
def test_a_decoder_gets_the_tokens_of_visible_patches_and_the_mask_token_for_the_others(changes):
    model, masks = with_decoder(changes)
    images = torch.randn(2, 3, 64, 64, dtype=torch.double, requires_grad=True)
    logits = model.train()(images, masks)
    (gradient,) = torch.autograd.grad(logits.square().sum(), images)
    is_hidden = masks.mask.view(2, 1, 4, 1, 4, 1).expand(-1, 3, -1, 16, -1, 16).reshape(images.shape)
    assert not gradient[is_hidden].any()  # a leak would have a gradient
    assert gradient[~is_hidden].abs().min() > 0

    backbone, decoder, expected = model.backbone, model.decoder, []
    prefix = backbone.num_prefix_tokens
    may_look = torch.cat([torch.ones(2, prefix, dtype=torch.bool), ~masks.mask], dim=1)
    tokens = backbone.forward_features(images, attn_mask=may_look[:, None, None])[:, prefix:]
    for image in range(2):
        places = [
            decoder.mask_token[0, 0]
            if masks.mask[image, i]
            else decoder.patch_embed.proj.weight[:, :, 0, 0] @ tokens[image, i] + decoder.patch_embed.proj.bias
            for i in range(16)
        ]
        x = (torch.stack(places) + decoder.pos_embed[0])[None]
        for block in decoder.blocks:
            x = block(x)
        expected += [model.head(decoder.norm(x)[0, i]) for i in range(16) if masks.mask[image, i]]
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-10, rtol=0)


def test_with_a_decoder_all_masks_have_one_size():
    for masked, count in ((0.4, 26), (1.0, 63)):
        part = BeitPart(masked=masked, decoder_depth=1)
        masks = draw_masks(part, (8, 8), range(50), CPU)
        assert (masks.mask.sum(dim=1) == count).all()
        assert not masks.mask.gather(1, masks.visible).any()
        alone = [draw_masks(part, (8, 8), [seed], CPU) for seed in range(50)]
        assert torch.equal(masks.visible, torch.cat([one.visible for one in alone]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((lambda stem=stem: with_decoder(stem), "depend on the pixels of other patches")
          for stem in ("levit", "hmlp")),
        (lambda: with_decoder("dtn"), "DynamicTokenNorm reads the whole grid"),
        (lambda: with_decoder("gpsa(blocks=1)"), "GatedPositions reads the whole grid"),
        (lambda: with_decoder("", decoder_width=18), "a multiple of 4"),
        (lambda: BeitModel(vm.vit("mu2/16", img_size=16, num_classes=0), BeitPart(codes=8, decoder_depth=1)),
         "two patches or more"),
        (lambda: BeitPart(decoder_width=16), "set decoder_depth too"),
    ],
)  # fmt: skip
def test_a_decoder_is_refused_if_visible_patches_do_not_suffice(make, words):
    with pytest.raises(UserError, match=words):
        make()


def small_recipe(**options):
    small = {"codes": 16, "masked": 0.4, "least_block": 0.1, "mean": (0.5,), "std": (0.5,)}
    return RECIPES["beit_base"](2, batch_size=24).with_(**{**small, "drop_path": 0.0, **options})


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ("stem(kind=linear,norm=batch)", {}),
        ("relpos(shared=true)", {"decoder_depth": 1, "masked": 0.75}),
        ("dpn", {"vae_steps": 30}),
    ],
)
def test_a_trial_resumes_in_the_same_bits(tmp_path, ends_in_the_same_bits, changes, options):
    recipe, how = small_recipe(**options), RunOptions("cpu", progress=False, tensorboard=False)

    def train(out):
        train_trial(*on_digits("beit", recipe, *vm.parse_changes(changes)), recipe, out=out, options=how)

    ends_in_the_same_bits(train, tmp_path, "test", 5)
    trained = open_trial(tmp_path / "whole")
    if "vae_steps" in options:
        assert not trained.codes.waits_for_images
        assert not any("codes" in name for name, _ in trained.named_parameters())
    else:
        assert len(trained.codes.centers.unique(dim=0)) == 16
    assert (trained.decoder or trained.backbone).mask_token.abs().sum() > 0


def check_codes(model, pixels):
    """Codes are the nearest centers of what describes the patches, which is returned."""
    vectors = model.codes.describe(pixels)
    expected = torch.cdist(vectors, model.codes.centers.expand(8, -1, -1)).argmin(dim=-1)
    assert torch.equal(model.codes(pixels), expected)
    return vectors


def test_codes_are_the_nearest_centers_in_the_same_bits_each_time():
    centers = []
    for _ in range(2):
        model, _, images = on_digits("beit", small_recipe())
        fit_to_images(model, images)
        centers.append(model.codes.centers)
    assert torch.equal(*centers)
    assert check_codes(model, next(images.eval_batches("test", 8)).inputs).shape == (8, 16, 4)


def test_codes_of_an_encoder_are_clusters_of_its_features(tmp_path):
    torch.manual_seed(0)
    encoder = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=0)
    save(encoder, tmp_path / "encoder.safetensors")
    save(vm.vit("mu2/8", img_size=8, in_chans=1, num_classes=0), tmp_path / "other.safetensors")
    model, _, images = on_digits("beit", small_recipe(code_encoder=str(tmp_path / "encoder.safetensors")))
    fit_to_images(model, images)
    pixels = next(images.eval_batches("test", 8)).inputs
    tokens = encoder.eval().forward_features(pixels)[:, encoder.num_prefix_tokens :]
    torch.testing.assert_close(check_codes(model, pixels), F.normalize(tokens, dim=-1))
    assert not any("encoder" in name for name in model.state_dict())
    with pytest.raises(UserError, match="choose an encoder with the same grid"):
        on_digits("beit", small_recipe(code_encoder=str(tmp_path / "other.safetensors")))


def test_the_loss_of_a_vae_is_squared_error_and_divergence():
    torch.manual_seed(0)
    model, images = Vae(2, 5, 1).double(), torch.randn(3, 2, 4, 6, dtype=torch.double)
    torch.manual_seed(1)
    loss = model.loss(images)
    torch.manual_seed(1)
    logits = model.encoder(images)
    noise = -torch.empty_like(logits).exponential_().log()
    choice = ((logits + noise) / 0.9).exp()
    choice = choice / choice.sum(dim=1, keepdim=True)
    mixed, divergence = torch.zeros(3, 64, 2, 3, dtype=torch.double), []
    uniform = Categorical(torch.full((5,), 0.2, dtype=torch.double))
    for i, row, column in np.ndindex(3, 2, 3):
        for code in range(5):
            mixed[i, :, row, column] += choice[i, code, row, column] * model.vectors.weight[code]
        divergence.append(kl_divergence(Categorical(logits=logits[i, :, row, column]), uniform))
    expected = (model.decoder(mixed) - images).square().mean() + 0.1 * torch.stack(divergence).mean() / (2 * 2 * 2)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)


def of_colors(count=32):
    """Images of 4 x 4 patches of one color each, and the numbers of the colors (count, 16)."""
    generator = torch.Generator().manual_seed(0)
    number = torch.randint(2, (count, 4, 4), generator=generator)
    pixels = torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, -0.5]])[number].permute(0, 3, 1, 2)
    return pixels.repeat_interleave(2, 2).repeat_interleave(2, 3), number.flatten(1)


def vae_codes(steps, codes=8):
    backbone = vm.vit("mu1/2", img_size=8, num_classes=0)
    return BeitModel(backbone, BeitPart(codes=codes, vae_steps=steps)).codes


def test_a_vae_is_trained_once_and_in_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images, colors = of_colors()
    first, before = vae_codes(40), torch.get_rng_state()
    assert first.waits_for_images
    first.fit(images.split(10))
    assert torch.equal(torch.get_rng_state(), before)
    assert not first.waits_for_images
    assert adjusted_mutual_info_score(colors.flatten(), first(images).flatten()) > 0.7

    def stopped(*args, **options):
        raise KeyboardInterrupt

    (kept,) = (tmp_path / "vitmods" / "vae").glob("*.npz")
    with monkeypatch.context() as patch:
        patch.setattr(vae, "train_encoder", stopped)
        second = vae_codes(40)
        second.fit(images.split(16))  # reads what is kept
        with pytest.raises(KeyboardInterrupt):  # other images
            vae_codes(40).fit([images + 0.1])
        kept.write_bytes(kept.read_bytes()[:-20])
        with pytest.raises(KeyboardInterrupt):  # damaged
            vae_codes(40).fit([images])
    kept.unlink()
    third, threads = vae_codes(40), torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(vae.Vae, "loss", stopped)
        with pytest.raises(KeyboardInterrupt):  # in the middle
            third.fit([images])
    assert third.waits_for_images
    assert not list((tmp_path / "vitmods" / "vae").glob("*.npz"))
    torch.set_num_threads(2)
    try:
        third.fit([images])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for other in (second, third):
        for name, tensor in first.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_vae_with_few_codes_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images, _ = of_colors()
    with pytest.warns(UserWarning, match="of 8,000 codes after 3 steps: set more vae_steps"):
        vae_codes(3, codes=8000).fit([images])
    zeros = {name: np.zeros_like(value) for name, value in vae_codes(2).encoder.state_dict().items()}
    monkeypatch.setattr(vae, "train_encoder", lambda *args: zeros)
    with pytest.raises(UserError, match="uses 1 of 8 codes after 2 steps: nothing can be predicted"):
        vae_codes(2).fit([images])
    with pytest.raises(UserError, match="code_encoder and vae_steps both give the codes"):
        BeitPart(code_encoder="x", vae_steps=5)
    backbone = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=0, patch_drop=0.5)
    with pytest.raises(UserError, match="no effect in the task beit"):
        with_modules(backbone, TASKS["beit"].from_recipe(small_recipe()), 0, seed=0)


@pytest.mark.parametrize(("patch", "side"), [(1, 1), (3, 2), (4, 4), (14, 8), (16, 8)])
def test_a_vae_has_a_code_for_each_patch_of_any_size(patch, side):
    backbone = vm.vit(f"mu1/{patch}", img_size=(2 * patch, 3 * patch), num_classes=0)
    codes = BeitModel(backbone, BeitPart(codes=7, vae_steps=1)).codes
    images = torch.randn(2, 3, 2 * patch, 3 * patch)
    assert codes.view(images).shape == (2, 3, 2 * side, 3 * side)
    assert codes(images).shape == (2, 6)
