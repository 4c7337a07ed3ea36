#!/usr/bin/env bash
# Runs the tests with one release of torch, in a fresh environment of its own: scripts/matrix.sh 2.9.1
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${1:?usage: scripts/matrix.sh TORCH_VERSION}
environment=.venv-torch-$torch
constraints=$environment/constraints.txt

IFS=. read -r major minor _ <<<"$torch"
if ((major > 2 || (major == 2 && minor > 14))); then
    # A machine's own pip configuration may cap torch; a release this new is asked for on purpose.
    export PIP_CONFIG_FILE=/dev/null
fi

"${PYTHON:-python3}" -m venv --clear "$environment"
{
    echo "torch==$torch"
    grep -v '^torch==' constraints.txt
} >"$constraints"
"$environment/bin/python" -m pip install --quiet --constraint "$constraints" torch lightning-thunder
"$environment/bin/python" -m pip install --quiet --constraint "$constraints" --editable '.[test]'

"$environment/bin/python" -m pip list | grep -E '^(torch|lightning-thunder) '
"$environment/bin/python" -m pytest -n auto --dist loadfile
