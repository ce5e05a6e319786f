"""How credit is shared out."""

from hypothesis import given
from hypothesis import strategies as st

from duecourse.worker.credit import Account, distribute, rebalance

OUTS = st.lists(st.integers(0, 50), min_size=1, max_size=5)


@given(OUTS, st.integers(0, 100))
def test_all_that_is_free_goes_out_and_no_stream_is_far_below_another(outs: list[int], free: int) -> None:
    accounts = [Account(out=out, is_open=True) for out in outs]
    distribute(free, accounts)
    assert sum(account.out for account in accounts) == sum(outs) + free
    assert sum(account.unsent for account in accounts) == free
    given = [account.out for account in accounts if account.unsent]
    assert not given or max(given) - min(account.out for account in accounts) <= 1


@given(OUTS)
def test_withdrawals_and_their_answers_conserve_credit(outs: list[int]) -> None:
    accounts = [Account(out=out, is_open=True) for out in outs]
    rebalance(accounts)
    assert sum(account.out for account in accounts) == sum(outs)
    for account in accounts:
        assert -account.unsent == account.withdrawing <= account.out
        account.returned(account.withdrawing)
        assert account.out >= 0


def test_what_the_node_was_not_told_is_taken_back_at_once() -> None:
    account = Account(is_open=True)
    account.give(5)
    account.withdraw(3)
    assert (account.out, account.unsent, account.withdrawing) == (2, 2, 0)


def test_one_withdrawal_is_out_at_a_time() -> None:
    account = Account(out=5, is_open=True)
    account.withdraw(2)
    account.withdraw(2)
    assert (account.out, account.unsent, account.withdrawing) == (5, -2, 2)


def test_an_answer_cannot_take_more_than_was_withdrawn() -> None:
    account = Account(out=5, is_open=True)
    account.withdraw(2)
    account.returned(100)
    assert account.out == 3


def test_nothing_is_given_while_a_withdrawal_is_out_or_the_node_drains() -> None:
    withdrawing, draining = Account(out=5, is_open=True), Account()
    withdrawing.withdraw(2)
    distribute(4, [withdrawing, draining])
    assert (withdrawing.out, draining.out) == (5, 0)


def test_equals_take_turns() -> None:
    accounts = [Account(is_open=True), Account(is_open=True)]
    for expected in [(1, 0), (0, 1), (1, 0)]:
        distribute(1, accounts)
        assert (accounts[0].out, accounts[1].out) == expected
        for account in accounts:
            account.out = account.unsent = 0


def test_a_limited_type_gets_its_share_less_what_is_here() -> None:
    account = Account(out=10, is_open=True)
    account.limit("block", 3, 1)
    assert account.limited_unsent == {"block": 2}
    account.limit("block", 3, 1)
    assert account.limited_unsent == {"block": 2}
    account.use("block")
    account.limit("block", 3, 1)
    assert account.limited == {"block": 2}


def test_a_limited_type_is_named_even_if_nothing_is_free() -> None:
    account = Account(out=10, is_open=True)
    account.limit("block", 1, 1)
    assert account.limited_unsent == {"block": 0}
