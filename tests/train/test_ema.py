import torch
from torch import nn

from vitmods.train.optim import Ema


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def set(self, value):
        self.weight.data.fill_(value)
        self.mean.fill_(10 * value)
        self.count.fill_(int(value))


def averaged(values, decay):
    """The definition, summed out."""
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def test_equals_the_normalized_sum_after_every_update():
    model, values = Model(), [3.0, -1.0, 4.0, 1.0, 5.0, 9.0]
    ema = Ema(model, decay=0.9)
    for count in range(1, len(values) + 1):
        model.set(values[count - 1])
        ema.update()
        expected = averaged(values[:count], 0.9)
        torch.testing.assert_close(ema.model.weight.data, torch.full((3,), expected, dtype=torch.float64))
        torch.testing.assert_close(ema.model.mean, torch.full((2,), 10 * expected, dtype=torch.float64))
        assert ema.model.count == int(values[count - 1])


def test_initial_weights_do_not_count():
    model = Model()
    model.set(1e6)
    ema = Ema(model, decay=0.999)
    model.set(2.0)
    ema.update()
    assert ema.model.weight.tolist() == [2.0] * 3


def test_state_comes_back():
    model = Model()
    ema = Ema(model, decay=0.5)
    model.set(3.0)
    ema.update()
    other = Ema(model, decay=0.5)
    other.load_state_dict(ema.state_dict())
    model.set(5.0)
    ema.update()
    other.update()
    assert torch.equal(ema.model.weight, other.model.weight)


def test_what_is_frozen_is_the_models_own_and_takes_no_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    ema = Ema(model, decay=0.5)
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    assert not ema.model.training
    assert ema.model[0].weight is model[0].weight
    assert ema.model[1].weight is not model[1].weight
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    ema.update()
    assert ema.model[1].weight.unique().tolist() == [3.0]
    assert model[1].weight.requires_grad
