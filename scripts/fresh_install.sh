#!/usr/bin/env bash
# Installs hookkit as a user does, in a new environment with what the registry has newest, and runs what it promises:
# the README's Python blocks, the programs of docs/contract.py, some of them through thunderfx, and the doctor.
# HOOKKIT_OFFLINE=1 says that there is no registry: then nothing is run, which the last line says.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

if [ "${HOOKKIT_OFFLINE:-0}" = 1 ]; then
    echo "NOT RUN: the fresh install, because HOOKKIT_OFFLINE=1"
    exit 0
fi

environment=$root/.venv-fresh
# A machine's own pip configuration may hold torch back; here the newest is asked for on purpose.
export PIP_CONFIG_FILE=/dev/null
"${PYTHON:-python3}" -m venv --clear "$environment"
trap 'rm -rf "$environment"' EXIT
if ! "$environment/bin/python" -m pip install --quiet --no-cache-dir .; then
    echo "NOT RUN: the fresh install: pip could not install hookkit and the newest torch; see above." >&2
    echo "Where there is no registry, HOOKKIT_OFFLINE=1 leaves this stage out." >&2
    exit 1
fi
"$environment/bin/python" -m pip list | grep -E '^(torch|lightning-thunder|hookkit) '

# From a folder of its own, so that the checkout is not what is imported.
cd "$environment"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$environment/bin/python" "$root/scripts/check_install.py" "$root"
"$environment/bin/python" -m hookkit check
