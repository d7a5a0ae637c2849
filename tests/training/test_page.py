"""report.html: well formed, its data equal to the records, safe whatever texts it shows, drawn for any run."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

import core
from core.pipeline import Action, Timeline
from core.pipeline.schedule.timeline import Event
from core.training.doctor.environment import environment
from core.training.log import charts
from core.training.log.charts import Axis, Curve, draw, legend, short, step_axis, value_axis
from core.training.log.facts import run_facts
from core.training.log.metrics import StepRecord
from core.training.log.page import Sample, embedded, write_page
from core.training.log.validation import ValidationRecord

EVIL = "</script><script>document.title='pwned'</script><!-- <b>bold</b> ]]> \u2028 & &lt; \x00 \ud800 é"
VOID = {"meta", "br", "img", "input", "link", "hr"}
TIMELINE = Timeline(((Event(Action("F", 0, 0), 0.0, 0.25), Event(Action("B", 0, 0), 0.25, 0.75)), ()))


class Page(HTMLParser):
    """A page taken apart: tags in order, texts by element, and that every element is closed where it should be."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.scripts = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            if tag in ("script", "pre"):
                self.scripts.append([dict(attributes) | {"tag": tag}, ""])

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "pre"):
            self.scripts[-1][1] += data
        else:
            self.texts.append(data)

    @property
    def data(self):
        (text,) = (text for facts, text in self.scripts if facts.get("id") == "data")

        def refuse(word):
            raise AssertionError(f"{word} is no JSON")

        return json.loads(text, parse_constant=refuse)

    @property
    def records(self):
        columns = self.data["records"]
        rows = zip(*columns.values(), strict=True)
        return [StepRecord.from_json(dict(zip(columns, row, strict=True))) for row in rows]

    def named(self, name):
        return [facts for tag, facts in self.tags if tag == name]


def record(step, **more):
    facts = {"loss": 2.5 / step, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_s": 9.0, "tflops_per_s": 0.1}
    return StepRecord(**{"step": step, "step_ms": 10.0, "tokens": 64, "memory_mib": 70.5, "mfu": 0.4} | facts | more)


def validation(step, loss, name="validation"):
    return ValidationRecord(step=step, name=name, loss=loss, bits_per_byte=loss / 2, tokens=10)


def page(tmp_path, records, **more):
    path = tmp_path / "out" / "report.html"
    write_page(path, records, **{"run": {}} | more)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"], "no temporary file is left"
    return Page(path)


def same(records, others):
    """Equal, NaN to NaN."""
    return [repr(r) for r in records] == [repr(r) for r in others]


ODD = [
    record(1),
    record(2, loss=math.nan, grad_norm=math.inf, skipped=1),
    record(4, mfu=None, memory_mib=None, tokens_per_s=math.nan),
    record(8, grad_norm=-math.inf, learning_rate=0.0, loss=1e300),
    record(9, loss=-1.5, grad_norm=1e-30),
]


@pytest.mark.parametrize("records", [[record(1)], ODD, ODD[1:2], [record(n) for n in range(1, 1200)], []], ids=len)
def test_the_embedded_data_are_the_records_and_every_curve_is_drawn(records, tmp_path):
    made = page(tmp_path, records, bytes_per_token=3.0, baselines={"gzip -9": 2.3})
    assert same(made.records, records)
    drawn = [facts["data-key"] for facts in made.named("svg") if facts.get("class") == "chart"]
    known = {name for name in ("memory_mib",) if any(getattr(r, name) is not None for r in records)}
    want = ["loss", "grad_norm", "learning_rate", "tokens_per_s", "memory_mib"] if records else []
    assert drawn == [name for name in want if name != "memory_mib" or name in known]
    for name in ("x", "y", "x1", "y1", "cx", "cy", "points", "d"):
        assert not [v for _, facts in made.tags if re.search("nan|inf", v := facts.get(name) or "")]


@pytest.mark.full
def test_a_hundred_thousand_records_are_kept_and_drawn_small(tmp_path):
    records = [record(n, loss=2 + math.sin(n / 9)) for n in range(1, 100_001)]
    records[77_776] = record(77_777, grad_norm=math.nan)
    made = page(tmp_path, records, bytes_per_token=3.0)
    columns = made.data["records"]
    assert columns["loss"] == [r.loss for r in records] and columns["step"] == list(range(1, 100_001))
    assert columns["grad_norm"][77_776] == "NaN"
    lines = [facts["points"] for facts in made.named("polyline")]
    assert len(lines) == 5 and all(len(points.split()) == charts.BUCKETS for points in lines)
    bands = [facts for facts in made.named("polygon") if facts["class"] == "band"]
    assert len(bands) == 5 and [f["d"] for f in made.named("path") if f["class"] == "odd"]


def test_texts_cannot_leave_their_place(tmp_path):
    made = page(
        tmp_path,
        [record(1)],
        run={f"data.{EVIL}": EVIL},
        origin={f"data.{EVIL}": EVIL},
        environment={EVIL: EVIL},
        baselines={EVIL: 2.0},
        timelines={EVIL: TIMELINE},
        sample=Sample(EVIL, EVIL),
        bytes_per_token=3.0,
        title=EVIL,
        facts={EVIL: EVIL},
        validations=[validation(1, 2.0, EVIL)],
    )
    assert [facts.get("id") for facts, _ in made.scripts if facts["tag"] == "script"] == ["data", None], "ours alone"
    assert not made.named("b")
    assert made.data["sample"] == {"prompt": EVIL, "written": EVIL} and made.data["facts"] == {EVIL: EVIL}
    assert made.data["run"] == {f"data.{EVIL}": EVIL}
    samples = [text for facts, text in made.scripts if facts["tag"] == "pre"]
    assert samples == [EVIL.replace("\ud800", "\\ud800")] * 2, "shown as it is; half of a pair is no text"


def test_data_cannot_end_their_script():
    data = {"a": "</script><!--<script>", "b": [1, None, "é\u2028"]}
    assert not set("<>&\u2028") & set(embedded(data)) and json.loads(embedded(data)) == data


def test_nothing_is_fetched(tmp_path):
    made = page(
        tmp_path, ODD, timelines={"last": TIMELINE}, sample=Sample("", "http://example.org"), bytes_per_token=1.0
    )
    assert not [facts for _, facts in made.tags if {"src", "href", "srcset", "action"} & facts.keys()]
    (policy,) = (f["content"] for f in made.named("meta") if f.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    script = made.scripts[-1][1]
    assert not re.search(r"fetch|XMLHttp|import|@import|url\(", script)


def test_configuration_environment_and_timelines_are_told(tmp_path):
    run = {"optimizer.lr": 3e-4, "optimizer.betas": (0.9, 0.95), "data.train": (), "device": None}
    told = {"training.fast": True, "training.limit": math.inf, "training.path": torch.device("cpu")}
    made = page(
        tmp_path, [record(1)], run=run | told, origin={"optimizer.lr": "run.toml:7"}, timelines={"last": TIMELINE}
    )
    texts = [text.strip() for text in made.texts if text.strip()]
    for words in ("optimizer|lr|0.0003|run.toml:7", "betas|0.9 0.95", "train|none", "fast|yes"):
        assert words in "|".join(texts)
    assert made.data["run"]["optimizer.betas"] == [0.9, 0.95] and made.data["run"]["training.limit"] == "Infinity"
    assert made.data["origin"] == {"optimizer.lr": "run.toml:7"} and made.data["run"]["training.path"] == "cpu"
    assert made.data["timelines"] == {"last": [[["F", 0, 0, 0.0, 0.25], ["B", 0, 0, 0.25, 0.75]], []]}
    assert any("750 ms" in text for text in texts), "seconds are drawn in milliseconds"


def test_the_environment_of_a_run(tmp_path):
    facts = environment(torch.device("cpu"))
    assert {"Python", "torch", "CPU", "device", "attention"} <= facts.keys()
    assert page(tmp_path, [record(1)], environment=facts).data["environment"] == facts


def test_validations_are_points_and_tiles_and_the_best_is_marked(tmp_path):
    found = [validation(2, 3.0), validation(4, 1.0), validation(8, 2.0), validation(8, 5.0, "books")]
    made = page(tmp_path, ODD, bytes_per_token=3.0, validations=found, baselines={"unigram": 50.0})
    points = [facts for facts in made.named("circle") if facts["class"].startswith("point") and "r" in facts]
    assert [facts["class"] for facts in points if "best" in facts["class"]] == ["point best p0", "point best p1"]
    words = "|".join(text.strip() for text in made.texts if text.strip())
    assert "validation, step 4: 0.5000, the best" in words and "validation, step 2: 1.5000" in words
    assert "validation|1.000|bits per byte, best 0.500 at step 4" in words
    assert "books|2.500|bits per byte, the best" in words and "unigram 50.000 (above)" in words
    assert [row["validation_loss"] for row in made.data["validations"]] == [3.0, 1.0, 2.0, 5.0]


def test_two_runs_can_be_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/lib/python3/core/pretrain.py", "--data.train", "my corpus"])
    records = [record(1, time=1000.0), record(9, time=1000.0 + 3725, tokens_seen=4608)]
    facts = run_facts(records, "2 processes on CPU: 2-way tensor parallel", 2_557_632)
    assert facts.pop("date")[:2] == "20" and facts.pop("code").startswith(f"paracore {core.__version__}")
    assert facts == {
        "layout": "2 processes on CPU: 2-way tensor parallel", "parameters": "2,557,632", "tokens seen": "4,608",
        "duration": "1 h 2 min", "command": "python -m core.pretrain --data.train 'my corpus'",
    }  # fmt: skip
    words = "|".join(page(tmp_path, records, facts=facts).texts)
    assert all(f"{name}|{value}" in words for name, value in facts.items())
    assert run_facts([], "1 process on CPU", 1).keys() == {"date", "layout", "parameters", "command", "code"}


class Letters:
    """A tokenizer of one token per byte."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_a_sample_is_set_off_from_its_prompt():
    assert Sample.of(Letters(), list(b"abc"), list(b"abcdef")) == Sample("abc", "def")
    cut = "aé".encode()
    assert Sample.of(Letters(), list(cut[:2]), list(cut)) == Sample("a\ufffd", "\ufffd"), "in the middle of a letter"


def test_changed_settings_come_first_and_the_rest_is_folded(tmp_path):
    run = {"optimizer.lr": 3e-4, "model.seed": 1}
    origin = {"optimizer.lr": "run.toml:7", "model.seed": "default"}
    made = page(tmp_path, [record(1)], run=run, origin=origin, environment={"torch": "2"})
    words = "|".join(text.strip() for text in made.texts if text.strip())
    assert "Settings that were changed|optimizer.lr|0.0003|run.toml:7|All settings|" in words
    assert len(made.named("details")) == 2 and "Environment|torch|2" in words


def test_a_loss_without_its_bytes_stays_in_nats(tmp_path):
    for unknown in (0.0, math.nan, math.inf):
        made = page(tmp_path, [record(1)], bytes_per_token=unknown, baselines={"gzip -9": 2.3})
        assert "nats per token" in "".join(made.texts) and "bits per byte" not in "".join(made.texts)


def test_an_old_page_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_page(path, [record(1)], run={})
    before = path.read_text()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("core.training.log.page.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_page(path, [record(2)], run={})
    assert path.read_text() == before


# drawing


@pytest.mark.parametrize(
    "value, told",
    [(0, "0"), (12345678, "12.35M"), (15000, "15k"), (1234, "1234"), (2e-3, "0.002"), (5e-4, "5e-4"), (-3e12, "-3T")],
)
def test_short_numbers(value, told):
    assert short(value) == told


@pytest.mark.parametrize("low, high", [(0, 1), (1, 2), (0, 1e-9), (-3, 1e6), (1.5, 1.6), (1e99, 9e99)])
def test_ticks_are_round_and_inside(low, high):
    ticks = Axis(low, high, 0, 100).ticks()
    slack = 1e-9 * (high - low)
    assert 2 <= len(ticks) <= 6 and all(low - slack <= tick <= high + slack for tick in ticks)
    apart = [b - a for a, b in pairwise(ticks)]
    assert apart == pytest.approx([apart[0]] * len(apart))


def curve(values, **more):
    return Curve(**{"key": "loss", "title": "Loss", "unit": "", "values": values} | more)


def test_an_axis_holds_all_that_is_drawn():
    far = curve([1.0, None, math.nan, 3.0], levels={"a": 3.5, "far": 9.0, "low": -9.0}, points={"p": [(1, 4.0)]})
    axis = value_axis(far)
    assert axis.low < 1 and 4 < axis.high < 9 and axis.at(1.0) > axis.at(3.5), "larger is higher"
    assert legend(far) == [("a", "3.500"), ("far", "9.000 (above)"), ("low", "-9.000 (below)")]
    assert draw(far, [1, 2, 3, 4]).count('class="level') == 1, "the curve is not pressed flat"
    assert value_axis(curve([1.0, 3.0], zero=True)).low == 0
    assert value_axis(curve([2.0, 2.0])).low < 2 < value_axis(curve([2.0, 2.0])).high
    for nothing in ([], [None], [math.nan], [0.0], [1e300]):
        axis = value_axis(curve(nothing))
        assert axis.low < axis.high and axis.ticks()
    wide = value_axis(curve([1e-3, 10.0], logarithmic=True))
    assert wide.logarithmic and wide.at(0.1) == pytest.approx((wide.at(1e-3) + wide.at(10.0)) / 2)
    assert wide.ticks() == pytest.approx([1e-3, 1e-2, 0.1, 1.0, 10.0])
    assert not value_axis(curve([0.0, 10.0], logarithmic=True)).logarithmic


def test_gaps_dots_and_marks():
    steps = [1, 2, 3, 4, 5, 6]
    drawn = draw(curve([1.0, 2.0, math.inf, 3.0, None, 4.0], marked=[3, 5]), steps)
    assert drawn.count('class="line"') == 1 and drawn.count('class="dot"') == 2
    assert "<title>step 3: inf, skipped</title>" in drawn and "<title>step 5: skipped</title>" in drawn
    assert step_axis([7]).at(7) == (charts.LEFT + charts.RIGHT) / 2


def test_of_very_many_marks_some_are_drawn():
    steps = list(range(1, 5001))
    assert 100 <= draw(curve([1.0] * 5000, marked=steps), steps).count('class="odd"') <= charts.MARKERS


# a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1360,1400"),
    "--proxy-server=127.0.0.1:9",  # where nobody listens
]


def colours(path):
    """Red, green, blue of every 7th pixel each way, 0 to 255."""
    from matplotlib.image import imread

    pixels = (imread(path)[::7, ::7, :3] * 255).round().astype(int)
    return [tuple(pixel) for row in pixels.tolist() for pixel in row]


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("scheme, bright", [("", True), ("--blink-settings=preferredColorScheme=0", False)])
def test_a_browser_shows_it(scheme, bright, tmp_path):
    path, picture = tmp_path / "report.html", tmp_path / "picture.png"
    records = [record(n, loss=3 + math.sin(n / 9), skipped=n % 50 == 0) for n in range(1, 300)]
    facts = {"run": {"optimizer.lr": 1e-3}, "timelines": {"last step": TIMELINE}, "sample": Sample(EVIL, EVIL)}
    write_page(path, records, bytes_per_token=3.0, baselines={"gzip -9": 2.0}, title="A run", **facts)
    moved = "document.querySelector('svg.chart').dispatchEvent(new PointerEvent('pointermove', {clientX: 1}))"
    path.write_text(path.read_text().replace("</body>", f"<script>{moved}</script></body>"))
    flags = [*FLAGS, *([scheme] if scheme else []), f"--user-data-dir={tmp_path / 'profile'}"]
    run = {"capture_output": True, "text": True, "timeout": 120}
    subprocess.run([CHROMIUM, *flags, f"--screenshot={picture}", path.as_uri()], check=True, **run)
    seen = colours(picture)
    counted = {colour: seen.count(colour) for colour in set(seen)}
    paper = max(counted, key=counted.get)
    assert len(counted) > 30 and counted[paper] < 0.98 * len(seen), "not blank"
    assert (sum(paper) > 600) == bright, "the page follows the reader's colour scheme"
    dom = subprocess.run([CHROMIUM, *flags, "--dump-dom", path.as_uri()], check=True, **run).stdout
    assert "<output>step 1: " in dom, "the script tells the value under the pointer"
    assert "<title>A run</title>" in dom, "no text became a script"
