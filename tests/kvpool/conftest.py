"""The command line, run in the tests' own process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from kvpool.cli import main
from tests.support.processes import ServerProcess


class Cli:
    """Runs `kvpool COMMAND --endpoint ...` in this process; returns what it printed and fails if it does."""

    def __init__(self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.server = server
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> str:
        out, err = self.fails(*arguments, status=0)
        assert err == ""
        return out

    def fails(self, *arguments: str, status: int = 1, endpoint: str | None = None) -> tuple[str, str]:
        """What it printed, to stdout and to stderr, when it ended with `status`. An empty endpoint is left out."""
        endpoint = self.server.endpoint if endpoint is None else endpoint
        given = [*arguments, "--endpoint", endpoint] if endpoint else arguments
        self._monkeypatch.setattr(sys, "argv", ["kvpool", *given])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self._capsys.readouterr()
        assert (ended.value.code or 0) == status, printed
        return printed.out, printed.err


CliAt = Callable[[ServerProcess], Cli]


@pytest.fixture
def cli_at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CliAt:
    """Makes the command line of a server: `cli_at(pool_server())`."""
    return lambda server: Cli(server, monkeypatch, capsys)


@pytest.fixture
def cli(server: ServerProcess, cli_at: CliAt) -> Cli:
    """The command line of the module's `server`."""
    return cli_at(server)
