"""The cage from the inside: enters kernel namespaces and becomes the untrusted program. Standard library only.

The porter enters new user, mount, pid, network, ipc and uts namespaces; the inmate is process 1 in there, sees a
read-only system and one small writable folder, and becomes the program. When one of them dies, the kernel kills those
that come after it. With `"cage": "bubblewrap"` bwrap is both; with `"none"` there is no cage, only limits.
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

Order = dict[str, Any]


Role = Callable[[dict[str, Any], int, int], None]  # order, report channel, output channel


NOBODY = 65534


FOLDER, PROGRAM = "/sandbox", "/sandbox.py"


SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")


DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "LC_ALL": "C.UTF-8"}


ENVIRONMENT |= {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}  # same verdict every time; few threads


PLACES = ("/tmp", "/mnt", "/var/tmp", "/srv", "/media", "/run")  # any folder will do to hang the new root on


PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38


SECCOMP_MODE_FILTER = 2


NAMESPACES = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000}


NAMESPACES["network"] = 0x40000000


MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32


MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 1 << 10, 1 << 11, 1 << 12, 1 << 14


MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21


MNT_DETACH, F_SETPIPE_SZ = 2, 1031


# statvfs bits are mount bits, but for relatime: a mount keeps the restrictions it came with or cannot be remounted.
HELD = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME


ST_RELATIME = 1 << 12


# The key comes back only when the program has run to its end: leaving early with status 0 is not passing. Limits are
# set in here, where they count this cage's processes alone; that they are counted is tried out, since the kernel
# never counts those of the machine's root, and a fork bomb is faster than any watcher.
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


def call(name: str, *arguments: Any) -> None:
    """A libc function that returns 0 when it worked; otherwise an OSError that names it."""
    values = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if getattr(libc, name)(*values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def command(order: Order, report: int, program: str) -> list[str]:
    limits = {
        "RLIMIT_AS": order["memory"],
        "RLIMIT_FSIZE": order["file_size"],
        "RLIMIT_NPROC": order["processes"],
        "RLIMIT_NOFILE": 32,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": order["seconds"] + 1,
    }
    if order["cage"] == "none":
        del limits["RLIMIT_NPROC"]  # out here it would count all of the user's processes
    # -s and -P keep modules of the user and of the working folder out; -B writes no bytecode.
    words = [order["python"], "-s", "-P", "-B", "-c", RUNNER, report, program]
    return [str(word) for word in words] + [f"{name}={value}" for name, value in limits.items()]


def environment(order: Order) -> dict[str, str]:
    return ENVIRONMENT | ({"PYTHONPATH": os.pathsep.join(order["packages"])} if order["packages"] else {})


def show(source: str, root: str) -> None:
    """Puts `source` read-only at the same path under `root`; a link stays a link."""
    target = root + source
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    call("mount", source, target, None, MS_BIND | MS_REC, None)
    flags = os.statvfs(source).f_flag
    held = (flags & HELD) | (MS_RELATIME if flags & ST_RELATIME else 0)
    call("mount", None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | held, None)


def build_root(order: Order) -> None:
    """A root in memory: system and interpreter read-only, no /proc, no home; only FOLDER can be written, a little."""
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    shown = [path for path in (*SYSTEM, *DEVICES, *order["shown"]) if os.path.lexists(path)]
    root = next(place for place in PLACES if os.path.isdir(place) and not any(under(path, place) for path in shown))
    call("mount", "cage", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=0755")
    for path in shown:
        if not os.path.lexists(root + path):
            show(path, root)
    with open(root + PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(order["program"])
    os.mkdir(root + FOLDER)
    room = f"size={order['folder_size']},nr_inodes=1024,mode=0777"
    call("mount", "folder", root + FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, room)
    os.chdir(root)
    os.mkdir("old")
    call("pivot_root", ".", "old")
    call("umount2", "/old", MNT_DETACH)
    os.rmdir("/old")
    call("mount", None, "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, None)
    os.chdir(FOLDER)


def under(path: str, place: str) -> bool:
    return os.path.commonpath((path, place)) == place


def forbid_more_namespaces() -> None:
    """A nested user namespace would bring back the right to mount, and with it memory that no limit counts."""
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
        with contextlib.suppress(OSError), open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
            file.write("0")


def refuse_calls(filter_code: bytes) -> None:
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if filter_code:
        code = ctypes.create_string_buffer(filter_code, len(filter_code))
        described = struct.pack("@HP", len(filter_code) // 8, ctypes.addressof(code))
        call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(described), 0, 0)


def inmate(order: Order, report: int, output: int) -> None:
    die_with_parent()
    os.setsid()  # or kill(0, …) would reach the warden
    forbid_more_namespaces()
    build_root(order)
    if os.getuid() != NOBODY:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        die_with_parent()  # a change of user takes it back
    refuse_calls(bytes.fromhex(order["filter"]))
    become(command(order, report, PROGRAM), environment(order), report, output)


def porter(order: Order, report: int, output: int) -> None:
    """Enters the namespaces, waits until the warden has said who is who in them, and lets the inmate go."""
    die_with_parent()
    call("unshare", sum(NAMESPACES.values()))
    os.write(report, b"entered")
    if os.read(report, 64) != b"mapped":
        return
    child = os.fork()
    if child == 0:
        attempt(inmate, order, report, output)
    os.waitpid(child, 0)


def become(words: list[str], variables: dict[str, str], report: int, output: int) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.set_inheritable(report, True)
    os.execve(words[0], words, variables)  # every other descriptor closes here


def piped(data: bytes) -> int:
    """A descriptor from which `data` can be read after an exec."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, max(len(data), 65536))
    os.write(writer, data)
    os.close(writer)
    os.set_inheritable(reader, True)
    return reader


def bubblewrapped(order: Order, report: int, output: int) -> None:
    """The same cage out of bwrap's hands."""
    die_with_parent()
    words = [order["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    if order["filter"]:
        words += ["--seccomp", str(piped(bytes.fromhex(order["filter"])))]
    for path in (*SYSTEM, *order["shown"]):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    program = piped(order["program"].encode("utf-8", "surrogatepass"))
    words += ["--ro-bind-data", str(program), PROGRAM, "--size", str(order["folder_size"]), "--tmpfs", FOLDER]
    words += ["--remount-ro", "/", "--chdir", FOLDER]
    for name, value in environment(order).items():
        words += ["--setenv", name, value]
    become([*words, "--", *command(order, report, PROGRAM)], {}, report, output)


def uncaged(order: Order, report: int, output: int) -> None:
    """Only limits: the folder the warden was started in, and no environment."""
    die_with_parent()
    os.setsid()
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(order["program"])
    become(command(order, report, "program.py"), environment(order), report, output)


def attempt(role: Role, order: Order, report: int, output: int) -> None:
    """A forked role: it becomes the program or says why it could not, and never returns into the warden."""
    try:
        role(order, report, output)
    except OSError as error:
        os.write(report, f"failed {error.strerror or error}".encode()[:200])
    finally:
        os._exit(1)


ROLES: dict[str, Role] = {"namespaces": porter, "bubblewrap": bubblewrapped, "none": uncaged}


SETUP_SECONDS = 60


PATIENCE = 6  # on a busy machine a program may take this many times its seconds, if it spent them waiting for a core


def map_users(pid: int) -> None:
    """Who the cage's users are outside. Root becomes nobody, whose processes the kernel counts; root's it does not."""
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("allow" if user == 0 else "deny")
    for kind, own in (("uid", user), ("gid", group)):
        choices = [f"0 0 1\n{NOBODY} {NOBODY} 1"] if user == 0 and group == 0 else []
        for choice in [*choices, f"{NOBODY} {own} 1"]:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/{kind}_map", "w") as file:
                    file.write(choice)
                break


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants, as seen from out here. Orphans of a pid namespace belong to its process 1."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                for child in file.read().split():
                    yield from family(int(child))


@dataclass(slots=True)
class Usage:
    """What a cage holds at a moment: processes, bytes, seconds of computing, and its longest wait for a core."""

    processes: int = 0
    memory: int = 0
    computed: float = 0.0
    waited: float = 0.0


def usage(pid: int) -> Usage:
    total = Usage()
    for member in family(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{member}/statm") as file:
                total.memory += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with open(f"/proc/{member}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:15]  # own and reaped children's, user and system
            total.computed += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            with open(f"/proc/{member}/schedstat") as file:
                total.waited = max(total.waited, int(file.read().split()[1]) / 1e9)
            total.processes += 1
    return total


def excess(order: Order, pid: int, since: float, before: Usage) -> str | None:
    """What the program has too much of, if anything. Its seconds pass while it computes, sleeps or waits for itself."""
    now, wall = usage(pid), time.monotonic() - since
    alone = wall - (now.waited - before.waited)
    if max(alone, now.computed - before.computed, wall / PATIENCE) > order["seconds"]:
        return "time"
    if now.memory > order["memory"]:
        return "memory"
    return "processes" if now.processes > order["processes"] + 2 else None  # the porter and bwrap's own are no inmates


def heard(report: socket.socket) -> Iterator[bytes]:
    """The messages that have come in; the last one may lie there after its sender is gone."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while data := report.recv(256, socket.MSG_DONTWAIT):
            yield data


def watch(order: Order, pid: int, report: socket.socket, output: int) -> dict[str, str]:
    """Waits for the program's end or for its first excess."""
    key, tail, written = secrets.token_bytes(32), b"", 0
    started, ready, before, ended = time.monotonic(), 0.0, Usage(), False
    if order["cage"] != "namespaces":
        report.send(key)
    while True:
        # Not reaped yet: until it is cleared away its number is nobody else's.
        ended = ended or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        for message in heard(report):
            if message.startswith(b"failed "):
                return {"ended": "failed" if ready else "no cage", "why": message[7:].decode(errors="replace")}
            if message == b"entered" and not ready:
                map_users(pid)
                report.send(b"mapped")
                report.send(key)
            elif message == b"ready" and not ready:
                ready, before = time.monotonic(), usage(pid)
            elif ready and message == key:
                return {"ended": "passed"}
        if select.select([output], [], [], 0)[0] and (data := os.read(output, 65536)):
            written, tail = written + len(data), (tail + data)[-2000:]
        elif ended:
            return {"ended": "failed", "why": tail.decode(errors="replace").strip().rpartition("\n")[2]}
        else:
            select.select([report], [], [], 0.01)
        if written > order["output"]:
            return {"ended": "failed", "why": "output"}
        if not ready and time.monotonic() - started > SETUP_SECONDS:
            return {"ended": "no cage", "why": f"it did not start within {SETUP_SECONDS} s"}
        if ready and not ended and (why := excess(order, pid, ready, before)):
            return {"ended": "failed", "why": why}


def clear(pid: int) -> None:
    """Ends what is left. The kernel empties a cage whose process 1 died; without a cage each process is looked for."""
    deadline = time.monotonic() + 10
    os.kill(pid, signal.SIGKILL)  # before anything is looked for: looking takes longer than forking
    while time.monotonic() < deadline:
        for member in family(os.getpid()):
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
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    order = json.load(sys.stdin)
    # Packets keep the few messages apart; each side has its own end.
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        mine.close()
        attempt(ROLES[order["cage"]], order, theirs.fileno(), printed)
    theirs.close()
    os.close(printed)
    verdict = watch(order, pid, mine, output)
    clear(pid)
    json.dump(verdict, sys.stdout)
