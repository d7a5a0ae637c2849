"""`make test-versions`: an environment per version of torch, a short cover of the tests in each, a table.

    python tests/versions.py 2.11.0 2.12.1 2.13.0 latest          # PYTHON=python3.13 for another interpreter

Environments stay in .versions/, so that a second call takes minutes. The exit status is 1 where a test failed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# what a new torch has broken before, and what a training step runs through: autograd, collectives, every layout
COVER = [
    "tests/autograd",
    "tests/optimizer",
    "tests/parallel_state",
    "tests/pipeline/test_draw.py",
    "tests/pipeline/test_torch_csv.py",
    "tests/data_parallel/test_bytes.py",
    "tests/data_parallel/test_stages.py",
    "tests/parity/test_pipeline.py",
    "tests/parity/test_universal.py",
    "tests/dist_checkpointing/test_import.py",
    "tests/training/test_average.py",
    "tests/training/test_texts.py",
]
NEEDED = ["pytest>=8", "hypothesis>=6.100", "tomli_w>=1", "pyyaml>=6", "transformers>=4.56"]


def tried(torch: str, python: str) -> tuple[str, bool]:
    """(a row of the table, whether all passed)."""
    environment = ROOT / ".versions" / f"torch-{torch}-{Path(python).name}"
    own = environment / "bin" / "python"
    begin = time.perf_counter()
    if not (environment / "ready").exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
        wanted = "torch" if torch == "latest" else f"torch=={torch}"
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted]
        subprocess.run([*install, "-e", f"{ROOT}[train,huggingface]", *NEEDED], check=True)
        (environment / "ready").touch()
    installed = time.perf_counter()
    says = "import platform, torch; print(torch.__version__, platform.python_version())"
    version, interpreter = subprocess.check_output([own, "-c", says], text=True).split()
    done = subprocess.run(
        [own, "-m", "pytest", "-m", "not full", *COVER],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    log = environment / "tests.log"
    log.write_text(done.stdout + done.stderr)
    summary = _summary(done.stdout)
    minutes = (time.perf_counter() - installed) / 60
    print(f"torch {version}, Python {interpreter}: {summary} in {minutes:.1f} min ({log})", flush=True)
    if installed - begin > 1:
        print(f"  (installed in {(installed - begin) / 60:.1f} min)", flush=True)
    return f"| {version} | {interpreter} | {summary} |", done.returncode == 0


def _summary(output: str) -> str:
    """`812 passed, 3 skipped` by the characters of pytest's dots, as quiet runs print no last line."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "errors": 0, "known not to": 0}
    names = {".": "passed", "F": "failed", "s": "skipped", "E": "errors", "x": "known not to"}
    for line in output.splitlines():
        dots, _, percent = line.rpartition("[")
        if percent.endswith("%]") and set(dots.strip()) <= set(names):
            for dot in dots.strip():
                counts[names[dot]] += 1
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no test ran"


def main() -> int:
    python = os.environ.get("PYTHON", sys.executable)
    rows = [tried(version, python) for version in sys.argv[1:] or ["latest"]]
    print("\n| torch | Python | cover |\n|---|---|---|\n" + "\n".join(row for row, _ in rows))
    return 0 if all(passed for _, passed in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
