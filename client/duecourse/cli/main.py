"""The command line `duecourse`. An interrupt ends it quietly, also while what it is made of is still being imported."""

import sys
from typing import Final

_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line."""
    try:
        from duecourse.cli import commands

        commands.app()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
