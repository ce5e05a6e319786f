"""Free ports: nobody listens there, nobody else is given them, and no outgoing connection takes them."""

import socket
from pathlib import Path

import pytest

from duecourse.cli.launcher import ports


def test_a_port_is_given_once() -> None:
    given = [ports.free_port() for _ in range(200)]
    assert len(set(given)) == len(given)
    assert all(ports.is_free(port) for port in given)


def test_where_somebody_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ports.free_port(), ports.free_port()
    with socket.create_server((ports.HOST, first)):
        monkeypatch.setattr(ports, "_numbers", iter([first, second]))
        assert ports.free_port() == second


def test_outgoing_connections_are_given_others() -> None:
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not setting.exists():
        pytest.skip("this system does not tell which ports outgoing connections are given")
    assert ports.free_port() < int(setting.read_text().split()[0])
