"""The difference between a fine-tuned model and its base as a file, and several tasks on one backbone."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.adapters.transfer import shapes_of
from vitmods.finetune.adapters import CONFIG, SavedAdapters
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import write_atomically
from vitmods.util.limits import parse_json
from vitmods.util.text import Printed, first_of

FORMAT = "vitmods-delta-1"
_BESIDE = "task:"  # before the names of the modules' tensors


@dataclass(frozen=True)
class Delta:
    """The tensors of a task that differ from its base.

    source:  name in messages
    config:  of the task's model
    weights: the tensors that differ
    digests: of every tensor of the task's model
    base:    fingerprint of the base that it was made from
    modules: all tensors of the task's own modules (a decoder), by their names in the task's model: for its
             `load_state_dict(..., strict=False)` around the model of `load_delta`
    """

    source: str
    config: ViTConfig
    weights: Mapping[str, Tensor]
    digests: Mapping[str, str]
    base: str
    modules: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the task's own tensors."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.modules.values()))

    def tensors(self, base: ViT) -> dict[str, Tensor]:
        """Return all tensors of the task's model: its own, and for the rest the very tensors of ``base``.

        Raises UserError if a tensor is in neither, or the base's is not the one that the delta was made from.
        """
        shared = base.state_dict()
        missing = [name for name in self.digests if name not in self.weights and name not in shared]
        if missing:
            raise UserError(f"{self.source} is incomplete: {first_of(missing, 3)} is neither in it nor in the base.")
        assembled = {name: self.weights[name] if name in self.weights else shared[name] for name in self.digests}
        wrong = [
            name for name in assembled if name not in self.weights and digest(assembled[name]) != self.digests[name]
        ]
        if wrong:
            raise UserError(
                f"{self.source} belongs to another base: {first_of(wrong, 3)} differ from the base that it was trained "
                f"with (fingerprint {self.base}, this one {fingerprint(base)}). Give the model that was fine-tuned."
            )
        return assembled


def save_delta(model: nn.Module, base: nn.Module, path: str | Path) -> Delta:
    """Write the tensors of ``model`` that differ from ``base`` as safetensors; replaces ``path`` atomically.

    Args:
        model: the fine-tuned model; its resolution and number of classes may differ from the base's. Of a task's
            model, the ``backbone`` is compared, and everything else is saved whole.
        base: the model that training started from, as it was then. Both are vitmods ViTs, or models of timm, Hugging
            Face or torchvision that can be read exactly.
        path: ends in ``.safetensors``.

    Raises:
        UserError: another suffix, a model that cannot be read, models that are equal, or a file that cannot be written
            (an old one is unchanged then).
    """
    from safetensors.torch import save

    is_task_model = hasattr(model, "lr_scales")
    state = model.state_dict() if is_task_model else {}
    modules = {n: t.detach().cpu().clone() for n, t in state.items() if not n.startswith("backbone.")}
    path, model, base = Path(path), as_vit(model.backbone if is_task_model else model), as_vit(base)  # type: ignore[arg-type]
    if path.suffix != ".safetensors":
        raise UserError(f"{path.name}: a delta is a .safetensors file; give it that ending.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    of_base = {name: digest(tensor) for name, tensor in base.state_dict().items()}
    changed = {name: tensor.clone() for name, tensor in tensors.items() if of_base.get(name) != digests[name]}
    if not changed and not modules and model.vit_config == base.vit_config:
        raise UserError("The model equals its base: there is nothing to save. Was the base trained in place?")
    delta = Delta(path.name, model.vit_config, changed, digests, fingerprint(base), modules)
    metadata = {
        "format": FORMAT,
        "base": delta.base,
        "config": model.vit_config.to_json(),
        "digests": json.dumps(digests),
        "own": json.dumps(list(changed)),
        "modules": json.dumps({name: digest(tensor) for name, tensor in modules.items()}),
    }
    tensors = changed | {_BESIDE + name: tensor for name, tensor in modules.items()}
    write_atomically(path, lambda file: file.write(save(tensors, metadata)))
    return delta


def load_delta(base: nn.Module, path: str | Path) -> ViT:
    """Return the fine-tuned model: a new ViT of the delta's tensors and copies of the base's, on the base's device.

    Raises UserError if the file is damaged, incomplete or not a delta, or was made from another base. Only safetensors
    is read, which cannot run code.
    """
    base = as_vit(base)
    delta = read_delta(path)
    return assemble(delta, base, {name: tensor.clone() for name, tensor in delta.tensors(base).items()})


def assemble(delta: Delta, base: ViT, tensors: Mapping[str, Tensor]) -> ViT:
    """Return a ViT of the delta's config whose parameters and buffers are these very tensors, on the base's device."""
    # Checked before memory is allocated for the config of the file.
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected = shapes_of(delta.source, delta.config, at_most=len(shapes))
    wrong = [name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)]
    if wrong:
        raise UserError(
            f"{delta.source} does not fit its own config: {first_of(wrong, 3)} is missing or has another shape."
        )
    reference = next(base.parameters())
    with torch.random.fork_rng(devices=[]):  # its initial weights are not used
        model = ViT(delta.config).to(device=reference.device, dtype=reference.dtype)
    model.load_state_dict({name: tensor.to(reference.device) for name, tensor in tensors.items()}, assign=True)
    sizes = {"input_size": model.pretrained_cfg["input_size"], "num_classes": delta.config.num_classes}
    sizes["label_names"] = None  # base's
    model.pretrained_cfg = model.default_cfg = {**base.pretrained_cfg, **sizes}
    model.changes = base.changes
    return model.train(base.training)


def read_delta(path: str | Path) -> Delta:
    """Read and check a delta file. Raises UserError if it is damaged, incomplete, or not a delta."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: memory that a file is mapped to is aligned otherwise, which may alter the last bit of a product.
            tensors, metadata = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"The delta {path} does not exist.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path.name} is not a safetensors file, or is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path.name} is not a delta of this version of vitmods: save_delta writes one.")
    try:
        config = ViTConfig.from_json(metadata["config"])
        digests, base = dict(parse_json(metadata["digests"])), metadata["base"]
        names = [str(name) for name in parse_json(metadata["own"])]
        module_digests = {str(name): value for name, value in parse_json(metadata.get("modules", "{}")).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path.name} is damaged: its metadata cannot be read ({error}).") from error
    modules = {name.removeprefix(_BESIDE): tensors.pop(name) for name in [*tensors] if name.startswith(_BESIDE)}
    missing = [n for n in names if n not in tensors] + [n for n in module_digests if n not in modules]
    if missing:
        raise UserError(f"{path.name} is incomplete: it lacks {first_of(missing, 3)}. Save the delta again.")
    broken = [name for name, tensor in tensors.items() if digests.get(name) != digest(tensor)]
    broken += [name for name, tensor in modules.items() if module_digests.get(name) != digest(tensor)]
    if broken:
        raise UserError(f"{path.name} is damaged: {first_of(broken, 3)} differs from its digest. Copy the file again.")
    return Delta(path.name, config, tensors, digests, base, modules)


def digest(tensor: Tensor) -> str:
    """Return 128 bits that identify type, shape and contents of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    hasher = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that identify all weights of a model that ``save_delta`` accepts."""
    return fingerprint_of(as_vit(model).state_dict())


def fingerprint_of(weights: Mapping[str, Tensor]) -> str:
    """Return 16 hexadecimal digits that identify named tensors."""
    lines = (f"{name} {digest(tensor)}\n" for name, tensor in sorted(weights.items()))
    return hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()


class MultiTask(Printed, nn.Module):
    """Serves several fine-tuned models that have most weights in common; for inference.

    ``multi["pets"]`` is the ViT of a task, with its own head, positions and resolution; ``multi(images, "pets")`` calls
    it. Changing the task copies nothing, outputs equal those of the separate models bit for bit, and ``to`` keeps the
    weights shared.

    Args:
        base: the model that the tasks were fine-tuned from. Its tensors are used, not copied: do not train it further.
        tasks: name -> delta, as a file or as ``save_delta`` returned it, or a folder of LoRA's or DoRA's adapters (a
            trial's ``adapter``, or peft's), which are not merged; None is the base as it is.

    Raises:
        UserError: a delta or adapters cannot be read, or belong to another base, or tasks are missing.
    """

    def __init__(self, base: nn.Module, tasks: Mapping[str, Delta | str | Path | None]) -> None:
        super().__init__()
        if not tasks:
            raise UserError("Give at least one task: MultiTask(base, {'pets': 'pets.safetensors'}).")
        base = as_vit(base)
        # One object for each of the base's tensors, so that moving a task moves it for all.
        shared = base.state_dict() | {
            name: nn.Parameter(p.detach(), requires_grad=False) for name, p in base.named_parameters()
        }
        self.models = nn.ModuleDict()
        self._keys = {name: f"task{number}" for number, name in enumerate(tasks)}  # a module's name has no dots
        for name, source in tasks.items():
            if source is None:
                delta, tensors = Delta("The base", base.vit_config, {}, {}, ""), shared
            elif not isinstance(source, Delta) and (Path(source) / CONFIG).is_file():
                self.models[self._keys[name]] = _with_adapters(base, shared, SavedAdapters.read(Path(source)))
                continue
            else:
                delta = source if isinstance(source, Delta) else read_delta(source)
                of_task = delta.tensors(base)
                tensors = {key: tensor if key in delta.weights else shared[key] for key, tensor in of_task.items()}
            self.models[self._keys[name]] = assemble(delta, base, tensors)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.eval()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self._keys)

    def __getitem__(self, task: str) -> ViT:
        """Return the ViT of a task. Raises UserError for an unknown one, naming the nearest."""
        if task not in self._keys:
            raise UserError(f"Unknown task '{task}'. {nearest(task, self._keys)}")
        model = self.models[self._keys[task]]
        assert isinstance(model, ViT)
        return model

    def forward(self, images: Tensor, task: str) -> Tensor:
        """Map (B, in_chans, height, width) in the task's resolution to (B, classes of the task)."""
        return self[task](images)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory; shared weights count once."""
        return _distinct_bytes(self)

    def __str__(self) -> str:
        """Format a table with a row for each task: images, classes, weights, and the weights of all tasks."""
        lines = [f"{'task':<20} {'images':>10} {'classes':>8} {'weights':>10}"]
        for task in self.tasks:
            config = self[task].vit_config
            size = "x".join(map(str, config.img_size))
            lines.append(f"{task:<20} {size:>10} {config.num_classes:>8} {_mb(_distinct_bytes(self[task])):>10}")
        return "\n".join([*lines, f"{'together':<20} {'':>10} {'':>8} {_mb(self.nbytes):>10}"])


def _with_adapters(base: ViT, shared: Mapping[str, Tensor], adapters: SavedAdapters) -> ViT:
    """Return a ViT of the base's very tensors with adapters beside them, and with the modules trained with them."""
    config = base.vit_config
    if adapters.size and adapters.size != tuple(config.img_size):
        width, height = reversed(adapters.size)
        raise UserError(
            f"{adapters.folder} was trained for images of {height} x {width} pixels, and the base takes "
            f"{config.img_size[0]} x {config.img_size[1]}: call base.set_input_size(({height}, {width})) first."
        )
    head = adapters.modules.get("head.weight")
    if head is not None:
        config = config.with_(num_classes=len(head))
    tensors = {**shared, **{name: nn.Parameter(tensor, False) for name, tensor in adapters.modules.items()}}
    model = assemble(Delta(str(adapters.folder), config, {}, {}, ""), base, tensors)
    adapters.put_into(model)
    return model.to(next(base.parameters()).device).eval()


def _distinct_bytes(model: nn.Module) -> int:
    storages = (tensor.untyped_storage() for tensor in model.state_dict().values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g} MB"
