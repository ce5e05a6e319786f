"""Settings of a node: what can be set, by what name, within which bounds.

A setting is looked for in this order: command-line flag, environment (`DUECOURSE_` and its name in capitals), the TOML
file that `DUECOURSE_CONFIG` names, default. Durations are written `250ms`, `5s`, `1m30s`, `24h`, or as a number of
seconds, and are microseconds inside. Secrets come from the environment or from files, never from flags, which anybody
on the machine can read. Nothing else in a node reads its environment.
"""

import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from duecourse.model import bounds, durations, names
from duecourse.model.addresses import host_and_port
from duecourse.model.instants import Micros

ENVIRONMENT_PREFIX: Final = "DUECOURSE_"
FILE_VARIABLE: Final = "DUECOURSE_CONFIG"
_WILDCARDS: Final = frozenset(("", "0.0.0.0", "::"))  # noqa: S104 to tell them from addresses that others can reach


class InvalidSettings(Exception):
    """The settings cannot be used; the message has a line for each fault and says what is expected."""


class StoreKind(StrEnum):
    """Where tasks are kept."""

    POSTGRES = "postgres"
    MEMORY = "memory"


class CoordinationKind(StrEnum):
    """How nodes agree who leads."""

    SOLO = "solo"
    ETCD = "etcd"


class LogFormat(StrEnum):
    """How log events are written."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """Below what importance log events are left out."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class DurationRange:
    """Checks a duration, and says its bounds as a person would."""

    at_least: Micros
    at_most: Micros
    usually_at_least: Micros = 0
    """What is said: less is only for tests, and checked elsewhere."""

    def __call__(self, value: Micros) -> Micros:
        """Return the value if it lies within."""
        if not self.at_least <= value <= self.at_most:
            raise ValueError(f"{durations.write(value)} is not within {self}")
        return value

    def __str__(self) -> str:
        return f"{durations.write(max(self.at_least, self.usually_at_least))} to {durations.write(self.at_most)}"


def _parse_duration(value: object) -> Micros:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("write a duration such as 250ms, 5s, 1m30s or 24h")
    return durations.parse(str(value))


def _check_address(address: str) -> str:
    host_and_port(address)
    return address


def _check_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        host_and_port(address)
    return addresses


def _check_name(name: str) -> str:
    if not names.is_name(name):
        raise ValueError(f"1 to {bounds.MAX_NAME_BYTES} characters of {names.ALPHABET} are wanted")
    return name


def _split_list(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _name_node() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:100] or "node"
    return f"{host}-{secrets.token_hex(4)}"


Duration = Annotated[Micros, BeforeValidator(_parse_duration)]
Address = Annotated[str, AfterValidator(_check_address)]


class Settings(BaseSettings):
    """All settings of one node. Cannot be changed once made; `load` makes it and explains what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        validate_default=False,
    )

    node_id: Annotated[str, AfterValidator(_check_name)] = Field(
        default_factory=_name_node,
        description="Name of this node, unique in the cluster. Default: the host's name with a random ending.",
    )
    api_listen: Address = Field(
        default=f"127.0.0.1:{bounds.API_PORT}",
        description="Where clients and workers are served, host:port. Port 0 takes a free one.",
    )
    advertise: Address | None = Field(
        default=None,
        description="Where others reach api-listen, host:port. Default: api-listen itself, with the host's name in"
        " place of a wildcard address.",
    )
    peer_listen: Address = Field(
        default=f"127.0.0.1:{bounds.PEER_PORT}",
        description="Where the other nodes of the cluster reach this one, host:port. Port 0 takes a free one. Not"
        " for clients; unused by a solo node.",
    )
    advertise_peer: Address | None = Field(
        default=None,
        description="Where the other nodes reach peer-listen, host:port. Default: peer-listen itself, with the host's"
        " name in place of a wildcard address.",
    )
    admin_listen: Address = Field(
        default=f"127.0.0.1:{bounds.ADMIN_PORT}",
        description="Where /metrics, /healthz and /readyz are served, host:port. Port 0 takes a free one.",
    )
    store: StoreKind = Field(
        default=StoreKind.POSTGRES,
        description="Where tasks are kept: postgres, or memory, which loses them with the process.",
    )
    postgres_dsn: SecretStr | None = Field(
        default=None,
        description="Connection string of Postgres, postgresql://user@host:5432/database. No flag: it may hold a"
        " password.",
    )
    postgres_dsn_file: Path | None = Field(
        default=None,
        description="File that holds the connection string, in place of DUECOURSE_POSTGRES_DSN.",
    )
    coordination: CoordinationKind = Field(
        default=CoordinationKind.SOLO,
        description="How nodes agree who leads which shard: solo, one node alone, or etcd.",
    )
    etcd_endpoints: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(_split_list), AfterValidator(_check_addresses)
    ] = Field(
        default=(),
        description="Members of etcd, host:port, separated by commas.",
    )
    etcd_prefix: Annotated[str, AfterValidator(_check_name)] = Field(
        default="duecourse",
        description="What this cluster's keys in etcd begin with. Clusters that share an etcd need one each.",
    )
    etcd_ca_file: Path | None = Field(
        default=None,
        description="File of the certificates that vouch for etcd's. Set: etcd is reached by TLS.",
    )
    etcd_cert_file: Path | None = Field(
        default=None,
        description="File of this node's certificate for etcd, if etcd wants one.",
    )
    etcd_key_file: Path | None = Field(
        default=None,
        description="File of the key to it.",
    )
    etcd_user: str | None = Field(
        default=None,
        description="User name in etcd, if it wants one.",
    )
    etcd_password_file: Path | None = Field(
        default=None,
        description="File of that user's password.",
    )
    session: Annotated[Duration, AfterValidator(DurationRange(bounds.SECOND, bounds.MINUTE))] = Field(
        default=bounds.DEFAULT_SESSION,
        description="How long a node may be silent to etcd before its shards move to others.",
    )
    shards: int = Field(
        default=bounds.DEFAULT_SHARDS,
        ge=1,
        le=bounds.SLOTS,
        description="How many shards a store gets that this node creates (memory). Any other keeps its own number.",
    )
    lease: Annotated[
        Duration, AfterValidator(DurationRange(100 * bounds.MILLISECOND, bounds.HOUR, bounds.MIN_LEASE))
    ] = Field(
        default=bounds.DEFAULT_LEASE,
        description="How long a worker may be silent before its attempts are taken from it. At least three heartbeat"
        " intervals.",
    )
    heartbeat: Annotated[Duration, AfterValidator(DurationRange(20 * bounds.MILLISECOND, bounds.MINUTE))] = Field(
        default=bounds.DEFAULT_HEARTBEAT,
        description="How often workers and nodes tell each other that they live.",
    )
    horizon: Annotated[Duration, AfterValidator(DurationRange(2 * bounds.BUCKET, bounds.HOUR))] = Field(
        default=bounds.HORIZON,
        description="How far ahead due tasks are loaded into memory. A multiple of 10s.",
    )
    retention: Annotated[Duration, AfterValidator(DurationRange(bounds.MIN_RETENTION, bounds.MAX_DELAY))] = Field(
        default=bounds.DEFAULT_RETENTION,
        description="How long ended tasks are kept, and their ids with them.",
    )
    drain: Annotated[Duration, AfterValidator(DurationRange(0, bounds.HOUR))] = Field(
        default=bounds.DRAIN,
        description="How long a node that shuts down gives calls and streams to end by themselves.",
    )
    idle_check: Annotated[Duration, AfterValidator(DurationRange(20 * bounds.MILLISECOND, bounds.IDLE_CHECK))] = Field(
        default=bounds.IDLE_CHECK,
        description="How often a node asks the store whether its terms still stand.",
    )
    commit_lanes: int = Field(
        default=bounds.COMMIT_LANES,
        ge=1,
        le=16,
        description="How many transactions are under way at once.",
    )
    max_pending_submissions: int = Field(
        default=bounds.MAX_PENDING_SUBMISSIONS,
        ge=bounds.MAX_BATCH,
        le=10_000_000,
        description="How many submissions may wait to become durable before more are refused with RESOURCE_EXHAUSTED.",
    )
    max_worker_streams: int = Field(
        default=bounds.MAX_WORKER_STREAMS,
        ge=1,
        le=100_000,
        description="How many worker streams may be open before more are refused with RESOURCE_EXHAUSTED.",
    )
    reflection: bool = Field(
        default=False,
        description="Serve gRPC reflection, so that tools can list the methods.",
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="console (for people), json (for machines), or auto: console on a terminal, else json.",
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Log events below this importance are left out.",
    )
    short_times: bool = Field(
        default=False,
        description="For tests: allow leases below 15s.",
        json_schema_extra={"hidden": True},
    )
    placement_settles: Annotated[Duration, AfterValidator(DurationRange(0, bounds.MINUTE))] = Field(
        default=bounds.PLACEMENT_SETTLES,
        description="For tests: how long nodes must not have come or gone before shards move to balance them.",
        json_schema_extra={"hidden": True},
    )
    wall_clock_error_file: Path | None = Field(
        default=None,
        description="For fault tests: file that holds by how many microseconds this node's wall clock is to be wrong.",
        json_schema_extra={"hidden": True},
    )
    failpoints: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)] = Field(
        default=(),
        description="For fault tests: names, separated by commas, of points at which the process kills itself.",
        json_schema_extra={"hidden": True},
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Look at flags, then the environment, then the file."""
        file = os.environ.get(FILE_VARIABLE)
        if not file:
            return init_settings, env_settings
        if not Path(file).is_file():
            raise SettingsError(f"{FILE_VARIABLE}: there is no file {file}")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=file)

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        shortest = bounds.HEARTBEATS_PER_LEASE * self.heartbeat
        if self.lease < shortest:
            raise ValueError(
                f"lease: {durations.write(self.lease)} is less than {bounds.HEARTBEATS_PER_LEASE} heartbeat intervals,"
                f" {durations.write(shortest)}"
            )
        if self.lease < bounds.MIN_LEASE and not self.short_times:
            raise ValueError(
                f"lease: {durations.write(self.lease)} is less than the shortest, {durations.write(bounds.MIN_LEASE)}"
            )
        if self.horizon % bounds.BUCKET:
            raise ValueError(
                f"horizon: {durations.write(self.horizon)} is not a multiple of {durations.write(bounds.BUCKET)}"
            )
        return self

    @model_validator(mode="after")
    def _check_postgres(self) -> Self:
        sources = (self.postgres_dsn is not None) + (self.postgres_dsn_file is not None)
        if sources == 2:
            raise ValueError("postgres_dsn: set either the connection string or its file, not both")
        if sources == 0 and self.store is StoreKind.POSTGRES:
            raise ValueError(
                "postgres_dsn: where is Postgres? Set DUECOURSE_POSTGRES_DSN or --postgres-dsn-file,"
                " or run `duecourse dev`, which brings its own"
            )
        return self

    @model_validator(mode="after")
    def _check_coordination(self) -> Self:
        if (self.etcd_cert_file is None) != (self.etcd_key_file is None):
            raise ValueError("etcd_cert_file: set it together with etcd_key_file")
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            raise ValueError("etcd_user: set it together with etcd_password_file")
        if self.coordination is CoordinationKind.ETCD:
            if not self.etcd_endpoints:
                raise ValueError("etcd_endpoints: where is etcd? Set DUECOURSE_ETCD_ENDPOINTS")
            if self.store is StoreKind.MEMORY:
                raise ValueError("coordination: nodes that meet in etcd need a store that they share: store postgres")
        return self

    def read_postgres_dsn(self) -> str:
        """Return the connection string of Postgres; it may hold a password. Raises InvalidSettings."""
        if self.postgres_dsn_file is None:
            assert self.postgres_dsn is not None
            return self.postgres_dsn.get_secret_value()
        try:
            dsn = self.postgres_dsn_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSettings(f"postgres_dsn_file: {error}") from error
        if not dsn:
            raise InvalidSettings(f"postgres_dsn_file: {self.postgres_dsn_file} is empty")
        return dsn

    def wall_clock_error(self) -> Micros:
        """Return by how much the wall clock is to be wrong just now, for a fault test."""
        return int(self.wall_clock_error_file.read_text()) if self.wall_clock_error_file else 0

    def advertised_address(self, port: int) -> str:
        """Return where others reach the API, once its listener was given a port."""
        return self.advertise or _reachable(self.api_listen, port)

    def advertised_peer_address(self, port: int) -> str:
        """Return where the other nodes reach this one, once its listener for them was given a port."""
        return self.advertise_peer or _reachable(self.peer_listen, port)


def _reachable(listen: str, port: int) -> str:
    host, _ = host_and_port(listen)
    if host in _WILDCARDS:
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def load(flags: Mapping[str, object]) -> Settings:
    """Gather the settings; `flags` are those given on the command line, by name. Raises InvalidSettings."""
    try:
        return Settings(**cast(dict[str, Any], dict(flags)))
    except ValidationError as error:
        raise InvalidSettings("\n".join(_explain(fault["loc"], fault["msg"]) for fault in error.errors())) from None
    except SettingsError as error:
        raise InvalidSettings(str(error)) from error
    except ValueError as error:
        # Of the sources only the file can fail to parse: TOML's errors are ValueErrors, and so are those of decoding.
        raise InvalidSettings(f"{os.environ.get(FILE_VARIABLE, 'settings')}: {error}") from error


def _explain(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    name = str(location[0])
    return f"{name}: {message if name in Settings.model_fields else 'there is no such setting'}"
