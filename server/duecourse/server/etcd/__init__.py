"""etcd as Duecourse uses it: a thin client that tells the truth about what it does not know.

Coordination goes through etcd, and nothing here ever decides safety: etcd proposes, the store disposes. What this room
promises instead is to be honest and never to stay stuck.

- Every call has a deadline, and goes to one member at a time. A member that refuses or does not answer is left for the
  next one. Reads are linearizable, always.
- A write that failed is one of three: surely not applied (`EtcdUnavailable`, `EtcdRefused`), or unknown
  (`EtcdUnknown`: it was sent and its answer was lost). No write whose answer was lost is ever repeated by the client;
  the caller re-reads first. Only what is the same when done twice is tried again, at the next member.
- A `Watch` goes on by itself through restarts, frozen members, lost connections and compaction. It is a wake-up, not
  the truth: `Mirror` combines it with linearizable reads on connecting and at intervals.
- A lease counts from when the last answered sign of life was sent. It is lost only when etcd says that there is no such
  lease; silence means nothing.

`keys` is the only module that knows the key space.
"""
