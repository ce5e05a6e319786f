"""Clusters on this machine, for `duecourse dev`, `demo` and `bench`: Postgres, etcd, nodes and workers as children.

Nothing that is started here outlives the process that started it, however that process ends: see `leash`.
"""
