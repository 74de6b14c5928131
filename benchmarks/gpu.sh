#!/usr/bin/env bash
# All that one GPU can tell in eight minutes, without a network: what is right, and how fast it is.
#
#     bash benchmarks/gpu.sh OUT [--device cuda] [--limit-s 480]
#
# Needs torch, setuptools, pip and a C++ compiler. Installs the package into OUT/package, beside what the machine has,
# and writes OUT/gpu.md after every step: a run that is cut off has told all that it knew. PYTHON is the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3}
# pip builds beside its source: a copy leaves the checkout as it is.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -r "$root"/{compile_fsdp,passes,ops,pyproject.toml,README.md,LICENSE} "$source"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	--upgrade --target "$out/package" "$source"
export PYTHONPATH="$out/package:$root/tests:$root/benchmarks"
"$python" "$root/benchmarks/gpu_kit/run.py" --out "$out" "$@"
