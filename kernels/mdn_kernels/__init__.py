"""Operators of linear attention with a fast-weight state; they need torch and Triton only and work alone."""

import os

# Look at the values of the log gates before each call (one reduction, on a GPU one synchronisation).
# Switch it off with MDN_CHECK_GATES=0, or by assignment, for timing; torch.compile and graph capture skip it.
CHECK_GATES = os.environ.get("MDN_CHECK_GATES", "1") != "0"
