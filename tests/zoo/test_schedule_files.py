"""Every odd or damaged file of a schedule is read right, or refused with words."""

import pytest

from tests.zoo import schedule_files
from tests.zoo.case import judge, observe


@pytest.mark.parametrize("case", schedule_files.CASES, ids=lambda case: case.what)
def test_a_file_is_right_or_refused(case):
    seen = observe(case.run)
    assert not any(word in seen.message[:200] for word in ("TypeError", "AttributeError", "KeyError")), seen.message
    judge(case, [seen])
