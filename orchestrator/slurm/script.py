"""Renders the batch script of a sweep."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.running.environment import LONGEST_TEMPORARY, OBJECT_STORE, QUIET
from orchestrator.slurm.job import Job


def directives_of(job: Job, *, name: str, path: Path, here: Path) -> list[str]:
    """All options of sbatch, without the leading dashes."""
    return [
        f"job-name={name}",
        "dependency=singleton",  # a sweep has one writer: its second job waits for the first, and continues
        *job.directives(),
        "no-kill",  # trials of a node that fails run on the others
        "export=ALL",
        "open-mode=append",
        f"output={path.with_suffix('')}-%j.log",
        f"chdir={here}",
    ]


def script_of(
    job: Job, flags: Sequence[str], *, name: str, path: Path, here: Path, dashboard: bool, binds: Sequence[Path] = ()
) -> str:
    """The script that will be stored at `path`, in the sweep's directory.

    Relative paths among the sweep's `flags` are relative to `here`. `binds` are the paths that a container can see.
    Nothing of the environment is written into the script: sbatch passes it on, with HF_TOKEN and Ray's token.
    """
    stem = path.with_suffix("")
    template = Environment(
        loader=PackageLoader("orchestrator.slurm"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
        comment_start_string="{##",  # {# is a length in bash
        comment_end_string="##}",
    ).get_template("job.sh.j2")
    return template.render(
        script=shlex.quote(str(path)),
        directives=[_quoted(directive) for directive in directives_of(job, name=name, path=path, here=here)],
        python="python" if job.container else shlex.quote(sys.executable),
        setup=None if job.setup is None else shlex.quote(str(job.setup.resolve())),
        image=None if job.image is None else shlex.quote(job.image),
        binds=[shlex.quote(str(bind)) for bind in binds],
        gpus=job.gpus_per_node > 0,
        exports=shlex.join(f"{switch}={value}" for switch, value in QUIET.items()),
        logs=shlex.quote(str(stem)),
        folder=shlex.quote(str(path.parent.parent)),
        longest=LONGEST_TEMPORARY,
        object_store=OBJECT_STORE,
        dashboard=dashboard,
        flags=shlex.join(flags),
        requeue=job.requeue,
    )


def _quoted(directive: str) -> str:
    """A directive as sbatch reads it in a script. Values contain no double quotes."""
    option, equals, value = directive.partition("=")
    return f'{option}="{value}"' if equals and re.search(r"[\s'#]", value) else directive
