#!/usr/bin/env bash
# Make .venv with everything that runs, tests and measures forebay on a CPU. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=deploy/locks/all-cpu.txt
say() { printf 'set-up: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$python" ] || die "no Python found; install Python 3.11 or set PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    die "$python is $("$python" --version 2>&1), the lock files are for Python 3.11; set PYTHON=/path/to/python3.11"

[ -x .venv/bin/python ] || { say "making .venv"; "$python" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

# Some machines have this one wheel at hand, and plain pip finds it. PyTorch's own index is named for torch alone: an
# unreachable extra index given for every package would cost minutes of retries.
torch=$(grep '^torch==' "$lock")
if [ "$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" != "${torch#torch==}" ]; then
    say "installing $torch"
    pip install --no-deps "$torch" 2>/dev/null ||
        pip install --no-deps "$torch" --index-url https://download.pytorch.org/whl/cpu
fi

say "installing $(grep -c == "$lock") locked packages (some minutes the first time)"
pip install --no-deps -r "$lock"
pip install --no-deps --no-build-isolation --editable .
touch .venv/.ready
say "done"
