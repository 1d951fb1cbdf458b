import pytest
import torch
from torch import nn

import vitmods as vm
from vitmods.recipes import Recipe
from vitmods.train.optim import check_every_parameter_is_trained, make_optimizer, parameter_groups, without_gradient


def names_of(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_only_matrices_decay_and_neither_position_nor_tokens():
    model = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10, reg_tokens=2, layer_scale=1e-4)
    decay, no_decay = (names_of(model, group) for group in parameter_groups(model, 0.1))
    assert decay | no_decay == {name for name, _ in model.named_parameters()}
    assert {"pos_embed", "cls_token", "reg_token"} <= no_decay
    assert decay == {
        name
        for name, parameter in model.named_parameters()
        if name.endswith("weight") and parameter.ndim >= 2 and "norm" not in name
    }


def test_frozen_parameters_are_left_out():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1, 0]
    check_every_parameter_is_trained(model, make_optimizer(model, Recipe()))


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_optimizer(nn.Linear(3, 2).requires_grad_(False), Recipe())


def test_a_parameter_outside_every_group_is_an_error():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = make_optimizer(model, Recipe())
    model[1] = nn.Linear(2, 5)
    with pytest.raises(ValueError, match=r"does not hold 1\.weight, 1\.bias"):
        check_every_parameter_is_trained(model, optimizer)


def test_a_parameter_in_two_groups_is_an_error():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, Recipe())
    optimizer.param_groups[1]["params"].append(model.weight)
    with pytest.raises(ValueError, match="two of the optimiser's groups"):
        check_every_parameter_is_trained(model, optimizer)


def test_parameters_without_gradient_are_named():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["used"](torch.ones(1, 2)).sum().backward()
    assert without_gradient(model) == ["unused.weight", "unused.bias"]


def test_sgd_with_momentum():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, Recipe(optimizer="sgd", momentum=0.8, lr=0.1, weight_decay=0.2))
    assert type(optimizer) is torch.optim.SGD
    assert [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.8, 0.2), (0.8, 0.0)]
    weight = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, weight - 0.1 * (1 + 0.2 * weight))
