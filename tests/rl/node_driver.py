"""A driver that joins a Ray of several nodes: `python -m tests.rl.node_driver ADDRESS FOLDER CASE...`.

Prints, as JSON, the line with which each case (overrides joined by commas) is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rl.cluster import joined_cluster
from rl.compose import load_config
from rl.errors import UserError
from rl.nodes import open_nodes


def refused(address: str, folder: str, *cases: str) -> dict[str, str]:
    found = {}
    own = [
        "+recipe=tiny",
        "learner.data_parallel=2",
        f"cluster.ray_address={address}",
        "cluster.patience_s=2",
    ]
    for case in cases:
        with joined_cluster(address):
            try:
                open_nodes(
                    load_config([*own, *case.split(",")]), Path(folder) / "run", Path(folder) / "model"
                )
            except UserError as error:
                found[case] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(refused(*sys.argv[1:])))
