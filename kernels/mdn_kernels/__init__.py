"""Operators of linear attention with a fast-weight state; they need torch and Triton only and work alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Look at the values of the log gates before each call (one reduction, on a GPU one synchronisation).
# Switch it off with MDN_CHECK_GATES=0, or by assignment, for timing; torch.compile and graph capture skip it.
CHECK_GATES = os.environ.get("MDN_CHECK_GATES", "1") != "0"

# See `overwriting_states`.
OVERWRITE_STATES = False


@contextmanager
def overwriting_states() -> Iterator[None]:
    """Inside, a version that decodes may put the final states into the initial states' own memory.

    For loops that keep their states in one place, as a CUDA graph does. The final states are returned as
    always; the initial ones are spent. Where gradients are wanted nothing is overwritten.
    """
    global OVERWRITE_STATES
    was, OVERWRITE_STATES = OVERWRITE_STATES, True
    try:
        yield
    finally:
        OVERWRITE_STATES = was
