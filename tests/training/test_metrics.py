"""Numbers that people read: the line, JSONL, the picture, the terminal."""

import errno
import json
import math
import struct
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.pipeline import Action, Timeline
from core.pipeline.schedule.timeline import Event
from core.training.log.console import Console, fitted
from core.training.log.metrics import MetricsLog, StepRecord, memory_mib, read_metrics
from core.training.log.validation import ValidationRecord, read_validations
from core.training.run.summary import _kept, write_report

OLD = {  # a record of a run from before `mfu`
    "grad_norm": 0.75,
    "learning_rate": 1e-3,
    "tokens_per_s": 12345.6,
    "tflops_per_s": 0.0123,
    "step_ms": 98.76,
    "tokens": 2048,
}


def record(step, loss=2.5, **more):
    return StepRecord(**OLD | {"step": step, "loss": loss} | more)


def test_the_line_of_a_step_can_be_grepped():
    line = (
        "step    20/300 | loss 2.5000 | grad norm 0.7500 | lr 1.00e-03 | 12,346 tokens/s | 98.8 ms/step | "
        "0.0123 TFLOP/s"
    )
    assert record(20).line(300) == line
    with_mfu = line.replace("tokens/s |", "tokens/s | mfu 41.2% |")
    assert record(20, mfu=0.4123, memory_mib=5.0).line(300) == with_mfu
    assert fitted(with_mfu, 80) == with_mfu[: with_mfu.index(" | mfu")] and fitted(line, 200) == line
    sentence = "a sentence of words " * 6
    assert fitted(sentence, 80).replace("\n ", "") == sentence.strip() and len(fitted(sentence, 80).split("\n")) == 2
    drawing = "rank 0 | F0 F1" + " F2" * 40
    assert fitted(drawing, 80) == drawing


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    log = MetricsLog(tmp_path)
    log.add(record(1, math.nan, grad_norm=math.inf, skipped=1))
    log.add(record(2, -math.inf, mfu=math.nan))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert (rows[0]["loss"], rows[0]["grad_norm"], rows[1]["loss"]) == ("NaN", "Infinity", "-Infinity")
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(first.loss) and first.grad_norm == math.inf and first.skipped == 1
    assert second.loss == -math.inf and math.isnan(second.mfu)


def test_files_of_other_versions_are_read(tmp_path):
    path, old = tmp_path / "metrics.jsonl", OLD | {"step": 1, "loss": 2.5}
    rows = [old, old | {"step": 2, "grad_norm": math.inf}, old | {"step": 3, "from_the_future": [1]}, {"step": 4}, 5]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo')
    found = read_metrics(path)
    assert [r.step for r in found] == [1, 2, 3] and found[1].grad_norm == math.inf
    assert all((r.mfu, r.memory_mib, r.skipped) == (None, None, 0) for r in found)


def test_a_resumed_log_keeps_what_is_not_made_again_and_tells_sinks_only_of_new_records(tmp_path):
    for step in (1, 2, 3):
        MetricsLog(tmp_path, start=step - 1).add(record(step))
    told = []

    class Told:
        add, close = staticmethod(told.append), staticmethod(lambda: told.append("closed"))

    with MetricsLog(tmp_path, start=2, sinks=[Told()]) as log:
        assert [r.step for r in log.records] == [1, 2]
        log.add(record(3, 1.0))
    log.close()
    assert told == [record(3, 1.0), "closed"], "once"
    assert read_metrics(tmp_path / "metrics.jsonl") == [record(1), record(2), record(3, 1.0)]


def validation(step, loss, name="validation", **more):
    return ValidationRecord(step=step, name=name, loss=loss, bits_per_byte=loss / 2, tokens=10, **more)


def test_validations_are_rows_of_their_own_and_the_best_is_marked(tmp_path):
    told = []

    class Told:
        add, close = staticmethod(lambda record: told.append(record.scalars())), staticmethod(lambda: None)

    with MetricsLog(tmp_path, sinks=[Told()]) as log:
        log.add(record(1))
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5), (4, math.nan)):
            log.add_validation(validation(step, loss, time=5.0, tokens_seen=64 * step))
        log.add_validation(validation(4, 9.0, "books"))
    assert [r.best for r in log.validations] == [True, True, False, False, True]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[2] == {
        "step": 2, "time": 5.0, "tokens_seen": 128, "validation": "validation", "validation_loss": 1.0,
        "validation_perplexity": math.e, "validation_bits_per_byte": 0.5, "validation_tokens": 10,
        "validation_best": True,
    }  # fmt: skip
    assert read_metrics(tmp_path / "metrics.jsonl") == [record(1)]
    again = read_validations(tmp_path / "metrics.jsonl")
    assert again[:3] == log.validations[:3] and math.isnan(again[3].loss) and again[4].name == "books"
    assert set(told[1]) == {"validation/loss", "validation/perplexity", "validation/bits_per_byte"}
    assert told[-1]["validation/books/loss"] == 9.0
    resumed = MetricsLog(tmp_path, start=2)
    assert [r.step for r in resumed.validations] == [1, 2]
    assert not resumed.add_validation(validation(3, 1.2)).best, "step 2 was lower"
    of_other_data = replace(validation(4, 1.3), tokens=12)
    assert resumed.add_validation(of_other_data).best, "step 2 was of another text"
    assert validation(200, 5.0771, best=True).line(200) == (
        "step   200/200 | validation 2.5385 bits per byte | perplexity 160.3 | best"
    )
    assert validation(1, 1e4).perplexity == math.inf


def test_memory_is_what_the_process_held_at_most():
    before = memory_mib(torch.device("cpu"))
    block = torch.ones(1 << 24)  # 64 MiB, touched
    during = memory_mib(torch.device("cpu"))
    del block
    assert 10 < before <= during == memory_mib(torch.device("cpu")) and during > 64


def test_records_are_on_disk_at_once_and_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for _ in range(2):
        log = MetricsLog(path.parent)
        for step in (1, 2):
            log.add(record(step))
            assert len(path.read_text().splitlines()) == step
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    none = {"experts": [], "expert_load": None, "aux_loss": None, "z_loss": None}
    plain = [{name: value for name, value in vars(r).items() if name != "rewards"} for r in log.records]
    assert rows == [r | none for r in plain] and rows[1]["step"] == 2
    assert rows[0].keys() == {
        "step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "tflops_per_s", "step_ms", "tokens",
        "mfu", "memory_mib", "skipped", "spikes", "time", "tokens_seen", "experts", "expert_load",
        "aux_loss", "z_loss",
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
    with pytest.raises(KeyError, match="stop"), Console(0, 5, tokens_per_step=1000) as console:
        assert console.bar
        clock = [0.0]
        console._progress.get_time = lambda: clock.append(clock[-1] + 0.25) or clock[-1]
        for step in (1, 2, 3):
            console.every_step(step, 1.25)
        console.say("[x] | a line of its own")
        raise KeyError("stop")
    assert not console.bar, "the bar is gone whatever ended the loop"
    out = capsys.readouterr().out
    assert "[x] | a line of its own\n" in out and "3/5" in out and "1.250" in out
    assert "tokens/s" in out


def test_a_resumed_run_starts_its_bar_where_it_was(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich._console", None)
    with Console(0, 9, start=7) as console:
        assert console._progress.tasks[0].completed == 7, "else the first step would count for eight"


def test_a_full_disk_of_the_log_does_not_end_the_run(tmp_path, monkeypatch):
    received = []
    sink = SimpleNamespace(add=received.append, close=lambda: None)
    log = MetricsLog(tmp_path, sinks=[sink])
    log.add(record(1))

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.warns(UserWarning, match=r"metrics.jsonl cannot be written: .*No space.*from step 2 on it"):
            log.add(record(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.add(record(3))
    assert [one.step for one in log.records] == [1, 2, 3] == [one.step for one in received]
    assert [one.step for one in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_file_of_a_run_that_is_over_is_said_not_to_be_written(tmp_path):
    written, said = [], []
    with _kept(tmp_path / "a", written, said.append):
        pass
    with _kept(tmp_path / "b", written, said.append):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert written == [tmp_path / "a"]
    assert said == [f"note: {tmp_path / 'b'} is not written: [Errno 28] No space left on device"]
