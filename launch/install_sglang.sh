#!/usr/bin/env bash
# Install the real SGLang server for a machine without a GPU, in a virtual environment of its own (about 2.7 GB).
#
#   launch/install_sglang.sh VENV [PYTHON]
#
# Start it with   VENV/bin/python launch/sglang_cpu.py --model-path MODEL --device cpu ...
# Test it with    ASYNCRL_SGLANG_PYTHON=VENV/bin/python pytest tests/contract
# Running it again is cheap: it ends at once when the environment is complete, and goes on where it was broken off.
set -euo pipefail

version=0.5.23
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements=$here/sglang-cpu-requirements.txt

fail() {
    echo "install_sglang: $1" >&2
    exit 1
}

[ $# -ge 1 ] && [ $# -le 2 ] || fail "usage: launch/install_sglang.sh VENV [PYTHON]"
venv=$1
python=${2:-python3}
log=$venv/install.log
# The stamp holds what was installed, so that a changed list or version installs again.
stamp=$venv/asyncrl-sglang-$version.txt

if [ -f "$stamp" ] && cmp -s "$stamp" "$requirements" && [ -x "$venv/bin/python" ]; then
    echo "sglang $version is already installed in $venv"
    exit 0
fi
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    fail "this machine has a CUDA GPU: install the normal server with 'pip install sglang==$version' instead"
fi

if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv" || fail "cannot make a virtual environment in $venv with $python (is python3-venv installed?)"
fi

step() {
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1 ||
        fail "pip could not install $2: $(grep -m1 '^ERROR' "$log" || tail -n1 "$log") (whole log: $log)"
}

echo "installing sglang $version for the CPU into $venv (about 2.7 GB, some minutes)"
: >"$log"
step -r "$requirements"
step --no-deps "sglang==$version"
cp "$requirements" "$stamp"
echo "sglang $version is installed in $venv"
