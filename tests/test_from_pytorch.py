"""docs/from_pytorch.md, run: the same losses on every layout it names; layers of one's own."""

import re
from pathlib import Path

import pytest
import torch

from core import dist_checkpointing, parallel_state
from core.data_parallel import DataParallel
from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear, fill_from_full

PAGE = Path(__file__).parents[1] / "docs" / "from_pytorch.md"


def run_page(**arguments):
    """Losses of this rank's rows [batches], as the page's program gives them."""
    program = page()
    parallel_state.destroy_model_parallel()
    try:
        return program["main"](**arguments)
    finally:
        parallel_state.destroy_model_parallel()


def test_the_page_gives_one_process_losses_on_every_layout_and_its_checkpoint_opens_under_any(ranks, tmp_path):
    checkpoint = str(tmp_path / "step")
    (alone,) = ranks(run_page, world=1)
    assert alone[-1] < alone[0] and len(alone) == 8
    for arguments in ({"tp": 2, "save": checkpoint}, {"zero_stage": 1}, {"zero_stage": 3}):
        parts = ranks(run_page, world=2, **arguments)
        losses = parts[0] if arguments.get("tp") == 2 else torch.stack(parts).mean(0)
        torch.testing.assert_close(losses, alone, rtol=1e-9, atol=0)
    (again,) = ranks(run_page, world=1, load=checkpoint)
    both = ranks(run_page, world=2, zero_stage=3, load=checkpoint)
    torch.testing.assert_close(torch.stack(both).mean(0), again, rtol=1e-9, atol=0)
    assert again[0] < alone[0] - 0.05


def page():
    program = {"__name__": "page"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)), program)
    return program


def from_the_plain_module(plain, path):
    """Logits of the page's module, with the plain one's weights: from its checkpoint, and tensor by tensor."""
    parallel_state.destroy_model_parallel()
    program = page()
    ps = parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    tokens = torch.arange(8).view(1, 8)
    try:
        loaded = program["Model"](Placement.of(ps))
        state = {"model": program["sharded_state_dict"](DataParallel(loaded, ps))}
        dist_checkpointing.load(state, path, ps=ps, mapping=program["whole_qkv"])
        filled = program["Model"](Placement.of(ps))
        for name, parameter in filled.named_parameters():
            fill_from_full(parameter, plain[name])
        with pytest.raises(ValueError, match=r"\[5\] has 5 elements, the parameter is \[3, 32\], 96; give all of it"):
            fill_from_full(filled.layers[0].qkv.bias, torch.ones(5))
        return loaded(tokens).detach(), filled(tokens).detach()
    finally:
        parallel_state.destroy_model_parallel()


def plain_weights():
    """Of the module with nn.Linear(h, 3 * h), by name, and its logits."""
    parallel_state.destroy_model_parallel()
    model = page()["Model"](Placement()).double()  # as the ranks compute
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {n: w.flatten(0, 1) if ".qkv." in n else w for n, w in weights.items()}, model(
        torch.arange(8).view(1, 8)
    ).detach()


def test_the_plain_modules_weights_go_into_split_layers(ranks, tmp_path):
    torch.manual_seed(1)
    plain, logits = plain_weights()
    assert plain["layers.0.qkv.weight"].shape == (96, 32)
    ps = parallel_state.ParallelState.single("cpu")
    dist_checkpointing.save({"model": plain}, str(tmp_path / "plain"), ps=ps)
    for found in ranks(from_the_plain_module, plain, str(tmp_path / "plain"), world=2):
        for each in found:
            torch.testing.assert_close(each, logits, rtol=1e-9, atol=1e-12)


def drawn(dtype):
    """Weights and biases of a column and a row layer, as this rank drew them."""
    parallel_state.destroy_model_parallel()
    ps = parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    torch.manual_seed(3)
    place = Placement.of(ps, dtype)
    layers = ColumnParallelLinear(4, (2, 6), split_dim=1, place=place), RowParallelLinear(6, 4, place=place)
    parallel_state.destroy_model_parallel()
    return [parameter.detach() for layer in layers for parameter in layer.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_draw_their_parts_of_one_tensor(ranks, dtype):
    ((column, column_bias, row, row_bias),) = ranks(drawn, dtype, world=1)
    assert column.dtype == dtype and 0.005 < column.float().std() < 0.04
    assert not column_bias.any() and not row_bias.any()
    parts = ranks(drawn, dtype, world=2)
    assert torch.equal(torch.cat([part[0] for part in parts], 1), column)
    assert torch.equal(torch.cat([part[2] for part in parts], 1), row)


def without_a_place():
    parallel_state.destroy_model_parallel()
    ps = parallel_state.initialize_model_parallel(2)
    try:
        DataParallel(torch.nn.Sequential(ColumnParallelLinear(4, 6), RowParallelLinear(6, 4)), ps)
    finally:
        parallel_state.destroy_model_parallel()


def test_a_layer_that_is_whole_on_every_tensor_rank_is_refused(ranks):
    message = r"0\.weight \(and 2 more\) is \[6, 4\], and a rank of this layout \(tp=2\) holds \[3, 4\] of it; build"
    with pytest.raises(AssertionError, match=message):
        ranks(without_a_place, world=2)
