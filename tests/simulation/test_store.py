"""The simulated store without trouble passes the suite that every store has to pass."""

# ruff: noqa: F403
from conformance.test_commit import *
from conformance.test_fence import *
from conformance.test_loads import *
from conformance.test_reads import *
from conformance.test_retention import *
