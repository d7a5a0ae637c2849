"""The room's door: every public name, and no heavy import before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import core.datasets


@pytest.mark.parametrize("name", dir(core.datasets))
def test_public_names_exist_and_are_defined_where_the_door_says(name):
    found = getattr(core.datasets, name)
    home = core.datasets._HOME[name]
    assert getattr(found, "__module__", f"core.datasets.{home}") == f"core.datasets.{home}"


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; it has .*'GPTBatches'"):
        _ = core.datasets.nothing


def test_files_and_order_need_neither_torch_nor_tokenizers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['tokenizers'] = None\n"
        "from core.datasets import TokenFile, sample_ids, standard_library, bits_per_byte\n"
        "try:\n    from core.datasets import Tokenizer\n"
        "except ImportError as error:\n    assert 'paracore[train]' in str(error)\n"
        "else:\n    raise AssertionError('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
