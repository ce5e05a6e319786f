"""`duecourse server`: runs a node. Its options are the node's settings, read from where they are defined.

They are gathered only when the command runs, since that takes longer than all the rest of the command line.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duecourse.cli import connection, exits, extras

if TYPE_CHECKING:
    from duecourse.server.config_listing import Setting

_HELP = """Run a scheduler node until it is told to stop.

A setting is taken from the first of these that has it:
- its option,
- the variable DUECOURSE_ with its name in capitals,
- the TOML file that DUECOURSE_CONFIG names,
- its default.

Secrets have no option: set DUECOURSE_POSTGRES_DSN, or --postgres-dsn-file.
"""

_EXIT_CODES = (
    "Exit codes: 0 told to end; 1 it could not serve; 2 the command line or a setting is wrong; 3 the store refuses"
    " this node; 4 another node has taken its place; 5 etcd and the store are not of one cluster; 6 another node has"
    " its name."
)


def server(context: typer.Context) -> None:
    """Run a scheduler node."""
    connection.quieten()
    with extras.needed("server", "runs a node"):
        from duecourse.server import config_listing

        settings = config_listing.describe()
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(help=_HELP, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})(
        _command(settings)
    )
    app(args=context.args, prog_name=context.command_path)


def _command(settings: "tuple[Setting, ...]") -> Callable[..., None]:
    """Make a function with a parameter for every setting, for the library to make options of."""

    def run_node(**given: Any) -> None:
        _run({name: value for name, value in given.items() if value is not None})

    run_node.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_annotation(setting),
            )
            for setting in settings
            if setting.flag is not None
        ]
    )
    run_node.__annotations__ = {setting.name: _annotation(setting) for setting in settings if setting.flag is not None}
    return run_node


def _annotation(setting: "Setting") -> Any:
    is_switch = setting.kind == "boolean"
    # Short words here leave room for the names of the options, which would be cut on a terminal of 80 columns.
    option = typer.Option(
        setting.flag or "",
        help=_help(setting),
        metavar=None if is_switch else "CHOICE" if setting.choices else setting.kind.upper(),
        show_default=False,
        hidden=setting.is_hidden,
    )
    return Annotated[bool | None if is_switch else str | None, option]


def _help(setting: "Setting") -> str:
    sentences = [setting.description]
    if not all(choice in setting.description for choice in setting.choices):
        sentences.append(f"One of {', '.join(setting.choices)}.")
    if setting.range:
        sentences.append(f"From {setting.range}.")
    if setting.default:
        sentences.append(f"Default: {setting.default}.")
    return " ".join(sentences)


def _run(given: dict[str, object]) -> None:
    with extras.needed("server", "runs a node"):
        from duecourse.server import config
    try:
        settings = config.load(given)
    except config.InvalidSettings as error:
        for line in str(error).splitlines():
            exits.fail(line)
        raise typer.Exit(exits.ExitCode.USAGE) from None
    with extras.needed("server", "runs a node"):
        from duecourse.server import node
    raise typer.Exit(node.run(settings))
