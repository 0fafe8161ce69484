"""The system calls a caged program is refused, as a seccomp filter. Pure data: installs nothing.

Namespaces and limits hold the program already; these are the calls that would reach around them: memory that no
limit counts (SysV segments, memory files, kernel rings and keys), sockets, signals to and memory of other processes,
further namespaces.
"""

import platform
import struct

EPERM = 1
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4
FOREIGN = 0x40000000  # x32 calls: the same machine code under other numbers

# machine: (audit architecture, numbers in the order of NAMES)
NAMES = (  # noqa: SIM905 - as they stand in the manual
    "socket shmget msgget mq_open memfd_create memfd_secret io_uring_setup add_key request_key keyctl bpf "
    "perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev unshare setns mount umount2 pivot_root "
    "kill pidfd_send_signal rt_sigqueueinfo"
).split()
MACHINES = {
    "x86_64": (
        0xC000003E,
        "41 29 68 240 319 447 425 248 249 250 321 298 323 101 310 311 272 308 165 166 155 62 424 129",
    ),
    "aarch64": (
        0xC00000B7,
        "198 194 186 180 279 447 425 217 218 219 280 241 282 117 270 271 97 268 40 39 41 129 424 138",
    ),
}


def refusal_filter() -> bytes:
    """The filter for this machine as the kernel reads it; empty where its call numbers are not known here."""
    if platform.machine() not in MACHINES:
        return b""
    architecture, listed = MACHINES[platform.machine()]
    numbers = [int(number) for number in listed.split()]
    assert len(numbers) == len(NAMES)
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, len(numbers) + 1, 0, FOREIGN),
        *((JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
