#!/usr/bin/env bash
# Makes .venv with titanforge in it, on a machine that may have nothing but Python >= 3.11.
#   bash scripts/setup.sh [extra ...]      e.g. `bash scripts/setup.sh dev`
# A second run with the same pyproject.toml and settings returns at once.
#   TITANFORGE_TORCH   requirement for torch, e.g. "torch==2.13.0" (default: pyproject.toml's)
#   PYTHON             interpreter to build .venv from (default: the newest 3.11+ found)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }
fail() { say "error: $*"; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

apt_install() {  # apt_install PACKAGE...: installs as root, else tells what to install
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing $* with apt-get"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; } >&2
    else
        fail "missing $*: install it (Debian/Ubuntu: sudo apt-get install $*) and run this again"
    fi
}

make_venv() {
    local python version
    if ! python=$(find_python); then
        apt_install python3 python3-venv
        python=$(find_python) || fail "Python 3.11 or newer is needed and this system has none; set PYTHON to one"
    fi
    say "making .venv with $("$python" --version) ($python)"
    # Debian splits venv's ensurepip off into a package of its own.
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        apt_install "$version-venv"
    fi
    "$python" -m venv .venv
}

have() { .venv/bin/python -c "$1" >/dev/null 2>&1; }

extras=$(IFS=,; echo "$*")
torch=${TITANFORGE_TORCH:-}

if [ -x .venv/bin/python ] && ! new_enough .venv/bin/python; then
    fail ".venv exists but its Python is missing or older than 3.11: delete .venv and run this again"
fi
[ -x .venv/bin/python ] || make_venv

# What the installation depends on, as a hash; the stamp holds it and each set of extras installed since.
stamp=.venv/.titanforge-setup
key=$( { cat pyproject.toml; echo "$PWD"; .venv/bin/python --version; } | sha256sum | cut -d' ' -f1)
installed() { grep -qxF "$key $1" "$stamp" 2>/dev/null; }
if { installed "extras=$extras" || { [ -z "$extras" ] && grep -qF "$key " "$stamp" 2>/dev/null; }; } \
    && { [ -z "$torch" ] || installed "torch=$torch"; } && have 'from importlib.metadata import version; version("titanforge"), version("torch")'; then
    exit 0
fi

have 'import pip' || .venv/bin/python -m ensurepip --upgrade >&2
say "installing titanforge${extras:+[$extras]}${torch:+ with $torch} into .venv (a few minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off \
    ${torch:+"$torch"} --editable ".${extras:+[$extras]}" >&2
# A new torch requirement replaces the old one; a new hash replaces everything.
{
    grep -F "$key extras=" "$stamp" 2>/dev/null || true
    echo "$key extras=$extras"
    echo "$key torch=$torch"
} > "$stamp.new"
mv "$stamp.new" "$stamp"
command -v cc >/dev/null 2>&1 || say "note: no C compiler; torch.compile and GPU kernels need one" \
    "(apt-get install build-essential python3-dev)"
say "done"
