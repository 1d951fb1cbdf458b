"""Steps of a model on batches of noise, made as trials make them: what dry runs time, and what costs are ratios of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from vitmods.bench import Work, now, peak_bytes, seconds_per_call
from vitmods.data.batch import Batch
from vitmods.recipes import Recipe
from vitmods.study.bases import Base
from vitmods.tasks.base import Task
from vitmods.train.optim import Ema, clip_gradients, make_optimizer


class Steps:
    """A model on its device, with its optimizer and moving average.

    Args:
        model: as it is trained, frozen where the recipe says so; it is trained a few steps and not kept as it was.
        task: what is trained; a copy is used, since what it keeps from step to step belongs to one model.
        recipe: gives the optimizer, clipping, moving average and precision.
        device: where the steps are made.
        images: what the model is built for: size, channels and classes.
    """

    def __init__(self, model: nn.Module, task: Task, recipe: Recipe, device: torch.device, images: Base):
        self._beside = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
        self.model = model if there else model.to(device)  # tensors without numbers are moved once at most
        self.recipe, self.device, self._images = recipe, device, images
        self.task = copy.copy(task)
        self.task.begin(model)
        self.optimizer = make_optimizer(model, recipe)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ema = None if recipe.ema is None else Ema(model, recipe.ema)

    def train(self, count: int) -> Work:
        """A training step on a batch of `count` images that is on the device at once."""
        batch = self._batch(count)

        def step() -> None:
            self._part(batch, 1)
            self._update()

        return step

    def infer(self, count: int) -> Work:
        """The outputs of `count` images."""
        images = self._batch(count).inputs

        def infer() -> None:
            self.model.eval()
            with torch.inference_mode(), self._autocast():
                self.model(images)

        return infer

    def timed(self, count: int, parts: int = 1, most_s: float = 0.0) -> tuple[int, float, float]:
        """Time a step on a batch of `parts` parts of `count` images each, by the wall clock.

        After `most_s` seconds no further part begins; one is always computed.

        Returns:
            How many parts were computed, seconds of each, and seconds of the update.
        """
        batch, computed, begin = self._batch(count), 0, now(self.device)
        while computed < parts and (computed == 0 or now(self.device) - begin < most_s):
            self._part(batch, parts)
            computed += 1
        trained = now(self.device)
        self._update()
        return computed, (trained - begin) / computed, now(self.device) - trained

    def fitting(self, make: Callable[[int], Work], largest: int, most_s: float, least: int = 1) -> int:
        """The largest batch, halved from `largest`, for which a call of `make(batch)` takes no longer than about
        `most_s` seconds. A first call that takes many times that is not repeated."""
        least = min(least, largest)
        few, begin = make(least), now(self.device)
        few()
        if now(self.device) - begin > 4 * most_s:
            return least
        alone, batch = seconds_per_call(few, 2, self.device) / least, largest
        while batch > least and alone * batch > most_s:
            batch = max(least, batch // 2)
        return batch

    def peak(self, count: int, parts: int = 1) -> int:
        """Bytes at the peak of a training step; models that are on the device beside this one are left out."""
        self.timed(count)  # the optimizer's state is made
        found = peak_bytes(lambda: self.timed(count, parts, float("inf")), self.alive(), self.device)
        return found - self._beside

    def infer_peak(self, count: int) -> int:
        """Bytes at the peak of `count` images' outputs: the weights and what stands beside them, without the images,
        and without what training keeps."""
        own = [*self.model.parameters(), *self.model.buffers()]
        infer, weights = self.infer(count), sum(tensor.nbytes for tensor in own)
        beside = torch.cuda.memory_allocated(self.device) - weights if self.device.type == "cuda" else 0
        return peak_bytes(infer, own, self.device) - beside

    def _part(self, batch: Batch, parts: int) -> None:
        self.model.train()
        with self._autocast():
            loss, _ = self.task.loss(self.model, batch)
        (loss / parts).backward()

    def _update(self) -> None:
        if self.recipe.optimizer.clip_norm is not None:
            clip_gradients(self._parameters, self.recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.task.after_step(self.model, 1, 1)

    def _batch(self, count: int) -> Batch:
        shape = (self._images.in_chans, *self._images.img_size)
        return self.task.synthetic(count, shape, self._images.num_classes, self.recipe).to(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16-mixed")

    def alive(self) -> Iterator[Tensor]:
        """What stays between steps, but for gradients."""
        for model in (self.model, *((self.ema.model,) if self.ema else ())):
            yield from (*model.parameters(), *model.buffers())
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
