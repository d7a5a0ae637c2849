"""Every file of DeepSpeed's is right, told or refused with words."""

import pytest

from tests.zoo import deepspeed
from tests.zoo.case import judge, observe


@pytest.mark.parametrize("case", deepspeed.CASES, ids=lambda case: case.what)
def test_a_file_is_right_told_or_refused(case):
    judge(case, [observe(case.run)])
