"""Triton's interpreter without work that changes nothing: nearly all of its time goes into types and checks.

Left out is only what it computes again and again, or computes and throws away; `test_interpreter.py` compares what is
left with the interpreter as it comes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest


def quicken(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    _replace_language_once_a_launch(patch, interpreter)
    _make_types_once(patch, interpreter)
    # Of every sum, difference and product of integers: computed again in int64, compared with the limits, and, as the
    # options say nothing of debugging, dropped.
    assert not interpreter.interpreter_builder.options.debug
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)


def _replace_language_once_a_launch(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """At a launch, and again at every call of a device function, the interpreter replaces the functions of
    `triton.language` by its own. The calls change what the launch has left to change.
    """
    replace, language = interpreter._patch_lang, {id(interpreter.tl), id(interpreter.tl.core)}
    replaced: set[frozenset[int]] = set()

    def replace_once(function: Any) -> Any:
        seen = frozenset(language.intersection(map(id, function.__globals__.values())))
        if seen in replaced:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = replace(function)
        replaced.add(seen)
        restore = scope.restore

        def restore_all() -> None:
            restore()
            replaced.clear()

        scope.restore = restore_all
        return scope

    patch.setattr(interpreter, "_patch_lang", replace_once)


def _make_types_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """The parts of a block's type, a tensor's shape and NumPy's type of an element follow from names and sizes."""
    core = interpreter.tl.core
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_type = interpreter._get_np_dtype
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            make_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    def numpy_type_once(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        """Blocks of one shape, which `block` has made one object, stay what they are."""
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(semantic, "broadcast_impl_value", broadcast_others)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
