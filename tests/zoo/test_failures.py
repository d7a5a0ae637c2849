"""Every way to fail a rank, on four processes: the survivors name it, in time."""

import pytest

from tests.zoo import failures
from tests.zoo.case import judge
from tests.zoo.crew import SIZE, Crew


@pytest.fixture(scope="module")
def crew():
    made = Crew()
    yield made
    made.close()


def marked(case):
    return pytest.param(case, id=case.what, marks=() if case.cheap else pytest.mark.full)


@pytest.mark.parametrize("case", [marked(case) for case in failures.CASES])
def test_a_failure_is_named_on_every_rank(crew, case):
    answers = crew(failures.__name__, failures.CASES.index(case), case)
    assert sorted(answers) == [rank for rank in range(SIZE) if rank not in case.lost], "who answered"
    judge(case, [seen for _, seen in answers.values()])
    bound = 1.1 * case.timeout_s + 9 if case.timeout_s == failures.HANG else 12
    assert all(seconds < bound for seconds, _ in answers.values()), [seconds for seconds, _ in answers.values()]
