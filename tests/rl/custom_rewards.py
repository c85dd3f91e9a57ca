"""Reward functions for tests: of what a model without any training gets, and such as behave badly."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rl.data.problem import Problem
from rl.rewards.score import Score

not_a_function = 3


def always_right(response: str, problem: Problem) -> Score:
    """Nothing is left to learn."""
    return Score(1.0, correct=True)


def even_length(response: str, problem: Problem) -> Score:
    """Some responses of a model that knows nothing are right."""
    return Score.of(len(response) % 2 == 0)


_ANSWERED: list[str] = []


def solved_after_300(response: str, problem: Problem) -> Score:
    """`even_length` for as many responses, then `always_right`."""
    _ANSWERED.append(response)
    return (even_length if len(_ANSWERED) <= 300 else always_right)(response, problem)


def by_order(response: str, problem: Problem) -> Score:
    """Does what the response says."""
    command, _, argument = response.partition(" ")
    match command:
        case "score":
            return Score(float(argument), correct=argument == problem.answer)
        case "sleep":
            time.sleep(float(argument))
        case "hold":  # inside C, with the interpreter lock held: no Python handler or thread can interrupt it
            ctypes.PyDLL(None).sleep(int(argument))
        case "spin":
            while True:
                pass
        case "raise":
            raise RuntimeError(argument)
        case "recurse":
            return by_order(response, problem)
        case "exit":
            sys.exit(int(argument))
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "allocate":
            return Score(float(len(bytearray(int(argument)))), correct=False)
        case "child":  # leaves the id of a process of its own, then hangs
            child = subprocess.Popen(["sleep", "600"])
            Path(argument).write_text(str(child.pid))
            time.sleep(600)
        case "modules":
            return Score.failed(
                ",".join(sorted(set(sys.modules) & {"torch", "numpy", "ray", "vllm", "sympy", "datasets"}))
                or "none"
            )
        case "pid":
            return Score(float(os.getpid()), correct=False)
    return Score.of(False)


def no_score(response: str, problem: Problem) -> float:
    return 1.0


def one_argument(response: str) -> Score:
    return Score.of(True)


_SEEN: list[str] = []


def forgetful(response: str, problem: Problem) -> Score:
    """Another value each time: depends on what the process has scored before, and on which process it is."""
    _SEEN.append(response)
    return Score(os.getpid() + len(_SEEN) / 10, correct=True)


def ascii_only(response: str, problem: Problem) -> Score:
    return Score.of(response.encode("ascii") == b"34")


_LEAKED: list[bytearray] = []


def leaky(response: str, problem: Problem) -> Score:
    """Keeps 200 MiB for each response "leak"; says which process it is."""
    if response == "leak":
        _LEAKED.append(bytearray(200 * 2**20))
    return Score(float(os.getpid()), correct=False)
