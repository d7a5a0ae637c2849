"""The example does what it says, on one process."""

import runpy
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "examples" / "reshard.py")


def test_it_reads_at_another_layout_and_copies(tmp_path, capsys):
    runpy.run_path(SCRIPT, run_name="recipe")["run"](str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    read = [line for line in lines if line.startswith("saved by 2 ranks")]
    assert len(read) == 6 and all(line.endswith("max |difference| 0.0") for line in read)
    assert any("no data movement needed" in line and "tp=4" in line for line in lines)
    assert any("for-tp3" in line and "verified" in line for line in lines)
    assert any(line.startswith("the same: 1 arrays") for line in lines)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000001", "for-tp3"}
