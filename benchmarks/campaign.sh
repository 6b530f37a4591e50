#!/usr/bin/env bash
# Runs a command on a machine with a GPU, in a copy of the files, with what pack.sh has packed. From their top folder:
#
#   MDN_COMMIT=... benchmarks/campaign.sh OUT COMMAND...
#   mkdir -p results/DATE-GPU && tar -C results/DATE-GPU -xzf OUT/records.tar.gz         # at home
#
# Adds what the command prints to OUT/log.txt, and leaves OUT/records.tar.gz: all records under runs/ without weights,
# checkpoints and the samples that no report draws. The archive is written every half minute: a killed command has one.
set -euo pipefail
out=$1
shift
export PYTHONPATH="build/site:src:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out" build/site runs

unpack() { # ARCHIVE FOLDER, once
  local archive=build/$1.tar.xz stamp=build/site/.$1
  [[ -e $archive && ! $stamp -nt $archive ]] || return 0
  python3 -W ignore -m tarfile -e "$archive" "$2"
  touch "$stamp"
}
unpack triton build/site
unpack site build/site
unpack data .

records() {
  local archive=$out/.records.$BASHPID # the loop below may be at it as well
  [[ -n $(ls runs) ]] || return 0
  # Status 1: a file changed while it was read.
  tar -C runs --exclude='.*' --exclude=checkpoints --exclude=model.safetensors --exclude='*.partial' --exclude='*.tmp' \
    --exclude={lm,commonsense,positions,niah,retrieval}.samples.jsonl.gz -czf "$archive" $(ls runs) 2> /dev/null ||
    (($? == 1)) || return 0
  mv -f "$archive" "$out/records.tar.gz"
}

while sleep 30 && kill -0 $$ 2> /dev/null; do records; done &
packing=$!
echo "== $(date -Is) $*" >> "$out/log.txt"
status=0
"$@" 2>&1 | tee -a "$out/log.txt" || status=$?
echo "== $(date -Is) status $status" >> "$out/log.txt"
kill "$packing"
records
rm -f "$out"/.records.*
exit "$status"
