#!/usr/bin/env bash
# Installs hookkit as a user does, in a new environment with what the registry has newest, and runs what it promises:
# the README's Python blocks, the programs of docs/contract.py, some of them through thunderfx, and the doctor.
# Where that cannot be tried, because there is no registry or no room, exits with 77 and says why.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
not_run=77 # what automake's tests exit with when they are skipped

environment=$root/.venv-fresh
# A machine's own pip configuration may hold torch back; here the newest is asked for on purpose.
export PIP_CONFIG_FILE=/dev/null
"${PYTHON:-python3}" -m venv --clear "$environment"
trap 'rm -rf "$environment"' EXIT

gigabytes=$(($(df --output=avail -k . | tail -n 1) >> 20))
if ((gigabytes < 12)); then
    echo "NOT RUN: the fresh install: torch's newest build needs 12 GB while it is installed, there are $gigabytes GB"
    exit $not_run
fi
if ! "$environment/bin/python" -m pip download --quiet --no-deps --no-cache-dir --retries 1 --timeout 20 \
    --dest "$environment/probe" attrs; then
    echo "NOT RUN: the fresh install: pip reaches no registry"
    exit $not_run
fi
"$environment/bin/python" -m pip install --quiet --no-cache-dir --no-deps .
if ! "$environment/bin/python" -m pip install --quiet --no-cache-dir .; then
    echo "NOT RUN: the fresh install: pip could not bring torch and lightning-thunder; see above"
    exit $not_run
fi
"$environment/bin/python" -m pip list | grep -E '^(torch|lightning-thunder|hookkit) '

# From a folder of its own, so that the checkout is not what is imported.
cd "$environment"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$environment/bin/python" "$root/scripts/check_install.py" "$root"
"$environment/bin/python" -m hookkit check
