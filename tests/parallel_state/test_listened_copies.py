"""Deep copies of tensors that are listened to are their own, however many there are."""

import copy

import torch

from core.optimizer.state.shown import ShardSums


def test_each_copy_has_its_own_values():
    sums = ShardSums()
    for _ in range(20):
        parts = {number: (sums.filed(torch.full((3,), float(number))), number) for number in range(30)}
        for number, (part, _) in copy.deepcopy(parts).items():
            assert type(part) is torch.Tensor
            assert part.tolist() == [number] * 3


def test_a_tensor_that_is_there_twice_is_copied_once():
    part = ShardSums().filed(torch.ones(3))
    first, second = copy.deepcopy([part, part])
    assert first is second
    assert first.data_ptr() != part.data_ptr()
