"""A model object of another library, known by the module that its class comes from; no library is imported to ask."""

from torch import nn

from vitmods.adapters.tensors import Coverage
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def read_model(model: nn.Module) -> tuple[ViT, Coverage]:
    """The model as a vitmods ViT, exactly, with the account of its tensors.

    Raises UserError for classes and parts that are not covered.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if "timm" in libraries:
        from vitmods.adapters.timm import read as read_timm

        return read_timm(model)
    if "transformers" in libraries:
        from vitmods.adapters.huggingface import read as read_huggingface

        return read_huggingface(model)
    if "torchvision" in libraries:
        from vitmods.adapters.torchvision import read as read_torchvision

        return read_torchvision(model)
    name = type(model).__name__
    if name in WRAPPERS:
        raise UserError(f"A {name} wraps the model: give the model inside, model.{WRAPPERS[name]}.")
    raise UserError(
        f"A {name} cannot be changed: give a vitmods ViT (vm.vit), timm's or torchvision's VisionTransformer, or "
        "Hugging Face's ViTModel or ViTForImageClassification."
    )
