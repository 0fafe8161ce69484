"""Ports for a job's Ray: free, and none that the kernel gives to others meanwhile."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.slurm import free_ports


def test_ports_are_free_and_below_those_that_the_kernel_gives_away() -> None:
    command = [sys.executable, "-m", "orchestrator.slurm.free_ports", "2"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, second = map(int, told.split())
    assert first != second
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_ports.FIRST <= min(first, second) <= max(first, second) < given_from
    for port in (first, second):
        socket.create_server(("", port)).close()


def test_a_port_that_somebody_has_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    [taken] = free_ports.free_ports(1)
    monkeypatch.setattr(free_ports, "FIRST", taken)
    monkeypatch.setattr(free_ports, "sample", lambda ports, _: ports[:1])
    assert free_ports.free_ports(1) == [taken]
    with socket.create_server(("", taken)), pytest.raises(SystemExit, match="0 are free and 1 are needed"):
        free_ports.free_ports(1)


def test_where_the_kernel_tells_nothing_its_usual_range_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(free_ports, "GIVEN_AWAY", tmp_path / "nothing")
    assert max(free_ports.free_ports(50)) < 32_768
