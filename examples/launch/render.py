"""A job file for Slurm or Kubernetes from a run's configuration; torchrun is the engine of both.

    python examples/launch/render.py slurm --nodes 4 --processes 8 --config run.toml > job.sbatch && sbatch job.sbatch
    python examples/launch/render.py kubernetes --nodes 4 --processes 8 --config runs/run.toml | kubectl apply -f -

The configuration is checked against nodes x processes ranks first, so that nothing waits in a queue to fail;
`--no-check` where the data lies elsewhere.
"""

import re
import string
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from core.training import RunConfig
from core.training.log.console import errors_as_one_line

FILES = {"slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}


class _Template(string.Template):
    delimiter = "@"  # `$` and `%` belong to the shell and to Slurm
    idpattern = r"[a-z]+"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job file is told. nodes: machines or pods. processes: ranks on each of them, one per accelerator."""

    nodes: int = 1
    processes: int = 8
    config: str = "run.toml"
    name: str = "pretrain"
    script: str = "examples/pretrain_gpt.py"
    python: str = "python"
    cpus: int = 64
    threads: int = 4
    hours: int = 24
    port: int = 29500
    grace: int = 120  # seconds between SIGTERM and the end
    image: str = "pytorch/pytorch:latest"  # kubernetes: with this project and its train extra installed
    claim: str = "training"  # kubernetes: the volume claim that becomes /workspace: the project, its data and runs


def render(system: Literal["slurm", "kubernetes"], job: Job) -> str:
    """The text of the job file. Raises ValueError: values that no job file can hold, all of them."""
    wrong = [f"{name}={n} must be at least 1" for name, n in asdict(job).items() if isinstance(n, int) and n < 1]
    wrong += [f"port={job.port} must be at most 65535"] if job.port > 65535 else []
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", job.name):
        wrong.append(f"name={job.name!r} must be small letters, digits and hyphens, at most 52, as for a host")
    wrong += [
        f"{field}={value!r} holds other characters than letters, digits and ./:@+-_"
        for field, value in asdict(job).items()
        if isinstance(value, str) and field != "name" and not re.fullmatch(r"[\w./:@+-]+", value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    text = (Path(__file__).parent / FILES[system]).read_text(encoding="utf-8")
    values = asdict(job) | {"restarts": 10 * job.nodes}
    return _Template(text).substitute({name: str(value) for name, value in values.items()})


def main(
    system: tyro.conf.Positional[Literal["slurm", "kubernetes"]],
    job: tyro.conf.OmitArgPrefixes[Job],
    check: bool = True,
) -> None:
    """Print the job file."""
    text = render(system, job)
    if check:
        if not Path(job.config).is_file():
            raise ValueError(f"config={job.config} is not here to be checked; give a file, or --no-check")
        run = RunConfig.from_toml(job.config).check(job.nodes * job.processes)
        if run.checkpoint.directory is None:
            print("note: without checkpoint.directory a job that is started again begins at step 0", file=sys.stderr)
    print(text, end="")


if __name__ == "__main__":
    with errors_as_one_line():
        tyro.cli(main, description=__doc__)
