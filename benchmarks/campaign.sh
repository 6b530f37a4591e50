#!/usr/bin/env bash
# Runs a command on a machine with a GPU, in a copy of the files, with what pack.sh has packed. From their top folder:
#
#   MDN_COMMIT=... benchmarks/campaign.sh OUT NAME COMMAND...
#   mkdir -p results/DATE-GPU && tar -C results/DATE-GPU -xzf OUT/records.tar.gz         # at home
#
# OUT/NAME.log has the command's output, OUT/records.tar.gz all records under runs/ without weights, checkpoints and
# the samples that no report draws. The archive is written every half minute, so that a killed campaign leaves it, too.
set -euo pipefail
out=$1 name=$2
shift 2
export PYTHONPATH="build/site:src:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out" build/site runs

unpack() { # ARCHIVE FOLDER, once
  local archive=build/$1.tar.xz stamp=build/site/.$1
  [[ -e $archive && ! $stamp -nt $archive ]] || return 0
  python3 -W ignore -m tarfile -e "$archive" "$2"
  touch "$stamp"
}
unpack triton build/site & unpack data . & unpack site build/site && wait

records() {
  [[ -n $(ls runs) ]] || return 0
  tar -C runs --exclude='.*' --exclude=checkpoints --exclude=model.safetensors --exclude='*.partial' --exclude='*.tmp' \
    --exclude={lm,commonsense,positions,niah,retrieval}.samples.jsonl.gz -czf "$out/.records" $(ls runs) 2> /dev/null ||
    (($? == 1)) || return 0 # 1: a file changed while it was read
  mv -f "$out/.records" "$out/records.tar.gz"
}
while sleep 30; do records; done &
packing=$!
status=0
"$@" 2>&1 | tee -a "$out/$name.log" || status=$?
kill "$packing"
records
exit "$status"
