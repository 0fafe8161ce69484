"""`reuse-sweep COMMAND`, also `python -m orchestrator.cli COMMAND`: finds and runs the sub-command."""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import NoReturn

from orchestrator.cli.console import run_command
from sampler.errors import InputError, did_you_mean

COMMANDS = {  # name: module, what it does
    "sweep": ("sweep", "run policies over benchmarks; the same command again continues"),
    "status": ("reports", "show the progress of a sweep"),
    "report": ("reports", "write the report of a sweep: HTML, Markdown, figures"),
    "export": ("reports", "export results as lm-eval files or CSV, or push them to the Hub"),
    "import": ("reports", "import results that lm-eval wrote with another engine"),
    "track": ("reports", "send totals and verdicts to TensorBoard, W&B, MLflow or Trackio"),
    "tasks": ("tasks", "list the benchmarks, or run one without Ray"),
    "generate": ("sampling", "continue prompts from standard input"),
    "score": ("sampling", "compute log-likelihoods of texts from standard input"),
    "profile": ("sampling", "measure how much each layer changes between passes"),
    "check": ("diagnostics", "verify that a device computes correctly and fast enough"),
    "parity": ("diagnostics", "compare a model with its checkpoint's own code, step by step"),
    "bench": ("bench", "measure the speed of a model, or where a sweep spends its time"),
    "slurm": ("slurm", "submit a sweep to Slurm, or show the status of its jobs"),
    "version": ("diagnostics", "print versions, devices and cache directories, for bug reports"),
}
HELP = """usage: reuse-sweep COMMAND [flags]
Compares layer-reuse policies for block-diffusion language models.

commands:
{commands}

examples:
  reuse-sweep sweep --tasks gsm8k,minerva_math --limit 100
  reuse-sweep report results/tiny --open
`reuse-sweep COMMAND --help` describes the flags of a command."""


def main(command: str | None = None) -> NoReturn:
    """The entry point. Modules such as orchestrator.status pass their `command`; otherwise it is the first argument."""
    words = sys.argv[1:] if command is None else [command, *sys.argv[1:]]
    is_sweep = words[:1] == ["sweep"]
    if is_sweep:  # it handles Ctrl-C itself; until then there is nothing to clean up
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_command(lambda: dispatch(words), defer_output_errors=is_sweep)


def dispatch(words: Sequence[str]) -> None:
    command, *arguments = words or ["--help"]
    if command in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())))
        return
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS, otherwise=f"commands are {', '.join(COMMANDS)}")
        raise InputError(f"unknown command {command!r}; {hint}")
    module = import_module(f"orchestrator.cli.{COMMANDS[command][0]}")
    getattr(module, f"{command}_" if iskeyword(command) else command)(arguments)


if __name__ == "__main__":
    main()
