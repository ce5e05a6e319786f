"""Settings: where they come from, what is refused, and what is told about them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duecourse.model import bounds, durations
from duecourse.server import config, config_listing

SECRET = "canary-7f3a"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in config_listing.describe():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv(config.FILE_VARIABLE, raising=False)
    monkeypatch.setenv("DUECOURSE_STORE", "memory")


def write_file(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    file = folder / "duecourse.toml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv(config.FILE_VARIABLE, str(file))


def test_defaults_are_the_documented_bounds() -> None:
    settings = config.load({})
    assert settings.lease == bounds.DEFAULT_LEASE
    assert settings.horizon == bounds.HORIZON
    assert settings.shards == bounds.DEFAULT_SHARDS
    assert not settings.reflection
    assert settings.failpoints == ()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_file(monkeypatch, tmp_path, 'lease = "40s"\nshards = 8\ncommit_lanes = 4\n')
    monkeypatch.setenv("DUECOURSE_LEASE", "50s")
    monkeypatch.setenv("DUECOURSE_SHARDS", "16")
    settings = config.load({"lease": "1m"})
    assert (settings.lease, settings.shards, settings.commit_lanes) == (bounds.MINUTE, 16, 4)


def test_two_nodes_on_one_host_get_different_names() -> None:
    assert config.load({}).node_id != config.load({}).node_id


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lease": "14s", "heartbeat": "1s"}, "lease: 14s is less than the shortest, 15s"),
        ({"lease": "20s", "heartbeat": "7s"}, "lease: 20s is less than 3 heartbeat intervals, 21s"),
        ({"horizon": "25s"}, "horizon: 25s is not a multiple of 10s"),
        ({"drain": "2h"}, "drain: 2h is not within 0s to 1h"),
        ({"drain": "-1s"}, "drain: '-1s' is not a duration"),
        ({"heartbeat": "soon"}, "heartbeat: 'soon' is not a duration such as"),
        ({"heartbeat": True}, "heartbeat: write a duration such as"),
        ({"api_listen": "localhost"}, "api_listen: 'localhost' is not an address"),
        ({"api_listen": "::1:7400"}, "api_listen: '::1:7400': write an IPv6 address in brackets"),
        ({"api_listen": "host:99999"}, "api_listen: 'host:99999' is not an address"),
        ({"node_id": "a b"}, "node_id: 1 to 255 characters of"),
        ({"shards": "0"}, "shards: Input should be greater than or equal to 1"),
        ({"store": "mysql"}, "store: Input should be 'postgres' or 'memory'"),
        ({"speed": "fast"}, "speed: there is no such setting"),
        ({"store": "postgres"}, "postgres_dsn: where is Postgres?"),
    ],
)
def test_a_bad_setting_is_refused_by_name(flags: dict[str, object], message: str) -> None:
    with pytest.raises(config.InvalidSettings) as refusal:
        config.load(flags)
    assert str(refusal.value).startswith(message)


def test_every_fault_gets_a_line_of_its_own() -> None:
    with pytest.raises(config.InvalidSettings) as refusal:
        config.load({"shards": "0", "drain": "x"})
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["lease = ", "\xff", 'leese = "5s"'])
def test_a_file_that_cannot_be_used_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_file(monkeypatch, tmp_path, "")
    (tmp_path / "duecourse.toml").write_text(text, encoding="latin-1")
    with pytest.raises(config.InvalidSettings):
        config.load({})


def test_a_file_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(config.FILE_VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(config.InvalidSettings, match=r"there is no file .*none\.toml"):
        config.load({})


def test_tests_may_shorten_leases() -> None:
    settings = config.load({"lease": "900ms", "heartbeat": "300ms", "short_times": True})
    assert settings.lease == 900 * bounds.MILLISECOND


def test_failpoints_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUECOURSE_FAILPOINTS", "before_commit, after_commit")
    assert config.load({}).failpoints == ("before_commit", "after_commit")


def test_the_connection_string_comes_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "dsn"
    file.write_text(f"postgresql://a:{SECRET}@h/d\n", encoding="utf-8")
    settings = config.load({"store": "postgres", "postgres_dsn_file": str(file)})
    assert settings.read_postgres_dsn() == f"postgresql://a:{SECRET}@h/d"
    monkeypatch.setenv("DUECOURSE_POSTGRES_DSN", f"postgresql://b:{SECRET}@h/d")
    with pytest.raises(config.InvalidSettings, match="not both"):
        config.load({"store": "postgres", "postgres_dsn_file": str(file)})
    assert config.load({"store": "postgres"}).read_postgres_dsn() == f"postgresql://b:{SECRET}@h/d"


def test_a_connection_string_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    settings = config.load({"store": "postgres", "postgres_dsn_file": str(tmp_path / "dsn")})
    with pytest.raises(config.InvalidSettings, match="postgres_dsn_file"):
        settings.read_postgres_dsn()
    (tmp_path / "dsn").write_text("\n", encoding="utf-8")
    with pytest.raises(config.InvalidSettings, match="is empty"):
        settings.read_postgres_dsn()


def test_a_secret_is_nowhere_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUECOURSE_POSTGRES_DSN", f"postgresql://b:{SECRET}@h/d")
    settings = config.load({})
    assert config_listing.redacted(settings)["postgres_dsn"] == "(set)"
    assert SECRET not in repr(settings) + str(settings) + str(config_listing.redacted(settings))
    with pytest.raises(config.InvalidSettings) as refusal:
        config.load({"shards": "0"})
    assert SECRET not in str(refusal.value)
    assert [setting.name for setting in config_listing.describe() if setting.flag is None] == ["postgres_dsn"]


def test_what_is_listed_can_be_loaded_again() -> None:
    settings = config.load({"lease": "90s", "reflection": "true", "failpoints": "a,b", "api_listen": "[::1]:0"})
    listed = {name: text for name, text in config_listing.redacted(settings).items() if text}
    assert config.load(listed) == settings


def test_every_setting_is_described() -> None:
    for setting in config_listing.describe():
        assert setting.description.endswith("."), setting.name
        assert (setting.kind == "choice") == bool(setting.choices)
        assert (setting.kind in ("duration", "integer")) == bool(setting.range)


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:5000"),
        ("[::1]:0", None, "[::1]:5000"),
        ("0.0.0.0:0", "node-1.example:7400", "node-1.example:7400"),
    ],
)
def test_the_advertised_address_is_one_that_others_can_reach(listen: str, advertise: str | None, address: str) -> None:
    assert config.load({"api_listen": listen, "advertise": advertise}).advertised_address(5000) == address


def test_a_wildcard_address_is_advertised_by_the_hosts_name() -> None:
    assert config.load({"api_listen": "0.0.0.0:7400"}).advertised_address(7400) != "0.0.0.0:7400"


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("5", 5 * bounds.SECOND),
        ("0.25", 250 * bounds.MILLISECOND),
        ("250ms", 250 * bounds.MILLISECOND),
        ("1m30s", 90 * bounds.SECOND),
        ("1.5h", 90 * bounds.MINUTE),
        ("7d", 7 * bounds.DAY),
        ("10us", 10),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, micros: int) -> None:
    assert durations.parse(text) == micros


@pytest.mark.parametrize("text", ["", "s", "5 s", "5x", "-5s", "5s!", "1e9", "inf", "nan", "٣s", "5S"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as"):
        durations.parse(text)


@given(st.integers(min_value=0, max_value=bounds.MAX_DELAY))
def test_a_written_duration_reads_back_the_same(micros: int) -> None:
    assert durations.parse(durations.write(micros)) == micros
