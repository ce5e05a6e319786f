"""The cluster clock: what all nodes of a cluster agree the time is, whatever their own clocks say.

`projection` holds where the reference stands, as an interval; `discipline` decides whether a reading of the reference
is followed; both are pure. `cluster_clock` takes the readings, and is the `Clock` of a node.
"""
