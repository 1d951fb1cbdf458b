"""Weights of models with parallel branches under the names of the sequential model with the same branches.

Block i of k branches holds what are blocks k i to k i + k - 1 of that model. Its names are those of timm's
ParallelThingsBlock: ``blocks.3.attns.1.attn.qkv.weight`` for k = 2 is ``blocks.7.attn.qkv.weight`` there.
"""

import re

_INSIDE = {
    "norm1": "attns.{}.norm",
    "attn": "attns.{}.attn",
    "norm1_branch": "attns.{}.norm_branch",
    "ls1": "attns.{}.ls",
    "norm2": "ffns.{}.norm",
    "mlp": "ffns.{}.mlp",
    "norm2_branch": "ffns.{}.norm_branch",
    "ls2": "ffns.{}.ls",
}
_SEQUENTIAL = {tuple(name.split(".{}.")): sequential for sequential, name in _INSIDE.items()}


def sequential_name(name: str, parallel: int) -> str:
    """From the name of a weight in a model of ``parallel`` branches; names outside of the blocks stay."""
    match = re.fullmatch(r"blocks\.(\d+)\.(attns|ffns)\.(\d+)\.(\w+)\.(.+)", name)
    if not match:
        return name
    block, kind, branch, module, weight = match.groups()
    return f"blocks.{int(block) * parallel + int(branch)}.{_SEQUENTIAL[kind, module]}.{weight}"


def parallel_name(name: str, parallel: int) -> str:
    """The inverse of ``sequential_name``; with one branch, and of modules that branches do not have, names stay."""
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(.+)", name)
    if not match or parallel == 1:
        return name
    block, module, weight = match.groups()
    if module not in _INSIDE:
        return name
    index, branch = divmod(int(block), parallel)
    return f"blocks.{index}.{_INSIDE[module].format(branch)}.{weight}"
