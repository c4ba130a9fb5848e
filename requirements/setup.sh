#!/usr/bin/env bash
# Makes the development environment in $VENV: PyTorch and vLLM for the CPU, kvpool itself with everything for its tests.
# Safe to run again. Needs pip's package index, and apt (as root) once for what the machine lacks: a C++ compiler,
# Python's venv, the libraries of the Mooncake wheel, systemd-analyze, Node, Redis, nftables; and Chromium with its driver, without
# which the dashboard's tests in a browser are skipped. Programs of apt's packages prometheus and nginx, for tests, are
# taken out of them.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${VENV:=.venv}"

# Python compiles a module when it is first imported; most never are.
install=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile)

missing=()
for library in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
  ldconfig -p | grep -q "${library%%:*}" || missing+=("${library##*:}")
done
command -v c++ >/dev/null || missing+=(g++)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v npm >/dev/null || missing+=(nodejs npm)
{ command -v valkey-server || command -v redis-server; } >/dev/null || missing+=(redis-server)
[ "$(id -u)" != 0 ] || command -v nft >/dev/null || missing+=(nftables)  # Its test makes a namespace.
"$PYTHON" -c "import ensurepip" 2>/dev/null ||
  missing+=("$("$PYTHON" -c 'import sys; print("python{}.{}-venv".format(*sys.version_info))')")
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "setup: install ${missing[*]} (apt-get install ${missing[*]}), then run this again" >&2
    exit 1
  fi
  echo "setup: system packages ${missing[*]}"
  apt-get -qq update  # At this runlevel Redis starts no service.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${missing[@]}" >/dev/null
fi

if ! command -v chromedriver >/dev/null; then
  if [ "$(id -u)" = 0 ]; then
    echo "setup: system packages chromium chromium-driver"
    { apt-get -qq update &&
      DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; } ||
      echo "setup: apt has no Chromium with its driver, so the dashboard's tests in a browser will be skipped" >&2
  else
    echo "setup: for the dashboard's tests in a browser: apt-get install chromium chromium-driver" >&2
  fi
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# A package with another hash than the files' is refused. They list all packages, so pip need not look for more.
locked=("${install[@]}" --no-deps --require-hashes)

echo "setup: PyTorch for the CPU"
if ! errors=$("${locked[@]}" -r requirements/torch.txt 2>&1); then
  case $errors in *"No matching distribution found"*) ;; *) echo "$errors" >&2 && exit 1 ;; esac
  echo "setup: pip found no CPU build of PyTorch, so it installs the CUDA build: gigabytes, and not checked by hash"
  "${install[@]}" "$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements/torch.txt)"
fi
echo "setup: vLLM for the CPU, and what all need (minutes)"
"${locked[@]}" -r requirements/lock.txt
"${install[@]}" --no-deps --no-build-isolation -e .

# unpack PACKAGE PROGRAM...: puts programs beside Python. Installing apt's package would start a service.
unpack() {
  local package=$1 program found unpacked missing=() bin
  bin=$(cd "$VENV/bin" && pwd)
  for program in "${@:2}"; do
    if [ -x "$bin/$program" ]; then continue; fi
    if found=$(PATH=$PATH:/usr/sbin command -v "$program"); then ln -sf "$found" "$bin/$program"; else missing+=("$program"); fi
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "setup: ${missing[*]}"
  unpacked=$(mktemp -d)
  if (cd "$unpacked" && { apt-get -qq download "$package" || { [ "$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq download "$package"; }; } &&
    dpkg-deb -x "$package"_*.deb .) >/dev/null 2>&1; then
    for program in "${missing[@]}"; do install -m 755 "$unpacked"/usr/*bin/"$program" "$bin"; done
  else
    echo "setup: no ${missing[*]}: tests fail until $bin has ${missing[*]}" >&2
  fi
  rm -rf "$unpacked"
}
unpack prometheus prometheus promtool
unpack nginx nginx
if [ ! -f "$VENV/share/compose-spec.json" ] || [ requirements/deploy_tools.py -nt "$VENV/share/compose-spec.json" ]; then
  echo "setup: Helm, kubectl, hadolint, and the schemas of Kubernetes and compose files"
  "$VENV/bin/python" requirements/deploy_tools.py "$VENV" ||
    echo "setup: no Helm: tests/deploy fails until requirements/deploy_tools.py has put it into $VENV/bin" >&2
fi
echo "setup: done"
