"""The hash that places a task: documented, stable for ever, computable in any language.

A task's slot is the first 14 bits of BLAKE2b with an 8-byte digest over `namespace`, a zero byte, and `task_id`, both
UTF-8. A shard is a range of slots; the first cut gives every shard the same share of them.
"""

from hashlib import blake2b

from duecourse.model import bounds

_SHIFT = 16 - (bounds.SLOTS.bit_length() - 1)


def slot_of(namespace: str, task_id: str) -> int:
    """Return the slot, 0 to 16,383, of a task."""
    digest = blake2b(f"{namespace}\0{task_id}".encode(), digest_size=8).digest()
    return (digest[0] << 8 | digest[1]) >> _SHIFT


def shard_of_slot(slot: int, shards: int) -> int:
    """Return the shard that holds a slot when `shards` equal ranges cover them all."""
    return slot * shards // bounds.SLOTS


def first_slot(shard: int, shards: int) -> int:
    """Return the lowest slot of a shard; `first_slot(shards, shards)` is the end of all."""
    return -(-shard * bounds.SLOTS // shards)
