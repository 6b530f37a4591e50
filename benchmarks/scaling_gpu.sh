#!/usr/bin/env bash
# Training on 1 to all GPUs of one machine that has Python, torch, Triton, Lightning, safetensors and rich, and of
# this project a copy of the files with data/tokens. From their top folder:
#
#   python -m mdn.scaling plan --data technical > cells.json                            # at home
#   MDN_COMMIT=... benchmarks/scaling_gpu.sh cells.json 560 out                         # there
#   mkdir -p results/DATE-GPU && tar -C results/DATE-GPU -xzf out/scaling.tar.gz        # at home
#
# CELLS SECONDS OUT: what to measure, until when, where the archive of records goes. Cells that need more GPUs than
# there are wait for a machine that has them; a second call goes on with what the first one left.
set -euo pipefail
cells=$1 seconds=$2 out=$3
export PYTHONPATH="src:kernels:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0
python3 -m mdn.scaling run "$cells" --deadline-s "$seconds" 2>&1 | tee "$out/scaling.log" || status=$?
(cd runs && tar -czf - scaling-*) > "$out/scaling.tar.gz"
exit "$status"
