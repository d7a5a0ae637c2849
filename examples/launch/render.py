"""A job file for Slurm or Kubernetes from a run's configuration; torchrun is the engine of both.

    python examples/launch/render.py slurm --nodes 4 --processes 8 --config run.toml > job.sbatch && sbatch job.sbatch
    python examples/launch/render.py kubernetes --nodes 4 --processes 8 --config runs/run.toml | kubectl apply -f -

The configuration is checked against nodes x processes ranks first, so that nothing waits in a queue to fail;
`--no-check` where the data lies elsewhere.
"""

import argparse
import re
import string
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from core.training import RunConfig
from core.training.log.console import errors_as_one_line

FILES = {"slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}


class _Template(string.Template):
    delimiter = "@"  # `$` and `%` belong to the shell and to Slurm
    idpattern = r"[a-z]+"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job file is told. nodes: machines or pods. processes: ranks on each of them, one per accelerator.

    script: a module, or a file that ends in .py. The empty ones are left out of the file; directives and commands
    are lines of their own, separated by ";".
    """

    nodes: int = 1
    processes: int = 8
    config: str = "run.toml"
    name: str = "pretrain"
    script: str = "core.pretrain"
    python: str = "python"
    cpus: int = 64
    threads: int = 4
    hours: int = 24
    port: int = 29500
    grace: int = 120  # seconds between SIGTERM and the end
    image: str = (
        "pytorch/pytorch:latest"  # kubernetes: with this project and its train extra installed
    )
    claim: str = "training"  # kubernetes: the volume claim that becomes /workspace: the project, its data and runs
    partition: str = ""  # Slurm's, as the four below
    account: str = ""
    qos: str = ""
    gres: str = ""  # "gpu:h100:8" in the place of --gpus-per-node
    container: str = ""  # an image, for clusters whose srun has --container-image
    directives: str = ""  # more lines that begin with #SBATCH: "exclusive; mail-type=END"
    commands: str = (
        ""  # of the shell, before the run: "module load cuda; source .venv/bin/activate"
    )


_LINES = ("directives", "commands")
_OPTIONAL = ("partition", "account", "qos", "gres", "container")


def render(system: str, job: Job) -> str:
    """The text of the job file. Raises ValueError: values that no job file can hold, all of them."""
    wrong = [
        f"{name}={n} must be at least 1"
        for name, n in asdict(job).items()
        if isinstance(n, int) and n < 1
    ]
    wrong += [f"port={job.port} must be at most 65535"] if job.port > 65535 else []
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", job.name):
        wrong.append(
            f"name={job.name!r} must be small letters, digits and hyphens, at most 52, as for a host"
        )
    wrong += [
        f"{field}={value!r} holds other characters than letters, digits and ./:@+-_"
        for field, value in asdict(job).items()
        if isinstance(value, str)
        and field not in ("name", *_LINES)
        and not re.fullmatch(r"[\w./:@+-]*" if field in _OPTIONAL else r"[\w./:@+-]+", value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    text = (Path(__file__).parent / FILES[system]).read_text(encoding="utf-8")
    program = [job.script] if job.script.endswith(".py") else ["-m", job.script]
    values = asdict(job) | {
        "restarts": 10 * job.nodes,
        "program": " ".join(program),
        "words": f"\n{' ' * 12}- ".join(program),
        "directives": "".join(f"#SBATCH {line}\n" for line in _directives(job)),
        "commands": "".join(
            f"{line.strip()}\n" for line in job.commands.split(";") if line.strip()
        ),
        "container": f" --container-image={job.container}" if job.container else "",
    }
    return _Template(text).substitute({name: str(value) for name, value in values.items()})


def _directives(job: Job) -> list[str]:
    """What stands behind #SBATCH in lines that not every cluster needs."""
    found = [
        f"--{name}={value}"
        for name in ("partition", "account", "qos")
        if (value := getattr(job, name))
    ]
    found.append(f"--gres={job.gres}" if job.gres else f"--gpus-per-node={job.processes}")
    return [
        *found,
        *(f"--{line}" for part in job.directives.split(";") if (line := part.strip(" -"))),
    ]


def main() -> None:
    """Print the job file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=FILES)
    for field in fields(Job):
        parser.add_argument(
            f"--{field.name}", type=type(field.default), default=field.default, metavar="VALUE"
        )
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="the data lies elsewhere"
    )
    told = vars(parser.parse_args())
    system, check = told.pop("system"), told.pop("check")
    job = Job(**told)
    text = render(system, job)
    if check:
        if not Path(job.config).is_file():
            raise ValueError(
                f"config={job.config} is not here to be checked; give a file, or --no-check"
            )
        run = RunConfig.from_toml(job.config).check(job.nodes * job.processes)
        if run.checkpoint.directory is None:
            print(
                "note: without checkpoint.directory a job that is started again begins at step 0",
                file=sys.stderr,
            )
    print(text, end="")


if __name__ == "__main__":
    with errors_as_one_line():
        main()
