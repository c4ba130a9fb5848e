from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpool.protocol.errors import ConfigError
from vllm_plugin import releases
from vllm_plugin.connector import KVPoolConnector, warn_if_untested


def test_releases_that_are_not_tested_are_warned_of() -> None:
    tested = ("0.30.0", "0.32.0", "0.33.0", "0.33.1rc2", "0.32.0+cpu", vllm.__version__)
    assert not any(map(warn_if_untested, tested))
    assert all(map(warn_if_untested, ("0.29.9", "0.34.0", "1.0", "0.34.0.dev1+gabc", "dev")))


def test_the_compatibility_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/compatibility.md").read_text()
    assert all(f"{major}.{minor}" in page for major, minor in releases.TESTED)


def test_a_contract_that_lacks_a_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    releases.check_contract()
    with monkeypatch.context() as patch:
        patch.delattr(releases.base, "KVConnectorTransferResults")
        with pytest.raises(ConfigError, match=r"needs vLLM 0\.30 or later: vLLM .* \(KVConnectorTransferResults\); up"):
            releases.check_contract()
        with pytest.raises(ConfigError, match=r"upgrade vLLM, or serve without --kv-transfer-config"):
            KVPoolConnector(None, KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]
    monkeypatch.delitem(releases.SchedulerOutput.__dataclass_fields__, "kv_connector_block_state")
    with pytest.raises(ConfigError, match=r"\(SchedulerOutput\.kv_connector_block_state\); upgrade"):
        releases.check_contract()


def test_extra_keys_of_events_are_vllms_own() -> None:
    assert releases.event_extra_keys([None, (("lora", "adapter"),)]) == [None, ("adapter",)]
    assert releases.event_extra_keys([]) is None
