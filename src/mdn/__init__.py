"""Reproduction pipeline for MDN: Parallelizing Stepwise Momentum for Delta Linear Attention."""

import os

# Read when torch is imported, so it stands here. By default OpenMP's threads spin while they wait for each
# other: on a laptop with anything else to do, a step then takes up to twenty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
