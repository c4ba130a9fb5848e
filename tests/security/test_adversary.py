"""The adversary finds what each mechanism keeps apart once that is taken out; with all of them it stays in bounds.

Times are those of a shared machine: an attack is made again if its score is on the wrong side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool_server.process.runtime import KEEP_BYTES
from tests.security.adversary import FLOODS, SEEDS, Attack, Field
from tests.support.processes import wait_for

pytestmark = pytest.mark.more
TRIES = 4
BACK_S = 10.0


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with contextlib.closing(Field(tmp_path_factory.mktemp("field"))) as field:
        yield field


def _scores(field: Field, attack: Attack, is_right: Callable[[float], bool]) -> list[float]:
    """Of an attack, up to one that is right."""
    scores: list[float] = []
    while len(scores) < TRIES and not (scores and is_right(scores[-1])):
        scores.append(field.score(attack)[0])
    return scores


@pytest.mark.parametrize("name", SEEDS)
def test_known_attacks_stay_in_bounds(field: Field, name: str) -> None:
    assert min(scores := _scores(field, SEEDS[name], lambda score: score <= 1.0)) <= 1.0, scores


@pytest.mark.parametrize("name", FLOODS)
def test_nginx_keeps_floods_in_bounds_that_the_server_alone_does_not(tmp_path: Path, name: str) -> None:
    for has_nginx in (True, False):
        directory = tmp_path / f"{has_nginx}"
        directory.mkdir()
        with contextlib.closing(Field(directory, has_nginx=has_nginx)) as field:
            scores = _scores(field, FLOODS[name], lambda score: (score <= 1.0) == has_nginx)  # noqa: B023
        assert (scores[-1] <= 1.0) == has_nginx, scores


def test_the_memory_of_a_burst_is_returned(tmp_path: Path) -> None:
    with contextlib.closing(Field(tmp_path)) as field:
        before = field.server.own_bytes
        bursts = 4 * ("whole messages of many", "streams of many")  # On a busy machine some are small.
        assert any(field.score(SEEDS[name])[1]["grown"] > 2 * KEEP_BYTES for name in bursts)
        wait_for(lambda: field.server.own_bytes < before + 2 * KEEP_BYTES, "most of it is back", BACK_S)


@pytest.mark.parametrize(
    ("mechanism", "name"),
    [
        ("turns", "large puts"),
        ("events handled together", "whole messages of many"),
        ("counted fields", "messages full of empty parts"),
        ("verifications in steps", "verifications of tiny chunks"),
    ],
)
def test_without_a_mechanism_its_attack_is_found(tmp_path: Path, mechanism: str, name: str) -> None:
    environment = {"UNMENDED": mechanism}
    with contextlib.closing(Field(tmp_path, "tests.security.unmended", environment)) as field:
        assert max(scores := _scores(field, SEEDS[name], lambda score: score > 1.0)) > 1.0, scores
