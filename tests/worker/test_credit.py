"""How credit is shared out."""

from hypothesis import example, given
from hypothesis import strategies as st

from duecourse.worker.credit import DEMAND_LASTS, Account, distribute, forget_demand, move, rebalance

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


def an_account(out: int = 0, demand: int = 0) -> Account:
    return Account(out=out, is_open=True, demand=demand, tells_demand=True)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=5), st.integers(0, 100))
def test_free_credit_goes_where_work_waits_first(accounts: list[tuple[int, int]], free: int) -> None:
    made = [an_account(out, demand) for out, demand in accounts]
    distribute(free, made)
    assert sum(account.unsent for account in made) == free
    missing = sum(max(0, demand - out) for out, demand in accounts)
    elsewhere = sum(account.unsent for account in made if not account.demand)
    assert elsewhere <= max(0, free - missing)


def test_streams_where_work_waits_share_alike_and_take_turns() -> None:
    accounts = [an_account(demand=9), an_account(), an_account(demand=9)]
    distribute(6, accounts)
    assert [account.out for account in accounts] == [3, 0, 3]
    for _ in range(2):
        for account in accounts:
            account.out = 0
        distribute(1, accounts)
    assert accounts[1].turn == 0
    assert sorted(account.turn for account in accounts[::2]) == [2, 3]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=2, max_size=5))
@example([(0, 16), (3, 0), (3, 0), (12, 0)])
def test_as_much_is_moved_as_waits_and_only_from_where_nothing_does(accounts: list[tuple[int, int]]) -> None:
    made = [an_account(out, demand) for out, demand in accounts]
    move(made)
    wanted = sum(demand for out, demand in accounts if not out)
    idle = sum(out for out, demand in accounts if not demand)
    assert sum(account.withdrawing for account in made) == min(wanted, idle)
    assert not any(account.withdrawing for account in made if account.demand)
    left = [account.out - account.withdrawing for account in made if account.withdrawing]
    kept = [account.out for account in made if not account.withdrawing and not account.demand]
    assert not left or max(left) <= max([min(left), *kept]) + 1


def test_what_is_under_way_back_is_waited_for_but_not_for_ever() -> None:
    accounts = [an_account(demand=1), an_account(out=3), an_account(out=2)]
    move(accounts)
    move(accounts)
    assert [account.withdrawing for account in accounts] == [0, 1, 0]
    rebalance(accounts)
    assert [account.withdrawing for account in accounts] == [0, 1, 1]


def test_nothing_is_moved_to_where_credit_is_out_already() -> None:
    accounts = [an_account(out=1, demand=5), an_account(out=3)]
    move(accounts)
    assert not accounts[1].withdrawing


def test_a_single_credit_stays_where_it_is_when_nothing_waits() -> None:
    accounts = [an_account(out=1), an_account()]
    rebalance(accounts)
    assert not accounts[0].withdrawing


def test_a_node_where_work_waits_keeps_its_share_of_what_is_made_even() -> None:
    accounts = [an_account(out=8, demand=2), an_account(out=4), an_account()]
    rebalance(accounts)
    assert [account.withdrawing for account in accounts] == [0, 2, 0]


def test_a_node_that_does_not_tell_has_its_turn_every_second() -> None:
    silent, other = Account(is_open=True), an_account(out=1)
    rebalance([silent, other])
    assert other.withdrawing == 1
    other.returned(1)
    distribute(1, [silent, other])
    assert silent.out == 1
    silent.unsent = 0
    other.wants(1, 0)
    rebalance([silent, other])
    assert silent.withdrawing == 1


def test_what_was_supposed_of_a_node_is_forgotten_when_it_tells() -> None:
    slow_to_tell, other = Account(is_open=True), an_account(out=1)
    rebalance([slow_to_tell, other])
    other.returned(1)
    distribute(1, [slow_to_tell, other])
    # As by the first word of the cluster that it sends, a moment later.
    slow_to_tell.tells()
    other.wants(1, 0)
    move([slow_to_tell, other])
    assert slow_to_tell.unsent == 0, "what it was not told of yet is taken back at once"
    assert slow_to_tell.out == 0


def test_demand_that_is_not_repeated_is_forgotten() -> None:
    account = an_account()
    account.wants(3, 100)
    forget_demand([account], 99 + DEMAND_LASTS)
    assert account.demand == 3
    forget_demand([account], 100 + DEMAND_LASTS)
    assert account.demand == 0


def test_a_node_that_drains_gives_back_all_and_wants_no_more() -> None:
    account = an_account(out=5)
    account.withdraw(2)
    account.close()
    account.returned(2)
    assert (account.out, account.withdrawing) == (3, 3)
    account.returned(3)
    account.wants(7, 0)
    assert (account.out, account.demand) == (0, 0)
