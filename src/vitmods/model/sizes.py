"""Images of other sizes: for good, and from call to call."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor, nn
from torch.fx import Proxy

from vitmods.layers.position import resample
from vitmods.model.build import initial_positions
from vitmods.util.errors import UserError, nearest

if TYPE_CHECKING:
    from vitmods.model.vit import ViT

Resampling = Literal["bicubic", "bilinear"]
Grid = tuple[int, int]


def resize(
    model: "ViT",
    img_size: int | tuple[int, int] | None,
    patch_size: int | tuple[int, int] | None,
    positions: Resampling,
    dynamic: bool | None,
) -> None:
    """``ViT.set_input_size``"""
    if positions not in get_args(Resampling):
        known = get_args(Resampling)
        raise UserError(f"Positions cannot be resampled by '{positions}'. {nearest(str(positions), known)}")
    old = model.vit_config
    new = old.with_(
        img_size=img_size or old.img_size,
        patch_size=patch_size or old.patch_size,
        dynamic_img_size=old.dynamic_img_size if dynamic is None else dynamic,
    )
    model.patch_embed.set_input_size(new.img_size, new.patch_size)
    model.patch_embed.strict_img_size = not new.dynamic_img_size
    model.vit_config, model._grid = new, None
    set_grid(model, new.grid)
    if model.pos_embed is None or new.grid == old.grid:
        return
    if old.position != "learn":
        fixed = initial_positions(new)
        assert fixed is not None
        model._set_positions(fixed.to(model.pos_embed))
        return
    prefix = old.num_prefix_tokens if old.position_on_prefix else 0
    trained = model.pos_embed.requires_grad
    model._set_positions(resample(model.pos_embed.detach(), old.grid, new.grid, prefix, positions == "bilinear"))
    model.pos_embed.requires_grad_(trained)


def grid_of_images(model: "ViT", images: Tensor) -> Grid | None:
    """The (rows, columns) of patches that norms and positions in attention have to know; None where none reads them."""
    reads = next(reads_grid(model), None)
    if reads is None:
        return None
    if isinstance(images, Proxy):
        raise UserError(
            f"{type(reads).__name__} reads the grid, which torch.fx does not know where images may have any size: call "
            "set_input_size(dynamic_img_size=False) first."
        )
    return model.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))


def reads_grid(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that have to know how many rows and columns the tokens form."""
    return (module for module in model.modules() if "grid_size" in getattr(module, "takes", ()))


def set_grid(model: nn.Module, grid: Grid) -> None:
    for module in reads_grid(model):
        module.grid_size = grid  # type: ignore[assignment]
