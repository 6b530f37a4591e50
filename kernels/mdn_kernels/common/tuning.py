"""How kernels that tune themselves, FLA's, try their candidates in this process (which changes Triton), and
processes that compile them side by side.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from math import inf

# Of a candidate; by default an eighth of a second, half a minute for each of FLA's operators.
TUNING_MS = {"warmup": 5, "rep": 30}


@cache
def take_first_candidates() -> None:
    """In this process kernels that tune themselves take the first of their candidates that runs: to compile
    and time all of FLA's takes minutes, and only speed depends on it. No training finds that on the disk."""
    from triton.runtime.autotuner import Autotuner

    prune, bench, found = Autotuner.prune_configs, Autotuner._bench, False

    def begin(self, *arguments, **keywords):
        nonlocal found
        found = False
        return prune(self, *arguments, **keywords)

    def first(self, *arguments, **keywords):
        nonlocal found
        times = [inf] if found else bench(self, *arguments, **keywords)
        found |= times[0] < inf
        return times

    def once(call, quantiles):
        call()
        return [0.0]

    def not_on_disk(self, key, candidates, tune):
        tune()
        return False

    Autotuner.prune_configs, Autotuner._bench = begin, first
    Autotuner.do_bench = property(lambda self: once)
    Autotuner.check_disk_cache = not_on_disk


def tune_quickly() -> None:
    """In this process kernels that tune themselves time their candidates for TUNING_MS."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda self: partial(do_bench, **TUNING_MS))


def share_candidates(share: float) -> None:
    """In this process tuned kernels run each of their candidates once, beginning after that share of them."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def rotated(self, *arguments, **options):
        found = prune(self, *arguments, **options)
        at = int(share * len(found))
        return found[at:] + found[:at]

    def once(call, quantiles):
        call()
        return [0.0] * len(quantiles)

    Autotuner.prune_configs = rotated
    Autotuner.do_bench = property(lambda self: once)


def compile_side_by_side(command: Sequence[str], deadline: float = inf) -> None:
    """Starts Python with `command`, n and count, once a core, n from 0 to count - 1, and waits for all, at
    most until `deadline`, as time.time() tells it. Each is to call `share_candidates(n / count)` and then
    what it is to compile: the others, and this process, find it in Triton's cache on disk."""
    count = os.cpu_count() or 1
    # What they choose is no choice: it must not be found on the disk.
    environment = {"OMP_NUM_THREADS": "1", "FLA_CACHE_RESULTS": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    active = [
        subprocess.Popen([sys.executable, *command, str(n), str(count)], env=os.environ | environment)
        for n in range(count)
    ]
    try:
        for process in active:
            process.wait(None if deadline == inf else max(0.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        print("not all kernels are compiled yet", flush=True)
    finally:
        for process in active:
            process.kill()
            process.wait()
