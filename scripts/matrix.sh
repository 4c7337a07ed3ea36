#!/usr/bin/env bash
# Runs the tests with other releases of torch: scripts/matrix.sh [TORCH_VERSION...], by default with each of the range.
# Each has a fresh environment, which is removed when its tests have passed. The outcomes go to build/matrix.tsv, a
# line each: torch, Python, thunder, outcome. Exits with 1 where one failed.
set -euo pipefail
cd "$(dirname "$0")/.."

if (($# == 0)); then
    set -- 2.7.1 2.8.0 2.9.1 2.10.0 2.12.1 2.13.0 2.14.1 2.15.0
fi
# A machine's own pip configuration may cap torch; here a release is asked for on purpose.
export PIP_CONFIG_FILE=/dev/null

run_with() {
    local torch=$1
    local environment=.venv-torch-$torch
    local python=$environment/bin/python
    "${PYTHON:-python3}" -m venv --clear "$environment"
    {
        echo "torch==$torch"
        # What torch brings itself, it brings in its own version.
        grep -vE '^(torch|triton|setuptools)==' constraints.txt
    } >"$environment/constraints.txt"
    "$python" -m pip install --quiet --no-cache-dir --constraint "$environment/constraints.txt" \
        torch lightning-thunder --editable '.[test,examples]'
    local versions outcome=0
    versions=$("$python" -c "
import platform
from importlib.metadata import version
print(version('torch'), platform.python_version(), version('lightning-thunder'), sep='\t')")
    "$python" -m pytest -n auto --dist loadfile -q 2>&1 | tee "$environment/tests.log" || outcome=$?
    printf '%s\t%s\n' "$versions" "$(tail -n 1 "$environment/tests.log")" | tee -a build/matrix.tsv
    ((outcome == 0)) && rm -rf "$environment"
    return "$outcome"
}

mkdir -p build
status=0
for torch in "$@"; do
    echo "== torch $torch"
    # In a shell of its own: in a condition "set -e" would not hold, and a failed installation would go unseen.
    set +e
    (set -e; run_with "$torch")
    (($? == 0)) || status=1
    set -e
done
exit "$status"
