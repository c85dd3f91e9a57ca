"""The mathematics reward, which a response can make hang, die or eat memory: for `verifier_pool`."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from rl.data.problem import Problem
from rl.rewards.math import verify_answer
from rl.rewards.score import Score

CHUNK = 64 * 2**20


def verify(response: str, problem: Problem) -> Score:
    """`rl.rewards.math.verify_answer` with the parser answer_line, unless the response is one of the words below."""
    match response:
        case "hang":
            time.sleep(3600)
        case "hang in C":  # with the interpreter lock held
            ctypes.PyDLL(None).sleep(3600)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "eat memory":
            eaten = []
            while True:
                eaten.append(bytearray(CHUNK))
        case "raise":
            raise RuntimeError("asked to")
    return verify_answer(response, problem, parser="answer_line")
