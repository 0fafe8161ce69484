"""The sandbox for ordinary users, for root, and where memory runs out."""

import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sandbox_forgeries import FORGERIES, PROMPT, SOLUTION, TESTS
from tasks_fakes import bench, working_sandbox

from tasks import hooks, sandbox
from tasks.sandbox import CodeTests

ROOT = Path(sandbox.__file__).parents[1]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# Reads cases (program, setup, tests, names) from stdin, runs them and prints which of them passed.
RUN_CASES = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from tasks import sandbox
cases, drop_user, seconds = json.load(sys.stdin)
if drop_user:
    sandbox.find_sandbox = lambda: sandbox.Sandbox(bwrap="/usr/bin/bwrap", drop_user=drop_user)
def passes(case):
    program, setup, tests, names = case
    tests = sandbox.CodeTests(setup=setup, tests=tests, names=tuple(names))
    return sandbox.run_program(program, tests, limits=sandbox.Limits(seconds=seconds)).passed
with ThreadPoolExecutor(2) as pool:
    print(json.dumps(list(pool.map(passes, cases))))
"""
Case = tuple[str, str, str, tuple[str, ...]]


def run_as(user: int, cases: list[Case], *, drop_user: str = "", seconds: int = 10) -> list[bool]:
    """Run cases with a Python that every user can read, on a copy of the sandbox's files."""
    working_sandbox()
    python = shutil.which("python3", path="/usr/bin")
    check = [python or "", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if python is None or subprocess.run(check, check=False).returncode:
        pytest.skip("no Python 3.11 that an ordinary user could run")
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    try:
        (folder / "tasks").mkdir()
        for path in ROOT.glob("tasks/sandbox*.py"):
            shutil.copy(path, folder / "tasks")
        (folder / "run.py").write_text(RUN_CASES)
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        words: Any = {"user": user, "group": user, "extra_groups": [], "cwd": folder, "env": {"PATH": "/usr/bin:/bin"}}
        data = json.dumps([cases, drop_user, seconds]).encode()
        done = subprocess.run([python, "run.py"], input=data, stdout=subprocess.PIPE, check=True, **words)
        found: list[bool] = json.loads(done.stdout)
        return found
    finally:
        shutil.rmtree(folder)


def case(program: str, tests: CodeTests = TESTS) -> Case:
    return program, tests.setup, tests.tests, tests.names


ACTIONS = (
    "os.fork()",
    "os.kill(os.getppid(), 9)",
    "open('/tmp/x', 'w')",
    "socket.socket()",
    "bytearray(4 << 30)",
    "mmap.mmap(-1, 4096)",
    "[threading.Thread(target=time.sleep, args=(9,)).start() for _ in range(17)]",
    "1 / (ctypes.CDLL(None).unshare(0x10000000) == 0)",
    "[open(str(n), 'w').close() or time.sleep(0.001) for n in range(5000)]",
)


@as_root
@pytest.mark.parametrize("user", [12345, 0])
def test_sandbox_works_for_ordinary_users_and_for_root_without_privileges(user: int) -> None:
    modules = "ctypes, mmap, os, socket, threading, time"
    actions = [f"import {modules}\ndef f():\n    {action}\n    return True" for action in ACTIONS]
    cases = [case(PROMPT + SOLUTION), *(case(action, CodeTests(tests="f()", names=("f",))) for action in actions)]
    found = run_as(user, cases, drop_user="" if user else "before", seconds=8)
    assert found == [True] + [False] * len(actions)


@functools.cache
def humaneval_cases() -> list[Case]:
    with gzip.open(bench() / "openai/openai_humaneval/HumanEval.jsonl.gz", "rt") as file:
        documents = [json.loads(line) for line in file]
    target = "{test}\ncheck({entry_point})"
    tests = [hooks.humaneval_tests(document, target.format(**document)) for document in documents]
    programs = [hooks.build_program(document, document["canonical_solution"]) for document in documents]
    return [case(*pair) for pair in zip(programs, tests, strict=True)]


@as_root
@pytest.mark.slow
@pytest.mark.parametrize("user", [12345, 0])
def test_canonical_solutions_pass_and_forgeries_do_not_for_every_user(user: int) -> None:
    assert run_as(user, humaneval_cases()) == [True] * 164
    assert not any(run_as(user, [case(program) for program in FORGERIES.values()], seconds=2))


# Fills 700 MB like a worker with a model, then runs programs that use more memory than is left.
WORKER = """
import sys
from tasks.sandbox import CodeTests, run_program
model = bytearray(b"x") * (700 << 20)
for program in sys.argv[1:]:
    assert not run_program(program, CodeTests(tests="assert f() is True", names=("f",))).passed, program
print("alive", len(model))
"""
MEMORY_PROGRAMS = (
    "x = bytearray(b'x') * (900 << 20)\nwhile True: pass",
    "import mmap\nx = [mmap.mmap(-1, 100 << 20) for _ in range(30)]\nfor m in x: m.write(bytes(100 << 20))",
    "import mmap\nx = mmap.mmap(-1, 900 << 20, flags=mmap.MAP_PRIVATE)\nwhile True: x[::4096] = b'x' * (900 << 8)",
    "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').write(bytes(4096))",
    "def f(): return [['x'] * 1000 for _ in range(100_000)]",
)


@as_root
def test_kernel_does_not_kill_the_worker_when_memory_runs_out() -> None:
    working_sandbox()
    group = memory_cgroup(1536 << 20)
    try:
        script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        words = ["sh", "-c", script, "sh", sys.executable, "-c", WORKER, *MEMORY_PROGRAMS]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (f"alive {700 << 20}\n", 0), done.stderr
    finally:
        group.rmdir()


def memory_cgroup(size: int) -> Path:
    """A new cgroup with this much memory; skips the test where none can be made."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"sandbox-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(size))
            return group
        group.rmdir()
    pytest.skip("no memory cgroup can be created here")
