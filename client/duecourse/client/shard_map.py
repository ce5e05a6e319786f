"""Who leads which tasks, as a node told it. A hint: whoever is asked passes on what it does not lead itself."""

from bisect import bisect_right

from duecourse.v1 import cluster_service_pb2


class ShardMap:
    """One picture of the cluster. `addresses` are those of all live nodes."""

    def __init__(self, picture: cluster_service_pb2.WatchClusterResponse) -> None:
        by_name = {node.node_id: node.address for node in picture.nodes}
        shards = sorted(picture.shards, key=lambda shard: shard.slot_from)
        self.addresses = tuple(filter(None, by_name.values()))
        self._starts = [shard.slot_from for shard in shards]
        self._leaders = [by_name.get(shard.leader, "") for shard in shards]

    @property
    def has_several(self) -> bool:
        """Tell whether it makes a difference which node is asked."""
        return len(self.addresses) > 1

    def leader(self, slot: int) -> str:
        """Return the address of the node that leads a slot; empty if none is known."""
        index = bisect_right(self._starts, slot) - 1
        return self._leaders[index] if index >= 0 else ""
