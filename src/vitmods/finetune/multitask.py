"""Several tasks on one backbone: a model a task, made of the same tensors wherever the tasks do not differ."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.finetune.delta import Delta, assemble, read_delta
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, nearest


class MultiTask(nn.Module):
    """Serves several fine-tuned models that have most weights in common; for inference.

    ``multi["pets"]`` is the ViT of a task, with its own head, positions and resolution; ``multi(images, "pets")`` calls
    it. Going from task to task copies nothing, outputs are those of the separate models bit for bit, and ``to`` keeps
    the weights shared.

    Args:
        base: the model that the tasks were fine-tuned from. Its tensors are used, not copied: do not train it further.
        tasks: name -> delta, as a file or as ``save_delta`` returned it; None is the base as it is.

    Raises:
        UserError: a delta cannot be read or was made from another base, or there is no task.
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
        for name, given in tasks.items():
            if given is None:
                delta, tensors = Delta("The base", base.vit_config, {}, {}, ""), shared
            else:
                delta = given if isinstance(given, Delta) else read_delta(given)
                of_task = delta.tensors(base)
                tensors = {key: tensor if key in delta.own else shared[key] for key, tensor in of_task.items()}
            self.models[self._keys[name]] = assemble(delta, base, tensors)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.eval()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self._keys)

    def __getitem__(self, task: str) -> ViT:
        """The ViT of a task. Raises UserError for an unknown one, naming the nearest."""
        if task not in self._keys:
            raise UserError(f"There is no task '{task}'. {nearest(task, self._keys)}")
        model = self.models[self._keys[task]]
        assert isinstance(model, ViT)
        return model

    def forward(self, images: Tensor, task: str) -> Tensor:
        """(B, in_chans, height, width) in the task's resolution -> (B, its classes)."""
        out: Tensor = self[task](images)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, what is shared counted once."""
        return _distinct_bytes(self)

    def __str__(self) -> str:
        """A table with a row a task: images, classes, weights, and those of all tasks together."""
        lines = [f"{'task':<20} {'images':>10} {'classes':>8} {'weights':>10}"]
        for task in self.tasks:
            config = self[task].vit_config
            size = "x".join(map(str, config.img_size))
            lines.append(f"{task:<20} {size:>10} {config.num_classes:>8} {_mb(_distinct_bytes(self[task])):>10}")
        return "\n".join([*lines, f"{'together':<20} {'':>10} {'':>8} {_mb(self.nbytes):>10}"])


def _distinct_bytes(model: nn.Module) -> int:
    storages = (tensor.untyped_storage() for tensor in model.state_dict().values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g} MB"
