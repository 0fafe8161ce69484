"""The batch script of one sweep, from its template. Writes no file and starts nothing."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.running.environment import LONGEST_TEMPORARY, OBJECT_STORE, QUIET
from orchestrator.slurm.job import Job


def directives_of(job: Job, *, name: str, path: Path, here: Path) -> list[str]:
    """All that sbatch is told, without the leading dashes."""
    return [
        f"job-name={name}",
        "dependency=singleton",  # a sweep has one writer: a second job of it waits for the first, and continues
        *job.directives(),
        "no-kill",  # a node that fails takes its trials along, and others run them
        "export=ALL",
        "open-mode=append",
        f"output={path.with_suffix('')}-%j.log",
        f"chdir={here}",
    ]


def script_of(job: Job, flags: Sequence[str], *, name: str, path: Path, here: Path, dashboard: bool) -> str:
    """`path`: where it will lie, in the sweep's folder. `here`: where relative paths among the flags mean something.

    Nothing of the environment is written into it: sbatch hands that on by itself, HF_TOKEN with it.
    """
    stem = path.with_suffix("")
    template = Environment(
        loader=PackageLoader("orchestrator.slurm"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
        comment_start_string="{##",  # the usual one is a length in bash
        comment_end_string="##}",
    ).get_template("job.sh.j2")
    return template.render(
        script=shlex.quote(str(path)),
        directives=[_quoted(told) for told in directives_of(job, name=name, path=path, here=here)],
        python=shlex.quote(sys.executable),
        setup=None if job.setup is None else shlex.quote(str(job.setup.resolve())),
        exports=shlex.join(f"{switch}={value}" for switch, value in QUIET.items()),
        logs=shlex.quote(str(stem)),
        folder=shlex.quote(str(path.parent.parent)),
        longest=LONGEST_TEMPORARY,
        object_store=OBJECT_STORE,
        dashboard="true" if dashboard else "false",
        flags=shlex.join(flags),
        requeue=job.requeue,
    )


def _quoted(directive: str) -> str:
    """As sbatch reads it in a script; what it is told holds no double quotes."""
    option, equals, value = directive.partition("=")
    return f'{option}="{value}"' if equals and re.search(r"[\s'#]", value) else directive
