"""Conversations that are longer than a row, of whose answers nothing is left."""

import pytest

from tests.datasets.test_conversations import batches, file  # noqa: F401


def test_a_conversation_of_whose_answers_nothing_is_left_is_passed_over(file):  # noqa: F811
    """Else a row without labels: 0 / 0."""
    made = batches(file, s=8)
    prompts = [len(file.document(i)) for i in range(100)]
    lost = [i for i in range(100) if not file.answers(*_reach(file, i, 8)).any()]
    assert made.unanswered == lost and 0 < len(lost) < 100
    labels = made._windows(range(made.num_samples))["labels"]
    assert (labels != -100).any(1).all()
    assert (labels != -100).sum() == sum(file.answers(*_reach(file, i, 8)).sum() for i in range(100))
    assert max(prompts) > 8
    with pytest.raises(ValueError, match="sequence_length=1 leaves nothing of the answers of all 100 conversations"):
        batches(file, s=1)


def _reach(source, number, s):
    """From the first token that a row of s inputs predicts to behind its last."""
    first = source.document_start(number)
    return first + 1, min(first + s + 1, first + len(source.document(number)))
