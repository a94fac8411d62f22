"""``quantization_config`` of ``config.json``, read and checked: which format a checkpoint's packed matrices have.

What is packed and what is not, the files say: a matrix whose ``weight`` lies there in a float dtype is taken as it is,
whatever the lists of exceptions name (they may hold regular expressions, which nobody here runs). What is packed must
be of the one format that the configuration names. A method, or an option that would change a number, that this build
does not know is an error that says what it does know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.errors import ModelLoadError
from engine.model.quantised.awq import BITS as AWQ_BITS
from engine.model.quantised.awq import awq
from engine.model.quantised.codec import Codec, Present
from engine.model.quantised.fp8 import F8, block_scaled, row_scaled
from engine.model.quantised.gptq import BITS as GPTQ_BITS
from engine.model.quantised.gptq import Layout, gptq
from engine.model.quantised.grouped import PACKED_BITS, Grouping, packed_numbers, plain_numbers
from engine.model.quantised.mxfp4 import mxfp4

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
"""Values of ``quant_method`` that are read."""

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
"""Values of ``format`` of compressed-tensors that are read."""

MAX_GROUP = 1 << 20
"""Inputs that share a scale."""

ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    "k_scale", "v_scale", "kv_scale",
)  # fmt: skip
"""Suffixes of tensors about activations: no use for them where weights are dequantised."""

PLACE = "config.json: quantization_config"

MatrixCodec = Callable[[Present, tuple[int, int]], Codec]
"""Finds the codec of a matrix of ``(outputs, inputs)`` among what a checkpoint holds for it."""

StackCodec = Callable[[Present, str, tuple[int, int, int]], Codec]
"""The same of all matrices of ``(experts, outputs, inputs)``, below each other, by the stem of their tensors' names."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint packs its matrices."""

    method: str
    matrix: MatrixCodec | None
    """None where only stacked experts are packed (mxfp4)."""
    stacked: StackCodec | None = None
    """Of experts that lie in one tensor."""
    ignored: tuple[str, ...] = ()
    """Suffixes of tensors that a checkpoint may hold beside them and that dequantised weights have no use for."""


def read_scheme(config: Mapping[str, object]) -> Scheme | None:
    """The scheme that a ``config.json`` names, None when its weights are not packed.

    Raises:
        ModelLoadError: an unknown method or option; the message says what is supported.
    """
    inner = config.get("text_config")
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None and isinstance(inner, dict):
        given = inner.get("quantization_config")
    if given is None:
        return None
    options = Options(given, PLACE)
    method = options.choice("quant_method", METHODS)
    readers = {
        "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "mxfp4": _mxfp4,
    }  # fmt: skip
    return readers[method](options)


class Options:
    """Typed, ranged access to an untrusted JSON object; null counts as absent."""

    def __init__(self, values: object, place: str) -> None:
        if not isinstance(values, dict):
            raise ModelLoadError(f"{place} is not a JSON object")
        self._values: dict[str, object] = values
        self._place = place

    def get(self, key: str) -> object:
        """Whatever is there, or None."""
        return self._values.get(key)

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of the allowed words, in any case."""
        value = self._values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str) or value.lower() not in allowed:
            raise ModelLoadError(f"{self._place}: {key} is not supported; supported are: {', '.join(allowed)}")
        return value.lower()

    def number(self, key: str, allowed: tuple[int, ...]) -> int:
        """One of the allowed whole numbers."""
        value = self._values.get(key)
        if type(value) is not int or value not in allowed:
            names = ", ".join(str(one) for one in allowed)
            raise ModelLoadError(f"{self._place}: {key} is not supported; supported are: {names}")
        return value

    def group(self, key: str) -> int:
        """A number of inputs; 0 for all of them, which files write as -1 or leave out."""
        value = self._values.get(key)
        if value is None or (type(value) is int and value == -1):
            return 0
        if type(value) is not int or not 1 <= value <= MAX_GROUP:
            raise ModelLoadError(f"{self._place}: {key} must be -1 or an integer from 1 to {MAX_GROUP}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise ModelLoadError(f"{self._place}: {key} must be true or false")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """Outputs and inputs of a block, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(one) is int and 1 <= one <= MAX_GROUP for one in value)
        ):
            raise ModelLoadError(f"{self._place}: {key} must be two integers from 1 to {MAX_GROUP}")
        return value[0], value[1]

    def part(self, key: str) -> Options:
        """An object inside."""
        return Options(self._values.get(key), f"{self._place}.{key}")


def _fp8(options: Options) -> Scheme:
    options.choice("fmt", ("e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"), "e4m3")
    block = options.block("weight_block_size")
    if block is None:
        return Scheme("fp8", _rows("weight_scale", tuple(F8)), ignored=ACTIVATIONS)

    def matrix(present: Present, shape: tuple[int, int]) -> Codec:
        return block_scaled(present, shape, block, scale="weight_scale_inv", numbers=tuple(F8))

    return Scheme("fp8", matrix, ignored=ACTIVATIONS)


def _awq(options: Options) -> Scheme:
    options.number("bits", (AWQ_BITS,))
    options.choice("version", ("gemm",), "gemm")
    if not options.boolean("zero_point", True):
        raise ModelLoadError(f"{PLACE}: zero_point false is not supported: AWQ stores zero points")
    group = options.group("group_size")
    return Scheme("awq", lambda present, shape: awq(present, shape, group))


def _gptq(options: Options) -> Scheme:
    form = options.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    layout = Layout(options.number("bits", GPTQ_BITS), options.group("group_size"), form == "gptq")
    return Scheme("gptq", lambda present, shape: gptq(present, shape, layout))


def _mxfp4(_options: Options) -> Scheme:
    return Scheme("mxfp4", None, stacked=mxfp4)


def _compressed_tensors(options: Options) -> Scheme:
    form = options.choice("format", FORMATS)
    groups = options.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"{PLACE}: config_groups is not a JSON object with entries")
    found = []
    for number, group in enumerate(groups.values()):
        inside = Options(group, f"{PLACE}.config_groups[{number}]")
        inside.choice("format", (form,), form)
        found.append(_weights_of(inside.part("weights"), form))
    if any(one != found[0] for one in found):
        raise ModelLoadError(f"{PLACE}: config_groups differ in how weights are packed; one way is supported")
    kind, _strategy, grouping, block = found[0]
    return Scheme("compressed-tensors", _compressed_matrix(form, kind, grouping, block), ignored=ACTIVATIONS)


_Weights = tuple[str, str, Grouping, tuple[int, int] | None]


def _weights_of(weights: Options, form: str) -> _Weights:
    kind = weights.choice("type", ("float", "int"), "int")
    if kind == "float" and form not in ("float-quantized", "naive-quantized"):
        raise ModelLoadError(f"{PLACE}: weights of type float are not supported in format {form}")
    bits = weights.number("num_bits", PACKED_BITS if form == "pack-quantized" else (8,))
    group = weights.group("group_size")
    strategies: tuple[str, ...] = ("tensor", "channel", "block" if kind == "float" else "group")
    if form == "pack-quantized":
        strategies = ("channel", "group")
    strategy = weights.choice("strategy", strategies, "group" if group else strategies[0])
    if (strategy == "group") != (group > 0):
        raise ModelLoadError(f"{PLACE}: strategy {strategy} does not go with group_size {group or 'absent'}")
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise ModelLoadError(f"{PLACE}: strategy block needs block_structure")
    return kind, strategy, Grouping(bits, group, weights.boolean("symmetric", True)), block


def _compressed_matrix(form: str, kind: str, grouping: Grouping, block: tuple[int, int] | None) -> MatrixCodec:
    if form == "pack-quantized":
        return lambda present, shape: packed_numbers(present, shape, grouping)
    if kind == "int":
        return lambda present, shape: plain_numbers(present, shape, grouping)
    if block is None:
        return _rows("weight_scale", tuple(F8))
    return lambda present, shape: block_scaled(present, shape, block, scale="weight_scale", numbers=tuple(F8))


def _rows(scale: str, numbers: tuple[str, ...]) -> MatrixCodec:
    return lambda present, shape: row_scaled(present, shape, scale=scale, numbers=numbers)
