import json
import re
from xml.etree import ElementTree

import pytest

from core.pipeline.draw.draw import draw_svg, draw_text, draw_trace
from core.pipeline.schedule.actions import Action
from core.pipeline.schedule.passes import add_recompute
from core.pipeline.schedule.player import play
from core.pipeline.schedule.schedules import make
from core.pipeline.schedule.timeline import Event, Timeline
from tests.pipeline.plays import play_whole

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name, ranks, microbatches, chunks=None, **costs):
    return play_whole(make(name, ranks, microbatches, chunks), **costs).timeline


def test_text_has_a_row_per_rank_and_small_letters_for_the_second_stage():
    assert draw_text(timeline("zb-v", 2, 3)) == (
        "rank 0 | F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ...\n"
        "rank 1 | ...F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2\n"
        "\n"
        "F forward, I input gradients, W weight gradients, small letters: a rank's second stage, `.` idle\n"
    )


def test_text_is_as_wide_as_things_take_long():
    drawn = draw_text(timeline("1f1b", 2, 2))
    assert drawn.startswith("rank 0 | F0 F1 ...B0    ...B1\nrank 1 | ...F0 B0    F1 B1    ...\n")
    longer = draw_text(timeline("1f1b", 2, 2, F=4))
    assert longer.startswith("rank 0 | F0    F1    ..B0 ......B1\nrank 1 | ......F0    B0 F1    B1 ..\n")


def test_text_names_later_chunks():
    drawn = draw_text(timeline("interleaved-1f1b", 1, 1, 4))
    assert re.match(r"rank 0 \| F0  f0  F0' f0' b0' +B0' +b0 +B0\n", drawn)
    assert "small letters: a rank's second stage, F' third, f' fourth ..." in drawn


def test_recompute_is_drawn():
    drawn = draw_text(play(add_recompute(make("1f1b", 2, 2))).timeline)
    assert "R0 ...B0" not in drawn
    assert drawn.startswith("rank 0 | F0 F1 R0 B0    R1 B1\n")
    assert "R recompute" in drawn


@pytest.mark.parametrize("width", [20, 60, 80, 118, 1000])
def test_text_fits_the_terminal_and_loses_nothing(width):
    whole = timeline("v-half", 4, 12)
    lines = draw_text(whole, width).splitlines()[:-2]
    assert all(len(line) <= width for line in lines)
    for rank, row in enumerate(whole.rows):
        drawn = " ".join(line.partition("|")[2] for line in lines if line.startswith(f"rank {rank} |"))
        assert len(re.findall(r"[FIWfiw]\d+", drawn)) == len(row)


def test_one_long_or_short_action_does_not_spoil_the_drawing():
    def row(length_of):
        starts = [0.0]
        for k in range(20):
            starts.append(starts[-1] + length_of(k))
        return tuple(Event(Action("F", 0, k), starts[k], starts[k + 1]) for k in range(20))

    for length_of in (lambda k: 1e-6 if k % 3 else 1.0, lambda k: 1e-6 if k == 5 else 1.0, lambda k: 0.0):
        assert len(draw_text(Timeline((row(length_of),)))) < 600


def test_ranks_line_up_and_nothing_is_drawn_of_nothing():
    lines = draw_text(timeline("gpipe", 11, 2), 1000).splitlines()
    assert lines[0].startswith(" rank 0 | ")
    assert lines[10].startswith("rank 10 | ")
    assert draw_text(Timeline(((), ()))) == "nothing ran\n"
    assert draw_svg(Timeline(((), ()))).count("idle") == 1


def test_svg_has_a_box_per_action_and_says_the_bubble():
    whole = timeline("zb-v", 4, 8)
    picture = draw_svg(whole, "zb-v < 4 & 8", unit="s")
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == 4 * 8 * 6
    assert len({box.get("fill") for box in boxes}) == 6  # F, I, W, two chunks each
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "zb-v < 4 & 8" in texts
    assert "step 25.5 s, bubble 5.9 %" in texts
    assert texts.count("7") == 4 * 6
    assert {"rank 3", "F forward", "I input gradients", "W weight gradients", "idle"} <= set(texts)


@pytest.mark.parametrize("scale", [1e-6, 0.37, 1, 12345])
def test_svg_stays_in_its_frame(scale):
    events = (Event(Action("B", 0, 0), 0.0, 3 * scale), Event(Action("UNSHARD", 0), 3 * scale, 4 * scale))
    root = ElementTree.fromstring(draw_svg(Timeline((events,))))
    wide, high = (float(number) for number in root.get("viewBox").split()[2:])
    for box in root.iter(f"{SVG}rect"):
        if box.get("x"):
            assert float(box.get("x")) + float(box.get("width")) <= wide
            assert float(box.get("y")) + float(box.get("height")) <= high
    assert 5 <= sum(path.get("d").endswith("v4") for path in root.iter(f"{SVG}path")) <= 13


def test_trace_has_a_thread_per_rank_in_microseconds():
    whole = timeline("1f1b", 2, 2)
    events = json.loads(draw_trace(whole))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    first = next(event for event in events if event["ph"] == "X" and event["tid"] == 1 and event["name"] == "B1")
    assert (first["ts"], first["dur"], first["args"]) == (5e6, 2e6, {"stage": 1, "microbatch": 1})
    assert sum(event["ph"] == "X" for event in events) == 8
    assert json.loads(draw_trace(whole, microseconds=1))["traceEvents"][-1]["dur"] == 2
