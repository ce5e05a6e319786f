"""The node's shards: the loop that drives them, the lanes that commit their writes, the terms that make and end them.

::

     commands, streams ──▶ inbox ──▶ Loop ──writes──▶ CommitLane ──▶ TaskStore
                             ▲        │ │                  │
                             │        │ └──reads──▶ Reads ─┤
                             └────────┼───── answers ◀─────┘
                                      ▼
                          answers to callers, messages to workers

All of it runs in one thread; only the loop touches a shard. Terms add shards to the loop once they are loaded, and take
them out when the store says that they are over.
"""
