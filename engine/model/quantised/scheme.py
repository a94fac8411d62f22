"""Packing scheme of a checkpoint's matrices, from ``quantization_config`` of ``config.json``.

The files decide which matrices are packed: a matrix whose ``weight`` has a float dtype is read as is, whatever the
lists of exceptions name (they may hold regular expressions, which are never evaluated). Packed matrices must have the
one format that the configuration names. An unknown method, or an unknown option that would change a number, is an error
that lists the supported ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.errors import ModelLoadError
from engine.model.checkpoint.fields import Fields
from engine.model.quantised.awq import BITS as AWQ_BITS
from engine.model.quantised.awq import awq
from engine.model.quantised.codec import Codec, Present
from engine.model.quantised.fp8 import F8, block_scaled, row_scaled
from engine.model.quantised.gptq import BITS as GPTQ_BITS
from engine.model.quantised.gptq import Layout, gptq
from engine.model.quantised.grouped import PACKED_BITS, ScaleGrouping, packed_numbers, plain_numbers
from engine.model.quantised.mxfp4 import mxfp4

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
"""Supported values of ``quant_method``."""

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
"""Supported values of compressed-tensors' ``format``."""

MAX_GROUP = 1 << 20
"""Largest number of inputs that share a scale."""

ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "kv_scale",
)
"""Suffixes of activation tensors, unused because weights are dequantised."""

PLACE = "config.json: quantization_config"

MatrixCodec = Callable[[Present, tuple[int, int]], Codec]
"""Finds the codec of a matrix of ``(outputs, inputs)`` among the tensors that a checkpoint holds for it."""

StackCodec = Callable[[Present, str, tuple[int, int, int]], Codec]
"""Finds the codec of stacked matrices ``(experts, outputs, inputs)`` by the stem of their tensors' names."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Packing scheme of a checkpoint's matrices."""

    method: str
    matrix: MatrixCodec | None
    """Codec finder for single matrices; None where only stacked experts are packed (mxfp4)."""
    stacked: StackCodec | None = None
    """Codec finder for experts stored in one tensor."""
    ignored: tuple[str, ...] = ()
    """Suffixes of additional tensors that a checkpoint may hold and that dequantised weights do not use."""


def read_scheme(config: Mapping[str, object]) -> Scheme | None:
    """Read the scheme named by a ``config.json``; None when its weights are not packed.

    Raises:
        ModelLoadError: an unknown method or option; the message lists the supported ones.
    """
    inner = config.get("text_config")
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None and isinstance(inner, dict):
        given = inner.get("quantization_config")
    if given is None:
        return None
    options = _options(given, PLACE)
    method = options.choice("quant_method", METHODS)
    readers = {"awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "mxfp4": _mxfp4}
    return readers[method](options)


class Options(Fields):
    """The object ``quantization_config``, or one inside it."""

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Return one of the permitted words, in any case."""
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.error(f"{key} is not supported; supported are: {', '.join(allowed)}")
        return value.lower()

    def one_of(self, key: str, allowed: tuple[int, ...]) -> int:
        """Return one of the permitted integers."""
        value = self.values.get(key)
        if type(value) is not int or value not in allowed:
            raise self.error(f"{key} is not supported; supported are: {', '.join(map(str, allowed))}")
        return value

    def group(self, key: str) -> int:
        """Return a number of inputs; 0 for all of them, which files write as -1 or leave out."""
        value = self.values.get(key)
        whole = value is None or (type(value) is int and value == -1)
        return 0 if whole else self.integer(key, 1, MAX_GROUP)

    def block(self, key: str) -> tuple[int, int] | None:
        """Return outputs and inputs of a block, or None."""
        found = self.integers(key, 2, 1, MAX_GROUP)
        return None if found is None else (found[0], found[1])


def _options(value: object, place: str) -> Options:
    if not isinstance(value, dict):
        raise ModelLoadError(f"{place} is not a JSON object")
    return Options(place, value)


def _fp8(options: Options) -> Scheme:
    options.choice("fmt", ("e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"), "e4m3")
    block = options.block("weight_block_size")
    if block is None:
        return Scheme("fp8", _rows("weight_scale", tuple(F8)), ignored=ACTIVATIONS)

    def matrix(present: Present, shape: tuple[int, int]) -> Codec:
        return block_scaled(present, shape, block, scale="weight_scale_inv", numbers=tuple(F8))

    return Scheme("fp8", matrix, ignored=ACTIVATIONS)


def _awq(options: Options) -> Scheme:
    options.one_of("bits", (AWQ_BITS,))
    options.choice("version", ("gemm",), "gemm")
    if not options.boolean("zero_point", default=True):
        raise ModelLoadError(f"{PLACE}: zero_point false is not supported: AWQ stores zero points")
    group = options.group("group_size")
    return Scheme("awq", lambda present, shape: awq(present, shape, group))


def _gptq(options: Options) -> Scheme:
    form = options.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    layout = Layout(options.one_of("bits", GPTQ_BITS), options.group("group_size"), form == "gptq")
    return Scheme("gptq", lambda present, shape: gptq(present, shape, layout))


def _mxfp4(_options: Options) -> Scheme:
    return Scheme("mxfp4", None, stacked=mxfp4)


def _compressed_tensors(options: Options) -> Scheme:
    form = options.choice("format", FORMATS)
    groups = options.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"{PLACE}: config_groups is not a JSON object with entries")
    found = []
    for number, group in enumerate(groups.values()):
        inside = _options(group, f"{PLACE}.config_groups[{number}]")
        inside.choice("format", (form,), form)
        weights = _options(inside.values.get("weights"), f"{inside.name}.weights")
        found.append(_weights_of(weights, form))
    if any(one != found[0] for one in found):
        raise ModelLoadError(f"{PLACE}: config_groups differ in how weights are packed; one way is supported")
    kind, _strategy, grouping, block = found[0]
    return Scheme("compressed-tensors", _compressed_matrix(form, kind, grouping, block), ignored=ACTIVATIONS)


_Weights = tuple[str, str, ScaleGrouping, tuple[int, int] | None]


def _weights_of(weights: Options, form: str) -> _Weights:
    kind = weights.choice("type", ("float", "int"), "int")
    if kind == "float" and form not in ("float-quantized", "naive-quantized"):
        raise ModelLoadError(f"{PLACE}: weights of type float are not supported in format {form}")
    bits = weights.one_of("num_bits", PACKED_BITS if form == "pack-quantized" else (8,))
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
    return kind, strategy, ScaleGrouping(bits, group, weights.boolean("symmetric", default=True)), block


def _compressed_matrix(form: str, kind: str, grouping: ScaleGrouping, block: tuple[int, int] | None) -> MatrixCodec:
    if form == "pack-quantized":
        return lambda present, shape: packed_numbers(present, shape, grouping)
    if kind == "int":
        return lambda present, shape: plain_numbers(present, shape, grouping)
    if block is None:
        return _rows("weight_scale", tuple(F8))
    return lambda present, shape: block_scaled(present, shape, block, scale="weight_scale", numbers=tuple(F8))


def _rows(scale: str, numbers: tuple[str, ...]) -> MatrixCodec:
    return lambda present, shape: row_scaled(present, shape, scale=scale, numbers=numbers)
