"""What ranks hold and read: against the model's own layouts, and against a count of what each rank touches."""

from itertools import product

import pytest

from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.format.grid import cell_of, inner_shape, read_bytes
from core.dist_checkpointing.planning.cuts import check_layout, cuts, read_amplification
from core.parallel_state import Layout
from core.tensor_parallel.embedding import padded_vocab_rows
from tests.dist_checkpointing.meshes import GPT_70B, GPT_124M, SMALL, small_cells


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("rows", [20, 1003, 50257])
def test_a_vocabulary_is_cut_as_the_model_pads_it(tp, rows):
    layout = Layout((rows, 4), {"tp": 0}, padding={0: padded_vocab_rows(rows, tp) - rows})
    boxes = [layout.box({"tp": rank}, {"tp": tp})[0] for rank in range(tp)]
    found = cuts(ArrayInfo((rows, 4), "float32", 0, ragged=True), tp, 1)
    assert found == [[(box.start, box.stop) for box in boxes], [(0, 4)]]


def test_stacks_are_cut_in_stages_and_single_arrays_are_not():
    assert cuts(ArrayInfo((7, 6, 2), "float32", 1, stacked=True), 3, 2) == [
        [(0, 3), (3, 7)],
        [(0, 2), (2, 4), (4, 6)],
        [(0, 2)],
    ]
    assert cuts(ArrayInfo((6,), "float32"), 3, 2) == [[(0, 6)]]


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_amplification_is_what_the_ranks_touch(tp, pp):
    with small_cells():
        infos = list(SMALL.arrays().values())
        needed = read = 0
        for info in infos:
            dims = cuts(info, tp, pp)
            ranks = [[box] for box in product(*dims) if all(a < b for a, b in box)] * (
                tp if info.tp_dim is None else 1
            )
            for box in ranks:
                mine = read_bytes(info, box)
                needed, read = needed + mine[0], read + mine[1]
        units = [(info, inner_shape(cell_of(info)) or cell_of(info)) for info in infos]
        assert read_amplification(units, tp, pp) == pytest.approx(read / needed, rel=1e-12)


def test_amplification_of_known_models():
    def of(model, tp):
        return read_amplification(
            [(i, inner_shape(cell_of(i)) or cell_of(i)) for i in model.arrays().values()], tp, pp=1
        )

    assert of(GPT_124M, 2) < 1.01 and of(GPT_124M, 4) < 1.01 and of(GPT_70B, 8) < 1.001
    assert of(GPT_124M, 3) > 1.1


def test_what_cannot_be_cut_is_named_with_what_can():
    arrays = {
        "qkv": ArrayInfo((2, 8, 3), "float32", 1, stacked=True),
        "fc1": ArrayInfo((2, 36, 3), "float32", 1, stacked=True),
        "table": ArrayInfo((1003, 3), "float32", 0, ragged=True),
        "norm": ArrayInfo((2, 3), "float32", None, stacked=True),
    }
    for tp in (1, 2, 4):
        check_layout(arrays, tp, 2)
    with pytest.raises(ValueError, match=r"tp=3 does not divide qkv \(8\); all arrays can be cut in 1, 2, 4$"):
        check_layout(arrays, 3, 1)
    with pytest.raises(ValueError, match=r"pp=3 stages are more than there are layers in fc1 \(2\), .* at most 2"):
        check_layout(arrays, 1, 3)
    with pytest.raises(ValueError, match="at least 1"):
        check_layout(arrays, 0, 1)
    check_layout({"table": arrays["table"]}, 5, 1)
