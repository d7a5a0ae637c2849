"""The room's door: every public name, and no heavy import before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import core.datasets
from core.lazy_exports import exported


@pytest.mark.parametrize("name, home", exported("core.datasets").items())
def test_public_names_exist_and_are_defined_where_the_door_says(name, home):
    assert getattr(getattr(core.datasets, name), "__module__", home) == home


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; it has .*GPTBatches"):
        _ = core.datasets.nothing


def test_bytes_are_prepared_and_inspected_without_torch_and_any_extra(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    missing = ["torch", "tokenizers", "rich", "pyarrow", "datasets", "zstandard", "tyro"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "from core.datasets import inspect, prepare, split_documents, load_tokenizer\n"
        f"assert prepare.main(['--input', '{tmp_path}/a.txt', '--output', '{tmp_path}/b']) == 0\n"
        f"assert inspect.main(['{tmp_path}/b', '--verify']) == 0\n"
        f"more = ['--output', '{tmp_path}/c', '--train-tokenizer', '300']\n"
        f"assert prepare.main(['--input', '{tmp_path}/a.txt', *more]) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'some text" in done.stdout
    assert "error: the tokenizer needs the package tokenizers: pip install tokenizers" in done.stderr


def test_files_and_order_need_neither_torch_nor_tokenizers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['tokenizers'] = None\n"
        "from core.datasets import TokenFile, sample_ids, standard_library, bits_per_byte\n"
        "try:\n    from core.datasets import Tokenizer\n"
        "except ImportError as error:\n    assert 'pip install tokenizers' in str(error)\n"
        "else:\n    raise AssertionError('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
