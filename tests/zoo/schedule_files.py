"""Files of schedules as people, spreadsheets and other programs leave them: read right, or refused with words."""

import csv
import io
from dataclasses import dataclass

import torch
from torch import nn

from core.parallel_state import ParallelState
from core.pipeline import Pipeline, Schedule, play
from core.pipeline.draw.torch_csv import read_csv, write_csv
from core.pipeline.schedule import schedules as named
from core.pipeline.schedule.passes import add_recompute, split_backward
from core.pipeline.schedule.player import check
from tests.zoo.case import Case, Family

GOOD = write_csv(named.make("1f1b", 2, 2))  # 0F0,0F1,0B0,0B1 / 1F0,1B0,1F1,1B1
ZB = write_csv(named.make("zb-v", 2, 4))
TEXT = named.make("1f1b", 2, 2).text()


def read(text, microbatches=2, **facts):
    """What a script does with a file before it trains."""
    made = read_csv(text, **facts)
    check(made, microbatches)
    play(made)
    return made


def parse(text, microbatches=2):
    made = Schedule.parse(text)
    check(made, microbatches)
    play(made)
    return made


@dataclass(frozen=True)
class File(Case):
    """A text, how it is read, and what is meant by it (the actions of each rank)."""


def orders(schedule):
    return {f"rank {r}": ids(order) for r, order in enumerate(split_backward(schedule).orders)}


def ids(order):
    return torch.tensor([[" FIWRB".index(a.kind), a.stage, a.microbatch] for a in order])


def right(what, text, meant=GOOD, how=read, **facts):
    def run():
        got, want = orders(how(text, **facts)), orders(read_csv(meant))
        assert got.keys() == want.keys()
        return {rank: (got[rank], want[rank]) for rank in want}

    return Case(what, run, remedy="nothing to do")


def refused(what, text, says, how=read, remedy="the message names line and cell, or the action", **facts):
    def run():
        how(text, **facts)

    return Case(what, run, "refused", says, remedy)


def without(cell, text=GOOD):
    return "\n".join(",".join(c for c in line.split(",") if c != cell) for line in text.split())


def swapped(a, b, text=GOOD):
    return text.replace(a, "#").replace(b, a).replace("#", b)


def quoted(text):
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(csv.reader(io.StringIO(text)))
    return out.getvalue()


OLD = "0F0,0F1,0B0,0W0,0B1,0W1\n1F0,1B0,1W0,1F1,1B1,1W1\n"
NEW = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


class Identity(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def built(**facts):
    """A pipeline of one rank with a strange argument."""

    def run():
        stages = [Identity() for _ in range(facts.pop("stages", 1))]
        Pipeline(stages, ps=ParallelState.single("cpu"), **facts).close()

    return run


def argument(what, says, **facts):
    return Case(what, built(**facts), "refused", says, "the message names the argument")


CASES = [
    right("a file as torch writes it", GOOD),
    right("line ends of Windows", GOOD.replace("\r\n", "\n").replace("\n", "\r\n")),
    right("line ends of an old Mac", GOOD.replace("\r\n", "\n").replace("\n", "\r")),
    right("a byte order mark (a spreadsheet's UTF-8)", "\ufeff" + GOOD),
    right("spaces around the cells", GOOD.replace(",", " , ")),
    right("tabs around the cells", GOOD.replace(",", "\t,\t")),
    right("quotes around the cells", quoted(GOOD)),
    right("empty lines at the end", GOOD + "\n\n\n"),
    right("no line end at the end", GOOD.strip()),
    right("empty cells between (a table of clock ticks)", GOOD.replace(",", ",,,")),
    right("cells that a spreadsheet filled up at the end", GOOD.strip().replace("\r\n", ",,,\r\n") + ",,,"),
    right("torch's letters before 2.6: B beside W is the input half", OLD, NEW),
    right("B and W of old letters far apart", "0F0,0F1,0B0,0B1,0W0,0W1\n1F0,1B0,1F1,1B1,1W0,1W1\n",
          "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"),
    right("some microbatches with B, others with I and W", "0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n",
          "0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n"),
    right("an F beside a B in brackets (OVERLAP_F_B)",
          "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"),
    right("communication written into it", "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
          "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n", how=lambda text: computed(text)),
    right("leading zeros", GOOD.replace("F0", "F00").replace("B1", "B01")),
    right("a schedule with W after I, zb-v", ZB, ZB, microbatches=4),
    right("a placement that is given beside it", GOOD, placement=[0, 1]),
    right("the text of a schedule", TEXT, how=parse),
    right("the text of a schedule, spaces doubled", TEXT.replace(" ", "  "), how=parse),
    refused("an empty file", "", "this is no action"),
    refused("a file of empty lines", "\n\n\n", "this is no action"),
    refused("a file of commas", ",,,\n,,,\n", "this is no action"),
    refused("only a byte order mark", "\ufeff", "this is no action"),
    refused("bytes instead of text", GOOD.encode(), "this is a bytes"),
    refused("None instead of text", None, "this is a NoneType"),
    refused("a path instead of what is in it", "runs/zb.csv", "line 1, cell 1: 'runs/zb.csv' is not an action"),
    refused("a header line", "rank,actions\n" + GOOD, "line 1, cell 1: 'rank' is not an action; write stage, kind"),
    refused("a column with the rank's number", "0," + GOOD, "line 1, cell 1: '0' is not an action"),
    refused("a comment", "# zb-v\n" + GOOD, "line 1, cell 1: '# zb-v' is not an action"),
    refused("semicolons of a German spreadsheet, in one cell", "0F0 0F1\n", "'0F0 0F1' is not an action"),
    refused("small letters", GOOD.lower(), "'0f0' is not an action"),
    refused("the letter first", GOOD.replace("0F0", "F00"), "line 1, cell 1: 'F00' is not an action"),
    refused("a letter of another program", GOOD.replace("0F1", "0D1"), "line 1, cell 2: '0D1' is not an action"),
    refused("a minus sign", GOOD.replace("0F1", "-1F1"), "'-1F1' is not an action"),
    refused("a number with a point", GOOD.replace("0F1", "0F1.0"), "'0F1.0' is not an action"),
    refused("digits of another script", GOOD.replace("0F1", "0F\u0661"), "is not an action"),
    refused("a number of 5000 digits", GOOD.replace("0F1", "0F" + "1" * 5000), "is not an action"),
    refused("a NUL byte", GOOD.replace("0F1", "0F\0"), "line contains NUL|is not an action"),
    refused("a quote that never ends", '"' + GOOD, "is not an action|unexpected end"),
    refused("brackets of another kind", "(0F0;0B0)TOGETHER\n", "one in brackets ends with OVERLAP_F_B"),
    refused("brackets that never end", GOOD.replace("0F1", "(0F1;0B0"), "is repeated"),
    refused("a page of HTML", "<html><body>404</body></html>", "is not an action"),
    refused("JSON", '[["0F0"]]', "is not an action"),
    refused("an empty line in the middle", GOOD.replace("\r\n", "\n").replace("\n", "\n\n", 1),
            "gives no stage to rank 1 of 3 ranks"),
    refused("an F is missing", without("0F1"), "0B1 comes before 0F1, whose result it needs"),
    refused("a B is missing", without("1B1"), "misses 1"),
    refused("a W is missing", without("1W1", NEW), "misses 1W1"),
    refused("an I is missing", without("1I1", NEW), "1W1 comes before 1I1"),
    refused("a whole microbatch is missing", without("0F1", without("0B1", without("1F1", without("1B1")))),
            "misses 0F1"),
    refused("the last rank's line is missing", ZB.rsplit("\r\n", 2)[0], "no rank does F of stage 1", microbatches=4),
    refused("the first line is missing", GOOD.split()[1], "no rank does F of stage 0"),
    refused("a line twice", GOOD + GOOD.split()[1], "line 3: 1F0 on rank 2, but rank 1 has other F of stage 1"),
    refused("an action twice", GOOD.replace("0F1", "0F1,0F1"), "0F1 is repeated: a stage does each microbatch once"),
    refused("backward before forward", swapped("0F0", "0B0"), "0B0 comes before 0F0"),
    refused("ranks that wait for each other", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "never ends: rank 0 stops at"),
    refused("an F of a stage on two ranks", GOOD.replace("1F1", "0F5"), "a stage lives on 1 rank"),
    refused("a backward on another rank than the F", without("0B1").replace("1B1", "0B1"), "0B1 belongs to rank 0"),
    refused("a gap in the stages", GOOD.replace("1F", "2F").replace("1B", "2B"), "no rank does F of stage 1 of 3"),
    refused("more microbatches than the step has", GOOD, "none of its 2 stages and 1 microbatches", microbatches=1),
    refused("fewer microbatches than the step has", GOOD, "never does F of microbatch 2 of 3", microbatches=3),
    refused("a placement for other ranks", GOOD, "gives no stage to rank 1|puts a stage on rank", placement=[0, 0]),
    refused("a placement that is turned round", GOOD, "0F0 belongs to rank 1", placement=[1, 0]),
    refused("a file cut in the middle", ZB[: len(ZB) // 2], "misses|is not an action|no rank|comes before",
            microbatches=4),
    refused("two files joined", GOOD + ZB, "a stage lives on 1 rank"),
    refused("the text of a schedule without its head", TEXT.split("\n", 1)[1], "starts with `name: rank of stage 0",
            parse),
    refused("the text of a schedule without a placement", TEXT.replace(": 0 1", ":"), "starts with `name:", parse),
    refused("a placement of superscripts", TEXT.replace(": 0 1", ": 0 \u00b9"), "starts with `name: rank", parse),
    refused("the text of a schedule with a rank too many", TEXT + "0F0\n", "gives no stage to rank 2", parse),
    refused("the text of a schedule with a rank too few", TEXT.rsplit("\n", 2)[0], "puts a stage on rank 1", parse),
    refused("a CSV read as text", GOOD, "starts with `name: rank of stage 0", parse),
    refused("a text read as CSV", TEXT, "line 1, cell 1: '1f1b: 0 1' is not an action"),
    refused("a schedule with R written as CSV", add_recompute(named.make("gpipe", 2, 2)),
            "has 4 R, but torch's schedules have 0", write_csv),
    argument("schedule=None", "schedule=None is no schedule: give a name", schedule=None),
    argument("schedule=5", "schedule=5 is no schedule", schedule=5),
    argument("a name that is almost right", "did you mean '1f1b'", schedule="1f1b "),
    argument("a path for a schedule", "there is no schedule 'zb.csv'", schedule="zb.csv"),
    argument("a function that returns text", "returned '0F0', not a Schedule", schedule=lambda p, m: "0F0"),
    argument("num_microbatches=2.0", "num_microbatches=2.0 must be at least 1, a whole number", num_microbatches=2.0),
    argument("num_microbatches='4'", "num_microbatches='4' must be at least 1, a whole number", num_microbatches="4"),
    argument("num_microbatches=None", "num_microbatches=None must be at least 1", num_microbatches=None),
    argument("num_microbatches=0", "num_microbatches=0 must be at least 1", num_microbatches=0),
    argument("a schedule of more ranks than there are", "places 2 stages on 2 ranks", schedule=read_csv(GOOD),
             num_microbatches=2),
    argument("a schedule of another number of microbatches", "misses 0F2", num_microbatches=3,
             schedule=read_csv("0F0,0F1,0B0,0B1")),
]  # fmt: skip


def computed(text):
    """Without its communication, which is made anew."""
    made = read(text)
    rows = ([a for a in order if "_" not in a.kind] for order in made.orders)
    return Schedule.make(made.placement, rows, made.name)


FAMILY = Family(
    "Files of schedules",
    "Read by `read_csv` or `Schedule.parse`, checked and played as `Pipeline` does it; compared action by action "
    "with what was meant. The last ones are arguments of `Pipeline`.",
    CASES,
)
