from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpool.protocol.errors import ConfigError
from vllm_plugin import releases
from vllm_plugin.connector import KVPoolConnector, warn_if_untested


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.33.0", "0.33.1rc2", "0.32.0+cpu", vllm.__version__])
def test_tested_releases_are_silent(version: str) -> None:
    assert not warn_if_untested(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "1.0", "0.34.0.dev1+gabc", "dev"])
def test_others_are_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warn_if_untested(version)


def test_the_compatibility_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/compatibility.md").read_text()
    assert all(f"{major}.{minor}" in page for major, minor in releases.TESTED)


def test_a_contract_without_failed_requests_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    releases.check_contract()
    monkeypatch.delattr(releases.base, "KVConnectorTransferResults")
    with pytest.raises(
        ConfigError, match=r"needs vLLM 0\.30 or later: vLLM .* \(KVConnectorTransferResults\); upgrade"
    ):
        releases.check_contract()


def test_a_contract_without_block_tables_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(releases.SchedulerOutput.__dataclass_fields__, "kv_connector_block_state")
    with pytest.raises(ConfigError, match=r"\(SchedulerOutput\.kv_connector_block_state\); upgrade"):
        releases.check_contract()


def test_a_connector_of_a_refused_release_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(releases.base, "KVConnectorTransferResults")
    with pytest.raises(ConfigError, match=r"upgrade vLLM, or serve without --kv-transfer-config"):
        KVPoolConnector(None, KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]


def test_extra_keys_of_events_are_vllms_own() -> None:
    assert releases.event_extra_keys([None, (("lora", "adapter"),)]) == [None, ("adapter",)]
    assert releases.event_extra_keys([]) is None
