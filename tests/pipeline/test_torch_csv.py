"""Against torch's own reader, and its own generators (private names of torch 2.11 and later)."""

import csv
import io
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action

from core.pipeline.draw.torch_csv import read_csv, write_csv
from core.pipeline.schedule.actions import looped, v_shape
from core.pipeline.schedule.passes import add_recompute
from core.pipeline.schedule.player import check
from core.pipeline.schedule.schedules import NAMED, make
from tests.pipeline.plays import over_ideal, play_whole

# torch's name -> ours, the placement, step over ideal and peak memory at P=4 M=8
TORCH = {
    "GPipe": ("gpipe", looped(4), 1.375, 8),
    "Interleaved1F1B": ("interleaved-1f1b", looped(4, 2), 1.1875, 5.5),
    "LoopedBFS": ("looped-bfs", looped(4, 2), 1.1875, 8),
    "InterleavedZeroBubble": ("interleaved-zb", looped(4, 2), 1.0625, 4),
    "ZBVZeroBubble": ("zb-v", v_shape(4), 1.0625, 4),
    "DualPipeV": ("dualpipe-v", v_shape(4), 1.0625, 4.5),
}


def by_torch(name, ranks, microbatches, **options):
    """The CSV that torch writes of its own schedule."""
    rows = get_schedule_ops(name, ranks, microbatches, None if name == "GPipe" else 2, **options)
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 8)])
def test_torch_reads_what_we_write_and_we_read_it_back(name, ranks, microbatches, tmp_path):
    schedule = make(name, ranks, microbatches)
    text = write_csv(schedule)
    assert read_csv(text, name=name) == schedule
    (tmp_path / "schedule.csv").write_text(text)
    reader = SimpleNamespace(pipeline_order={}, _validate_and_set_stage_mapping=lambda order: None)
    PipelineScheduleMulti._load_csv(reader, str(tmp_path / "schedule.csv"))
    for rank, order in enumerate(schedule.orders):
        assert [
            (a.computation_type.value, a.stage_index, a.microbatch_index) for a in reader.pipeline_order[rank]
        ] == [tuple(action) for action in order]


@pytest.mark.parametrize("name", TORCH)
def test_we_read_what_torch_generates(name):
    ours, placement, over, peak = TORCH[name]
    schedule = read_csv(by_torch(name, 4, 8))
    assert schedule.placement == placement == make(ours, 4, 8).placement
    check(schedule, 8)
    played = play_whole(schedule, fused=True)
    assert (over_ideal(played), played.peak) == (over, peak)
    own = play_whole(make(ours, 4, 8), fused=True)
    assert (over_ideal(own), own.peak) == (over, peak)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_we_read_torch_with_communication(name):
    text = by_torch(name, 4, 8, with_comms=True)
    assert "SEND_F" in text
    assert "UNSHARD" in text
    schedule = read_csv(text)
    check(schedule, 8)
    kinds = {action.kind for order in schedule.orders for action in order}
    assert {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"} <= kinds
    assert over_ideal(play_whole(schedule, fused=True)) == TORCH[name][2]
    # without overlapped pairs, what we write is what torch wrote, but for the waits of torch 2.15
    if "OVERLAP" not in text:
        rows = [[cell for cell in row if "WAIT" not in cell] for row in csv.reader(io.StringIO(text))]
        assert list(csv.reader(io.StringIO(write_csv(schedule)))) == rows
    for cell in (cell for row in csv.reader(io.StringIO(write_csv(schedule))) for cell in row):
        assert str(_Action.from_str(cell)) == cell


def test_empty_cells_and_overlapped_pairs():
    schedule = read_csv("0F0,, (0F1;1B0)OVERLAP_F_B,1F0 ,\n\n", placement=(0, 0, 1))
    assert [list(map(str, order)) for order in schedule.orders] == [["0F0", "0F1", "1B0", "1F0"], []]


def test_torch_has_no_recompute():
    schedule = add_recompute(make("1f1b", 2, 2))
    with pytest.raises(
        ValueError, match="schedule '1f1b' has 2 R, but torch's schedules have 0: write the schedule as"
    ):
        write_csv(schedule)
    assert read_csv("0F0,0R0,0B0\n").recomputed == {(0, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, cell 2: '1X0' is not an action"),
        (
            "0F0,(0F1;0B0)BOTH\n",
            "line 1, cell 2: .*BOTH' is no action of torch's; one in brackets ends with OVERLAP_F_B",
        ),
        ("0F0\n0F1,1F0\n", "line 2: 0F1 on rank 1, but rank 0 has other F of stage 0: a stage lives on 1 rank"),
        ("0F0\n2F0\n", "no rank does F of stage 1 of 3: number the stages without gaps"),
        ("0F0\n,\n", "gives no stage to rank 1 of 2 ranks"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        read_csv(text)


def test_waits_of_newer_torch_are_left_out():
    """As torch 2.15 writes them; what is nearly one is refused."""
    waits = "0F0,0SEND_F0,0WAIT_SEND_F0,0F1\n0RECV_F0,1F0,(1F1;1WAIT_SEND_B0)OVERLAP_F_B,1WAIT_REDUCE_GRAD\n"
    plain = "0F0,0SEND_F0,0F1\n0RECV_F0,1F0,1F1\n"
    assert read_csv(waits) == read_csv(plain)
    for bad in ("WAIT_SEND_F0", "0WAIT_RECV_F0", "0WAIT_SEND_F0x"):
        with pytest.raises(ValueError, match=f"line 1, cell 2: '{bad}' is not an action"):
            read_csv(f"0F0,{bad}\n")
