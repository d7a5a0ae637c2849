"""A module knows how its parameters are spread, whatever takes their place."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations

from core.parallel_state import Init, Layout, layout_of
from core.parallel_state.layout import set_layout
from core.parallel_state.modules import named_buffers, named_parameters
from core.parallel_state.random import chosen_seed
from core.parallel_state.spread import SpreadModule, building_device, keep_layouts

LAYOUT = Layout((6, 4), {"tp": 0})


class Half(SpreadModule):
    """Half of a matrix of 6 rows."""

    def __init__(self, kind=SpreadModule):
        super().__init__()
        self.weight = Parameter(torch.randn(3, 4))
        set_layout(self.weight, LAYOUT)
        self.weight.initial = Init(std=1.0)
        self.weight = self.weight  # as it is registered once it is known


def replace(module):
    module.weight = Parameter(torch.zeros(3, 4))


def load(module):
    module.load_state_dict({"weight": torch.zeros(3, 4)}, assign=True)


def swap(module):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict({"weight": torch.zeros(3, 4)})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


WAYS = {
    "replaced": replace,
    "assigned": load,
    "swapped": swap,
    "meta": lambda m: m.to("meta"),
    "meta and back": lambda m: m.to("meta").to_empty(device="cpu"),
    "half": lambda m: m.half(),
    "copied": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_takes_its_place_has_the_layout(way):
    module = Half()
    module = WAYS[way](module) or module
    assert layout_of(module.weight) == LAYOUT and module.weight.initial == Init(std=1.0)
    assert copy.deepcopy(module).weight.parallel_layout == LAYOUT


@pytest.mark.parametrize("way", WAYS)
def test_a_module_of_ones_own_has_it_where_parameters_are_asked_for(way):
    module = nn.Linear(4, 3, bias=False)
    set_layout(module.weight, LAYOUT)
    keep_layouts(module)
    module = WAYS[way](module) or module
    assert [layout_of(p) for _, p in named_parameters(module)] == [LAYOUT]


def test_another_shape_is_refused_before_it_is_there():
    module = Half()
    before = module.weight
    with pytest.raises(
        ValueError, match=r"is \[3, 4\], this rank's part of \[6, 4\], .* by \[6, 4\]; give every rank"
    ):
        module.weight = Parameter(torch.zeros(6, 4))
    assert module.weight is before


def test_a_split_parameter_computed_from_others_is_refused():
    module = Half()
    parametrizations.weight_norm(module)
    with pytest.raises(ValueError, match=r"weight of \[6, 4\] is split, .* from other parameters .weight_norm"):
        keep_layouts(module)


def test_one_that_is_whole_may_be_computed():
    module = Half()
    set_layout(module.weight, Layout((3, 4)))
    keep_layouts(module)
    parametrizations.weight_norm(module)
    keep_layouts(module)


def test_a_parameter_taken_away_is_forgotten():
    module = Half()
    module.weight = None
    keep_layouts(module)
    del module.weight
    keep_layouts(module)
    module.weight = Parameter(torch.zeros(2, 2))
    assert layout_of(module.weight) == Layout((2, 2))


def test_buffers_of_the_state_only():
    module = nn.BatchNorm1d(3)
    module.register_buffer("aside", torch.zeros(1), persistent=False)
    assert [name for name, _ in named_buffers(module)] == ["running_mean", "running_var", "num_batches_tracked"]


def test_where_parameters_are_made():
    cpu = torch.device("cpu")
    assert building_device(cpu) == cpu
    with torch.device("meta"):
        assert building_device(cpu).type == "meta"


def test_a_seed_that_somebody_chose_counts_and_no_other():
    torch.seed()  # 64 random bits, as in a process that nobody seeds
    assert chosen_seed(7) == 7
    torch.manual_seed(3)
    first = chosen_seed(7)
    assert first != 7 and first == chosen_seed(8)
    torch.manual_seed(4)
    assert chosen_seed(7) != first
