"""Free ports: nobody listens there, and they are given once."""

import socket

import pytest
from services.ports import free_port

from duecourse.cli.launcher import ports
from duecourse.cli.launcher.errors import LaunchError


def test_a_port_is_given_once() -> None:
    given = [ports.free_port() for _ in range(200)]
    assert len(set(given)) == len(given)


def test_where_somebody_listens_is_passed_over_until_there_is_none_left() -> None:
    taken = free_port()
    with socket.create_server((ports.HOST, taken)):
        around = ports.Ports(range(taken, taken + 2))
        assert {around.free_port() for _ in range(4)} == {taken + 1}
        with pytest.raises(LaunchError, match=f"no port from {taken} to {taken} is free"):
            ports.Ports(range(taken, taken + 1)).free_port()
