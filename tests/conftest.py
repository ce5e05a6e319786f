"""What all tests share: the services that some of them run against, and where temporary files lie."""

import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["services.etcd", "services.postgres"]

_TEMPORARY_ROOT = "PYTEST_DEBUG_TEMPROOT"
_SIMULATED = "simulated "

# How long an example takes is the machine's affair: one that gets no time to run would fail a test.
settings.register_profile("tests", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if the simulation's seeds were enough to see all that can happen, and have not."""
    if session.exitstatus == pytest.ExitCode.OK and any(lost for _, _, lost in _simulated(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell how many seeds of the simulation counted, and what they have not seen."""
    for kind, seen, lost in _simulated(config):
        terminalreporter.write_line(
            f"simulation: {seen['seeds']} seeds of {kind} without a violation, {seen['counted']} of them counted"
        )
        if lost:
            terminalreporter.write_line(f"simulation: SEEDS OF {kind} SHOULD HAVE SEEN: {', '.join(lost)}", red=True)


def _simulated(config: pytest.Config) -> Iterator[tuple[str, Counter[str], list[str]]]:
    """Sum up what the parts of `simulation/test_seeds.py` hand on: per kind, what was seen, and what should have been.

    Parts may have run in several processes, whose reports all come together where they are told.
    """
    reporter: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    sums: dict[str, Counter[str]] = {}
    for report in reporter.getreports("passed") if reporter is not None else ():
        for name, value in report.user_properties:
            if name.startswith(_SIMULATED):
                sums.setdefault(name.removeprefix(_SIMULATED), Counter()).update(json.loads(str(value)))
    for kind, seen in sums.items():
        # Only here, since most sessions run no seeds.
        from simulation import coverage, plan

        yield kind, seen, coverage.lost(plan.Kind(kind), seen["seeds"], seen["counted"], seen)
