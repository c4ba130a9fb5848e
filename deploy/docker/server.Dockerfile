# The image of kvpool-server. From the repository's root: docker build -f deploy/docker/server.Dockerfile -t kvpool:0.1.0 .
# Pin the base to a digest: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python3 -m venv /opt/kvpool
# The packages come with their hashes, in a layer of their own: it stays as it is while the code changes.
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN /opt/kvpool/bin/pip install --no-deps --require-hashes -r requirements/build.txt -r requirements/runtime.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kvpool kvpool
COPY kvpool_server kvpool_server
COPY vllm_plugin vllm_plugin
RUN /opt/kvpool/bin/pip install --no-deps --no-build-isolation . && /opt/kvpool/bin/kvpool-server --version

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="kvpool-server" \
      org.opencontainers.image.description="A KV-cache pool for vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
# Any user may enter /var/lib/kvpool: a server that the chart runs as another user has its tier in a directory below.
RUN groupadd --gid 10001 kvpool && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kvpool \
    && install -d -m 0750 -o kvpool -g kvpool /run/kvpool \
    && install -d -m 0755 -o kvpool -g kvpool /var/lib/kvpool
COPY --from=build /opt/kvpool /opt/kvpool
# Without compiled modules of its own making: the root file system may be read-only.
ENV PATH=/opt/kvpool/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
VOLUME ["/run/kvpool", "/var/lib/kvpool"]
EXPOSE 50051 50052 50053
# kvpool-server is process 1: it handles SIGTERM, SIGUSR2 and SIGHUP itself, and waits for its data workers.
STOPSIGNAL SIGTERM
# With TLS other words ask: kvpool --tls DIR ping, or /healthz by https.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:50052/healthz', timeout=4)"]
ENTRYPOINT ["kvpool-server"]
CMD ["--memory=1GiB", "--unix-listen=/run/kvpool/kvpool.sock", "--unix-mode=0660"]
