"""How a program ends: a mistake of the user's once per job, last on the terminal; and a reader that leaves early."""

import json
import os
import signal
import sys
import threading
import time
import traceback

# the first rank ends first, and torchrun ends the others; on a busy machine that takes seconds
_HEAD_START_S = 5.0
_LAST_CALLS = 3  # of a crash, below torchrun's lines


def say_mistake(message: str, *, lost_others: bool = False) -> None:
    """To standard error; under torchrun to the file that it shows below its own lines when this process failed.

    lost_others: this rank ends because another one did.
    """
    if not _shown_by_torchrun(message, lost_others):
        print(message, file=sys.stderr, flush=True)


def show_crash(error: BaseException, *, lost_others: bool = False) -> None:
    """The last calls of a traceback, for torchrun to show last; Python prints the whole one, above its lines."""
    crash = "".join(traceback.format_exception(error, limit=-_LAST_CALLS)).rstrip()
    _shown_by_torchrun(crash, lost_others)


def _shown_by_torchrun(message: str, lost_others: bool) -> bool:
    """False where there is no torchrun, or no room for its file."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    # torchrun's root cause is the first failure, by whole seconds: a consequence must not tie with its cause
    failed_at = int(time.time() + (_HEAD_START_S if lost_others else 0))
    facts = {"py_callstack": f"\n{message}", "timestamp": str(failed_at)}
    try:
        with open(file, "w", encoding="utf-8") as opened:
            json.dump({"message": {"message": message, "extraInfo": facts}}, opened)
    except OSError:  # a full disk, say
        return False
    return True


def say_to_reader(text: str) -> None:
    """To standard output, as long as somebody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has read enough; what is left is flushed at exit, to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def let_the_first_rank_end() -> None:
    """Before this rank ends with what all ranks found: torchrun ends it when the first one has left.

    It then ends with 0, or torchrun would list it among the failures, above the message of the first.
    """
    # Python allows handlers of signals in the main thread only
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    time.sleep(_HEAD_START_S)


def listed(mistakes: list[str]) -> str:
    """`error: ...`, or one line for each of several; what several rules met, a missing corpus say, is one mistake."""
    lines = list(dict.fromkeys(mistakes))
    if len(lines) == 1:
        return f"error: {lines[0]}"
    return "\n  ".join([f"error: this run has {len(lines)} mistakes:", *lines])
