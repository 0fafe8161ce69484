"""Tests of the sandbox: every attack fails, leaves no trace outside, and the next program still runs."""

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from tasks import sandbox
from tasks.sandbox import Limits, SandboxError, run_program

QUICK = Limits(seconds=2)


@functools.cache
def working_sandbox(kind: str) -> str:
    if kind == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed here")
    try:
        assert run_program("pass", kind=kind).passed
    except SandboxError as error:
        pytest.skip(f"the {kind} sandbox does not work on this machine: {error}")
    return kind


@pytest.fixture(params=sandbox.SANDBOXES)
def kind(request: pytest.FixtureRequest) -> str:
    return working_sandbox(request.param)


def attack(program: str, kind: str, limits: Limits = QUICK) -> sandbox.ProgramResult:
    verdict = run_program(textwrap.dedent(program), kind=kind, limits=limits)
    assert not verdict.passed
    return verdict


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("assert 1 + 1 == 2", True),
        ("import math, collections, typing, hashlib, re\nprint('é', math.pi)", True),
        ("import os\nopen('note', 'w').write('x')\nassert os.listdir('.') == ['note']", True),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", True),
        ("assert 1 + 1 == 3", False),
        ("raise SystemExit(0)", False),
        ("import os\nos._exit(0)", False),
        ("def f(:", False),
        ("\udcff", False),
        ("x = 1\n" * 100_000, False),
    ],
)
def test_program_passes_only_if_it_runs_to_its_end(program: str, passed: bool, kind: str) -> None:
    assert run_program(program, kind=kind).passed is passed


def test_each_program_starts_in_an_empty_folder(kind: str) -> None:
    assert run_program("open('left', 'w')", kind=kind).passed
    assert run_program("import os\nassert os.listdir('.') == []", kind=kind).passed


@pytest.mark.parametrize("swallow", [False, True])
def test_fork_bomb(swallow: bool, kind: str) -> None:
    inner = "except OSError: pass" if swallow else "finally: pass"
    attack(f"import os\nwhile True:\n    try: os.fork()\n    {inner}", kind)
    assert run_program("assert sum([1, 2]) == 3", kind=kind).passed, "the next program still runs"


def test_thread_bomb(kind: str) -> None:
    attack("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", kind)


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(600)"])
def test_endless_program_is_stopped_after_its_time_limit(program: str, kind: str) -> None:
    started = time.monotonic()
    assert run_program(program, kind=kind, limits=QUICK).reason == "time"
    assert time.monotonic() - started >= QUICK.seconds


def test_default_time_limit_is_ten_seconds() -> None:
    assert Limits().seconds == 10


@pytest.mark.parametrize(
    "deed",
    [
        "os.kill(os.getppid(), 9)",
        "os.kill(0, 9)",
        "os.kill(-1, 9)",
        "os.killpg(0, 9)",
        "[os.kill(pid, 9) for pid in range(2, 70000)]",
    ],
)
def test_program_cannot_kill_its_parent(deed: str, kind: str) -> None:
    attack(f"import os, signal\n{deed}", kind)


def test_program_cannot_kill_the_test_process(kind: str) -> None:
    attack(f"import os\nos.kill({os.getpid()}, 9)", kind)


SECRET = "hf_" + "secret" * 5


@pytest.mark.parametrize(
    "search",
    [
        "str(os.environ)",
        "str(os.environb) + ''.join(subprocess_env())",
        "''.join(open(f'/proc/{pid}/environ', errors='replace').read() for pid in range(1, 100))",
        "open(f'/proc/{PARENT}/environ', errors='replace').read()",
        "open(f'/proc/{PARENT}/mem', 'rb').read(10).hex()",
        "open('/proc/self/environ').read()",
        "ctypes.string_at(ctypes.pythonapi.environ).decode()",
    ],
)
def test_token_is_out_of_reach(search: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    attack(
        f"""
        import ctypes, os
        PARENT = {os.getpid()}
        def subprocess_env():
            return os.popen('env').read()
        found = {search}
        assert {SECRET[:4]!r} + {SECRET[4:]!r} in found
        """,
        kind,
    )


def test_memory_of_other_processes_is_out_of_reach(kind: str) -> None:
    attack(
        f"""
        import ctypes
        class Span(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        libc = ctypes.CDLL(None, use_errno=True)
        room = ctypes.create_string_buffer(8)
        here, there = Span(ctypes.addressof(room), 8), Span({id(SECRET)}, 8)
        assert libc.process_vm_readv({os.getpid()}, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8
        """,
        kind,
    )
    attack(f"import ctypes\nassert ctypes.CDLL(None).ptrace(16, {os.getpid()}, 0, 0) == 0", kind)


def test_home_directory_is_invisible(kind: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    attack(f"assert open({str(tmp_path / 'token')!r}).read()", kind)
    attack(f"import os\nassert os.path.exists({str(Path.home() / '.cache')!r})", kind)


@pytest.mark.parametrize("place", ["/x", "/usr/x", "/etc/x", "/tmp/x", "/dev/shm/x", "/sandbox.py", "{tmp}/x"])
def test_program_cannot_write_outside_its_folder(place: str, kind: str, tmp_path: Path) -> None:
    path = place.format(tmp=tmp_path)
    attack(f"open({path!r}, 'w').write('x')", kind)
    assert not Path(path).exists()


@pytest.mark.parametrize("path", [sys.executable, os.path.realpath(sys.executable), sandbox.__file__])
def test_program_cannot_change_the_interpreter_or_the_project(path: str, kind: str) -> None:
    before = Path(path).stat()
    attack(f"open({path!r}, 'ab').write(b'x')", kind)
    attack(f"import os\nos.chmod({path!r}, 0o777)", kind)
    assert Path(path).stat().st_size == before.st_size
    assert Path(path).stat().st_mode == before.st_mode


def test_program_cannot_fill_the_disk(kind: str) -> None:
    attack("with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))", kind)
    many = "n = 0\nwhile True:\n    n += 1\n    with open(f'f{n}', 'wb') as file: file.write(bytes(1 << 20))"
    attack(many, kind)
    attack("n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').close()", kind)


def test_program_cannot_open_a_socket(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        server.settimeout(0.2)
        port = server.getsockname()[1]
        attack(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", kind)
        attack(f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({str(tmp_path / 'socket')!r})", kind)
        attack("import socket\nsocket.socket()", kind)
        attack("import socket\nsocket.getaddrinfo('example.org', 80)[0]", kind)
        with pytest.raises(TimeoutError):
            server.accept()


def test_output_is_limited(kind: str) -> None:
    for stream in ("stdout", "stderr"):
        program = f"import sys\nfor _ in range(10_000): sys.{stream}.write('x' * 1_000_000)"
        assert attack(program, kind, Limits()).reason == "output"


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(4 << 30)",
        "import os\nfor _ in range(10): os.fork()\nx = bytearray(300 << 20)\nimport time\ntime.sleep(60)",
        "import mmap\nm = mmap.mmap(-1, 4 << 30)\nm[::4096] = bytes(1 << 20)",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0",
        "import os\nos.memfd_create('x')",
        "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/sandbox', b'tmpfs', 0, None) == 0",
    ],
)
def test_memory_is_limited(program: str, kind: str) -> None:
    attack(program, kind)


def test_program_cannot_gain_privileges(kind: str) -> None:
    attack("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", kind)
    attack("import os\nos.setuid(0)", kind)
    attack("import os\nassert os.system('mount -t tmpfs x /sandbox') == 0", kind)
    attack("import os\nos.mknod('disk', 0o600 | 0o060000, os.makedev(254, 0))", kind)
    assert run_program("import os\nassert os.getuid() == 65534 == os.geteuid()", kind=kind).passed


def test_python_level_escapes_fail(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    attack(f"import posix\nassert posix.system('touch {path}') == 0", kind)
    attack(f"import importlib, os\nimportlib.reload(os)\nassert os.system('touch {path}') == 0", kind)
    attack(f"import ctypes\nassert ctypes.CDLL(None).system(b'touch {path}') == 0", kind)
    assert not path.exists()


def test_all_processes_die_with_the_caller(kind: str) -> None:
    program = "import os, time\nfor _ in range(3): os.fork()\nif os.getpid() > 1: os.setsid()\ntime.sleep(600)"
    code = f"from tasks.sandbox import *\nrun_program({program!r}, kind={kind!r})"
    root = Path(sandbox.__file__).parents[1]
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    deadline = time.monotonic() + 120
    while len(members := descendants(child.pid)) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(members) >= 5
    child.kill()
    child.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in members) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [member for child in children for member in (int(child), *descendants(int(child)))]


def test_limits_apply_without_a_sandbox() -> None:
    assert run_program("assert True", kind="none").passed
    assert run_program("while True: pass", kind="none", limits=Limits(seconds=1)).reason == "time"
    assert run_program("import os\nassert 'PATH' not in os.environ", kind="none").passed
    assert not run_program("x = bytearray(4 << 30)", kind="none").passed
    left = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\ntime.sleep(30)"
    assert run_program(left, kind="none", limits=Limits(seconds=1)).reason == "time"


def test_error_names_why_each_sandbox_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SUPERVISOR_CODE", "raise SystemExit(1)")
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    sandbox.find_sandbox.cache_clear()
    with pytest.raises(SandboxError, match=r"namespaces: .*; bubblewrap: not installed"):
        sandbox.find_sandbox()
    sandbox.find_sandbox.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests already run as an ordinary user")
@pytest.mark.parametrize("kind", sandbox.SANDBOXES)
def test_sandbox_works_for_an_ordinary_user(kind: str) -> None:
    python, user = shutil.which("python3", path="/usr/bin"), 12345
    check = [python or "", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if python is None or subprocess.run(check, check=False).returncode:
        pytest.skip("no Python 3.11 that an ordinary user could run")
    if kind == "bubblewrap":
        if not shutil.which("bwrap"):
            pytest.skip("bubblewrap is not installed here")
    else:
        working_sandbox(kind)
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    try:
        (folder / "tasks").mkdir()
        for name in ("sandbox.py", "sandbox_supervisor.py"):
            shutil.copy(Path(sandbox.__file__).with_name(name), folder / "tasks" / name)
        (folder / "check.py").write_text(ORDINARY)
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        who = {"user": user, "group": user, "extra_groups": []}
        subprocess.run([python, "check.py", kind], cwd=folder, env={}, check=True, **who)  # type: ignore[call-overload]
    finally:
        shutil.rmtree(folder)


ORDINARY = """
import os, sys
from tasks.sandbox import Limits, run_program
kind, quick = sys.argv[1], Limits(seconds=1)
assert run_program("assert True", kind=kind).passed
for program in (
    "import os\\nwhile True: os.fork()",
    "while True: pass",
    "import os\\nos.kill(os.getppid(), 9)",
    f"import os\\nos.kill({os.getpid()}, 9)",
    "open('/tmp/x', 'w')",
    "import socket\\nsocket.socket()",
    "print('x' * 10**7)",
    "x = bytearray(4 << 30)",
    "import ctypes\\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
):
    assert not run_program(program, kind=kind, limits=quick).passed, program
assert run_program("import os\\nassert os.getuid() == 65534", kind=kind).passed
"""
