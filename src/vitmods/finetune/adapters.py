"""Low-rank adapters by peft: put into any model before training, merged into its weights after it, and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.finetune.roles import Adapters, parameter_roles
from vitmods.util.errors import UserError
from vitmods.util.files import make_folder, write_atomically
from vitmods.util.limits import parse_json, read_json
from vitmods.util.text import first_of, listing

CONFIG = "adapter_config.json"  # peft's names
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # before the names of tensors in peft's files


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(
            "lora and dora need the package peft: pip install 'vitmods[peft]'. biases and last(4) do without."
        ) from error
    return peft


def add_adapters(model: nn.Module, adapters: Adapters, seed: int = 0) -> None:
    """Put adapters beside the linear maps with the roles of `adapters.on`, in place; outputs stay the same.

    Their weights are drawn from `seed`, so that every process and a resumed trial draw the same. An
    `nn.MultiheadAttention` is one map of queries, keys and values, and one of its output. Raises UserError without
    peft, where the model has adapters already, or has no such maps.
    """
    peft = _peft()
    if has_adapters(model):
        raise UserError("This model has adapters already: merge them first (vitmods.finetune.merge_adapters).")
    roles = parameter_roles(model)
    attentions = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.MultiheadAttention)
        and roles.get(f"{name}.{'in_proj_' if name in attentions else ''}weight") in adapters.roles
        and not any(name.startswith(f"{attention}.") for attention in attentions)
    ]
    if not targets:
        present = {roles.get(f"{name}.weight") for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        raise UserError(
            f"{adapters.kind}(on={adapters.on}): this model does not have linear maps with this role, but with "
            f"{listing(sorted(role for role in present if role))}."
        )
    rank = adapters.rank or _matching_rank(model, targets, adapters.kind == "dora")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=adapters.alpha or rank,
        target_modules=targets,
        use_dora=adapters.kind == "dora",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:  # such as DoRA for nn.MultiheadAttention
            raise UserError(f"{adapters.kind}(on={adapters.on}): {error}") from None


def _matching_rank(model: nn.Module, targets: Sequence[str], with_norms: bool) -> int:
    """The rank with which adapters of these maps have as many parameters as `attention` trains beside the head."""
    roles = parameter_roles(model)
    count = sum(p.numel() for name, p in model.named_parameters() if roles[name] in ("attention", "positions"))
    names = [f"{target}.in_proj_weight" for target in targets] + [f"{target}.out_proj.weight" for target in targets]
    names += [f"{target}.weight" for target in targets]
    weights = [p for name, p in model.named_parameters() if name in set(names)]
    return max(1, round((count - with_norms * sum(map(len, weights))) / sum(len(w) + w.shape[1] for w in weights)))


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has low-rank adapters of peft."""
    return any(name.rpartition(".")[2] == "lora_A" for name, _ in model.named_modules())


def merge_adapters(model: nn.Module) -> None:
    """Merge all adapters into the weights beside them, in place: the model has its former modules and names again."""
    merged = list[str]()
    for name, module in [*model.named_modules()]:
        if not hasattr(module, "lora_A") or any(name.startswith(f"{outer}.") for outer in merged):
            continue
        unload = getattr(module, "unload_and_optionally_merge_module", None)
        if unload is not None:  # of nn.MultiheadAttention, with its output projection
            layer = unload(merge=True, safe_merge=False, adapter_names=None)
        else:
            module.merge()
            layer = module.get_base_layer()
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        merged.append(name)
    if hasattr(model, "peft_config"):
        del model.peft_config


def save_adapters(model: nn.Module, trained: Sequence[str], folder: Path) -> None:
    """Write the adapters of a model, not merged, as peft's `PeftModel.from_pretrained` opens them beside the weights
    that training started from, with the other modules that were trained. Nothing is written where peft could not open
    it: where the maps beside adapters are trained too, or parameters outside of modules.

    trained: names of the trained parameters.
    """
    from safetensors.torch import save

    tensors = model.state_dict()
    of_backbone = getattr(model, "backbone", model)
    prefix = "" if of_backbone is model else "backbone."  # the modules of a task are files of their own
    trained = [name for name in trained if name.startswith(prefix)]
    others = [name.removeprefix(prefix) for name in trained if ".lora_" not in name]
    if any(".base_layer." in name or "." not in name for name in others):
        return
    modules = sorted({name.rpartition(".")[0] for name in others})
    config: Any = copy(model.peft_config["default"])  # type: ignore[index]
    config.inference_mode = True
    config.target_modules = {name.removeprefix(prefix) for name in config.target_modules}
    config.modules_to_save = modules or None
    weights = {_PREFIX + name.removeprefix(prefix).replace(".default", ""): tensors[name] for name in trained}
    make_folder(folder)
    config.save_pretrained(str(folder))
    size = getattr(getattr(of_backbone, "vit_config", None), "img_size", ())
    metadata = {"format": "pt", "img_size": json.dumps(list(size))}
    content = save({name: tensor.cpu().contiguous().clone() for name, tensor in weights.items()}, metadata)
    write_atomically(folder / WEIGHTS, lambda file: file.write(content))


@dataclass(frozen=True)
class SavedAdapters:
    """A folder that `save_adapters` or peft wrote.

    weights: of the adapters and of the other trained modules, by their names in the model without adapters.
    size: (height, width) of the images that they were trained for; empty if it is not known.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    size: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> SavedAdapters:
        """Read and check a folder. Raises UserError if a file is missing or damaged, or holds other adapters."""
        from safetensors import SafetensorError, safe_open

        try:
            config = read_json(folder / CONFIG)
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                weights = {name.removeprefix(_PREFIX): file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                size = tuple(map(int, parse_json((file.metadata() or {}).get("img_size", "[]"))))
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise UserError(f"{folder} cannot be read as adapters of peft: {error}") from None
        if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
            raise UserError(f"{folder}: only adapters of LoRA and DoRA are read.")
        return cls(folder, config, weights, size)

    @property
    def modules(self) -> dict[str, Tensor]:
        """The tensors of the modules that were trained beside the adapters, such as the head."""
        return {name: tensor for name, tensor in self.weights.items() if ".lora_" not in name}

    def put_into(self, model: nn.Module) -> None:
        """Put the adapters beside the weights of `model`, in place. Raises UserError if they do not fit."""
        peft = _peft()
        names = [f for f in peft.LoraConfig.__dataclass_fields__ if f in self.config and f != "modules_to_save"]
        try:
            peft.inject_adapter_in_model(peft.LoraConfig(**{name: self.config[name] for name in names}), model)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.folder} does not fit this model: {error}") from None
        state = model.state_dict()
        tensors = {_named(name): tensor for name, tensor in self.weights.items() if ".lora_" in name}
        lacking = [name for name in state if ".lora_" in name and name not in tensors]
        wrong = [name for name in tensors if name not in state or state[name].shape != tensors[name].shape]
        if lacking or wrong:
            raise UserError(
                f"{self.folder} does not fit this model: {first_of(lacking + wrong, 3)} is not in both. "
                "Give the model that the adapters were trained with."
            )
        model.load_state_dict(tensors, strict=False)


def _named(name: str) -> str:
    """The name that a tensor of an adapter has in the model."""
    parent, _, rest = name.partition(".lora_")
    kind, _, leaf = rest.partition(".")
    return f"{parent}.lora_{kind}.default{f'.{leaf}' if leaf else ''}"
