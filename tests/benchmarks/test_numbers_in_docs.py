"""Each number with a unit in the documents is one of a benchmark's results, or a setting of the code."""

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.harness import figures, glance, plots, report
from benchmarks.harness.measuring import RESULTS

ROOT = Path(__file__).parents[2]
UNITS = {"ms": 1e-3, "s": 1, "seconds": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}
SUFFIXES = {"ms": 1e-3, "s": 1, "bytes": 1, "share": 1}
ELSEWHERE = "elsewhere"
"""Of a number that this code does not set: another program's default, a wire format, an arithmetic fact."""

SETTINGS = {
    "`lookup_timeout_ms` (200 ms)": "vllm_plugin.config: ConnectorConfig().lookup_timeout_ms",
    "`promotion_wait_ms` (1 s, with a tier)": "vllm_plugin.config: ConnectorConfig().promotion_wait_ms",
    "`load_timeout_ms` (5 s)": "vllm_plugin.config: ConnectorConfig().load_timeout_ms",
    "the target is 2 ms": ELSEWHERE,
    "end within 10 seconds": "kvpool.security.files: 2 * LOOK_EVERY_S # s",
    "`peer_memory=` at most (4 GiB)": "kvpool_server.tiers.file.peer_directories: DEFAULT_MEMORY_BYTES",
    "a 64th of it (or into 32 MiB": "kvpool_server.cache.arena: MIN_EXTENT_BYTES",
    "one for each 4 KiB of the arena": "kvpool_server.cache.arena: MIN_SLOT_BYTES",
    "(64 MiB at most); a subscriber": "kvpool_server.events.messages: MAX_BYTES",
    "`listen`, 100 bytes at most": "kvpool.transport.unix_socket: MAX_PATH_BYTES",
    "this server may take there, 4 MiB at least": ELSEWHERE,
    "multiples of 4 KiB": "kvpool_server.tiers.file.extents: DIRECT_BYTES",
    "gives to the cluster, 16 MiB at least": "kvpool_server.tiers.mooncake.tier: MIN_SEGMENT_BYTES",
    "each with 64 MiB to stage": "kvpool_server.tiers.mooncake.store_process: STAGING_BYTES",
    "A step waits for lookups for 10 % of its": "vllm_plugin.scheduler.lookups: MAX_WAIT_SHARE",
    "25 % of a short one": "vllm_plugin.scheduler.lookups: ASYNC_WAIT_SHARE",
    "0.5 ms where an": "vllm_plugin.scheduler.lookups: MIN_WAIT_S",
    "(of 250 ms at most)": "vllm_plugin.scheduler.lookups: LONG_STEP_S",
    "has worked for 1 ms": "vllm_plugin.scheduler.lookups: MAX_BEGIN_S",
    "longer than 50 ms": "vllm_plugin.scheduler.lookups: SHORT_STEP_S",
    "have a budget of 2 ms": "vllm_plugin.scheduler.lookups: MAX_WALKS_S",
    "lookup 10 ms)": "vllm_plugin.scheduler.lookups: MAX_LOOKUP_WALKS_S",
    "or 50 ms, and then vLLM preempts": "vllm_plugin.scheduler.store_jobs: RELIEF_S",
    "batches of 32 MiB": "vllm_plugin.worker.copy.cuda: STAGING_BYTES",
    "pieces of 1 MiB": "kvpool.transport.data_port: WRITTEN_PIECE_BYTES",
    "bounded to 5 %": "vllm_plugin.scheduler.load_policy: PROBE_SHARE",
    "loads 128 MiB from a file tier": "benchmarks.cases.mooncake_tier: PROMPT_BYTES",
    "with steps of 50 ms": ELSEWHERE,
    "Where 2 % of the blocks fit": ELSEWHERE,
    "a block hash of 32 bytes": "kvpool.protocol.types: HASH_BYTES",
    "any 32 bytes that name": "kvpool.protocol.types: HASH_BYTES",
    "process waits 2 s at most": "kvpool.client.tracing: CLOSE_S",
    "all 32 bytes": "kvpool.protocol.types: HASH_BYTES",
    "reads nothing for 10 seconds": "kvpool_server.events.publisher: REPLAY_STALL_S",
    "connection is closed after 30 seconds": "kvpool_server.events.sockets: DEAF_MS",
    "and a snapshot 10 seconds after its last one": "kvpool_server.events.publisher: SNAPSHOT_EVERY_S",
    "10 seconds after the last one of its key": "kvpool_server.events.publisher: SNAPSHOT_EVERY_S",
    "one snapshot every 10 seconds": "kvpool_server.events.publisher: SNAPSHOT_EVERY_S",
    "probed every 10 ms": "kvpool_server.app.monitoring: PROBE_EVERY_S",
    "p99 is 0 until probes cover 10 s": "kvpool_server.app.monitoring: PROBED_S",
    "comes after 0.25 s": "vllm_plugin.session: FIRST_WAIT_S",
    "later ones up to 5 s apart": "vllm_plugin.session: MAX_RETRY_S",
    "up to 60 s apart": "vllm_plugin.session: MAX_FLAP_WAIT_S",
    "by 5 % of the compute time": "vllm_plugin.scheduler.load_policy: PROBE_SHARE",
    "of the arena, 10 % by default": "kvpool_server.sharing: Limits().pin_share",
    "a sample every 10 seconds": "kvpool_server.observability.site: INTERVAL_S",
    "one every 10 seconds": "kvpool_server.observability.site: INTERVAL_S",
    "less than 300 KiB": "tests.kvpool_server.page.test_browser: MAX_TRANSFER_BYTES",
    "written every 10 s": "kvpool_server.reports.usage_ledger: SAMPLE_S",
    "sampled every 10 s": "kvpool_server.reports.usage_ledger: SAMPLE_S",
    "Engines report every 10 s": "vllm_plugin.scheduler.telemetry: REPORT_EVERY_S",
    "within 1 % of one core": "kvpool_server.value.curve: CPU_SHARE",
    "takes 6 to 10 minutes on two cores": ELSEWHERE,
    "still answers 10 s after the deadline": "kvpool.commands.server: LATE_S",
    "`drain_ms` and 5 s together": "kvpool_server.app.composition: HANDOVER_S",
    "for `drain_ms` and 5 s more": "kvpool_server.app.composition: HANDOVER_S",
    "more than `drain_ms` and 5 s": "kvpool_server.app.composition: HANDOVER_S",
    "at most 10 % of a step": "vllm_plugin.scheduler.lookups: MAX_WAIT_SHARE",
    "waits up to 60 s": "vllm_plugin.session: MAX_FLAP_WAIT_S",
    "costs at most 5 %": "vllm_plugin.scheduler.load_policy: PROBE_SHARE",
    "2 MiB for each GiB": ELSEWHERE,
    "again after 10 s": "kvpool.client.transport_choice: RETRY_S[0]",
    "down to every 320 s": "kvpool.client.transport_choice: RETRY_S[1]",
    "for 5 s at most": "kvpool_server.data_plane.worker: PROVE_S",
    "its bytes in 256 MiB at most": "kvpool.transport.helpers: STAGING_BYTES",
    "no answer for 10 s": "kvpool_server.tiers.calls: ANSWER_S",
    "no calls for 1 s": "kvpool_server.tiers.calls: AWAY_S[0]",
    "up to 30 s": "kvpool_server.tiers.calls: AWAY_S[1]",
    "does not do it within 10 s": "kvpool_server.tiers.calls: ANSWER_S",
    "does not answer within 9 s": "kvpool_server.tiers.mooncake.store_process: START_S",
    "twice that and 16 MiB": "kvpool_server.tiers.file.own_blocks: COMPACT_AT_LEAST_BYTES # bytes",
    "`peer_memory=` (4 GiB) at most": "kvpool_server.tiers.file.peer_directories: DEFAULT_MEMORY_BYTES",
    "16 GiB of a journal": "kvpool_server.tiers.file.journal: MAX_JOURNAL_BYTES",
    "32 MiB of all journals": "kvpool_server.tiers.file.peer_directories: REFRESH_BYTES",
    "under a key of its own, 28 bytes)": "kvpool_server.tiers.block_mac: TAG_BYTES",
    "its arena; 16 MiB at least": "kvpool_server.tiers.mooncake.tier: MIN_SEGMENT_BYTES",
    "(`-client_ttl`, 10 s)": ELSEWHERE,
    "stages blocks in 64 MiB": "kvpool_server.tiers.mooncake.store_process: STAGING_BYTES",
    "no transfer within 90 s": "kvpool_server.tiers.mooncake.store_process: ANSWER_S",
    "a batch of 4 MiB": "kvpool_server.tiering.promoter: FIRST_BATCH_BYTES",
    "for 5 to 20 s": ELSEWHERE,
    "`MC_TCP_STATUS_TIMEOUT_SEC`, 3 s": ELSEWHERE,
    "more than 10 s. No lookup": "kvpool_server.tiers.calls: ANSWER_S",
    "`-default_kv_lease_ttl` (10 s)": ELSEWHERE,
    "believe for 10 s": "kvpool_server.tiers.mooncake.tier: FRESH_S",
    "need a deadline within 600 seconds": "kvpool_server.rpc.buffers: MAX_STREAM_S",
    "none follows within 20 ms": "kvpool.client.lookup_stream: RELEASE_WITHIN_S",
    "fingerprint have 32 bytes": "kvpool.protocol.types: HASH_BYTES",
    "greets: 8 bytes": "kvpool.transport.data_port: len(MAGIC) # bytes",
    "sends one message: 8 bytes": "kvpool.transport.unix_socket: len(MAGIC) # bytes",
    "with one message: 8 bytes": "kvpool.transport.unix_socket: len(MAGIC) # bytes",
    "the 16 bytes of a BLAKE2b": "kvpool.transport.unix_socket: NAME_BYTES",
    "`Segment.token`, of 16 bytes": "kvpool.transport.unix_socket: TOKEN_BYTES",
    "16 bytes nonce": "kvpool.transport.data_port: NONCE_BYTES",
    "the deadline (8 bytes": ELSEWHERE,
    "no permit in force after 5 s": "kvpool_server.data_plane.worker: PROVE_S",
    "within 0.25 s, or when": "kvpool_server.data_plane.worker: LOOK_EVERY_S",
    "BLAKE2b of 16 bytes": "kvpool.transport.data_port: MAC_BYTES",
    "A report has at most 64 KiB": "kvpool_server.sharing: Limits().max_spec_bytes",
    "chunks of up to 4 MiB": "kvpool_server.rpc.chunks: MAX_CHUNK_BYTES",
    "Both sides derive 80 bytes": "kvpool.transport.sealed_socket: 2 * _KEY_BYTES + CHANNEL_ID_BYTES # bytes",
    "16 bytes that name the channel": "kvpool.transport.sealed_socket: CHANNEL_ID_BYTES",
    "length of the plaintext (4 bytes": "kvpool.transport.sealed_socket: _LENGTH.size # bytes",
    "1 to 1 MiB), the ciphertext": "kvpool.transport.sealed_socket: RECORD_BYTES",
    "its tag of 16 bytes": "kvpool.transport.sealed_socket: _TAG_BYTES",
    "of the record in its direction (8 bytes)": "kvpool.transport.sealed_socket: _NONCE.size - 4 # bytes",
    "a proof of 16 bytes": "kvpool.transport.data_port: PROOF_BYTES",
    "limits by method, 1 MiB as a rule": "kvpool.protocol.replies: CONTROL_LIMIT # bytes",
    "accepts frames of 4 MiB": "kvpool.client.events: MAX_FRAME_BYTES",
    "replays of 1 GiB": "kvpool.client.events: MAX_REPLAY_BYTES",
    "in records of 1 MiB at most": "kvpool.transport.sealed_socket: RECORD_BYTES",
    "keys and tokens every 5 seconds": "kvpool.security.files: LOOK_EVERY_S",
    "Clocks may differ by 60 s": "kvpool_server.access.oidc: SKEW_S # s",
    "with a new key after 30 s": "kvpool_server.access.oidc: RETRY_S",
    "over HTTPS every 600 s": "kvpool_server.access.oidc: REFETCH_S",
    "Within 10 seconds of a change": "kvpool.security.files: 2 * LOOK_EVERY_S # s",
    "a report 64 KiB": "kvpool_server.sharing: Limits().max_spec_bytes",
    "a request | 4 MiB": "kvpool_server.rpc.buffers: MAX_REQUEST_BYTES",
    "and 64 KiB for what surrounds": "kvpool_server.rpc.buffers: MAX_DATA_BYTES - (4 << 20) # bytes",
    "without a list 128 KiB": "kvpool.protocol.messages: MESSAGE_BYTES",
    "the server asks for it | 128 KiB": "kvpool.protocol.messages: MESSAGE_BYTES",
    "A message to the server has 128 KiB": "kvpool.protocol.messages: MESSAGE_BYTES",
    "A request of more than 24 KiB": "kvpool_server.rpc.handlers: AT_ONCE_BYTES",
    "first message of a call | within 10 s": "kvpool_server.rpc.buffers: MESSAGE_S",
    "is ended, once by 1 s": "kvpool_server.sharing: SPARED_S",
    "payload | | 16 | 256 wait for 10 s": "kvpool_server.rpc.buffers: MESSAGE_S",
    "of a client wait for 10 s": "kvpool_server.rpc.buffers: MESSAGE_S",
    "`RESOURCE_EXHAUSTED` | 128 MiB": "kvpool_server.rpc.buffers: MAX_LARGE * 2 * MAX_REQUEST_BYTES",
    "and 1 MiB a client": "kvpool_server.rpc.buffers: 2 * MAX_OWN_LARGE_WAITING * (128 << 10) # bytes",
    "`RESOURCE_EXHAUSTED` | 1 GiB": "kvpool_server.rpc.buffers: MAX_DATA_STREAMS * 4 * MAX_REQUEST_BYTES",
    "replies of more than 16 KiB": "kvpool_server.rpc.buffers: SMALL_BYTES",
    "not sent yet | 128 MiB": "kvpool_server.rpc.buffers: MAX_UNSENT_BYTES",
    "after the call's work | 256 MiB": "kvpool_server.rpc.buffers: 2 * MAX_UNSENT_BYTES",
    "when it needs one | 256 MiB": "tests.security.test_floods: IDLE_STREAMS_BYTES",
    "the client waits | 512 MiB": "kvpool_server.rpc.grpc_server: MAX_CALLS * (128 << 10) # bytes",
    "Unix socket; 8 s for a TLS handshake": "kvpool_server.rpc.grpc_server: HANDSHAKE_S",
    "the server waits 30 s": "kvpool_server.rpc.buffers: PIECE_S",
    "for 1 MiB, and no longer": "kvpool_server.rpc.buffers: PACE_BYTES",
    "the furthest behind 256 KiB a second": "kvpool_server.sharing.fair_slots: SPARED_BYTES",
    "which is within 600 s": "kvpool_server.rpc.buffers: MAX_STREAM_S",
    "others wait for 10 s": "kvpool_server.rpc.buffers: MESSAGE_S",
    "32; a permit within 5 s": "kvpool_server.data_plane.worker: PROVE_S",
    "headers of a call | 16 KiB": "kvpool_server.rpc.grpc_server: MAX_METADATA_BYTES",
    "the call is refused | 64 MiB": "kvpool_server.rpc.grpc_server: MAX_CALLS * MAX_METADATA_BYTES",
    "with specifications of 16 MiB": "kvpool_server.sharing: Limits().max_specs_bytes",
    "headers of HTTP | 64 KiB": "kvpool_server.observability.http: MAX_REQUEST_BYTES",
    "16, each for 5 s": "kvpool_server.observability.http: CONNECTION_S",
    "KV events' ports | 1 KiB": "kvpool_server.events.sockets: MAX_RECEIVED_BYTES",
    "2,048 of at most 36 KiB": ELSEWHERE,
    "takes none for 30 s": "kvpool_server.events.sockets: DEAF_MS",
    "a gap | 72 MiB": "kvpool_server.events.sockets: PUB_HWM * (36 << 10) # bytes",
    "one in 10 s for a client": "kvpool_server.events.publisher: SNAPSHOT_EVERY_S",
    "120 s each": "kvpool_server.events.publisher: REPLAY_S",
    "2.25 MiB a client": "kvpool_server.events.sockets: ROUTER_HWM * (36 << 10) # bytes",
    "at most 5 times that of a quiet server | 1 s | 256 MiB more": ELSEWHERE,
    "at most 20 times | 1 s | 256 MiB more, and 1 MiB for each": ELSEWHERE,
    "more than 10 ms of CPU time": "tests.security.test_loop: PROMISED_S",
    "95 % of all resamplings": ELSEWHERE,
    "what all have at 100 %": ELSEWHERE,
    "a prompt of 64 MiB": "benchmarks.cases.tiers: PROMPT_BLOCKS * PROMPT_BLOCK_BYTES",
}
"""A phrase with a number that nobody measured -> where it is set: "module: expression", or ELSEWHERE."""


@pytest.mark.parametrize("document", figures.documents(), ids=lambda path: path.name)
def test_each_figure_is_the_one_of_its_result(document: Path):
    assert document.read_text() == figures.refresh(document.read_text(), report.TABLES), (
        "python -m benchmarks.harness.report"
    )


def test_the_pages_of_benchmarks_are_what_the_results_give(monkeypatch: pytest.MonkeyPatch):
    for module in (plots, glance):
        monkeypatch.setattr(module, "write", lambda figure, path: path)
    pages = report.pages()
    assert {path: path.read_text() for path in pages} == pages, "python -m benchmarks.harness.report"
    assert set(RESULTS.glob("*.md")) <= pages.keys()
    assert {path.stem for path in RESULTS.glob("*.json")} <= report.QUESTIONS.keys()
    assert all(glance._figures(question, RESULTS) for question in glance.QUESTIONS), "the first screen lacks a row"


@pytest.mark.parametrize("document", figures.documents(), ids=lambda path: path.name)
def test_a_number_with_a_unit_names_its_result_or_is_a_setting(document: Path):
    """A measured number has a comment that names its result (`benchmarks.harness.figures`), a setting its SETTINGS."""
    assert figures.loose(document.read_text(), SETTINGS) == []


def test_numbers_about_benchmarks_name_results_too():
    for prose in (report.INTRODUCTION, *report.QUESTIONS.values()):
        assert figures.loose(prose, SETTINGS) == []


@pytest.mark.parametrize(
    ("phrase", "where"),
    [
        pytest.param(phrase, where, marks=[pytest.mark.vllm] if where.startswith("vllm_plugin.") else [])
        for phrase, where in SETTINGS.items()
    ],
)
def test_a_setting_in_prose_is_the_one_in_the_code(phrase: str, where: str):
    texts = [*(path.read_text() for path in figures.documents()), report.INTRODUCTION, *report.QUESTIONS.values()]
    assert any(phrase in " ".join(text.split()) for text in texts), f"no page says {phrase!r}: take it out of SETTINGS"
    if where != ELSEWHERE:
        module, expression = where.split(": ")
        value = eval(expression, vars(importlib.import_module(module)))
        (suffix,) = re.findall(r"(ms|s|bytes|share)(?:\[\d\])?$", expression.lower())
        (number,) = figures.NUMBER.finditer(phrase)
        assert value * SUFFIXES[suffix] == pytest.approx(float(number["number"]) * UNITS[number["unit"]])
