"""How tables are fitted to a screen."""

from duecourse.cli import column_widths

TASK_ID = "01890a5d-ac96-774b-bcce-b302099a8057"


def test_columns_are_as_wide_as_their_cells_if_all_fit() -> None:
    assert column_widths.fit([["a", "bb"], ["a longer cell", ""]], 15) == [2, 13]


def test_the_widest_column_gives_way_first_and_only_between_words() -> None:
    assert column_widths.fit([["node-1"], ["the mail server said"], ["0.5 s"]], 20) == [6, 9, 5]
    assert column_widths.fit([["node-1"], ["127.0.0.1:7400"], ["-0.1 ms ±0.3"]], 24) == [6, 14, 4]


def test_words_are_broken_when_nothing_else_is_left_and_never_into_single_characters() -> None:
    assert column_widths.fit([["n"], ["scheduler.example:7400"], ["eligible"]], 22) == [1, 13, 8]
    assert column_widths.fit([["n"], ["scheduler.example:7400"], ["eligible"]], 5) == [1, 8, 8]


def test_an_id_of_the_usual_length_is_never_broken() -> None:
    assert column_widths.fit([[TASK_ID], ["succeeded"], ["2030-01-31 08:00:00Z"]], 50)[0] == len(TASK_ID)
    assert column_widths.fit([[TASK_ID * 2], ["succeeded"]], 60) == [51, 9]
