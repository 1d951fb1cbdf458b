"""Another normalizer in any transformer that is an ``nn.Module``: Swin, PVT, LeViT, BERT, Llama, T5, ..."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from vitmods.adapters.anatomy import NormSite
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.norm_choice import Heads, NormRow, Where, choose_norms, table
from vitmods.adapters.running import copy_model, reads_last, run
from vitmods.adapters.surgery import swap_norms
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.norm import Norm
from vitmods.util.errors import UserError
from vitmods.util.text import Printed


class Replaced(NamedTuple):
    """The new model, and a row for every norm that was found. Prints as a table."""

    model: nn.Module
    rows: tuple[NormRow, ...]

    def _repr_html_(self) -> str:
        return Printed._repr_html_(self)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return table(self.rows)


def replace_norms(
    model: nn.Module,
    change: Norm | DynamicTokenNorm,
    where: Where | None = None,
    heads: Heads | None = None,
    example: Any = None,
) -> Replaced:
    """A copy of any transformer with other norms, and a table of what was replaced; the old model is untouched.

    ``change`` says what the norms become: ``Norm(kind)``, or ``DynamicTokenNorm`` with its ``norms`` and ``blocks``.
    Gains and biases are carried, frozen norms stay frozen, device and type are the old norm's.

    ``where`` chooses the norms: a pattern (fnmatch) of module names or a role (``NormSite`` lists them), a compiled
    regular expression searched in the names, or a function of a ``NormSite``. Without it, ``Norm`` takes the norms of
    all blocks, and if it works on each token by itself those after the blocks too. ``DynamicTokenNorm`` takes what its
    paper says: all blocks; of a model with stages not those of the class token's stage; of a ViT with one stage the
    first ten twelfths. Norms of embeddings, between stages and inside attention stay.

    ``heads``, a number or a function of a ``NormSite``, is for norms by heads instead of those of the attention beside.

    Rows and columns of images are read at each forward; text is a sequence. Norms that read other tokens leave out
    those that the ``attention_mask`` (B, T) of the call marks as padding; without a mask all count.

    At the end copies of both models run on a small input, in evaluation mode: images of the model's size, some words,
    some tokens. ``example`` is what the model is called with instead, a tensor, a tuple of arguments or a mapping of
    keywords; a model that takes none of these is not tried without it.

    Raises NoEffect when nothing matches or everything is that kind already, and UserError for models without
    LayerNorm or RMSNorm, heads that do not divide the channels, a norm that is used at two places, a new model that
    does not run, and norms that mix tokens where they must not: in causal attention, chunks of a sequence, with
    tokens on the first axis, and, unless ``where`` is given, in decoders and where no block with attention was
    recognized.
    """
    replaced, may_leak = put_norms(model, change, where, heads)
    _try_out(
        copy_model(model), copy_model(replaced.model), [row.site for row in replaced.rows if row.now], example, may_leak
    )
    return replaced


def put_norms(
    model: nn.Module, change: Norm | DynamicTokenNorm, where: Where | None = None, heads: Heads | None = None
) -> tuple[Replaced, bool]:
    """The same without running a model, and whether tokens may now see later ones."""
    anatomy, rows = choose_norms(model, change, where, heads)
    # The exact conversion to RMSNorm is that of vm.apply.
    change = Norm("rms", exact=False) if change == Norm("rms") else change
    new = copy_model(model)
    mixes = swap_norms(new, anatomy, change, [row.site for row in rows if row.now])
    return Replaced(new, rows), where is None and mixes


def _try_out(old: nn.Module, new: nn.Module, norms: Sequence[NormSite], example: Any, may_leak: bool) -> None:
    """Runs copies of both models, which may change as they run, in evaluation mode and without gradients.

    ``example`` is what the model is called with: a tensor, a tuple of arguments or a mapping of keywords; None for one
    that is made. Where none can be made that the old model takes, nothing is tried. ``may_leak`` looks for causality
    as well: outputs of earlier tokens that did not read the last one, and now do.

    Raises UserError naming the norm at which the new model failed, or saying that it leaks.
    """
    inputs = find_inputs(old, example, norms[0].dim)
    if inputs is None:
        return
    entered = [""]
    for name in (site.name for site in norms):
        new.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: entered.__setitem__(0, name))
    try:
        run(new, inputs)
    except UserError:
        raise
    except Exception as error:  # whatever a norm or the model around it raises for tokens that do not fit
        where = f", at {entered[0]}" if entered[0] else ""
        raise UserError(
            f"The model does not run with these norms{where}: {str(error).rstrip('.')}. Leave that norm out with "
            "where=..., or use a kind that treats each token by itself."
        ) from error
    if may_leak and reads_last(old, inputs) is False and reads_last(new, inputs):
        raise UserError(
            "This model is causal, and with these norms earlier tokens see later ones: use a kind that treats each "
            "token by itself, or choose norms of a part that is not causal with where=..."
        )
