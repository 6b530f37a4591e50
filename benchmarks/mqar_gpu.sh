#!/usr/bin/env bash
# Associative recall (Fig. 4) on a machine with one GPU that has Python, torch, Triton and NumPy, and of this
# project a copy of the files. From their top folder:
#
#   python -m mdn.mqar plan --scale short --models mdn gdn comba kda mamba2 transformer > mqar.json    # at home
#   MDN_COMMIT=... benchmarks/mqar_gpu.sh mqar.json 480 6 out                                          # there
#   mkdir -p results/DATE-GPU && tar -C results/DATE-GPU -xzf out/mqar.tar.gz                          # at home
#
# CELLS SECONDS WORKERS OUT: what to train, until when, how many at a time, where the archive of records goes.
# A second call goes on with what the first one left.
set -euo pipefail
cells=$1 seconds=$2 workers=$3 out=$4
export PYTHONPATH=src:kernels PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0
python3 -m mdn.mqar run "$cells" --workers "$workers" --deadline-s "$seconds" 2>&1 | tee "$out/mqar.log" || status=$?
# Records without checkpoints, which are large and of use only here.
(cd runs && tar -czf - --exclude=checkpoints mqar-*) > "$out/mqar.tar.gz"
exit "$status"
