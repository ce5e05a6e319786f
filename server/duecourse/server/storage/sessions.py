"""Which nodes hold sessions with a Postgres store, be they of a cluster or solo."""

from typing import Final

from duecourse.model import bounds
from duecourse.server.storage import StoreUnavailable
from duecourse.server.storage.connections import CallFailed, Connections

_SQL: Final = """
    SELECT DISTINCT coalesce(host(client_addr), 'this machine') FROM pg_stat_activity
    WHERE application_name = 'duecourse' AND datname = current_database() ORDER BY 1
"""


async def of_nodes(dsn: str) -> list[str]:
    """Return the addresses of the machines whose nodes have sessions. Raises StoreUnavailable."""
    connections = Connections(dsn, 1, 10 * bounds.SECOND, {"application_name": "duecourse-rebind"})
    try:
        return [row[0] for row in await connections.call(_SQL)]
    except CallFailed as error:
        raise StoreUnavailable(str(error)) from error
    finally:
        await connections.close()
