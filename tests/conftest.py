"""What all tests share: the services that some of them run against, and where temporary files lie."""

import os
import shutil
import signal
import tempfile

import pytest

pytest_plugins = ["services.etcd", "services.postgres"]

_TEMPORARY_ROOT = "PYTEST_DEBUG_TEMPROOT"


def pytest_configure(config: pytest.Config) -> None:
    """Give every session of root a root folder of its own for temporary files.

    Postgres refuses to run as root and then runs as `nobody`, whom its files' parents must let pass. In the folder
    that sessions of one user share, each of them shuts everybody else out at its start, servers of others included.
    """
    if os.geteuid() == 0 and _TEMPORARY_ROOT not in os.environ and config.option.basetemp is None:
        root = tempfile.mkdtemp(prefix="duecourse-tests-")
        os.environ[_TEMPORARY_ROOT] = root
        config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))
    # A shell has what it starts in the background ignore Ctrl-C, and so would the commands that tests stop by it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many seeds of the simulation counted."""
    passed = terminalreporter.getreports("passed")
    counted = sum(
        int(str(value)) for report in passed for name, value in report.user_properties if name == "counted seeds"
    )
    if counted:
        terminalreporter.write_line(f"simulation: {counted} counted seeds without a violation")
