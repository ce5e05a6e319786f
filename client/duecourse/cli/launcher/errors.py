"""What goes wrong with a cluster on this machine."""


class LaunchError(Exception):
    """The cluster does not start or has ended; the message says what happened and what to do."""
