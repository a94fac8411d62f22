"""The Triton kernels under Triton's interpreter: the switch has to be on while Triton and the kernels are imported."""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests.native import ON_CARD

MODULES = (
    "activation",
    "adapters",
    "attention_tile",
    "blocks",
    "decode_attention",
    "gemv",
    "grouped",
    "logprobs",
    "norm",
    "palette",
    "palette_choice",
    "palette_direct",
    "palette_products",
    "prefill_attention",
    "prefill_copies",
    "prefill_pipelined",
    "rope",
    "routing",
    "sampler",
    "sampling_cut",
    "sampling_figures",
    "sampling_floor",
    "sampling_lean",
    "sampling_limit",
    "sampling_lists",
    "sampling_row",
    "scaled_rows",
    "steps",
    "tile_map",
)


def _import_interpreted() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("triton.experimental.gluon")  # loaded with the first launch, and as particular
        for module in MODULES:
            importlib.import_module(f"engine.backends.cuda.kernels.{module}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _patch_once() -> None:
    """Triton's interpreter replaces the language's functions anew at each call of a device function, and never undoes
    that of an inner one: milliseconds a call. Once is as good."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    patch, patched = interpreter._patch_lang, set()

    def patch_new(function: object) -> object:
        used = {id(one) for one in function.__globals__.values() if one is language or one is language.core}
        if not used <= patched:
            patch(function)
            patched.update(used)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_new


def _sum_in_float64() -> None:
    """Make the interpreter's products of tiles independent of a row's place in the tile, as a GPU's are.

    The interpreter multiplies with numpy, whose library takes other instructions for the rows that do not fill its own
    tile: on a Zen 3 rows 6 to 11 of 16 differ in their last bits from the same row elsewhere. Sums in float64, rounded
    once, do not; what a kernel itself adds up in another order still differs.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def create_exact_dot(self: object, a: Any, b: Any, d: Any, *rest: object) -> object:
        if not a.dtype.is_floating() or a.dtype.primitive_bitwidth == 8 or d.data.dtype != np.float32:
            return create_dot(self, a, b, d, *rest)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_exact_dot


def _look_up_types_once() -> None:
    """The interpreter makes a table of all types anew for each type that it asks for, several times an operation; the
    answers never change, and those for blocks and their numbers are the same."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    pointer = importlib.import_module("triton.language").pointer_type
    look_up: Callable[[Any], object] = interpreter._get_np_dtype
    known: dict[str, object] = {}

    def look_up_once(kind: Any) -> object:
        numbers = kind.scalar
        name = "pointer" if isinstance(numbers, pointer) else numbers.name
        if name not in known:
            known[name] = look_up(numbers)
        return known[name]

    interpreter._get_np_dtype = look_up_once


def _convert_bfloat16_by_shifts() -> None:
    """Make the interpreter convert between bfloat16 and float32, which have the same exponents, by a shift of bits: it
    takes each number apart and puts it together again, with some thirty operations on arrays.

    A shift gives the same bits of every number but those below the smallest normal one, of which the interpreter makes
    others; a GPU's have their own value, as here. Where it is told to round it does so as before.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    convert, nearest = interpreter._convert_float, interpreter._ir.ROUNDING_MODE.RTNE

    def convert_by_shift(given: Any, source: Any, target: Any, rounding: object) -> object:
        if source == language.bfloat16 and target == language.float32:
            return np.asarray(np.asarray(given).astype(np.uint32, order="C") << np.uint32(16))
        if source == language.float32 and target == language.bfloat16 and rounding != nearest:
            return np.asarray(np.asarray(given).view(np.uint32) >> np.uint32(16)).astype(np.uint16, order="C")
        return convert(given, source, target, rounding)

    interpreter._convert_float = convert_by_shift


def _leave_unseen_overflows_out() -> None:
    """The interpreter computes each sum, difference and product of integers a second time in 64 bits, and gives what it
    finds to an assertion that is off: eight operations more for one."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    assert not builder.options.debug, "assertions are on"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if not ON_CARD:
    _import_interpreted()
    _patch_once()
    _look_up_types_once()
    _leave_unseen_overflows_out()
    _convert_bfloat16_by_shifts()
    _sum_in_float64()


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """The interpreter computes with numpy, which would warn of what a GPU does silently: infinities and no numbers."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def place() -> Iterator[None]:
    """Tensors of tests lie where kernels compute."""
    # After the kernels, which it imports.
    support = importlib.import_module("tests.engine.backends.cuda.kernels.support")
    with support.OnCard() if ON_CARD else nullcontext():
        yield
