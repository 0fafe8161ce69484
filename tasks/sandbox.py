"""Run generated programs and their tests in sandboxes built by bubblewrap.

The program runs in one sandbox and the tests in another (tasks/sandbox_runner.py); only values cross between them, so
a program cannot reach the tests or their verdict. Restricting Python itself would not contain it: each sandbox has no
network, no other processes, no environment, a read-only view of the standard library, a filter for system calls, and
limits on time, memory, threads, files and output.
"""

import functools
import json
import os
import platform
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_PROGRAM_CHARACTERS = 60_000  # answers within the usual token limits are shorter
MB = 1024 * 1024
INSTALL_BUBBLEWRAP = (
    "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora, RHEL) "
    "or conda install -c conda-forge bubblewrap"
)

SUPERVISOR_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.sandbox_supervisor import main; main()"
# Longer than the supervisor's own limits, so that it normally exits by itself.
SUPERVISOR_WALL_FACTOR, SUPERVISOR_SETUP_SECONDS = 6, 120
SUPERVISOR_KILL_SECONDS = 10
WORKER_OOM_SCORE = 900  # at most; Ray gives its workers 1000, the score of the programs

FOLDER = "/sandbox"  # the only place where a program can write
NOBODY = 65534
FILTER_DESCRIPTOR = 6
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}  # reproducible outcomes


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a program and its tests may use. Time spent waiting for a busy core does not count towards `seconds`."""

    seconds: int = 10
    memory_bytes: int = 1024 * MB
    threads: int = 16
    file_bytes: int = 4 * MB
    folder_bytes: int = 16 * MB
    files: int = 1024
    output_bytes: int = 1 * MB


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTests:
    """Trusted code that decides whether a program is correct."""

    setup: str = ""  # runs before the tests
    tests: str  # passes if it ends without an exception
    names: tuple[str, ...]  # functions and classes of the program that the tests use


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    passed: bool  # the tests ran to their end without an exception
    reason: str = ""  # the exceeded limit, or the exception that ended the tests


class SandboxError(RuntimeError):
    """The sandbox could not be created; the program did not run."""


def run_program(
    program: str, tests: CodeTests, *, sandboxed: bool = True, limits: Limits | None = None
) -> ProgramResult:
    """Run `tests` against `program`. Without a sandbox only the limits apply."""
    return _run(program, tests, limits or Limits(), find_sandbox() if sandboxed else None)


@functools.cache
def find_sandbox() -> "Sandbox":
    """The kind of sandbox that works on this machine. Raises a SandboxError with the reasons if none does."""
    if platform.machine() not in MACHINES:
        known = " and ".join(MACHINES)
        raise SandboxError(f"there is no system call filter for {platform.machine()}, only for {known}")
    if (bwrap := shutil.which("bwrap")) is None:
        raise SandboxError(f"bubblewrap is not installed: {INSTALL_BUBBLEWRAP}")
    reasons = []
    probe = CodeTests(tests="assert add(1, 2) == 3", names=("add",))
    for drop in ("inside", "before") if os.geteuid() == 0 else ("",):
        sandbox = Sandbox(bwrap=bwrap, drop_user=drop)
        try:
            result = _run("def add(a, b): return a + b", probe, Limits(), sandbox)
        except SandboxError as error:
            reasons.append(str(error))
        else:
            if result.passed:
                return sandbox
            reasons.append(f"a trivial program failed ({result.reason})")
    raise SandboxError("; ".join(dict.fromkeys(reasons)) + _restriction())


def _restriction() -> str:
    path = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if path.exists() and path.read_text().strip() == "1":
        return "; AppArmor restricts user namespaces: enable its profile for bwrap as described in docs/tasks.md"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """How sandboxes are created on this machine.

    Programs never run as the machine's root, whose threads the kernel does not limit. If this process is root, it drops
    to an unprivileged user: inside the sandbox, which needs CAP_SYS_ADMIN, or before the sandbox starts, which needs
    user namespaces and a Python that other users can read. An ordinary user does not change.
    """

    bwrap: str
    drop_user: str  # "inside", "before", or "" for an ordinary user

    def command(self) -> list[str]:
        words = [self.bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--seccomp", str(FILTER_DESCRIPTOR)]
        if self.drop_user == "inside":
            words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            words += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        return [*words, *_visible_files()]


def _run(program: str, tests: CodeTests, limits: Limits, sandbox: Sandbox | None) -> ProgramResult:
    if len(program) > MAX_PROGRAM_CHARACTERS:
        return ProgramResult(passed=False, reason=f"longer than {MAX_PROGRAM_CHARACTERS} characters")
    _lower_oom_score()
    job = _supervisor_job(program, tests, limits, sandbox)
    timeout_seconds = SUPERVISOR_WALL_FACTOR * limits.seconds + SUPERVISOR_SETUP_SECONDS
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        # A new session that inherits no descriptors, no working directory and only the loader's environment variable.
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SUPERVISOR_CODE, str(Path(__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ},
            cwd=folder,
            start_new_session=True,
        )
        try:
            output, errors = supervisor.communicate(json.dumps(job).encode(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return ProgramResult(passed=False, reason=f"the sandbox did not end within {timeout_seconds} s")
        finally:
            if supervisor.returncode is None:
                os.killpg(supervisor.pid, signal.SIGKILL)
                supervisor.wait(SUPERVISOR_KILL_SECONDS)
            for pipe in (supervisor.stdin, supervisor.stdout, supervisor.stderr):
                assert pipe is not None
                pipe.close()
    if supervisor.returncode < 0:  # killed, by the kernel if memory ran out: not a reason to fail the trial
        return ProgramResult(passed=False, reason=f"the supervisor was killed by signal {-supervisor.returncode}")
    if supervisor.returncode > 0:
        raise SandboxError(errors.decode(errors="replace").strip().rpartition("\n")[2])
    result = json.loads(output)
    if result["ended"] == "no sandbox":
        raise SandboxError(result["reason"])
    return ProgramResult(passed=result["ended"] == "passed", reason=result["reason"])


def _lower_oom_score() -> None:
    """When memory runs out, the kernel kills the process with the highest score first: the program, not the worker."""
    path = Path("/proc/self/oom_score_adj")
    if int(path.read_text()) > WORKER_OOM_SCORE:
        path.write_text(str(WORKER_OOM_SCORE))


def _supervisor_job(program: str, tests: CodeTests, limits: Limits, sandbox: Sandbox | None) -> dict[str, Any]:
    python = _interpreter()
    drop_user = sandbox.drop_user if sandbox else ""
    user = _unused_user() if drop_user else None
    resources = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NPROC": limits.threads + 1,  # 1: bwrap's process 1
        "RLIMIT_NOFILE": 32,
        "RLIMIT_SIGPENDING": 64,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": limits.seconds + 1,
    }
    if sandbox is None:
        del resources["RLIMIT_NPROC"]  # outside a namespace it would count all processes of the user
    inside = {"user": user if drop_user == "inside" else None, "limits": resources}
    # -s and -P: no modules from the user's directory or the working directory; -S: no packages; -B: no bytecode files.
    runner = Path(__file__).with_name("sandbox_runner.py").read_text(encoding="utf-8")
    words = [python.executable, "-s", "-P", "-S", "-B", "-c", runner]
    return asdict(limits) | {
        "command": [*sandbox.command(), "--", *words] if sandbox else words,
        "environment": ENVIRONMENT | python.environment,
        "filter": seccomp_filter().hex() if sandbox else "",
        "folder": FOLDER if sandbox else "",
        "supervisor_drops_to": user if drop_user == "before" else None,
        "candidate": {"role": "candidate", "program": program} | inside,
        "tester": {"role": "tester", **asdict(tests)} | inside,
    }


def _unused_user() -> int:
    """A random user id from the upper half of those in this user namespace; in a container they may be few."""
    ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges, key=lambda entry: entry[2])
    half = min(count, 1 << 31) // 2  # bwrap prints ids as signed numbers
    return first + half + secrets.randbelow(max(1, half - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """The Python outside its virtual environment, with its standard library and the shared libraries of both."""

    executable: str
    module_paths: tuple[str, ...]
    libraries: tuple[str, ...]  # outside LIBRARY_FOLDERS

    @property
    def environment(self) -> dict[str, str]:
        folders = dict.fromkeys(os.path.dirname(path) for path in self.libraries)
        return {"LD_LIBRARY_PATH": os.pathsep.join(folders)} if folders else {}


# Imports every extension module of the standard library, then prints the module path and all mapped libraries.
LIST_LIBRARIES = """
import importlib, json, os, sys
for folder in sys.path:
    for name in sorted(os.listdir(folder)) if folder.endswith("lib-dynload") else ():
        try:
            importlib.import_module(name.partition(".")[0])
        except ImportError:
            pass
with open("/proc/self/maps") as file:
    mapped = {line.split(maxsplit=5)[5].strip() for line in file if ".so" in line}
print(json.dumps([[path for path in sys.path if os.path.exists(path)], sorted(mapped)]))
"""


@functools.cache
def _interpreter() -> Interpreter:
    executable = os.path.realpath(sys.executable)
    words = [executable, "-I", "-S", "-c", LIST_LIBRARIES]
    listed = subprocess.run(words, capture_output=True, check=False)
    if listed.returncode != 0:
        raise SandboxError(f"{executable} cannot import its own standard library")
    module_paths, mapped = json.loads(listed.stdout)
    hidden = [path for path in mapped if os.path.exists(path) and not _is_in(path, (*LIBRARY_FOLDERS, *module_paths))]
    return Interpreter(executable=executable, module_paths=tuple(module_paths), libraries=tuple(hidden))


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


@functools.cache
def _visible_files() -> tuple[str, ...]:
    """bwrap's options for everything in a sandbox: libraries, the interpreter, three devices and its own folder."""
    python = _interpreter()
    words: list[str] = []
    folders = [*LIBRARY_FOLDERS, *map(os.path.realpath, python.module_paths)]
    shown: list[str] = []
    for path in (*folders, *SYSTEM_FILES, *map(os.path.realpath, (python.executable, *python.libraries))):
        if not os.path.lexists(path) or _is_in(path, shown):
            continue
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            shown.append(path)
            words += ["--ro-bind", path, path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    for library in python.libraries:  # the loader may look for a library under another name
        folder = Path(library).parent
        names = [path for path in folder.iterdir() if path.is_symlink() and os.path.realpath(path) == library]
        words += [word for path in names for word in ("--symlink", os.path.basename(library), str(path))]
    packages = [f"{folder}/{name}" for folder in folders for name in PACKAGE_FOLDERS]
    for path in filter(os.path.isdir, (*packages, "/usr/lib/python3")):
        words += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    # bwrap would create parents that only root can enter.
    parents = sorted({str(parent) for path in (*shown, *DEVICES) for parent in Path(path).parents} - {"/"})
    words = [*(word for path in parents for word in ("--dir", path)), *words]
    words += ["--perms", "0777", "--size", str(Limits().folder_bytes), "--tmpfs", FOLDER]
    return (*words, "--remount-ro", "/", "--chdir", FOLDER)


# The filter refuses system calls that evade namespaces and limits: new processes, memory that no limit counts
# (shared mappings, SysV objects, memory files, io_uring, keys, record locks, attributes and watches of files, pages in
# pipes), sockets and passing descriptors, signals to and memory of other processes, further namespaces and mounts.
REFUSED_CALLS = """
fork 57 - vfork 58 - kill 62 129 rt_sigqueueinfo 129 138 pidfd_open 434 434 pidfd_getfd 438 438
pidfd_send_signal 424 424 ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 kcmp 312 272
socket 41 198 sendmsg 46 211 sendmmsg 307 269 shmget 29 194 semget 64 190 msgget 68 186 mq_open 240 180
memfd_create 319 279 memfd_secret 447 447 io_uring_setup 425 425 add_key 248 217 request_key 249 218 keyctl 250 219
io_setup 206 0 vmsplice 278 75 setxattr 188 5 lsetxattr 189 6 fsetxattr 190 7 setxattrat 463 463
inotify_init 253 - inotify_init1 294 26 fanotify_init 300 262 bpf 321 280 perf_event_open 298 241 userfaultfd 323 282
unshare 272 97 setns 308 268 chroot 161 51 mount 165 40 umount2 166 39 pivot_root 155 41 open_by_handle_at 304 265
open_tree 428 428 move_mount 429 429 fsopen 430 430 fsconfig 431 431 fsmount 432 432 fspick 433 433
mount_setattr 442 442 open_tree_attr 467 467
""".split()  # noqa: SIM905 - each name with its number on x86_64 and on aarch64
MACHINES = {  # machine: (audit architecture, numbers of clone, mmap and fcntl)
    "x86_64": (0xC000003E, 56, 9, 72),
    "aarch64": (0xC00000B7, 220, 222, 25),
}
CLONE3 = 435  # its flags are in memory, which a filter cannot read: it fails as on a kernel without it
CLONE_THREAD = 0x10000
NAMESPACE_FLAGS = 0x7E020000
SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS
LOCK_COMMANDS = (6, 7, 37, 38, 1024, 1026)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY
X32_CALL_BIT = 0x40000000  # x32 calls: the same machine code with other call numbers

EPERM, ENOSYS = 1, 38
LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in the kernel's seccomp_data; for arguments, of their lower halves.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 24, 40


def seccomp_filter() -> bytes:
    """The filter in the kernel's format."""
    architecture, clone, mmap, fcntl = MACHINES[platform.machine()]
    column = 1 + list(MACHINES).index(platform.machine())
    refuse = (RETURN, 0, 0, ERROR | EPERM)
    lines = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    lines += [(JUMP_AT_LEAST, 0, 1, X32_CALL_BIT), refuse]
    lines += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERROR | ENOSYS)]
    for number in filter(str.isdigit, REFUSED_CALLS[column::3]):
        lines += [(JUMP_EQUAL, 0, 1, int(number)), refuse]
    lines += [(JUMP_EQUAL, 0, 5, clone), (LOAD, 0, 0, FIRST_ARGUMENT)]  # threads only
    lines += [(JUMP_ANY_BIT, 2, 0, NAMESPACE_FLAGS), (JUMP_ANY_BIT, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW), refuse]
    lines += [(JUMP_EQUAL, 0, 5, mmap), (LOAD, 0, 0, FOURTH_ARGUMENT), (AND, 0, 0, SHARED_ANONYMOUS)]
    lines += [(JUMP_EQUAL, 0, 1, SHARED_ANONYMOUS), refuse, (RETURN, 0, 0, ALLOW)]
    lines += [(JUMP_EQUAL, 0, 2 * len(LOCK_COMMANDS) + 1, fcntl), (LOAD, 0, 0, SECOND_ARGUMENT)]
    for command in LOCK_COMMANDS:
        lines += [(JUMP_EQUAL, 0, 1, command), refuse]
    lines += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
