"""From LayerNorm to RMSNorm without changing the function: a residual stream that has zero mean over channels.

Let P = I - 11'/C take the mean over the C channels off a token, and R(x) = gamma x / sqrt(|x|^2 / C + eps). Then

    LayerNorm(x) = R(P x) + beta        RMSNorm(x) = R(x)

In a pre-norm ViT all that reads the stream x is LayerNorms, so P x in place of x gives the same outputs. The stream is
a sum, x = stem + position + tokens + branch_1 + branch_2 + ..., and P is linear: with P applied to each term there is
nothing left for LayerNorm to center.

- A linear map that writes to the stream: W h + b becomes (P W) h + P b. Positions and tokens p become P p.
- With LayerScale, g (W h + b) becomes g' (W' h + b') with g' W' = P g W and g' b' = P g b. g' is g, raised to |g| / C
  where it is smaller: no division by zero, and W' stays of the size of W.
- A LayerNorm that writes to the stream (Dual PatchNorm's, NormFormer's) has zero mean where its gain is the same for
  all channels, as a new one's is; its bias becomes P b. Nothing can be done about another gain, nor about a residual
  scale (NormFormer's) that is not the same for all channels.
- RMSNorm has no bias. What reads the norm is a linear map, and V (y + beta) + c = V y + (c + V beta).

The arithmetic is in float64 and rounded once. Dropout of single channels leaves a mean again, so the functions are
equal in evaluation (and in training without it); whole branches may be dropped.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    Weights = dict[str, Tensor]

ABSORBED = ("norm.bias", "fc_norm.bias", "blocks.*.norm[12].bias")
"""Patterns of the weights that live on in the bias of the map that reads them."""


def rms_config(config: ViTConfig) -> ViTConfig:
    """The config with RMSNorm wherever a norm reads the stream; the same config where all of them are RMSNorms.

    Norms elsewhere stay: inside the branches, of queries and keys, of map pooling. Raises UserError where no exact
    conversion exists.
    """
    branches = [branch for i in range(config.depth) for branch in config.branches(i)]
    on_stream = [norm for b in branches for norm in (b.before, b.after)] + [config.final_norm]
    if all(norm is None or norm.kind == "rms" for norm in on_stream):
        return config
    _check(config, branches)
    first = config.first_blocks
    return config.with_(
        attn=_rms_before(config.attn),
        mlp=_rms_before(config.mlp),
        first_blocks=first and replace(first, attn=_rms_before(first.attn), mlp=_rms_before(first.mlp)),
        final_norm=config.final_norm and replace(config.final_norm, kind="rms"),
        pool_norm=config.pool_norm or config.final_norm if config.pool == "map" else None,
        qkv_bias=config.qkv_bias or any(b.before and b.before.affine for b in branches[::2]),
        position="sincos2d_centered" if config.position == "sincos2d" else config.position,
    )


def _rms_before(branch: BranchConfig) -> BranchConfig:
    return replace(branch, before=branch.before and replace(branch.before, kind="rms"))


def _check(config: ViTConfig, branches: list[BranchConfig]) -> None:
    if config.reads_tokens:
        _refuse("a table of tokens and fixed positions write a mean into the stream")
    if any(b.after for b in branches):
        _refuse("a norm after the residual sum (post-norm) writes the whole stream, with a gain for each channel")
    readers = [*(b.before for b in branches), config.final_norm]
    if None in readers:
        _refuse("a branch or the head reads the stream without a norm and would miss its mean")
    for kind in {norm.kind for norm in readers if norm} - {"layer"}:
        _refuse(f"the norm '{kind}' reads the stream and is no LayerNorm, to which its mean makes no difference")
    writers = [config.stem.after, config.position_norm, *(b.branch for b in branches)]
    if config.stem.gelu:
        _refuse("the GELU at the end of the stem writes a mean into the stream")
    for kind in {norm.kind for norm in writers if norm} - {"layer"}:
        _refuse(f"the norm '{kind}' in the stem, after the positions or on a branch writes a mean into the stream")


def _refuse(reason: str) -> NoReturn:
    raise UserError(
        f"RMSNorm cannot take LayerNorm's place exactly here: {reason}. Write norm(kind=rms,exact=false), which keeps "
        "the weights and alters the outputs."
    )


def rms_weights(weights: "Weights", config: ViTConfig) -> "Weights":
    """The weights of the model that ``rms_config(config)`` describes, from those of ``config``'s.

    Raises UserError where the weights do not allow it: a gain that undoes the centering, a bias that nothing reads.
    """
    new = dict(weights)
    tokens = {"pos_embed": config.position == "learn", "cls_token": config.class_token, "reg_token": config.reg_tokens}
    for name in (name for name, present in tokens.items() if present):
        new[name] = _centered(_double(_take(new, name)), -1).to(new[name])
    _centre_map(new, "patch_embed.proj", "")
    _centre_norm(new, "patch_embed.norm", "")
    _centre_norm(new, "norm_pre", "")
    of_mlp = tuple(f"mlp.{name}" for name in mlp_readers(config))
    for i in range(config.depth):
        attn, mlp = config.branches(i)
        for branch, n, writer, readers in ((attn, 1, "attn.proj", ("attn.qkv",)), (mlp, 2, "mlp.fc2", of_mlp)):
            if branch.branch is None:
                _centre_map(new, f"blocks.{i}.{writer}", f"blocks.{i}.ls{n}.gamma")
            else:
                _centre_norm(new, f"blocks.{i}.norm{n}_branch", f"blocks.{i}.ls{n}.gamma")
            _absorb(new, f"blocks.{i}.norm{n}", *(f"blocks.{i}.{reader}" for reader in readers))
        _check_even(new, f"blocks.{i}.residual_scale.gamma")
    last = ("pre_logits",) if config.representation or config.head_hidden else ("head",) if config.num_classes else ()
    _absorb(
        new, "fc_norm" if config.norm_after_pool else "norm", *(("attn_pool.kv",) if config.pool == "map" else last)
    )
    return new


def _take(weights: "Weights", name: str) -> "Tensor":
    if name not in weights:
        _refuse(f"{name} is new, made by a change before this one (or give this change first)")
    return weights[name]


def _double(values: "Tensor") -> "Tensor":
    return values.cpu().double()  # some devices have no float64


def _centered(values: "Tensor", channels: int) -> "Tensor":
    return values - values.mean(channels, keepdim=True)


def _centre_map(weights: "Weights", name: str, gain: str) -> None:
    """A linear map (C, ...), its bias and the LayerScale behind it, so that what they write has zero mean."""
    before = after = _double(_take(weights, f"{name}.weight").new_ones(1))
    if gain in weights and weights[gain].any():
        before = _double(weights[gain])
        least = before.norm() / len(before)
        weights[gain] = before.where(before.abs() >= least, least).to(weights[gain])
        after = _double(weights[gain])
    for key in (f"{name}.weight", f"{name}.bias"):
        if key in weights:
            channels_last = _double(weights[key]).movedim(0, -1)
            weights[key] = (_centered(channels_last * before, -1) / after).movedim(-1, 0).to(weights[key])


def _centre_norm(weights: "Weights", name: str, gain: str) -> None:
    _check_even(weights, f"{name}.weight", gain)
    if f"{name}.bias" in weights:
        weights[f"{name}.bias"] = _centered(_double(weights[f"{name}.bias"]), 0).to(weights[f"{name}.bias"])


def _check_even(weights: "Weights", *names: str) -> None:
    for name in names:
        if name in weights and weights[name].min() != weights[name].max():
            _refuse(f"{name} differs between channels, which writes a mean into the stream")


def mlp_readers(config: ViTConfig) -> tuple[str, ...]:
    """The linear maps that read what goes into an MLP."""
    from vitmods.layers.mlp import MLPS  # layers import torch

    kind: Any = MLPS[config.mlp_kind]
    return tuple(kind.readers)


def _absorb(weights: "Weights", norm: str, *readers: str) -> None:
    """The norm's bias goes through the maps that read it into their biases."""
    beta = weights.pop(f"{norm}.bias", None)
    if beta is None or not beta.any():
        return
    if not readers:
        _refuse(f"nothing behind {norm} can take up its bias (the model has no head)")
    for reader in readers:
        weight, bias = _take(weights, f"{reader}.weight"), weights.get(f"{reader}.bias")
        shift = _double(weight) @ _double(beta)
        weights[f"{reader}.bias"] = (shift if bias is None else _double(bias) + shift).to(weight)
