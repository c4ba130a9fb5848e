# vLLM with kvpool's connector. From the repository's root: docker build -f deploy/docker/vllm.Dockerfile -t kvpool-vllm:0.1.0 .
# Pin the base to a digest: --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0@sha256:…
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements/runtime.txt requirements/
COPY kvpool kvpool
COPY kvpool_server kvpool_server
COPY vllm_plugin vllm_plugin
# vLLM's own packages stay as they are (a constraint for each): the wheels here are kvpool, built with vLLM's setuptools, and
# what vLLM lacks, in the versions and with the hashes of runtime.txt. The dry run only says what is lacking.
RUN python3 -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > /tmp/constraints.txt \
    && python3 -m pip wheel --wheel-dir /wheels --no-deps --no-build-isolation . \
    && python3 -m pip install --dry-run --only-binary :all: --quiet --constraint /tmp/constraints.txt --report /tmp/report.json /wheels/*.whl \
    && python3 -c "import json, re; lacks = {re.sub('[-_.]+', '-', each['metadata']['name']).lower() for each in json.load(open('/tmp/report.json'))['install']} - {'kvpool'}; pinned = {each.partition('==')[0]: each for each in re.split(r'\n(?=\w)', open('requirements/runtime.txt').read())}; print('\n'.join(pinned[name] for name in sorted(lacks)))" > /tmp/lacking.txt \
    && if grep -q == /tmp/lacking.txt; then python3 -m pip wheel --wheel-dir /wheels --no-deps --require-hashes -r /tmp/lacking.txt; fi

FROM ${VLLM_IMAGE}
COPY --from=build /wheels /tmp/wheels
RUN python3 -m pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl && rm -rf /tmp/wheels \
    && groupadd --gid 10001 kvpool && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/engine engine \
    && python3 -c "import importlib.metadata as m; assert any(e.name == 'kvpool' for e in m.entry_points(group='vllm.general_plugins'))"
# Caches of vLLM and of models, and digests of weights: a volume, because the root file system may be read-only.
ENV HOME=/home/engine PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/engine
VOLUME ["/home/engine"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# Loading a model takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
