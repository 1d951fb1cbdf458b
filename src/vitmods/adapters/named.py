"""A model from words, as the shell gives them: any, or a checkpoint with trained weights."""

from pathlib import Path
from typing import Any

from torch import nn

from vitmods.model.vit import ViT, vit
from vitmods.util.errors import UserError

LIBRARIES = ("timm", "hf", "torchvision")


def open_model(source: str, img_size: int | tuple[int, int] | None = None, **fields: Any) -> nn.Module:
    """A model from a path or a name.

    Args:
        source: a file or folder that ``vitmods.adapters.load`` reads, a trial's too; a size name with changes or none
            ("S/16", "S18x2/16", "S/16+dpn+rms"); or a library's own module: "timm:NAME", "torchvision:NAME",
            "hf:FOLDER" (the folder's config.json). All but files have new weights.
        img_size: of the images, in pixels; None: the model's own.
        fields: further fields of ViTConfig, for size names.

    Raises UserError when there is no such file or name, or the library is not installed.
    """
    library, mark, name = source.partition(":")
    if mark and library in LIBRARIES:
        return {"timm": _timm, "hf": _huggingface, "torchvision": _torchvision}[library](name, img_size)
    if Path(source).exists():
        return _file(Path(source), img_size)
    size, _, changes = source.partition("+")
    if Path(source).suffix in (".safetensors", ".pth", ".npz") or source.startswith((".", "/", "~")):
        raise UserError(f"There is no {source}.")
    model = vit(size, **fields, **({} if img_size is None else {"img_size": img_size}))
    if not changes:
        return model
    from vitmods.adapters.apply import apply
    from vitmods.changes import parse_changes

    return apply(model, *parse_changes(changes))


def open_checkpoint(source: str) -> ViT:
    """Trained weights, as they were trained, in evaluation mode: what fine-tuning, a study or an export begins with.

    Args:
        source: a trial's folder (`vitmods train`, or one of a study), a file or folder that `vitmods.adapters.load`
            reads, or the name of a timm model with published weights, with or without `timm:` before it.

    Raises:
        UserError: there is no such checkpoint, it cannot be read, or its weights cannot be had.
    """
    if Path(source).exists():
        from vitmods.adapters.files import load

        return load(source)
    import timm

    name = source.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(
            f"There is no checkpoint '{source}': give a trial's folder, a file of weights, or a timm model's name as "
            "vit_small_patch16_224.augreg_in1k."
        )
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the network, the hub or the file may raise
        raise UserError(
            f"timm gives no weights of {name}: {str(error).rstrip('.')}. Without a network, give a file of weights."
        ) from error
    from vitmods.adapters.timm import from_timm

    return from_timm(model).eval()


def _file(path: Path, img_size: int | tuple[int, int] | None) -> nn.Module:
    from vitmods.adapters.files import load

    model = load(path)
    if img_size is not None:
        model.set_input_size(img_size)
    return model


def _timm(name: str, img_size: int | tuple[int, int] | None) -> nn.Module:
    import timm

    from vitmods.adapters.timm import check_timm

    check_timm(f"timm:{name}", name, {})
    sized: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    model: nn.Module = timm.create_model(name, **sized)
    return model


def _torchvision(name: str, img_size: int | tuple[int, int] | None) -> nn.Module:
    from torchvision.models import get_model

    from vitmods.adapters.torchvision import check_torchvision

    check_torchvision(name)
    side = img_size[0] if isinstance(img_size, tuple) else img_size  # its images are square
    model: nn.Module = get_model(name, **({} if side is None else {"image_size": side}))
    return model


def _huggingface(name: str, img_size: int | tuple[int, int] | None) -> nn.Module:
    from vitmods.adapters.huggingface import build_classifier, read_huggingface_config

    config = read_huggingface_config(f"hf:{name}", Path(name))
    if img_size is not None:
        config.image_size = img_size
    return build_classifier(f"hf:{name}", Path(name), config)
