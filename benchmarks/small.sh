#!/usr/bin/env bash
# Trainings of scale `small`, each with its evaluations, side by side on one GPU and within a time limit. From the
# top folder of a checkout or of a copy of its files, with data/tokens/technical and data/raw (see README.md here):
#
#   MDN_COMMIT=... benchmarks/campaign.sh out benchmarks/small.sh "mdn gdn comba kda mamba2 transformer" 560 4
#
# MODELS SECONDS WORKERS: what to train, until when, how many at a time. A training that the limit cuts saves its step
# and goes on with the same command, as does an evaluation. No MLflow: `mdn sync --runs results/DATE-GPU` sends the
# records.
set -euo pipefail
read -ra models <<< "$1"
workers=$3
suites="niah lm commonsense dynamics retrieval positions" # longbench's prompts, of all lengths, take minutes a model
deadline=$(($(date +%s) + $2))
evaluating=90 # seconds before the deadline at which no training goes on
starting=60   # seconds without which none is begun
export OMP_NUM_THREADS=1 suites deadline evaluating starting MDN_GPU_SHARED_BY=$workers
mkdir -p build
params=build/small-params.yaml
sed -E 's/^( +uri:).*/\1 null/' params.yaml > "$params"
export params

left() { echo $((deadline - $(date +%s) - $1)); } # seconds, of which some are kept

train() {
  local seconds
  seconds=$(left "$evaluating")
  if ((seconds < starting)); then
    echo "left for the next call"
    return 1
  fi
  timeout --preserve-status --kill-after=30 "$seconds" \
    python3 pipeline/train_model.py --scale small --model "$1" --params "$params" ||
    { echo "training ended with status $? (75: it has saved its step)"; return 1; }
}

evaluate() {
  local seconds
  seconds=$(left 5)
  ((seconds > 0)) && timeout "$seconds" \
    python3 pipeline/evaluate_model.py --scale small --model "$1" --suite "$2" --params "$params" ||
    echo "$2 is incomplete"
}

cell() {
  train "$1" || return 0
  echo "trained, $(left 0) s left"
  # A process a suite: most of it is work of the host, and other models go on training.
  printf '%s\n' $suites | xargs -P 3 -I {} bash -c "evaluate $1 {}"
  echo "evaluated, $(left 0) s left"
}
export -f left train evaluate cell

printf '%s\n' "${models[@]}" | xargs -P "$workers" -I {} bash -c 'cell {} 2>&1 | sed -u "s/^/{}: /"'
