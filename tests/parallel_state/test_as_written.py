"""Those who hold compiled code as it was written may end in any order."""

import itertools

import pytest
import torch
from torch._dynamo import eval_frame

from core.parallel_state.by_hand.as_written import AsWritten


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_that_ends_gives_the_stance_back(order):
    holders = [AsWritten() for _ in order]
    for holder in holders:
        holder.hold()
        assert eval_frame._stance.stance == "force_eager"
    for number in order:
        assert eval_frame._stance.stance == "force_eager"
        holders[number].end()
        holders[number].end()  # again: nothing
    assert eval_frame._stance.stance == "default"


def test_a_programs_own_stance_stays():
    with torch.compiler.set_stance("eager_on_recompile"):
        holder = AsWritten()
        holder.hold()
        assert eval_frame._stance.stance == "eager_on_recompile"
        holder.end()
        assert eval_frame._stance.stance == "eager_on_recompile"
    assert eval_frame._stance.stance == "default"
