"""Hugging Face's Trainer trains, evaluates, saves and resumes our ViT in a wrapper that computes its loss."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import vitmods as vm

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class WithLoss(torch.nn.Module):
    def __init__(self, vit):
        super().__init__()
        self.vit = vit

    def forward(self, pixel_values, labels=None):
        logits = self.vit(pixel_values)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Images(torch.utils.data.Dataset):
    """Class 1 is bright on the left, class 0 on the right."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        image = 0.1 * torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        image[:, :, : 8 if index % 2 else 0] += 1
        return {"pixel_values": image, "labels": torch.tensor(index % 2)}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make(model, folder, steps, **options):
    arguments = hf.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=5e-3, report_to=[], save_steps=32,
        use_cpu=True, logging_steps=5, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    return hf.Trainer(model, arguments, train_dataset=Images(), eval_dataset=Images(), compute_metrics=accuracy)


def test_it_trains_evaluates_saves_and_resumes(tmp_path):
    torch.manual_seed(0)
    vit = vm.apply(vm.vit("mu/8", img_size=16, depth=2, num_classes=2), *vm.parse_changes("dpn+dtn"))
    trainer = make(WithLoss(vit), tmp_path, 32)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1
    saved = load_file(tmp_path / "checkpoint-32" / "model.safetensors")
    assert all(torch.equal(saved[f"vit.{name}"], value) for name, value in vit.state_dict().items())
    again = make(WithLoss(vm.ViT(vit.vit_config)), tmp_path, 36)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-32"))
    assert again.state.global_step == 36


def test_a_vit_itself_has_no_config_that_trainer_would_write_to(tmp_path):
    """With a loss of its own and batches named as the ViT's arguments Trainer takes it without a wrapper."""
    vit = vm.vit("mu/8", img_size=16, depth=2, num_classes=2)
    trainer = make(vit, tmp_path, 2, remove_unused_columns=False)
    assert not hasattr(vit, "config")
    trainer.compute_loss_func = lambda logits, labels, **_: F.cross_entropy(logits, labels)
    trainer.data_collator = lambda rows: {
        "x": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.stack([row["labels"] for row in rows]),
    }
    assert trainer.train().global_step == 2
