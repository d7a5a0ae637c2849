"""Validation: what each text of a corpus costs the model of an executor."""

from core.parallel_state import ParallelState
from core.training.run.data import Corpus, moved_to
from core.training.run.evaluate import StepExecutor, TextLoss, evaluate_text


def evaluate_texts(executor: StepExecutor, corpus: Corpus, ps: ParallelState) -> dict[str, TextLoss]:
    """Name -> loss of each validation text. Collective."""
    here, rank, size = moved_to(ps.device), ps.index("dp"), ps.size("dp")
    found = {}
    for name, text in corpus.validation_texts.items():
        found[name] = evaluate_text(executor, map(here, text.validation(rank, size)), len(text.valid_text))
    return found
