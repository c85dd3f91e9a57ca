"""The process that `rl.rewards.pool.RewardPool` starts: scores what comes through a pipe, sample by sample.

Run as ``python -m rl.rewards.worker DESCRIPTOR FUNCTION PARSER WRONG TIMEOUT_S MEMORY_MIB``. It imports the reward
and nothing else of the application.
"""

from __future__ import annotations

import resource
import signal
import sys
from multiprocessing.connection import Connection

from rl.errors import ConfigError
from rl.rewards.registry import load_reward

# LAST: a score from a process that wants to be replaced.
READY, SCORE, LAST, REFUSED = "ready", "score", "last", "refused"

_ORPHAN_GRACE_S = 5.0
_FULL = 0.75  # of the address space: what samples have left behind must not fail the next one


def main() -> None:
    descriptor, function, parser, wrong, timeout_s, memory_mib = sys.argv[1:]
    pipe = Connection(int(descriptor))
    limit = int(memory_mib) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        reward = load_reward(function, parser or None, float(wrong))
        pipe.send((READY, None))
        while True:
            response, problem = pipe.recv()
            # The pool kills this process at the limit. Should the pool itself be gone, the alarm does, even
            # inside a computation that never returns to Python: its default action needs no handler.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, float(timeout_s) + _ORPHAN_GRACE_S)
            score = reward(response, problem)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send((LAST if _address_space() > _FULL * limit else SCORE, score))
    except ConfigError as error:
        pipe.send((REFUSED, str(error)))
    except (EOFError, ConnectionError):
        pass  # the pool is closed


def _address_space() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
