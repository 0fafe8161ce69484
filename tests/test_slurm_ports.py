"""Ports for a job's Ray: free, and outside the kernel's ephemeral range."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.slurm import job as in_job
from sampler.errors import InputError


def test_ports_are_free_and_below_the_ephemeral_range() -> None:
    command = [sys.executable, "-m", "orchestrator.slurm", "free-ports", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, second = map(int, printed.split())
    assert first != second
    start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert in_job.FIRST_PORT <= min(first, second) <= max(first, second) < start
    for port in (first, second):
        socket.create_server(("", port)).close()


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    [taken] = in_job.free_ports(1)
    monkeypatch.setattr(in_job, "FIRST_PORT", taken)
    monkeypatch.setattr(in_job, "sample", lambda ports, _: ports[:1])
    assert in_job.free_ports(1) == [taken]
    with (
        socket.create_server(("", taken)),
        pytest.raises(InputError, match=r"1 ports from .* are needed, but only 0 are free"),
    ):
        in_job.free_ports(1)


def test_the_usual_range_is_avoided_if_the_kernels_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(in_job, "EPHEMERAL_RANGE", tmp_path / "nothing")
    assert max(in_job.free_ports(50)) < 32_768
