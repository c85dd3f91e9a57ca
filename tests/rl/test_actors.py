"""What every actor does, apart from its work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl.cluster import LOG_VARIABLE


def test_an_actor_prints_to_its_log_which_anyone_may_read_and_nobody_run(tmp_path: Path):
    log = tmp_path / "learner.log"
    code = "import os; os.umask(0o022); from rl.actors import Actor; Actor(); print('here')"
    environment = os.environ | {LOG_VARIABLE: str(log)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout == b""
    assert log.read_text() == "here\n"
    assert log.stat().st_mode & 0o777 == 0o644
