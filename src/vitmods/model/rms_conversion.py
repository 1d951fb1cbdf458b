"""From LayerNorm to RMSNorm without changing the function: a residual stream that has zero mean over channels.

Let P = I - 11'/C take the mean over the C channels off a token, and R(x) = gamma x / sqrt(|x|^2 / C + eps). Then

    LayerNorm(x) = R(P x) + beta        RMSNorm(x) = R(x)

In a pre-norm ViT all that reads the stream x is LayerNorms, so P x in place of x gives the same outputs. The stream is
a sum, x = stem + position + tokens + branch_1 + branch_2 + ..., and P is linear: with P applied to each term there is
nothing left for LayerNorm to center.

- A linear map that writes to the stream: W h + b becomes (P W) h + P b. Positions and tokens p become P p.
- With LayerScale, g (W h + b) becomes g' (W' h + b') with g' W' = P g W and g' b' = P g b. g' is g, raised to |g| / C
  where it is smaller: no division by zero, and W' stays of the size of W.
- A LayerNorm after the positions (CLIP's) subtracts the mean of its output: ``layer_centered``.
- Another LayerNorm that writes to the stream (Dual PatchNorm's, NormFormer's) has zero mean where its gain is the same
  for all channels, as a new one's is; its bias becomes P b. Other gains are refused, and so is a residual scale
  (NormFormer's) that is not the same for all channels.
- RMSNorm does not have a bias. What reads the norm is a linear map, and V (y + beta) + c = V y + (c + V beta).
- A final norm that no linear map reads (in a model without head) stays a LayerNorm.

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


def rms_config(config: ViTConfig) -> ViTConfig:
    """Return the config with RMSNorm wherever a norm reads the stream and a linear map reads the norm.

    Norms elsewhere stay: inside the branches, of queries and keys, of map pooling, and a final norm without a head. A
    config that is so already is returned as it is. Raises UserError where no exact conversion exists.
    """
    branches = [branch for i in range(config.depth) for branch in config.branches(i)]
    readers = [norm for b in branches for norm in (b.before, b.after)]
    readers += [config.final_norm] if final_readers(config) else []
    if all(norm is None or norm.kind == "rms" for norm in readers):
        return config
    _check(config, branches)
    final, position = config.final_norm, config.position_norm
    return config.with_slots(_rms_before, _rms_before).with_(
        final_norm=final and replace(final, kind="rms") if final_readers(config) else final,
        pool_norm=config.pool_norm or final if config.pool == "map" else None,
        position_norm=replace(position, kind="layer_centered") if position and position.affine else position,
        qkv_bias=config.qkv_bias or any(b.before and b.before.affine for b in branches[::2]),
        proj_bias=config.proj_bias or any(b.before and b.before.affine for b in branches[1::2]),
        position="sincos2d_centered" if config.position == "sincos2d" else config.position,
    )


def final_readers(config: ViTConfig) -> tuple[str, ...]:
    """Return the linear maps that read the final norm's output; none in a model without head."""
    if config.pool == "map":
        return ("attn_pool.kv",)
    if config.representation or config.head_hidden:
        return ("pre_logits",)
    return ("head",) if config.num_classes else ()


def absorbed(config: ViTConfig) -> tuple[str, ...]:
    """Return patterns of the biases that become part of the bias of the map that reads them."""
    return ("blocks.*.norm[12].bias", *(("norm.bias", "fc_norm.bias") if final_readers(config) else ()))


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
        _refuse(f"the norm '{kind}' reads the stream, and unlike a LayerNorm it depends on the stream's mean")
    position = config.position_norm if config.position_norm and config.position_norm.kind != "layer_centered" else None
    writers = [config.stem.after, position, *(b.branch for b in branches)]
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

    Raises UserError where the weights do not allow it: a gain that undoes the centering.
    """
    new = dict(weights)
    tokens = {"pos_embed": config.position == "learn", "cls_token": config.class_token, "reg_token": config.reg_tokens}
    for name in (name for name, present in tokens.items() if present):
        new[name] = centered(to_double(_take(new, name)), -1).to(new[name])
    _centre_map(new, "patch_embed.proj", "")
    _centre_norm(new, "patch_embed.norm", "")
    of_attn = tuple(f"attn.{name}" for name in attention_readers(config))
    of_mlp = tuple(f"mlp.{name}" for name in mlp_readers(config))
    for i in range(config.depth):
        attn, mlp = config.branches(i)
        for branch, n, writer, of_branch in ((attn, 1, "attn.proj", of_attn), (mlp, 2, "mlp.fc2", of_mlp)):
            if branch.branch is None:
                _centre_map(new, f"blocks.{i}.{writer}", f"blocks.{i}.ls{n}.gamma")
            else:
                _centre_norm(new, f"blocks.{i}.norm{n}_branch", f"blocks.{i}.ls{n}.gamma")
            readers = (f"blocks.{i}.{reader}" for reader in of_branch)
            _absorb(new, f"blocks.{i}.norm{n}", *readers, scale=config.norm_scale_at(i))
        _check_even(new, f"blocks.{i}.residual_scale.gamma")
    if final := final_readers(config):
        _absorb(new, "fc_norm" if config.norm_after_pool else "norm", *final)
    return new


def _take(weights: "Weights", name: str) -> "Tensor":
    if name not in weights:
        _refuse(f"{name} is new, made by a change before this one (or give this change first)")
    return weights[name]


def to_double(values: "Tensor") -> "Tensor":
    """In float64, on the CPU: some devices do not have it."""
    return values.detach().cpu().double()


def centered(values: "Tensor", channels: int) -> "Tensor":
    """Values without their mean over channels."""
    return values - values.mean(channels, keepdim=True)


def split_gain(gain: "Tensor | None") -> tuple[Any, Any]:
    """A LayerScale's factors in float64, as they are and raised where they are smaller than |g| / C; (1, 1) without."""
    if gain is None or not gain.any():
        return 1.0, 1.0
    before = to_double(gain).flatten()
    least = before.norm() / len(before)
    return before, to_double(before.where(before.abs() >= least, least).to(gain.dtype))


def _centre_map(weights: "Weights", name: str, gain: str) -> None:
    """A linear map (C, ...), its bias and the LayerScale behind it, so that what they write has zero mean."""
    _take(weights, f"{name}.weight")
    before, after = split_gain(weights.get(gain))
    if gain in weights and weights[gain].any():
        weights[gain] = after.to(weights[gain])
    for key in (f"{name}.weight", f"{name}.bias"):
        if key in weights:
            channels_last = to_double(weights[key]).movedim(0, -1)
            weights[key] = (centered(channels_last * before, -1) / after).movedim(-1, 0).to(weights[key])


def _centre_norm(weights: "Weights", name: str, gain: str) -> None:
    _check_even(weights, f"{name}.weight", gain)
    if f"{name}.bias" in weights:
        weights[f"{name}.bias"] = centered(to_double(weights[f"{name}.bias"]), 0).to(weights[f"{name}.bias"])


def _check_even(weights: "Weights", *names: str) -> None:
    for name in names:
        if name in weights and weights[name].min() != weights[name].max():
            _refuse(f"{name} differs between channels, which writes a mean into the stream")


def mlp_readers(config: ViTConfig) -> tuple[str, ...]:
    """The linear maps that read what goes into an MLP."""
    from vitmods.layers.mlp import MLPS  # layers import torch

    kind: Any = MLPS[config.mlp_kind]
    return tuple(kind.readers)


def attention_readers(config: ViTConfig) -> tuple[str, ...]:
    """The linear maps that read what goes into attention."""
    return ("qkv",) if config.gate == "none" else ("qkv", "gate")


def _absorb(weights: "Weights", norm: str, *readers: str, scale: float = 1.0) -> None:
    """The norm's bias, times a fixed scale, goes through the maps that read it into their biases."""
    beta = weights.pop(f"{norm}.bias", None)
    if beta is None or not beta.any():
        return
    for reader in readers:
        weight, bias = _take(weights, f"{reader}.weight"), weights.get(f"{reader}.bias")
        shift = scale * to_double(weight) @ to_double(beta)
        weights[f"{reader}.bias"] = (shift if bias is None else to_double(bias) + shift).to(weight)
