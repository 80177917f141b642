#!/bin/bash
# Builds what a job needs and packs it into one archive: interpreter, packages, kernels, program and, if given, data.
#
#   scripts/build.sh [--data PREFIX --vocab vocab.json --merges merges.txt] [-o fugaku_megatron.tar]
#   scripts/build.sh --data PREFIX --tokenizer-model MODEL    a folder of Hugging Face's tokenizer or a .model file of SentencePiece
#
# On Fugaku on a compute node, because packages must be built for it:
#   pjsub --interact -g GROUP -L "node=1,rscgrp=int,elapse=3:00:00,freq=2000,eco_state=0" --llio cn-cache-size=1Gi \
#       -x PJM_LLIO_GFSCACHE=/vol0004 --sparam "wait-time=600"
# The same on Debian or RHEL. Needed: python3 >= 3.10 with venv, g++ >= 11; with a working mpicc on the PATH mpi4py is built for that MPI,
# else MPICH comes as a wheel. PYTHON, CXX and MPI=system|mpich choose others.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUTPUT=$PWD/fugaku_megatron.tar DATA='' VOCAB='' MERGES='' MODEL=''
fail() { echo "build.sh: $*" >&2; exit 2; }
while (($#)); do
    (($# > 1)) || fail "$1 needs a value: see the top of this file"
    case $1 in
        --data) DATA=$2 ;;
        --vocab) VOCAB=$2 ;;
        --merges) MERGES=$2 ;;
        --tokenizer-model) MODEL=$2 ;;
        -o) OUTPUT=$(realpath -m "$2") ;;
        *) fail "unknown option $1: pass --data, --vocab, --merges, --tokenizer-model or -o" ;;
    esac
    shift 2
done
if [ -n "$DATA" ]; then
    files=("$DATA.bin" "$DATA.idx")
    if [ -z "$MODEL" ]; then files+=("$VOCAB" "$MERGES"); fi
    for file in "${files[@]}"; do
        [ -f "$file" ] || fail "--data $DATA: '$file' is not a file: pass --data PREFIX of .bin and .idx, --vocab and --merges, or --tokenizer-model"
    done
    [ -z "$MODEL" ] || [ -e "$MODEL" ] || fail "--tokenizer-model $MODEL: no such file or folder: pass the one that preprocess used"
fi

pack_data() {  # into data/ of the tree: tokens, their record of the tokenizer, and the tokenizer without a model's weights
    local name
    cp "$DATA.bin" "$DATA.idx" "$TREE/data/"
    if [ -f "$DATA.tokenizer.json" ]; then cp "$DATA.tokenizer.json" "$TREE/data/"; fi
    name=$(basename "$MODEL")
    if [ -d "$MODEL" ]; then
        PYTHONPATH=$TREE/app "$WORK/venv/bin/python" -c 'import pathlib, sys; from fugaku_megatron.convert.hugging_face.carried_files import carry
carry(*map(pathlib.Path, sys.argv[1:]))' "$MODEL" "$TREE/data/$name"
    elif [ -n "$MODEL" ]; then
        cp "$MODEL" "$TREE/data/$name"
    else
        cp "$VOCAB" "$TREE/data/vocab.json"
        cp "$MERGES" "$TREE/data/merges.txt"
    fi
}

SPACK=/vol0004/apps/oss/spack/share/spack/setup-env.sh
if [ -f "$SPACK" ]; then
    # shellcheck disable=SC1090,SC1091
    . "$SPACK"
    spack load gcc@13.4 python@3.13.5 fujitsu-mpi%gcc
fi
PYTHON=${PYTHON:-$(command -v python3)} || fail "python3 is not on the PATH: install it, or set PYTHON=/path/to/python3"
CXX=${CXX:-g++}
command -v "$CXX" >/dev/null || fail "$CXX is not on the PATH: install g++ 11 or newer, or set CXX"
[ "$("$CXX" -dumpversion | cut -d. -f1)" -ge 11 ] || fail "$CXX is version $("$CXX" -dumpversion): 11 or newer is needed (CXX=...)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$PYTHON is older than 3.10: set PYTHON=/path/to/python3"
MPI=${MPI:-$(echo '#include <mpi.h>' | mpicc -E - >/dev/null 2>&1 && echo system || echo mpich)}

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
TREE=$WORK/tree
mkdir -p "$TREE/bin" "$TREE/lib" "$TREE/site" "$TREE/app" "$TREE/data"

echo "1/5 packages ($PYTHON, $CXX, MPI $MPI)"
"$PYTHON" -m venv "$WORK/venv"
pip=("$WORK/venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# Of the packages that read tokenizers, the archive has the one that --tokenizer-model needs.
grep -vE '^(transformers|sentencepiece)==' "$ROOT/requirements.txt" > "$WORK/requirements.txt"
"${pip[@]}" -r "$WORK/requirements.txt"
if [ -n "$MODEL" ]; then
    "${pip[@]}" --constraint "$ROOT/requirements.txt" "$([ -d "$MODEL" ] && echo transformers || echo sentencepiece)"
fi
if [ "$MPI" = system ]; then
    "$ROOT/scripts/system_mpi.sh" "$WORK/venv/bin/python"
else
    "${pip[@]}" --constraint "$ROOT/requirements-mpi.txt" mpi4py mpich
fi

echo "2/5 kernels"
for part in fugaku_megatron kernels_sve tools pretrain_gpt.py pretrain_hybrid.py setup.py pyproject.toml README.md LICENSE; do
    cp -R "$ROOT/$part" "$TREE/app/"
done
find "$TREE/app" -name '_kernels*.so' -delete
(cd "$TREE/app" && CXX=$CXX "$WORK/venv/bin/python" setup.py --quiet build_ext --inplace && rm -rf build)

echo "3/5 interpreter"
cp -L "$("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')" "$TREE/bin/python3"
cp -R "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" "$TREE/lib/"
rm -rf "$TREE"/lib/python3*/{site-packages,dist-packages,test}
cp -R "$("$WORK/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/." "$TREE/site/"
for name in mpiexec mpiexec.hydra hydra_pmi_proxy; do
    if [ -f "$WORK/venv/bin/$name" ]; then cp -L "$WORK/venv/bin/$name" "$TREE/bin/"; fi
done
if [ "$MPI" = mpich ]; then cp -RL "$WORK"/venv/lib/{libmpi*,mpich} "$TREE/lib/"; fi  # the library and the libraries that it needs

echo "4/5 libraries that are not the system's"
{ find "$TREE" \( -name '*.so*' -o -path "$TREE/bin/*" \) -type f -exec ldd {} + 2>/dev/null || true; } |  # ldd fails on scripts
    awk '/=> \// {print $3}' | sort -u | while read -r library; do
    case $library in
        /lib/* | /lib64/* | /usr/lib/* | /usr/lib64/* | /opt/FJSV* | "$TREE"/* | "$WORK"/*) ;;
        *) [ -e "$TREE/lib/${library##*/}" ] || cp -L "$library" "$TREE/lib/" ;;
    esac
done
find "$TREE" -name __pycache__ -type d -prune -exec rm -rf {} +
"$PYTHON" -m compileall -q "$TREE/site" "$TREE/app" "$TREE"/lib/python3* >/dev/null || true  # nodes do not write bytecode

echo "5/5 archive"
if [ -n "$DATA" ]; then pack_data; fi
cd "$TREE"  # from elsewhere -c would find another fugaku_megatron first
PYTHONHOME=$TREE PYTHONPATH=$TREE/app:$TREE/site PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=$TREE/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
    bin/python3 -c 'import mpi4py, torch, numpy, regex, psutil; from fugaku_megatron.host import kernels; print("  kernels:", kernels.active())
mpi4py.rc.initialize = False
from mpi4py import MPI; print("  MPI:", MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0"))'
tar -cf "$OUTPUT.part" -C "$TREE" .
mv "$OUTPUT.part" "$OUTPUT"
echo "wrote $OUTPUT ($(du -h "$OUTPUT" | cut -f1)); put it where the job's ARCHIVE points"
