"""What the commands refuse, and that they say why."""

import pytest
from simulation import planted, run


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--seeds", "abc"], "'abc' is neither a seed nor a range FROM:UNTIL"),
        (["--seeds", ":5"], "':5' is neither a seed nor a range FROM:UNTIL"),
        (["--seeds", "5:2"], "there is no seed in '5:2'"),
        (["--kind", "foo"], "'foo' is none of solo, cluster"),
        (["--jobs", "0"], "'0' is no number of at least 1"),
        (["--stop-after", "-1"], "'-1' is no number of at least 1"),
        (["--shrink"], "--all and --shrink go with --trace"),
        (["--seeds", "0:3", "--trace"], "--trace shows one seed"),
    ],
)
def test_what_makes_no_sense_is_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(given)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_mutation_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        planted.main(["--only", "nothing of the kind"])
    assert ended.value.code == 2
    assert "no mutation's name contains 'nothing of the kind'" in capsys.readouterr().err
