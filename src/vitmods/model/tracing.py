"""Support for torch.fx, and TorchScript through it: unused arguments, and modules that become one node."""

from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Proxy, Tracer

from vitmods.layers.drop import DropKey, DropPath
from vitmods.layers.position import RelativePositionBias, RotaryPositions
from vitmods.layers.positional_attention import GatedPositions
from vitmods.layers.stems import LinearStem, Stem
from vitmods.util.errors import UserError

_WHOLE = (DropKey, DropPath, GatedPositions, RelativePositionBias, RotaryPositions)


def given(*arguments: Any) -> tuple[Any, ...]:
    """The arguments; None for one that torch.fx traces the model without, as it does where None or False is the
    default: the graph then takes no such argument, so that none is ignored."""
    values = []
    for argument in arguments:
        node = argument.node if isinstance(argument, Proxy) else None
        is_default = node is not None and node.op == "placeholder" and node.args in ((None,), (False,))
        if is_default and node is not None:
            node.graph.erase_node(node)
        values.append(None if is_default else argument)
    return tuple(values)


def keep_whole(images: Tensor) -> None:
    """While torch.fx traces: one node for each module whose forward depends on the tensors that it is given, which are
    norms (except LayerNorm), stems of several layers, stochastic depth, and the slots of attention."""
    if not isinstance(images, Proxy):
        return
    tracer = images.tracer
    if isinstance(tracer, Tracer) and "is_leaf_module" not in vars(tracer):
        is_leaf = tracer.is_leaf_module
        tracer.is_leaf_module = lambda m, name: _is_whole(m) or is_leaf(m, name)


def _is_whole(module: nn.Module) -> bool:
    if isinstance(module, nn.LayerNorm):
        return module.weight is None
    if isinstance(module, Stem):
        return type(module) is not LinearStem
    return isinstance(module, _WHOLE) or hasattr(module, "token_wise")


def scriptable(model: nn.Module) -> GraphModule:
    """The graph of a model in the mode that it has now, for ``torch.jit.script``. Raises UserError naming the modules
    that TorchScript cannot compile."""
    graph = GraphModule(model, Tracer().trace(model), type(model).__name__)
    modules = sorted({type(module).__name__ for module in graph.modules() if module is not graph and _is_whole(module)})
    if modules:
        raise UserError(
            f"TorchScript cannot compile {', '.join(modules)}. Export the model instead: vitmods.export, torch.export."
        )
    return graph
