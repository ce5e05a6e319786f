"""`duecourse cluster accept-clock`: has all nodes follow the store's clock, where they do not by themselves."""

import asyncio
from datetime import UTC, datetime
from typing import Final

from duecourse.cli import dsn, extras, output, values
from duecourse.cli.dsn import Dsn, DsnFile
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

_OPERATOR: Final = "operator"


def accept_clock(postgres_dsn: Dsn = None, dsn_file: DsnFile = None) -> None:
    """Have all nodes follow Postgres' clock, wherever it is now.

    For when nodes say that they do not follow it, since it has jumped, or since
    their own clocks disagree with it, and it is right. If it is wrong, mend it
    instead: after a jump forward all that has thereby become due starts. Nodes
    that run follow within a second. One that starts later needs another one
    that runs, or its own clock, to agree.
    """
    text = dsn.read(postgres_dsn, dsn_file)
    with extras.needed("server", "works on stores"):
        import duecourse.server.storage.postgres  # noqa: F401
    with dsn.failures_told(text):
        accepted = asyncio.run(_accept(text))
    ahead = accepted - SystemClock().wall()
    output.say(f"accepted: Postgres' clock shows {values.write_second(datetime.fromtimestamp(accepted / 1e6, UTC))}")
    if abs(ahead) > bounds.MAX_OFFSET:
        output.tell(f"that is {abs(ahead) / bounds.SECOND:.1f} s {'more' if ahead > 0 else 'less'} than this machine's")


async def _accept(text: str) -> Micros:
    from duecourse.server.storage.postgres import PostgresStore

    store = PostgresStore(text)
    await store.open()
    try:
        accepted = await store.accept_clock(None, _OPERATOR, 0)
    finally:
        await store.close()
    assert accepted is not None, "it was accepted wherever it was"
    return accepted
