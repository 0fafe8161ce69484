"""Tests of the sandbox: every attack fails, leaves no trace outside, and the next program still runs."""

import os
import platform
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox_forgeries import FORGERIES, PROMPT, SOLUTION, TESTS
from tasks_fakes import working_sandbox

from tasks import hooks, sandbox, sandbox_supervisor
from tasks.sandbox import CodeTests, Limits, ProgramResult, SandboxError, run_program

QUICK = Limits(seconds=1)
ROOT = Path(sandbox.__file__).parents[1]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def run(program: str, tests: str = "assert f() is True", limits: Limits | None = None) -> ProgramResult:
    """By default the program's function `f` must return True."""
    working_sandbox()
    return run_program(textwrap.dedent(program), hooks.mbpp_tests({}, textwrap.dedent(tests)), limits=limits)


def attack(action: str, *, limits: Limits = QUICK, before: str = "") -> ProgramResult:
    """Checks that `action` fails in the sandbox. Its last line must be an expression."""
    lines = textwrap.dedent(action).strip().split("\n")
    body = "\n    ".join([*lines[:-1], f"return bool({lines[-1]}) or True"])
    program = f"import ctypes, os, sys\n{before}\ndef f():\n    {body}"
    compile(program, "attack", "exec")  # a program with a syntax error would fail in any sandbox
    result = run(program, limits=limits)
    assert not result.passed, action
    return result


# Programs and values


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def f(): return 1 + 1 == 2", True),
        ("import math, collections, typing, hashlib, re, ssl, sqlite3, decimal\ndef f(): return 3 < math.pi", True),
        ("import os\ndef f():\n    open('note', 'w').write('x')\n    return os.listdir('.') == ['note']", True),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\ndef f(): return True", True),
        ("import asyncio\nasync def g(): return True\ndef f(): return asyncio.run(g())", True),
        ("def f(): return 1", False),
        ("def g(): return True", False),
        ("def f(): return True\nraise ValueError", False),
        ("def f(:", False),
        ("\udcff", False),
        ("def f(): return True\n" + "x = 1\n" * 100_000, False),
    ],
)
def test_program_passes_only_if_its_tests_pass(program: str, passed: bool) -> None:
    assert run(program).passed is passed


def test_values_cross_as_exact_built_in_types() -> None:
    values = (
        "None, True, False, 0, -7, 1 << 9000, 1.5, -0.0, float('inf'), 3j - 1, '', 'é\\n\\udcff\\0', b'\\0x', "
        "bytearray(b'a'), [], [[1], (2, 'a')], (), (1, [2]), set(), {1, (2, 3)}, frozenset({4}), {}, "
        "{'a': [1], (1, 2): None, 3: {4: 5}}, range(2, 9, 3), [True, 1, 1.0]"
    )
    tests = f"""
    for value in [{values}]:
        returned = f(value)
        assert returned == value and type(returned) is type(value) and repr(returned) == repr(value), value
    nan = f(float("nan"))
    assert nan != nan and type(nan) is float
    assert f(1, b=[2]) == {{"b": [2]}} and list(f(iter([1, 2]))) == [1, 2]
    """
    result = run("def f(a, **b): return b or a", tests)
    assert result.passed, result.reason


def test_instances_of_subclasses_become_plain_values() -> None:
    program = """
    import collections, enum
    Point = collections.namedtuple("Point", "x y")
    class Colour(enum.IntEnum):
        RED = 1
    class Text(str):
        __eq__ = lambda self, other: True
        __hash__ = str.__hash__
    values = [collections.Counter("aab"), collections.OrderedDict(a=1), collections.defaultdict(int, b=2), Point(1, 2)]
    values += [Colour.RED, Text("x"), {1: 2}.keys(), {1: 2}.values(), collections.deque([1]), (n for n in (1, 2))]
    def f(n): return values[n]
    """
    tests = """
    assert f(0) == {"a": 2, "b": 1} and type(f(0)) is dict
    assert (f(1), f(2), f(3), f(4)) == ({"a": 1}, {"b": 2}, (1, 2), 1)
    assert [type(f(n)) for n in (1, 2, 3, 4, 5)] == [dict, dict, tuple, int, str]
    assert f(5) == "x" and f(5) != "y"
    assert f(6) == {1} and list(f(7)) == [2] and list(f(8)) == [1] and f(8) != [1]
    assert f(9) != [1, 2]
    """
    result = run(program, tests)
    assert result.passed, result.reason


def test_functions_and_objects_stay_on_their_side() -> None:
    program = """
    class Pair:
        def __init__(self, a, b): self.a, self.b = a, b
        __eq__ = lambda self, other: True
    def twice(function, value): return function(function(value))
    def adder(n): return lambda value: value + n
    def total(pairs): return sum(pair.a + pair.b for pair in pairs)
    """
    tests = """
    assert twice(lambda value: value * 3, 2) == 18
    assert twice(adder(4), 1) == 9
    assert total([Pair(1, 2), Pair(3, 4)]) == 10
    assert Pair(1, 2) != 3 and not hasattr(Pair(1, 2), "a")
    """
    result = run(program, tests)
    assert result.passed, result.reason


def test_exceptions_of_the_candidate_reach_the_tests() -> None:
    program = """
    class Own(Exception): pass
    def f(error): raise {"v": ValueError("bad"), "k": KeyError, "o": Own("x")}[error]
    """
    tests = """
    for error, kind in (("v", ValueError), ("k", KeyError), ("o", RuntimeError), ("other", KeyError)):
        try:
            f(error)
        except kind as found:
            assert type(found) is kind
        else:
            raise AssertionError(error)
    """
    result = run(program, tests)
    assert result.passed, result.reason
    assert run("def f(): raise ValueError('bad')").reason == "ValueError: bad"


def test_each_program_starts_in_an_empty_folder() -> None:
    for _ in range(2):
        assert run("import os\nfound = os.listdir('.')\nopen('left', 'w')\ndef f(): return found == []").passed


# The verdict


def test_solution_passes() -> None:
    working_sandbox()
    assert run_program(PROMPT + SOLUTION, TESTS).passed


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_does_not_pass(name: str) -> None:
    working_sandbox()
    assert not run_program(FORGERIES[name], TESTS, limits=QUICK).passed


# Limits


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(600)"])
def test_endless_program_is_stopped_after_its_time_limit(program: str) -> None:
    started = time.monotonic()
    assert run(program, limits=QUICK).reason == "time"
    assert time.monotonic() - started >= QUICK.seconds


def test_default_limits() -> None:
    assert (Limits().seconds, Limits().memory_bytes) == (10, 1 << 30)


@pytest.mark.parametrize("call", ["os.fork()", "os.posix_spawn('/usr/lib', ['x'], {})", "1 / (os.system('true') == 0)"])
def test_new_processes_are_refused(call: str) -> None:
    """The CPU time of processes that are not waited for is not counted: 16 of them could exceed the limit six times."""
    attack(call, before="import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")


def test_threads_are_limited() -> None:
    start = "threading.Thread(target=time.sleep, args=(60,)).start()"
    attack(f"[{start} for _ in range(17)]", before="import threading, time")


@pytest.mark.parametrize(
    "action",
    [
        "bytearray(4 << 30)",
        "mmap.mmap(-1, 1 << 20)",  # shared and anonymous
        "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
        "ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0 or 1 / 0",
        "ctypes.CDLL(None).semget(0, 32000, 0o1600) >= 0 or 1 / 0",
        "ctypes.CDLL(None).msgget(0, 0o1600) >= 0 or 1 / 0",
        "os.memfd_create('x')",
        "fcntl.lockf(open('x', 'w'), fcntl.LOCK_EX, 1)",  # each record lock takes kernel memory
        "os.setxattr('x', 'user.a', b'x' * 1000)",  # so does each attribute of a file
        "ctypes.CDLL(None).inotify_init1(0) >= 0 or 1 / 0",
        "ctypes.CDLL(None).mount(b'x', b'/sandbox', b'tmpfs', 0, None) == 0 or 1 / 0",
    ],
)
def test_memory_that_no_limit_counts_is_refused(action: str) -> None:
    attack(action, before="import fcntl, mmap\nopen('x', 'w').close()")


def test_program_cannot_fill_the_disk() -> None:
    attack("[file.write(bytes(1 << 20)) for _ in range(8)]", before="file = open('big', 'wb')")
    attack("[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(64)]")
    many = "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').close()"
    assert run(many, limits=Limits()).reason == "files"


def test_output_is_limited() -> None:
    for stream in ("stdout", "stderr"):
        program = f"import sys\nfor _ in range(10_000): sys.{stream}.write('x' * 1_000_000)"
        assert run(program).reason == "output"


def test_limits_apply_without_a_sandbox() -> None:
    tests = CodeTests(tests="assert f() is True", names=("f",))
    quick: dict[str, Any] = {"sandboxed": False, "limits": QUICK}
    assert run_program("import os\ndef f(): return 'PATH' not in os.environ", tests, sandboxed=False).passed
    assert run_program("while True: pass", tests, **quick).reason == "time"
    assert not run_program("x = bytearray(4 << 30)\ndef f(): return True", tests, **quick).passed
    left = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\ntime.sleep(30)"
    assert run_program(left, tests, **quick).reason == "time"


# Escapes

EPERM, ENOSYS = 1, 38
CALLS = {  # with arguments for which the kernel itself would return another error, or none
    "unshare": (272, 97, "0x10000000"),
    "clone with a user namespace": (56, 220, "0x10000011, 0, 0, 0, 0"),
    "clone with a thread in a user namespace": (56, 220, "0x10010f00, 0, 0, 0, 0"),
    "clone3": (435, 435, "0, 0"),
    "setns": (308, 268, "-1, 0"),
    "mount": (165, 40, "0, 0, 0, 0, 0"),
    "open_tree": (428, 428, "-1, 0, 0"),
    "move_mount": (429, 429, "-1, 0, -1, 0, 0"),
    "fsopen": (430, 430, "0, 0"),
    "fsconfig": (431, 431, "-1, 0, 0, 0, 0"),
    "fsmount": (432, 432, "-1, 0, 0"),
    "fspick": (433, 433, "-1, 0, 0"),
    "mount_setattr": (442, 442, "-1, 0, 0, 0, 0"),
    "pidfd_open": (434, 434, "1, 0"),
    "pidfd_getfd": (438, 438, "-1, 0, 0"),
    "ptrace": (101, 117, "16, -1, 0, 0"),
    "process_vm_readv": (310, 270, "-1, 0, 0, 0, 0, 0"),
    "keyctl": (250, 219, "0, 0"),
    "bpf": (321, 280, "0, 0, 0"),
    "io_uring_setup": (425, 425, "0, 0"),
    "sendmsg": (46, 211, "-1, 0, 0"),
    "io_setup": (206, 0, "0, 0"),
    "vmsplice": (278, 75, "-1, 0, 0, 0"),
    "setxattr": (188, 5, "0, 0, 0, 0, 0"),
}


@pytest.mark.skipif(platform.machine() not in sandbox.MACHINES, reason="no system call filter for this machine")
def test_filter_refuses_system_calls() -> None:
    column = list(sandbox.MACHINES).index(platform.machine())
    calls = {name: f"{call[column]}, {call[2]}" for name, call in CALLS.items()}
    program = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = {}\n"
    for name, arguments in calls.items():
        program += f"found[{name!r}] = ctypes.get_errno() if libc.syscall({arguments}) == -1 else 0\n"
    expected = {name: ENOSYS if name == "clone3" else EPERM for name in calls}
    tests = f"found = f()\nassert found == {expected}, found"
    result = run(f"{program}\ndef f(): return found", tests)
    assert result.passed, result.reason


def test_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="no system call filter for riscv64, only for x86_64 and aarch64"):
        sandbox.find_sandbox.__wrapped__()


@pytest.mark.parametrize(
    "action",
    ["os.kill(os.getppid(), 9)", "os.kill(0, 9)", "os.kill(-1, 9)", "os.killpg(0, 9)", f"os.kill({os.getpid()}, 9)"],
    ids=["parent", "own group", "everybody", "killpg", "worker"],
)
def test_program_cannot_signal_other_processes(action: str) -> None:
    assert attack(action).reason.startswith("PermissionError")


SECRET = "hf_" + "secret" * 5


@pytest.mark.parametrize(
    "search",
    [
        "str(os.environ) + str(os.environb)",
        "''.join(open(f'/proc/{pid}/environ', errors='replace').read() for pid in range(1, 100))",
        f"open('/proc/{os.getpid()}/environ', errors='replace').read()",
        f"open('/proc/{os.getpid()}/mem', 'rb').read(10).hex()",
        "ctypes.string_at(ctypes.pythonapi.environ).decode()",
    ],
    ids=["environ", "all environments", "worker's environment", "worker's memory", "C environ"],
)
def test_token_is_out_of_reach(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    attack(f"1 / ({SECRET[:4]!r} + {SECRET[4:]!r} in {search})")


def test_home_and_packages_are_invisible(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    attack(f"open({str(tmp_path / 'token')!r}).read()")
    attack(f"os.stat({str(Path.home() / '.cache')!r})")
    attack(f"os.stat({str(Path(pytest.__file__).parent)!r})")
    attack(f"os.stat({sandbox.__file__!r})")
    attack("__import__('pytest')")


def test_only_the_standard_library_of_the_prefix_is_visible() -> None:
    program = """
    import os, sys
    library = os.path.dirname(os.__file__)
    found = {os.path.join(folder, name) for folder, _, names in os.walk(sys.prefix) for name in names}
    def inside(path): return path.startswith((library + "/", "/usr/lib", "/usr/share/zoneinfo")) or ".so" in path
    def f(): return sorted(path for path in found if not inside(path) and path != os.path.realpath(sys.executable))
    folders = [library + "/site-packages", "/usr/lib/python3"]
    def packages(): return [os.listdir(path) for path in folders if os.path.isdir(path)]
    """
    tests = "assert f() == [], f()\nassert not any(packages()), packages()"
    result = run(program, tests)
    assert result.passed, result.reason


@pytest.mark.parametrize("place", ["/x", "/usr/lib/x", "/etc/x", "/tmp/x", "/dev/shm/x", "/dev/x", "{tmp}/x"])
def test_program_cannot_write_outside_its_folder(place: str, tmp_path: Path) -> None:
    path = place.format(tmp=tmp_path)
    attack(f"open({path!r}, 'w').write('x')")
    assert not Path(path).exists()


@as_root
def test_mounts_below_visible_folders_are_read_only() -> None:
    """In a mount namespace of its own, a writable file system is mounted below /usr/lib."""
    working_sandbox()
    folders = (path for path in Path("/usr/lib").iterdir() if path.is_dir())
    place = next(str(path) for path in folders if not path.name.startswith("python"))
    program = f"def f(): return bool(open({place + '/x'!r}, 'w').write('x'))"
    code = f"""
        import sys
        from tasks.sandbox import CodeTests, run_program
        open({place + "/y"!r}, "w").close()
        tests = CodeTests(tests="f()", names=("f",))
        sys.exit(run_program({program!r}, tests).reason)
    """
    words = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o mode=0777 x {place} && exec "$@"', "sh"]
    words += [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize("path", [os.path.realpath(sys.executable), os.__file__])
def test_program_cannot_change_the_interpreter(path: str) -> None:
    before = Path(path).stat()
    attack(f"open({path!r}, 'ab').write(b'x')")
    attack(f"os.chmod({path!r}, 0o777)")
    assert Path(path).stat()[:7] == before[:7]


def test_program_cannot_open_a_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        server.settimeout(0.2)
        port = server.getsockname()[1]
        attack(f"socket.create_connection(('127.0.0.1', {port}), 1)", before="import socket")
        attack(f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})", before="import socket")
        attack("socket.getaddrinfo('example.org', 80)[0]", before="import socket")
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_descriptor_is_a_socket_of_the_host() -> None:
    program = """
    import os, stat
    def f():
        kinds = []
        for descriptor in range(64):
            try: kinds.append(stat.S_ISSOCK(os.fstat(descriptor).st_mode))
            except OSError: pass
        return len(kinds) == 5 and not any(kinds)
    """
    assert run(program).passed


def test_program_cannot_gain_privileges(tmp_path: Path) -> None:
    attack("os.setuid(0)")
    attack("os.mknod('disk', 0o600 | 0o060000, os.makedev(254, 0))")
    path = tmp_path / "x"
    attack(f"1 / (posix.system('touch {path}') == 0)", before="import posix")
    attack(f"1 / (ctypes.CDLL(None).system(b'touch {path}') == 0)")
    assert not path.exists()
    assert run("import os\ndef f(): return 0 not in {os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()}").passed


# The supervisor


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [member for child in children for member in (int(child), *descendants(int(child)))]


def test_all_processes_die_with_the_caller_and_are_killed_first_when_memory_runs_out() -> None:
    working_sandbox()
    program = "import time\ntime.sleep(600)"
    code = f"from tasks.sandbox import *\nrun_program({program!r}, CodeTests(tests='f()', names=('f',)))"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 900
    while len(members := descendants(child.pid)) < 7 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(members) == 7, "the supervisor, and in each sandbox bwrap, its process 1 and a Python"
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in members]
    assert scores == [1000] * 7
    child.kill()
    child.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in members) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def test_worker_has_a_lower_score_than_the_program() -> None:
    """Ray gives its workers the highest score."""
    working_sandbox()
    code = """
        from pathlib import Path
        from tasks import sandbox
        path = Path("/proc/self/oom_score_adj")
        path.write_text("1000")
        sandbox.run_program("def f(): return 1", sandbox.CodeTests(tests="f()", names=("f",)))
        print(path.read_text())
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == sandbox.WORKER_OOM_SCORE < 1000


def test_hanging_supervisor_fails_the_document_only(monkeypatch: pytest.MonkeyPatch) -> None:
    working_sandbox()
    monkeypatch.setattr(sandbox, "SUPERVISOR_CODE", "import time; time.sleep(600)")
    monkeypatch.setattr(sandbox, "SUPERVISOR_SETUP_SECONDS", 0)
    monkeypatch.setattr(sandbox, "SUPERVISOR_WALL_FACTOR", 1)
    assert run("def f(): return True", limits=QUICK).reason == "the sandbox did not end within 1 s"
    monkeypatch.setattr(sandbox, "SUPERVISOR_CODE", "import os; os.kill(os.getpid(), 9)")
    assert run("def f(): return True").reason == f"the supervisor was killed by signal {int(signal.SIGKILL)}"


def test_hanging_launcher_fails_the_document_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher = tmp_path / "bwrap"
    launcher.write_text("#!/bin/sh\nexec sleep 600\n")
    launcher.chmod(0o755)
    found = sandbox.Sandbox(bwrap=str(launcher), drop_user="")
    monkeypatch.setattr(sandbox, "find_sandbox", lambda: found)
    shorter = "import tasks.sandbox_supervisor as s; s.SETUP_TIMEOUT_SECONDS = 1; s.main()"
    monkeypatch.setattr(sandbox, "SUPERVISOR_CODE", f"import sys; sys.path.insert(0, sys.argv[1]); {shorter}")
    assert run("def f(): return True").reason == "the sandboxes did not start within 1 s"


def test_missing_bubblewrap_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    with pytest.raises(SandboxError, match="bubblewrap is not installed: apt-get install bubblewrap"):
        sandbox.find_sandbox.__wrapped__()


def test_error_says_why_bubblewrap_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher = tmp_path / "bwrap"
    launcher.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    launcher.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: str(launcher))
    with pytest.raises(SandboxError, match="uid map: Permission denied"):
        sandbox.find_sandbox.__wrapped__()


def test_cgroup_is_created_where_controllers_are_available(tmp_path: Path) -> None:
    """On a copy of the kernel's files: a parent without controllers, one that is not there, and one with them."""
    own = tmp_path / "own"
    job = {"memory_bytes": 1000, "threads": 16}

    def create(path: str) -> str | None:
        own.write_text(f"4:memory:/other\n0::{path}\n")
        return sandbox_supervisor.create_cgroup(job, str(tmp_path), str(own))

    for name, controllers in (("slice", "cpu memory pids"), ("slice/unit", ""), ("cpu", "cpu"), ("cpu/unit", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.subtree_control").write_text(controllers)
    assert create("/cpu/unit") is None
    assert create("/missing/unit") is None
    found = create("/slice/unit")
    assert found is not None
    assert Path(found).parent == tmp_path / "slice"
    assert Path(found, "memory.max").read_text() == "1000"
    assert Path(found, "pids.max").read_text() == "38"
