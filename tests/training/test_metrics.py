"""Numbers that people read: FLOPs, the line, JSONL, the picture, the terminal."""

import json
import math
import struct

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from core.models.gpt import GPTModel
from core.parallel_state import ParallelState
from core.pipeline import Action, Timeline
from core.pipeline.timeline import Event
from core.training.config import ModelConfig
from core.training.console import Console
from core.training.metrics import MetricsLog, StepRecord, flops_per_token
from core.training.summary import write_report

SHAPES = [
    ModelConfig(style="gpt2", num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=96),
    ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=6, num_query_groups=2, ffn_hidden_size=80),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.style)
def test_flops_are_torchs_own_with_half_of_the_attention(shape):
    """torch counts the whole square of the attention, as bmm where the plain kernel is asked for; causal attention
    needs half of it, and that half is what we state."""
    s, b, vocab = 24, 2, 128  # a vocabulary without padded rows
    config = shape.transformer()
    model = GPTModel(config, shape.spec(), vocab, s, parallel=ParallelState.single("cpu"))
    tokens = torch.randint(vocab, (b, s))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens).sum().backward()
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert attention == 3 * config.num_layers * 4 * s * s * b * config.hidden_size
    assert flops_per_token(config, vocab, s) * s * b == counter.get_total_flops() - attention // 2


def record(step, loss=2.5):
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=0.75,
        learning_rate=1e-3,
        tokens_per_s=12345.6,
        tflops_per_s=0.0123,
        step_ms=98.76,
        tokens=2048,
    )


def test_the_line_of_a_step_can_be_grepped():
    assert record(20).line(300) == (
        "step    20/300 | loss 2.5000 | grad norm 0.7500 | lr 1.00e-03 | 12,346 tokens/s | 0.0123 TFLOP/s | "
        "98.8 ms/step"
    )


def test_records_are_on_disk_at_once_and_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for _ in range(2):
        log = MetricsLog(path.parent)
        for step in (1, 2):
            log.add(record(step))
            assert len(path.read_text().splitlines()) == step
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [vars(r) for r in log.records] and rows[1]["step"] == 2
    assert rows[0].keys() == {
        "step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "tflops_per_s", "step_ms", "tokens"
    }  # fmt: skip


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = MetricsLog(None)
    log.add(record(1))
    assert len(log.records) == 1 and list(tmp_path.iterdir()) == []


def png(path):
    """(width, height) of a PNG, and that the file is one from beginning to end."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR" and content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_the_report_is_a_picture(tmp_path):
    records = [record(n, loss=5 / n) for n in range(1, 30)]
    for name, baselines in (("few", {"gzip -9": 2.0}), ("many", {"unigram": 4.7, "gzip -9": 2.0, "validation": 2.4})):
        write_report(tmp_path / f"{name}.png", records, bytes_per_token=3.0, baselines=baselines)
        assert png(tmp_path / f"{name}.png") == (990, 660)
    assert (tmp_path / "few.png").read_bytes() != (tmp_path / "many.png").read_bytes()


def test_the_report_shows_what_pipeline_ranks_did(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    bar = Axes.broken_barh
    monkeypatch.setattr(
        Axes, "broken_barh", lambda self, *a, **k: (drawn.append((*a, k["color"])), bar(self, *a, **k))[1]
    )
    row = (Event(Action("F", 0, 0), 0.0, 0.25), Event(Action("I", 0, 0), 0.5, 1.0))
    timelines = {"measured": Timeline((row, (Event(Action("F", 1, 0), 0.25, 0.5),)))}
    write_report(tmp_path / "r.png", [record(1, loss=2.0)], 3.0, baselines={}, timelines=timelines)
    assert [d[0] for d in drawn] == [[(0.0, 250.0)], [(500.0, 500.0)], [(250.0, 250.0)]]
    assert len({colour for *_, colour in drawn}) == 2, "a colour per kind"
    assert png(tmp_path / "r.png")[1] > 660, "a lane per rank below the curves"


def test_the_report_shows_bits_per_byte(tmp_path, monkeypatch):
    """What reaches the axes, since nobody reads pixels here."""
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: (drawn.append(a), plot(self, *a, **k))[1])
    write_report(tmp_path / "r.png", [record(1, loss=math.log(2) * 6)], bytes_per_token=3.0, baselines={})
    assert drawn == [([1], [pytest.approx(2.0)]), ([1], [0.75])]


def test_a_console_without_a_terminal_prints_lines(capsys):
    with Console(0, 3) as console:
        assert not console.bar
        console.say("[bold]step 1[/bold] | loss 2")
        console.every_step(1, 2.0)
    console.say("after")
    assert capsys.readouterr().out == "[bold]step 1[/bold] | loss 2\nafter\n"


def test_other_ranks_say_nothing(capsys):
    with Console(3, 3) as console:
        console.say("step 1")
        assert not console.bar
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_bar_below_the_lines(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich._console", None)  # it decides once, at its making
    with pytest.raises(KeyError, match="stop"), Console(0, 3) as console:
        assert console.bar
        console.every_step(2, 1.25)
        console.say("[x] | a line of its own")
        raise KeyError("stop")
    assert not console.bar, "the bar is gone whatever ended the loop"
    out = capsys.readouterr().out
    assert "[x] | a line of its own\n" in out and "2/3" in out and "1.250" in out
