"""What is taken for the addresses of nodes, and what is refused before anything is dialled."""

import pytest

from duecourse.client import Client
from duecourse.model.addresses import several
from duecourse.worker import Worker


def test_addresses_come_one_by_one_or_with_commas_and_count_once() -> None:
    assert several("a:1, b:2,,a:1") == several(["a:1", "b:2", "a:1"]) == ("a:1", "b:2")
    assert several("[::1]:7400,dns:///nodes:7400,unix:/run/node") == (
        "[::1]:7400",
        "dns:///nodes:7400",
        "unix:/run/node",
    )


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("localhost", "is localhost:7400 meant"),
        ("a:1,b", "is b:7400 meant"),
        ("127.0.0.1:99999", "not an address"),
        ("a:", "not an address"),
        ("http://a:7400", "no http://"),
        ("::1:7400", "in brackets"),
    ],
)
def test_what_is_no_address_is_refused_by_clients_and_workers(address: str, word: str) -> None:
    for make in (Client, Worker):
        with pytest.raises(ValueError, match=word):
            make(address)
