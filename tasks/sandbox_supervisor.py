"""The processes of a sandbox: a supervisor, a launcher and the untrusted program. Uses the standard library only.

The supervisor reads a JSON job from stdin, enforces the limits and writes a JSON outcome to stdout. It is a process of
its own, so that no environment variable, descriptor or memory of the sweep is near the program. The launcher enters new
user, mount, pid, network, ipc and uts namespaces and forks the child, which is process 1 in there, sees a read-only
system with one small writable folder, and becomes the program. If one of them dies, the kernel kills those below it.
With `"sandbox": "bubblewrap"` bwrap replaces launcher and child; with `"none"` only the limits apply.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Job = dict[str, Any]
Role = Callable[[Job, int, int], None]  # job, descriptor of the channel to the supervisor, descriptor for output

SETUP_TIMEOUT_SECONDS = 60
WALL_TIME_FACTOR = 6  # on a busy machine a program may take this many times its seconds while it waits for a core
CLEANUP_TIMEOUT_SECONDS = 10

NOBODY = 65534
FOLDER, PROGRAM = "/sandbox", "/sandbox.py"
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "LC_ALL": "C.UTF-8"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}  # reproducible outcomes, few threads
MOUNT_POINTS = ("/tmp", "/mnt", "/var/tmp", "/srv", "/media", "/run")  # candidates for the new root

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
NAMESPACES = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000}
NAMESPACES["network"] = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 1 << 10, 1 << 11, 1 << 12, 1 << 14
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH, F_SETPIPE_SZ = 2, 1031
# A remount must keep the mount's restrictions. statvfs reports them in the bits that mount uses, except relatime.
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME
ST_RELATIME = 1 << 12

# The program sends the key back only after it ran to its end, so exiting early with status 0 does not count as passing.
# Limits are set inside the sandbox, where RLIMIT_NPROC counts its processes alone. The kernel does not count processes
# of the machine's root, and a fork bomb is faster than the supervisor, so a fork tests that the limit is enforced.
RUNNER = """
def run(report, path, *limits):
    import os, resource, sys
    key = os.read(report, 64)
    for limit in limits:
        name, value = limit.split("=")
        kind, most = getattr(resource, name), int(value)
        if kind == resource.RLIMIT_NPROC:
            resource.setrlimit(kind, (1, most))
            try:
                child = os.fork()
            except BlockingIOError:
                pass
            else:
                if child:
                    os.write(report, b"failed the number of processes cannot be limited")
                os._exit(1)
        resource.setrlimit(kind, (most, most))
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        code = compile(file.read(), "<program>", "exec")
    os.write(report, b"ready")
    exec(code, {})
    sys.stdout.flush()
    os.write(report, key)
    os._exit(0)
import sys
run(int(sys.argv[1]), *sys.argv[2:])
"""

libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: Any) -> None:
    """Call a libc function that returns 0 on success; an OSError names it on failure."""
    values = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if getattr(libc, name)(*values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def die_with_parent() -> None:
    call_libc("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


# The launcher and the child


def run_role(role: Role, job: Job, report: int, output: int) -> None:
    """In a forked process: becomes the program or reports why it could not. Never returns to the supervisor's code."""
    try:
        role(job, report, output)
    except OSError as error:
        os.write(report, f"failed {error.strerror or error}".encode()[:200])
    finally:
        os._exit(1)


def launcher(job: Job, report: int, output: int) -> None:
    """Enter the namespaces, wait until the supervisor has mapped their users, and fork the child."""
    die_with_parent()
    call_libc("unshare", sum(NAMESPACES.values()))
    os.write(report, b"entered")
    if os.read(report, 64) != b"mapped":
        return
    pid = os.fork()
    if pid == 0:
        run_role(child, job, report, output)
    os.waitpid(pid, 0)


def child(job: Job, report: int, output: int) -> None:
    die_with_parent()
    os.setsid()  # otherwise kill(0, …) would reach the supervisor
    forbid_nested_namespaces()
    build_root(job)
    if os.getuid() != NOBODY:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        die_with_parent()  # changing the user resets it
    install_seccomp_filter(bytes.fromhex(job["filter"]))
    exec_program(runner_command(job, report, PROGRAM), environment(job), report, output)


def forbid_nested_namespaces() -> None:
    """A nested user namespace would allow mounts again, and with them memory that no limit counts."""
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
        with contextlib.suppress(OSError), open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
            file.write("0")


def build_root(job: Job) -> None:
    """Build a root in memory: system and interpreter read-only, no /proc, no homes, and one writable FOLDER."""
    call_libc("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    visible = [path for path in (*SYSTEM_PATHS, *DEVICES, *job["visible_paths"]) if os.path.lexists(path)]
    root = next(point for point in MOUNT_POINTS if os.path.isdir(point) and not any(is_in(p, point) for p in visible))
    call_libc("mount", "sandbox", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=0755")
    for path in visible:
        if not os.path.lexists(root + path):
            bind_read_only(path, root)
    with open(root + PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["program"])
    os.mkdir(root + FOLDER)
    options = f"size={job['folder_bytes']},nr_inodes=1024,mode=0777"
    call_libc("mount", "folder", root + FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(root)
    os.mkdir("old")
    call_libc("pivot_root", ".", "old")
    call_libc("umount2", "/old", MNT_DETACH)
    os.rmdir("/old")
    call_libc("mount", None, "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, None)
    os.chdir(FOLDER)


def is_in(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def bind_read_only(source: str, root: str) -> None:
    """Mount `source` read-only at the same path under `root`; a symbolic link is copied."""
    target = root + source
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    call_libc("mount", source, target, None, MS_BIND | MS_REC, None)
    flags = os.statvfs(source).f_flag
    kept = (flags & KEPT_FLAGS) | (MS_RELATIME if flags & ST_RELATIME else 0)
    call_libc("mount", None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept, None)


def install_seccomp_filter(filter_code: bytes) -> None:
    call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if filter_code:
        code = ctypes.create_string_buffer(filter_code, len(filter_code))
        program = struct.pack("@HP", len(filter_code) // 8, ctypes.addressof(code))
        call_libc("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0)


def bubblewrap(job: Job, report: int, output: int) -> None:
    """The same sandbox, built by bwrap."""
    die_with_parent()
    words = [job["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    if job["filter"]:
        words += ["--seccomp", str(pipe_with(bytes.fromhex(job["filter"])))]
    for path in (*SYSTEM_PATHS, *job["visible_paths"]):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    program = pipe_with(job["program"].encode("utf-8", "surrogatepass"))
    words += ["--ro-bind-data", str(program), PROGRAM, "--size", str(job["folder_bytes"]), "--tmpfs", FOLDER]
    words += ["--remount-ro", "/", "--chdir", FOLDER]
    for name, value in environment(job).items():
        words += ["--setenv", name, value]
    exec_program([*words, "--", *runner_command(job, report, PROGRAM)], {}, report, output)


def pipe_with(data: bytes) -> int:
    """A descriptor from which `data` can be read after an exec."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, max(len(data), 65536))
    os.write(writer, data)
    os.close(writer)
    os.set_inheritable(reader, True)
    return reader


def unsandboxed(job: Job, report: int, output: int) -> None:
    """Limits only, in the supervisor's temporary folder and without its environment."""
    die_with_parent()
    os.setsid()
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["program"])
    exec_program(runner_command(job, report, "program.py"), environment(job), report, output)


ROLES: dict[str, Role] = {"namespaces": launcher, "bubblewrap": bubblewrap, "none": unsandboxed}


def runner_command(job: Job, report: int, program: str) -> list[str]:
    limits = {
        "RLIMIT_AS": job["memory_bytes"],
        "RLIMIT_FSIZE": job["file_bytes"],
        "RLIMIT_NPROC": job["processes"],
        "RLIMIT_NOFILE": 32,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": job["seconds"] + 1,
    }
    if job["sandbox"] == "none":
        del limits["RLIMIT_NPROC"]  # outside a namespace it would count all processes of the user
    # -s and -P: no modules from the user's directory or the working directory; -B: no bytecode files.
    words = [job["python"], "-s", "-P", "-B", "-c", RUNNER, report, program]
    return [str(word) for word in words] + [f"{name}={value}" for name, value in limits.items()]


def environment(job: Job) -> dict[str, str]:
    return ENVIRONMENT | ({"PYTHONPATH": os.pathsep.join(job["packages"])} if job["packages"] else {})


def exec_program(words: list[str], variables: dict[str, str], report: int, output: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.set_inheritable(report, True)
    os.execve(words[0], words, variables)  # closes all other descriptors


# The supervisor


def map_users(pid: int) -> None:
    """Map the sandbox's users. Even under root the child runs as nobody: the kernel does not count root's processes."""
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("allow" if user == 0 else "deny")
    for kind, own in (("uid", user), ("gid", group)):
        maps = [f"0 0 1\n{NOBODY} {NOBODY} 1"] if user == 0 and group == 0 else []
        for text in [*maps, f"{NOBODY} {own} 1"]:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/{kind}_map", "w") as file:
                    file.write(text)
                break


def process_tree(pid: int) -> Iterator[int]:
    """A process and all its descendants. Orphans in a pid namespace are children of its process 1."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                for member in file.read().split():
                    yield from process_tree(int(member))


@dataclass(slots=True)
class Usage:
    """Resources of all processes in a sandbox."""

    processes: int = 0
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    core_wait_seconds: float = 0.0  # the longest time that one process waited for a core


def measure_usage(pid: int) -> Usage:
    total = Usage()
    for member in process_tree(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{member}/statm") as file:
                total.memory_bytes += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with open(f"/proc/{member}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:15]  # user and system, own and of reaped children
            total.cpu_seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            with open(f"/proc/{member}/schedstat") as file:
                total.core_wait_seconds = max(total.core_wait_seconds, int(file.read().split()[1]) / 1e9)
            total.processes += 1
    return total


def exceeded_limit(job: Job, pid: int, started: float, before: Usage) -> str | None:
    """The limit that the program exceeds, if any. Computing and sleeping count as time, waiting for a core does not."""
    now, wall_seconds = measure_usage(pid), time.monotonic() - started
    own_seconds = wall_seconds - (now.core_wait_seconds - before.core_wait_seconds)
    if max(own_seconds, now.cpu_seconds - before.cpu_seconds, wall_seconds / WALL_TIME_FACTOR) > job["seconds"]:
        return "time"
    if now.memory_bytes > job["memory_bytes"]:
        return "memory"
    return "processes" if now.processes > job["processes"] + 2 else None  # 2: the launcher, and bwrap's own process


def received_messages(report: socket.socket) -> Iterator[bytes]:
    """Messages received so far, including those of a sender that has exited."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while data := report.recv(256, socket.MSG_DONTWAIT):
            yield data


def supervise(job: Job, pid: int, report: socket.socket, output: int) -> dict[str, str]:
    """Wait until the program ends or exceeds a limit."""
    key, tail, output_bytes = secrets.token_bytes(32), b"", 0
    created, ready, before, ended = time.monotonic(), 0.0, Usage(), False
    if job["sandbox"] != "namespaces":
        report.send(key)
    while True:
        # WNOWAIT: as long as the process is not reaped, its pid cannot be reused.
        ended = ended or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        for message in received_messages(report):
            if message.startswith(b"failed "):
                reason = message[7:].decode(errors="replace")
                return {"ended": "failed" if ready else "no sandbox", "reason": reason}
            if message == b"entered" and not ready:
                map_users(pid)
                report.send(b"mapped")
                report.send(key)
            elif message == b"ready" and not ready:
                ready, before = time.monotonic(), measure_usage(pid)
            elif ready and message == key:
                return {"ended": "passed"}
        if select.select([output], [], [], 0)[0] and (data := os.read(output, 65536)):
            output_bytes, tail = output_bytes + len(data), (tail + data)[-2000:]
        elif ended:
            return {"ended": "failed", "reason": tail.decode(errors="replace").strip().rpartition("\n")[2]}
        else:
            select.select([report], [], [], 0.01)
        if output_bytes > job["output_bytes"]:
            return {"ended": "failed", "reason": "output"}
        if not ready and time.monotonic() - created > SETUP_TIMEOUT_SECONDS:
            return {"ended": "no sandbox", "reason": f"the program did not start within {SETUP_TIMEOUT_SECONDS} s"}
        if ready and not ended and (limit := exceeded_limit(job, pid, ready, before)):
            return {"ended": "failed", "reason": limit}


def kill_all(pid: int) -> None:
    """Kill what is left. The kernel clears a namespace whose process 1 died; without one each process is killed."""
    deadline = time.monotonic() + CLEANUP_TIMEOUT_SECONDS
    os.kill(pid, signal.SIGKILL)  # first, because finding processes takes longer than forking new ones
    while time.monotonic() < deadline:
        for member in process_tree(os.getpid()):
            if member != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def main() -> None:
    die_with_parent()
    call_libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    job = json.load(sys.stdin)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # packets keep messages separate
    output_reader, output_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        run_role(ROLES[job["sandbox"]], job, theirs.fileno(), output_writer)
    theirs.close()
    os.close(output_writer)
    outcome = supervise(job, pid, ours, output_reader)
    kill_all(pid)
    json.dump(outcome, sys.stdout)
