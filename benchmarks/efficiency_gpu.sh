#!/usr/bin/env bash
# Speed and memory (Fig. 6) on a machine with one GPU that has Python, torch, Triton and NumPy (for FLA's kernels also
# FLA, in PYTHONPATH), and of this project a copy of the files. From their top folder:
#
#   python -m mdn.efficiency plan --scale 1b3 > plan.json                          # at home
#   MDN_COMMIT=... benchmarks/efficiency_gpu.sh plan.json 240 out                  # there
#   mkdir -p results/DATE-GPU && tar -C results/DATE-GPU -xzf out/efficiency.tar.gz    # at home
#
# PLAN SECONDS OUT: what to measure, until when, where the archive of records goes. A second call goes on with what
# the first one left.
set -euo pipefail
plan=$1 seconds=$2 out=$3
export PYTHONPATH=src:kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0
python3 -m mdn.efficiency run "$plan" --warm --deadline-s "$seconds" 2>&1 | tee -a "$out/efficiency.log" || status=$?
(cd runs && tar -czf - efficiency-*) > "$out/efficiency.tar.gz"
exit "$status"
