#!/usr/bin/env bash
# Builds the wheel and the sdist in dist/, checks their metadata, and compiles the doctor's programs with the wheel,
# away from the checkout. Needs .venv, for torch and thunder; what builds and checks has an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
tools=.venv-dist

"$python" -m venv --clear "$tools"
"$tools/bin/python" -m pip install --quiet --constraint constraints.txt build twine
rm -rf dist
"$tools/bin/python" -m build --outdir dist .
"$tools/bin/python" -m twine check --strict dist/*

# On PYTHONPATH the wheel comes before the editable installation.
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
"$python" -m pip install --quiet --no-deps --target "$elsewhere" dist/*.whl
cd "$elsewhere"
export PYTHONPATH=$elsewhere
"$python" -c "
import hookkit, pathlib
assert pathlib.Path(hookkit.__file__).is_relative_to('$elsewhere'), hookkit.__file__"
"$python" -m hookkit check
