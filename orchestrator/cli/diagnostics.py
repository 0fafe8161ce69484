"""`reuse-sweep check` and `parity` verify what this machine computes; `version` prints versions. For bug reports."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.cli.console import Parser, parse_options, say
from orchestrator.cli.sampling import DEVICE_HELP, ModelOptions, SourceOptions
from orchestrator.core import system
from orchestrator.planning.fields import setting, shared
from orchestrator.planning.settings import SweepSettings
from sampler.errors import InputError, counted

CHECK_EXAMPLES = """examples:
  reuse-sweep check --device cuda                     the first command on a new GPU
  reuse-sweep check --device cuda --model Efficient-Large-Model/Fast_dLLM_v2_7B
  reuse-sweep check --device cpu --json
"""
PARITY_EXAMPLES = """examples:
  reuse-sweep parity --model DIR --python ENV/bin/python
  reuse-sweep parity --model Efficient-Large-Model/Fast_dLLM_v2_1.5B --python ENV/bin/python --device cuda
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions(SourceOptions):
    model: str = shared(SourceOptions, "model", default="tiny", metavar="MODEL")
    dtype: str = shared(SweepSettings, "dtype")
    device: str = shared(ModelOptions, "device")
    out: Path = setting(Path("check.json"), metavar="FILE", help="write the results to this file, for a bug report")
    json: bool = setting(False, help="print the results as JSON instead of a table")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityOptions(SourceOptions):
    model: str = setting(verbatim=True, metavar="MODEL", help="a directory or Hub id with its own modelling code")
    python: Path = setting(
        metavar="FILE", help="Python interpreter of an environment with the packages that the code needs"
    )
    device: str = setting("cpu", metavar="DEVICE", help=f"{DEVICE_HELP}; both run in float32")
    json: bool = setting(False, help="print the result as JSON")


def check(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep check",
        description="Verifies that a device computes correctly in the model's dtype, and fast enough. "
        "Exit code: 0 if all checks passed, 1 if one failed.",
        examples=CHECK_EXAMPLES,
    )
    options = parse_options(parser, CheckOptions, arguments)
    if not options.out.absolute().parent.is_dir() or options.out.is_dir():
        raise InputError(f"--out must be a file in an existing directory (got {options.out})")
    options.start()
    import torch

    from orchestrator.planning.estimate import free_on, memory_needed
    from sampler.check import BATCH, Memory, run_checks
    from sampler.device import numeric_flags, pick_device, pick_dtype
    from sampler.loading import load_model

    device = pick_device(options.device)
    dtype = str(pick_dtype(options.dtype, device)).removeprefix("torch.")
    files = options.find()
    memory = Memory(free=free_on(device), needed=memory_needed(files.config, dtype, batch_size=BATCH))
    model = load_model(files, dtype=dtype, device=options.device)
    about = system.describe_device(device.type, device.index)
    if not options.json:
        print(f"{options.model} in {dtype} on {about['name']}, torch {torch.__version__}", flush=True)
    results = []
    for result in run_checks(model, memory):
        results.append(result)
        if not options.json:
            state = {None: "-", True: "pass", False: "FAIL"}[result.passed]
            print(f"{state:5} {result.name:16} {result.detail}", flush=True)
    failed = [result.name for result in results if result.passed is False]
    with numeric_flags() as flags:
        contents = {
            "passed": not failed,
            "checks": [result.as_json() for result in results],
            "model": {"source": options.model, "revision": files.revision, "dtype": dtype},
            "device": about,
            "numeric_flags": flags,
            "packages": system.package_versions(),
            "code": system.code_version(),
        }
    text = json.dumps(contents, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        summary = (
            f"{len(failed)} of {counted(len(results), 'check')} failed: {', '.join(failed)}"
            if failed
            else "all checks passed"
        )
        print(f"{summary}; {options.out} has the details for a bug report")
    if failed:
        sys.exit(1)


def parity(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep parity",
        description="Runs the checkpoint's own Python code (as trust_remote_code does) with another interpreter and "
        "compares its logits and tokens with those of this package, step by step. Only run it for code that you trust. "
        "Exit code: 0 if they agree, 1 if they differ.",
        examples=PARITY_EXAMPLES,
    )
    options = parse_options(parser, ParityOptions, arguments)
    if not os.access(options.python, os.X_OK) or options.python.is_dir():
        raise InputError(f"--python {options.python} is not an interpreter; give a path such as ENV/bin/python")
    options.start()
    from sampler.loading import load_model
    from sampler.parity import code_files, compare

    files = options.find(code=True)
    scripts = code_files(files.folder)
    listed = ", ".join(f"{name} (sha256 {digest}…)" for name, digest in scripts.items())
    print(f"running {listed} of {files.folder} with {options.python}", file=sys.stderr, flush=True)
    comparison = compare(load_model(files, dtype="float32", device=options.device), options.python.absolute())
    differences = comparison.differences
    versions = ", ".join(f"{name} {value}" for name, value in comparison.child.items())
    if options.json:
        print(json.dumps({"agrees": not differences, "code": scripts, **asdict(comparison)}, indent=1))
    else:
        largest = f"logits differ by at most {comparison.largest:.2g}"
        print(f"{counted(comparison.states, 'step')} compared with {versions}; {largest}")
        if differences:
            print(f"{counted(len(differences), 'different step')}, first at {differences[0]}")
        else:
            print("all logits and tokens agree")
    if differences:
        sys.exit(1)


def version(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep version",
        description="Prints versions, devices and cache directories, for bug reports.",
        examples="examples:\n  reuse-sweep version\n",
    )
    parser.parse_args(arguments)
    from huggingface_hub import constants

    from orchestrator.analysis.trial_facts import describe_code

    code = system.code_version()
    say(system.PROJECT, f"{code['version'] or 'not installed'} ({describe_code(code)})")
    for name, installed in system.package_versions().items():
        say(name, installed)
    say("system:", platform.platform())
    try:
        for device in system.devices_here():
            say(f"device: {device.name}, {device.dtype}, {device.total / 2**30:.1f} GiB")
    except InputError as problem:  # for instance, a driver that is too old
        say(f"device: {problem}")
    say("Hub cache:", constants.HF_HUB_CACHE)
    say("temporary files:", tempfile.gettempdir())
