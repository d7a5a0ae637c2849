"""docs/compatibility.md is what the cases say."""

from tests.zoo.compatibility import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m tests.zoo.compatibility"
