"""How tensors travel: one file a codec, one interface, and the table of their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rl.sync.codecs.base import Codec
from rl.sync.codecs.bf16 import Bf16
from rl.sync.codecs.delta import Delta
from rl.sync.codecs.packed import Packed

CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in (Packed(), Delta(), Bf16())})
