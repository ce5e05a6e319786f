"""`duecourse bench`: measures a cluster, one that runs or one that it starts.

Every figure is taken from outside: what was acknowledged to the client, and what workers recorded when their handlers
began. `docs/benchmarks.md` tells the method and what was measured.
"""

from duecourse.cli.bench.commands import app

__all__ = ["app"]
