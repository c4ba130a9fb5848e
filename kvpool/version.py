"""The release, and the version of the contract that it speaks, in one place."""

__version__ = "0.1.0"

PROTOCOL = 1
"""Version of the contract between clients and servers (docs/reference/compatibility.md). Add one in the first change of
a release cycle after which a client or server of the release before would need to know of the change."""
