"""Results on disk: a folder for each piece of work, there whole or not at all, so that a diagnosis goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl.disk import room_for

Table = Mapping[str, np.ndarray]
Piece = tuple[dict[str, Any], Table]

_JSON, _TABLE = "result.json", "table.parquet"


class Store:
    """root: the folder of the pieces, each a JSON object and, where it has one, a table in Parquet."""

    def __init__(self, root: Path):
        self.root = root

    def piece(self, name: str, settings: object, make: Callable[[], Piece]) -> Piece:
        """What is stored under `name` for these settings, or else what `make` gives, which is then stored.

        settings: a JSON value, of everything that the piece depends on.
        """
        folder = self.folder(name, settings)
        if not folder.is_dir():
            self._write(folder, *make())
        return self.read(folder)

    def has(self, name: str, settings: object) -> bool:
        return self.folder(name, settings).is_dir()

    def folder(self, name: str, settings: object) -> Path:
        text = json.dumps(settings, sort_keys=True, default=str)
        label = name.replace("/", "+")
        return self.root / f"{label}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def read(self, folder: Path) -> Piece:
        result = json.loads((folder / _JSON).read_text(encoding="utf-8"))
        if not (folder / _TABLE).is_file():
            return result, {}
        import pyarrow.parquet as parquet

        table = parquet.read_table(folder / _TABLE)
        return result, {name: table[name].to_numpy() for name in table.column_names}

    def _write(self, folder: Path, result: Mapping[str, Any], table: Table) -> None:
        with room_for(folder):
            self.root.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
            try:
                (scratch / _JSON).write_text(json.dumps(result, indent=1), encoding="utf-8")
                if table:
                    import pyarrow
                    import pyarrow.parquet as parquet

                    parquet.write_table(pyarrow.table(dict(table)), scratch / _TABLE)
                scratch.chmod(0o755)
                os.rename(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
