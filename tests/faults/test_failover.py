"""What `poe failover` refuses before it starts anything."""

import pytest
from faults import failover


@pytest.mark.parametrize("given", ["0", "-1", "few"])
def test_rounds_are_a_positive_number(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        failover.main([f"--repeat={given}"])
    assert ended.value.code == 2
    assert f"'{given}' is no number of at least 1" in capsys.readouterr().err
