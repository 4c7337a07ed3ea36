#!/usr/bin/env bash
# Installs hookkit as a user does, in a new environment with what the registry has newest, and runs what it promises:
# the README's Python blocks, the programs of docs/contract.py, some of them through thunderfx, and the doctor.
#
# Exits with 77, and says NOT RUN and why, where that cannot be tried: no registry, no newer torch than the one that
# constraints.txt names, no room, or no time. A conflict of requirements, or a package that does not build, is a failure.
#
# FRESH_MINUTES         the time for everything, 25 by default; what is installed is run for ten at the most
# FRESH_ENVIRONMENT     an environment with torch and thunder to take instead of bringing them
# PYTHON                what makes the environment
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
minutes=${FRESH_MINUTES:-25}
developed_with=$(sed -n 's/^torch==//p' constraints.txt)
environment=$root/.venv-fresh
trap 'rm -rf "$environment"' EXIT

not_run() {
    echo "NOT RUN: the fresh install: $*"
    exit 77 # what automake's tests exit with when they are skipped
}

# How many seconds are left, up to a limit.
left() {
    local seconds=$((minutes * 60 - SECONDS))
    echo $((seconds < $1 ? seconds : $1))
}

# The newest torch that pip finds; nothing where it reaches no registry.
newest_torch() {
    timeout 60 "$python" -m pip index versions --retries 1 --timeout 20 torch 2>/dev/null |
        sed -n 's/^torch (\([^+]*\).*)$/\1/p'
}

is_newer() {
    [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | tail -n 1)" = "$1" ]
}

# Brings torch, thunder and attrs with hookkit, in the time that leaves five minutes to run it.
bring() {
    local gigabytes newest log=$environment/pip.log
    gigabytes=$(($(df --output=avail -k . | tail -n 1) >> 20))
    ((gigabytes >= 12)) ||
        not_run "torch's newest build needs 12 GB while it is installed, there are $gigabytes GB"
    (($(left 480) == 480)) || not_run "it needs eight minutes or more, there are $minutes"
    "${PYTHON:-python3}" -m venv --clear "$environment"
    python=$environment/bin/python

    # A machine's own pip configuration may hold torch back; the newest is asked for on purpose, without it if possible.
    if newest=$(PIP_CONFIG_FILE=/dev/null newest_torch) && [ -n "$newest" ]; then
        export PIP_CONFIG_FILE=/dev/null
        unset PIP_CONSTRAINT
    else
        newest=$(newest_torch) && [ -n "$newest" ] || not_run "pip reaches no registry with torch"
    fi
    is_newer "$newest" "$developed_with" ||
        not_run "the newest torch that pip finds is $newest, and 'make test' runs with $developed_with"

    # What builds the package comes by itself, so that a build that fails is not taken for a registry that fails.
    local status=0
    {
        timeout 60 "$python" -m pip install --quiet --no-cache-dir hatchling &&
            timeout $((minutes * 60 - 300 - SECONDS)) "$python" -m pip install --no-cache-dir --progress-bar off \
                --no-build-isolation .
    } >"$log" 2>&1 || status=$?
    ((status != 124)) || not_run "torch $newest did not come in time"
    if ((status != 0)); then
        tail -n 20 "$log"
        ! grep -qE 'ResolutionImpossible|metadata-generation-failed|Failed building|Failed to build' "$log" || exit 1
        not_run "pip could not bring torch $newest and lightning-thunder; see above"
    fi
    "$python" -m pip list 2>/dev/null | grep -E '^(torch|lightning-thunder|hookkit) '
}

# Installs hookkit beside an environment, which stays as it is.
borrow() {
    python=$1/bin/python
    "$root/.venv/bin/python" -m pip install --quiet --no-deps --target "$environment/packages" .
    export PYTHONPATH=$environment/packages
}

if [ -n "${FRESH_ENVIRONMENT:-}" ]; then
    borrow "$FRESH_ENVIRONMENT"
else
    bring
fi
((minutes * 60 - SECONDS >= 120)) || not_run "installed, but no time is left to run it"

# From a folder of its own, so that the checkout is not what is imported.
cd "$environment"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0
timeout "$(left 600)" "$python" "$root/scripts/check_install.py" "$root" --seconds "$(left 480)" || status=$?
((status != 124)) || { echo "the fresh install: a program did not come to an end" && exit 1; }
((status != 77)) || not_run "to its end: see above"
exit "$status"
