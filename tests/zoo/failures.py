"""Ways to fail a rank of four: every other rank names it, soon."""

import signal
import time

import torch

from tests.pipeline import tiny
from tests.zoo.case import Family
from tests.zoo.failing import (
    BAD,
    Failure,
    Speechless,
    anomaly,
    around,
    bad_loss,
    bad_sync,
    batch_of,
    crash,
    differently,
    hooked,
    inside,
    late_loss,
    leave,
    raises,
    rows,
    signalled,
    sleep,
    spin,
    two_at_once,
    wait_alone,
    with_loss,
    with_peers,
)


def told(where, error, stage=2, rank=2):
    return rf"rank {rank}, stage {stage}, microbatch {BAD}, action {where} [^\n]*{error}"


GONE, LATE = r"rank 2 is gone", r"the step failed: rank 2 told nothing"
HANG = 2.5


def killed(what, act, where="F", rank=2, says=None, **more):
    kept = {"rank_0_keeps_the_store": True} if more.pop("store", False) else {}
    cheap = more.pop("cheap", False)
    says = says or (GONE if rank == 2 else rf"rank {rank} (told nothing|is gone)")
    limit = HANG if act is not None and "STOP" in what else 30.0
    return Failure(
        what, inside(where, act, rank=rank, **more), says=says, lost=(rank,), timeout_s=limit, cheap=cheap, **kept
    )


def hangs(what, act, where="F", says=LATE, **more):
    return Failure(what, inside(where, act, **more), says=says, lost=(2,), timeout_s=HANG)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
CASES = [
    Failure(
        "an exception in the forward of the first stage",
        inside("F", raises(KeyError("k")), rank=0),
        says=told("F", "KeyError", 0, 0),
    ),
    Failure(
        "an exception in the forward of a middle stage",
        inside("F", raises(ArithmeticError("a"))),
        says=told("F", "ArithmeticError"),
        cheap=True,
    ),
    Failure(
        "an exception in the forward of the last stage",
        inside("F", raises(ArithmeticError("a")), rank=3),
        says=told("F", "ArithmeticError", 3, 3),
    ),
    Failure("an exception in backward", inside("I", raises(ArithmeticError("a"))), says=told("I", "ArithmeticError")),
    Failure(
        "an exception in a weight gradient",
        inside("W", raises(ArithmeticError("a")), schedule="zb-h1"),
        says=told("W", "ArithmeticError"),
    ),
    Failure(
        "an exception in a recomputation",
        inside("R", raises(ArithmeticError("a")), schedule="gpipe", recompute="stage"),
        says=told("[FR]", "ArithmeticError"),
    ),
    Failure(
        "an exception under zb-v",
        inside("F", raises(ArithmeticError("a")), schedule="zb-v"),
        says=told("F", "ArithmeticError"),
    ),
    Failure(
        "an exception under interleaved-1f1b",
        inside("I", raises(ArithmeticError("a")), schedule="interleaved-1f1b"),
        says=told("I", "ArithmeticError"),
    ),
    Failure("an exception in loss_fn", with_loss(bad_loss), says=r"rank 3, stage 3, microbatch 0.*ArithmeticError"),
    Failure(
        "an exception in loss_fn, where the last stage is on the first rank",
        with_loss(bad_loss, "zb-v"),
        says=r"rank 0, stage 7, microbatch 0.*ArithmeticError: in the loss",
    ),
    Failure(
        "loss_fn returns the loss alone",
        with_loss(lambda y, _: y.sum()),
        says="loss_fn returned Tensor, not 2 values; return",
    ),
    Failure("loss_fn does not reduce", with_loss(lambda y, _: (y, 1)), says="not 1 number in a tensor; sum it"),
    Failure("loss_fn detaches", with_loss(lambda y, _: (y.sum().detach(), 1)), says="do not detach it"),
    Failure("shapes that do not multiply in loss_fn", with_loss(late_loss), says=r"rank 3, stage 3.*shapes cannot"),
    Failure(
        "a stage returns another width in one microbatch",
        inside("F", lambda x: torch.cat([x, x], 1)),
        says=r"rank 2, stage 2, microbatch 3.*shapes cannot be multiplied",
    ),
    Failure(
        "an exception in evaluate", with_loss(bad_loss, call="evaluate"), says=r"rank 3, stage 3.*ArithmeticError"
    ),
    Failure("out of memory", inside("I", raises(OOM)), says=told("I", "OutOfMemoryError")),
    Failure("MemoryError", inside("F", raises(MemoryError("no more"))), says=told("F", "MemoryError")),
    Failure("an assertion", inside("F", raises(AssertionError("x > 0"))), says=told("F", "AssertionError")),
    Failure(
        "StopIteration of a data iterator", inside("F", raises(StopIteration())), says=told("F", "StopIteration")
    ),
    Failure("RecursionError", inside("F", raises(RecursionError("deep"))), says=told("F", "RecursionError")),
    Failure(
        "a TimeoutError of the user's own storage",
        inside("F", raises(TimeoutError("read timed out"))),
        says=told("F", "TimeoutError: read timed out"),
    ),
    Failure(
        "an exception whose text cannot be made", inside("F", raises(Speechless())), says=told("F", "Speechless")
    ),
    Failure(
        "an exception with a text of 3 MB",
        inside("F", raises(ArithmeticError("x" * 3_000_000))),
        says=told("F", "ArithmeticError"),
    ),
    Failure(
        "SystemExit in a stage",
        inside("F", raises(SystemExit(3))),
        says=told("F", "SystemExit") + r"|^SystemExit: 3$",
    ),
    Failure(
        "Ctrl-C on one rank",
        inside("F", raises(KeyboardInterrupt())),
        says=told("F", "KeyboardInterrupt") + r"|^KeyboardInterrupt: $",
        cheap=True,
    ),
    Failure(
        "a forward hook that looks for NaN", hooked("forward"), says=r"rank 2, stage 2.*FloatingPointError: a NaN"
    ),
    Failure(
        "a backward hook that looks for NaN", hooked("backward"), says=r"rank 2, stage 2.*FloatingPointError: a NaN"
    ),
    Failure(
        "a hook on a gradient that looks for NaN",
        hooked("gradient"),
        says=r"rank 2, stage 2.*FloatingPointError: a NaN",
    ),
    Failure("torch.autograd.detect_anomaly finds a NaN", anomaly, says=r"rank 2, stage 2.*returned nan values"),
    Failure(
        "an exception in the sums of gradients", bad_sync("finish"), says=r"rank 2, after its last action: Arith"
    ),
    Failure(
        "an exception before the first action", bad_sync("begin"), says=r"rank 2, before its first action: Arith"
    ),
    Failure("two ranks fail at once", two_at_once, says=r"rank [13], stage [13], microbatch 3.*from rank [13]"),
    Failure(
        "an exception while tensor peers wait in a collective",
        with_peers(raises(ArithmeticError("a"))),
        says=r"rank 3, stage 1, microbatch 3.*ArithmeticError",
    ),
    Failure(
        "a tensor rank dies while its peers wait in a collective",
        with_peers(leave),
        lost=(3,),
        says="rank 3 (is gone|told nothing)",
    ),
    Failure(
        "a tensor rank hangs while its peers wait in a collective",
        with_peers(sleep),
        lost=(3,),
        timeout_s=HANG,
        says="rank 3 told nothing",
    ),
    killed("SIGKILL (the OOM killer)", signalled(signal.SIGKILL), cheap=True),
    killed("SIGKILL in backward, zb-v", signalled(signal.SIGKILL), "I", schedule="zb-v"),
    killed("SIGTERM", signalled(signal.SIGTERM)),
    killed("a segmentation fault", crash),
    killed("os._exit", leave, "I"),
    killed("SIGKILL of the first rank", signalled(signal.SIGKILL), rank=0),
    killed("SIGKILL of the last rank", signalled(signal.SIGKILL), rank=3),
    killed(
        "SIGKILL of rank 0, which keeps the store",
        signalled(signal.SIGKILL),
        rank=0,
        store=True,
        cheap=True,
        says="rank 0 (is gone|told nothing)",
    ),
    killed(
        "SIGSTOP of rank 0, which keeps the store",
        signalled(signal.SIGSTOP),
        rank=0,
        store=True,
        says="rank 0 (is gone|told nothing)",
    ),
    Failure(
        "an exception on rank 0, which keeps the store",
        inside("F", raises(ArithmeticError("a")), rank=0),
        says=told("F", "ArithmeticError", 0, 0),
        rank_0_keeps_the_store=True,
    ),
    Failure(
        "an exception on another rank, rank 0 keeps the store",
        inside("I", raises(ArithmeticError("a")), rank=3),
        says=told("I", "ArithmeticError", 3, 3),
        rank_0_keeps_the_store=True,
    ),
    hangs("SIGSTOP (a debugger, a frozen container)", signalled(signal.SIGSTOP)),
    hangs("SIGSTOP in backward", signalled(signal.SIGSTOP), "I"),
    hangs("SIGSTOP, zb-v", signalled(signal.SIGSTOP), schedule="zb-v"),
    hangs("an endless loop", spin),
    hangs("an endless loop in backward", spin, "I"),
    hangs("a stage that waits for something outside", sleep),
    hangs("a stage in a collective of all ranks, alone", wait_alone, says="rank 2 .*in a call|waited for each other"),
    Failure(
        "a rank that never comes to the first step", around(2, sleep, first=0), says=LATE, lost=(2,), timeout_s=HANG
    ),
    Failure("a rank that never comes to a later step", around(2, sleep), says=LATE, lost=(2,), timeout_s=HANG),
    Failure("a replica that never comes", around(2, sleep, pipeline=2), says=LATE, lost=(2,), timeout_s=HANG),
    Failure(
        "a rank that comes too late",
        around(2, lambda _: time.sleep(HANG + 2.5)),
        says="rank 2 told nothing",
        timeout_s=HANG,
    ),
    Failure("a rank whose script has ended", around(2, leave), says="rank 2 (is gone|told nothing)", lost=(2,)),
    Failure(
        "one rank evaluates while the others step",
        around(2, lambda pipe: pipe.evaluate(rows(), tiny.squares)),
        timeout_s=HANG,
        says=r"rank 2 was in evaluate \(call 2\), the others in step \(call 2\): all ranks must make one call",
    ),
    Failure(
        "one rank is in forward while the others step",
        around(1, lambda pipe: pipe.forward(rows())),
        timeout_s=HANG,
        says=r"rank 1 was in forward \(call 2\), the others in step",
    ),
    Failure(
        "the batch of one rank does not divide",
        batch_of((12, 12, 13, 12)),
        says="rank 2, before its first action: ValueError: a batch of 13 samples does not divide",
        cheap=True,
    ),
    Failure(
        "the batch of the last rank is twice as long",
        batch_of((12, 12, 12, 24)),
        says="rank 3.*ValueError.*24 rows.*12",
        cheap=True,
    ),
    Failure("the batch of the first rank is shorter", batch_of((6, 12, 12, 12)), says="ValueError.*12 rows.*6"),
    Failure("unequal batches, some ranks without one", batch_of((12, None, None, 6)), says="ValueError.*6 rows.*12"),
    Failure("unequal batches under zb-v", batch_of((12, 12, 24, 12), "zb-v"), says="ValueError.*24.*12|12.*24"),
    Failure(
        "unequal batches in evaluate",
        batch_of((12, 12, 24, 12), call="evaluate"),
        says=r"ValueError.*\[12, 12, 24, 12\]",
    ),
    Failure(
        "other numbers of microbatches", differently(num_microbatches=4), says="ranks 0 and 2 were given different"
    ),
    Failure("other schedules", differently(schedule="gpipe"), says="ranks 0 and 2 were given different schedules"),
    Failure("another number of stages", differently(stages=2), says="was given 2 modules"),
]

FAMILY = Family(
    "A rank that fails",
    "Four ranks, most of them a pipeline; every surviving rank must name the one that failed (a timeout of 2.5 s or "
    "30 s; hangs are told a tenth of it and a second later).",
    CASES,
)
