"""Progress where there is no terminal: a line now and then, with rate and time left."""

from core.datasets.corpus import progress as module
from core.datasets.corpus.progress import progress


def test_a_line_every_few_seconds(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 4.9, 6.0, 7.0, 12.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with progress("reading", 60_000_000) as advance:
        for _ in range(5):
            advance(6_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 18.0 of 60.0 MB, 3.0 MB/s, 14 s left",
        "reading: 30.0 of 60.0 MB, 2.5 MB/s, 12 s left",
    ]


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    bars, make = [], module._bar
    monkeypatch.setattr(module, "_bar", lambda *args: bars.append(make(*args)) or bars[0])
    with progress("reading", 100) as advance:
        advance(30)
        advance(10)
        (task,) = bars[0].tasks
        assert (task.description, task.completed, task.total) == ("reading", 40, 100)


def test_without_rich_a_terminal_gets_lines(monkeypatch, capsys):
    monkeypatch.setitem(module.sys.modules, "rich.console", None)
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(module, "_SECONDS", 0)
    with progress("reading", 1_000_000) as advance:
        advance(500_000)
    assert capsys.readouterr().err.startswith("reading: 0.5 of 1.0 MB, ")
