"""Hugging Face's models of text as bases on sequences: new ones, from their configuration at a size."""

import math
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.libraries import LIBRARIES, Library
from vitmods.util.errors import UserError, nearest


def from_text(base: Any, name: str, trained: bool, options: dict[str, Any]) -> nn.Module:
    """A model of that type for sequence classification; options are fields of its configuration.

    Its call takes tokens (B, T), 0 being padding. It puts a class token before them, which its head reads,
    and fills them up to one length, a multiple of the blocks and chunks of its attention: some models choose their
    attention by the length of the first batch.

    Raises UserError for an unknown type or field, and where trained weights are asked for.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    if trained or "drop_path" in options:
        raise UserError(f"{base.spec}: models of tokens do not support pretrained weights or drop path.")
    if name not in KNOWN:
        raise UserError(
            f"Hugging Face does not have a model '{name}' that classifies sequences. {nearest(name, KNOWN)}"
        )
    config = AutoConfig.for_model(name)
    for key in options:
        if not hasattr(config, key):
            raise UserError(f"{base.spec}: the config does not have '{key}'. {nearest(key, config.to_dict())}")
    if hasattr(config, "axial_pos_embds"):  # axial positions want lengths that are products
        options = {"axial_pos_embds": False, **options}
    config = AutoConfig.for_model(name, **options)
    names = ("block_size", "lsh_attn_chunk_length", "local_attn_chunk_length", "attention_window")
    multiple = math.lcm(*(value for name in names if isinstance(value := getattr(config, name, 1), int)))
    length = -(-(base.img_size[1] + 1) // multiple) * multiple
    config.vocab_size, config.pad_token_id, config.num_labels = base.in_chans + 1, 0, base.num_classes
    config.max_position_embeddings = length
    if getattr(config, "attention_type", "") == "block_sparse":
        _choose_attention(base.spec, config, length)
    model: nn.Module = AutoModelForSequenceClassification.from_config(config)
    for part in model.modules():
        if getattr(part, "pooler", None) is not None and name == "big_bird":  # which its classifier does not read
            part.pooler = None  # type: ignore[assignment]
        for seed in ("attention_seed", "feed_forward_seed"):
            if hasattr(part, f"_init_{seed}"):
                setattr(part, f"_init_{seed}", partial(_draw, part, seed))
    reads = ReadsTokens(base.in_chans, length)
    model.register_forward_pre_hook(reads.before, with_kwargs=True)
    model.register_forward_hook(reads.after, always_call=True)
    return model


def _choose_attention(spec: str, config: Any, length: int) -> None:
    """Blocks pay, and work, from a length on; the model itself would change over at the first short batch."""
    least = (5 + 2 * config.num_random_blocks) * config.block_size
    if length <= least:
        config.attention_type = "original_full"
        warnings.warn(
            f"{spec} attends in blocks to more than {least} tokens; with {length} it attends to all of them. Longer "
            "sequences, or ?block_size=... and ?num_random_blocks=... below, make blocks.",
            stacklevel=2,
        )


def _draw(self: Any, name: str) -> None:
    """A seed from torch's random numbers, which a checkpoint keeps; Reformer's own comes from the operating system."""
    setattr(self, name, int(torch.randint(2**62, ())))
    torch.manual_seed(getattr(self, name))


class ReadsTokens:
    """Hooks around a model of text that is called only with tokens. In evaluation its random numbers (of hashing) are
    the same at each call, and those outside stay as they were."""

    def __init__(self, class_token: int, length: int):
        self.class_token, self.length = class_token, length
        self._open: list[ExitStack] = []

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(B, T) -> filled up, with a class token, and with the mask that says where."""
        stack = ExitStack()
        self._open.append(stack)
        tokens: Tensor = args[0] if args else kwargs["input_ids"]
        if not model.training:
            cuda = [tokens.device] if tokens.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            torch.manual_seed(0)
        padding = self.length - 1 - tokens.shape[1]
        if padding < 0:
            raise UserError(f"A sequence of {tokens.shape[1]} tokens is longer than the model's {self.length - 1}.")
        first = tokens.new_full((len(tokens), 1), self.class_token)
        tokens = torch.cat([first, nn.functional.pad(tokens, (0, padding))], dim=1)
        return (), {**kwargs, "input_ids": tokens, "attention_mask": (tokens != 0).long()}

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Random numbers as before."""
        if self._open:
            self._open.pop().close()


LIBRARIES.add("hf-text", Library(from_text, reads_tokens=True))
