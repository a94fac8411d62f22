"""What a fuzzer may call: bytes in, nothing out; raises only when a promise is broken.

Each target is one place where bytes of somebody else are read: frames of a sandbox, bodies of a caller, files of a
model, files of an operator. The promise of all of them: a value, or an error of the target's own kind.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from appliance.common import control
from appliance.common.catalog import embedded_model
from appliance.common.config_loader import load_config
from appliance.common.errors import ApplianceError, CarrierError
from appliance.common.keys import parse_records
from appliance.gateway.fleet.prefill_call import PrefillCallError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Operation
from appliance.gateway.grpc import message_mapping
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.http import openai, openai_embeddings
from bench.fuzz import carrier, prefill
from engine.errors import EngineError
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.safetensors import SafetensorsFile, parse_header
from engine.model.coded.codec import open_numpy_codec
from engine.model.coded.layout import ALIGNMENT, HEADER_BYTES, SUFFIX, CodedHeader
from engine.model.coded.palette import choose_code
from engine.text.conversation import parse_conversation
from engine.text.files import read_text_files
from engine.text.marks import ControlTokens
from engine.text.output.detect import FORMATS
from engine.text.output.format import OutputFormat
from engine.text.output.reader import OutputReaders
from engine.text.output.tools import parse_tools
from engine.text.template import ChatTemplate, parse_template
from engine.text.tokenizer import Tokenizer
from isolation.ipc.codec import decode, encode
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.errors import RemoteProtocolError
from isolation.ipc.messages import MAX_FRAME_BYTES, Finish
from isolation.ipc.output import ReadOutput, Thinking
from isolation.ipc.ring import CONTROL_BYTES, RingReader
from isolation.ipc.sampling import Sampling
from isolation.ipc.segment import Layout, standard_layout
from policy.errors import PolicyError
from policy.loader import Source, load_policy

STAMP = Stamp("req_fuzz", None, 0)
MAX_FILE_BYTES = 1 << 16
_FOLDER = tempfile.TemporaryDirectory(prefix="athanor-fuzz-")
_ARENA = memoryview(bytearray(CONTROL_BYTES + MAX_FRAME_BYTES))
_MAX_POPS = 100


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    run: Callable[[bytes], object]
    expected: tuple[type[Exception], ...]
    """What it may raise."""
    seeds: tuple[bytes, ...]
    """Inputs that it takes, to begin from."""

    def __call__(self, data: bytes) -> bool:
        """Feed it; whether the bytes were taken. Whatever else is raised is a finding."""
        try:
            self.run(data)
        except self.expected:
            return False
        return True


def _wire(data: bytes) -> None:
    if encode(decode(data)) != data:
        raise RuntimeError("a frame that decodes is not the one that encodes")


def _ring(data: bytes) -> None:
    for start, size in ((0, 8), (128, 8), (CONTROL_BYTES, len(data) - 16)):
        part, data = data[:size], data[size:]
        _ARENA[start : start + size] = part.ljust(size, b"\0") if size > 0 else b""
        if size <= 0:
            break
    reader = RingReader(_ARENA)
    try:
        for _ in range(_MAX_POPS):
            frame = reader.pop()
            if frame is None:
                return
            decode(frame)
    finally:
        reader.release()


def _grpc_generate(data: bytes) -> None:
    message_mapping.to_request(pb.GenerateRequest.FromString(data), STAMP)


def _grpc_embed(data: bytes) -> None:
    message_mapping.to_embed_request(pb.EmbedRequest.FromString(data), STAMP)


def _file(name: str, data: bytes) -> Path:
    path = Path(_FOLDER.name, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def _model_config(data: bytes) -> None:
    load_model_config(str(_file("model/config.json", data).parent))


def _coded(data: bytes) -> None:
    with SafetensorsFile(_file("coded.safetensors", data), open_numpy_codec) as file:
        for name, entry in file.tensors.items():
            file.read_stretch(name, 0, memoryview(bytearray(entry.data_bytes)))


def _coded_file() -> bytes:
    """A file with a coded tensor of a few weights, and a plain one behind it."""
    weights = array("H", [0x3F80, 0xBF80, 0x3F01, 0x7FC1, 0x0001] * 8).tobytes()
    codec = open_numpy_codec()
    code = choose_code([*codec.count(weights)])
    table, chunks = codec.encode(code, weights)
    size = HEADER_BYTES + len(table) + len(chunks)
    size += -size % ALIGNMENT
    header = {
        "a" + SUFFIX: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }
    body = (CodedHeader(code, (5, 8), size).pack() + table + bytes(chunks)).ljust(size, b"\0")
    return len(_json(header)).to_bytes(8, "little") + _json(header) + body + bytes(8)


def _text_files(data: bytes) -> None:
    _file("text/tokenizer.json", b"{}")
    read_text_files(_file("text/tokenizer_config.json", data).parent)


def _template(data: bytes) -> None:
    control_tokens = ControlTokens(("<|im_start|>", "<|im_end|>"))
    parsed = parse_template(data.decode("utf-8", "replace"))
    chat = ChatTemplate(parsed, control_tokens, special={"bos_token": "<s>"}, limit_bytes=1 << 16)
    chat.render(parse_conversation(b'{"messages": [{"role": "user", "content": "hello"}]}'))


def _policy(data: bytes) -> None:
    load_policy([Source("policy.yaml", data.decode("utf-8", "replace"))])


def _keys(data: bytes) -> None:
    parse_records(data.decode("utf-8", "surrogateescape"))


def _embedded(name: str) -> bytes:
    return (embedded_model() / name).read_bytes()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


_SUBMIT = Submit(7, bytes(32), array("I", [1, 2, 3]), 4, Sampling())
_STEP = StepOutput(array("Q", [7]), array("I", [5]), b"\0")
_PLAIN = encode(StepOutput())
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop": ["a"], "n": 2}
_TEXT = {"model": "m", "prompt": [1, 2], "temperature": 0.5, "logprobs": 3, "stream": True, "echo": False, "seed": 1}
_EMBED = {"model": "m", "input": ["a", "b"], "encoding_format": "float", "dimensions": 8}
_POLICY = b"""version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["m-*"], weight: 7, limits: {concurrency: 3, tokens_per_minute: 5}}
  beta: {credentials: ["key:b"], models: ["*"], namespace: user, regions: [eu], limits: {kv_tokens: {at_once: 9}}}
"""
_MACHINE = b"""models: [{name: m, path: m, kv_bytes: 1048576}]
policy: p.yaml
credentials: c.json
pepper: pepper
run_dir: run
region: eu
host: {price_per_hour: 2.5, currency: EUR}
listen: {http: "127.0.0.1:1", admin: "unix:a"}
"""
_KEYS = {"keys": {"a": {"hmac_sha256": "00" * 32, "created": "2026-01-01T00:00:00+00:00", "revoked": False}}}
_HEADER = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
_GENERATE = pb.GenerateRequest(model="m", text="hi", max_output_tokens=3, stop=["x"], choices=2)
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)


def _output(data: bytes) -> None:
    """Read the bytes as an output in the format that their first one chooses, cut where the second says; some as the
    tools of an output."""
    form = FORMATS[data[0] % len(FORMATS)] if data else FORMATS[0]
    readers = OutputReaders(OutputFormat(form, ("<think>", "</think>")), {}, [bytes([byte]) for byte in range(256)])
    body = array("I", list(data[2:]))
    at = data[1] % (len(body) + 1) if len(data) > 1 else 0
    tools = data[2:] if data and data[0] & 0x10 else _TOOLS
    first = ReadOutput(1, 0, Thinking.POSSIBLE, Finish.NONE, body[:at], tools, begins=True)
    last = ReadOutput(1, 0, Thinking.NONE, Finish.STOP, body[at:], b"")
    for job in (first, last):
        encode(readers.read(job))


_TOOLS = _json({"tools": [{"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}]})
_CALL = b'\x00\x00<tool_call>\n{"name": "f", "arguments": {"a": "\\u00e9", "b": [1, -2.5e3, null]}}\n</tool_call>'

TARGETS: dict[str, Target] = {
    "wire": Target(_wire, (RemoteProtocolError,), (encode(_SUBMIT), encode(_STEP))),
    "ring": Target(_ring, (RemoteProtocolError,), (len(_PLAIN).to_bytes(8, "little") + bytes(8) + _PLAIN,)),
    "layout": Target(Layout.decode, (RemoteProtocolError,), (standard_layout(("kv", 4096)).encode(),)),
    "control": Target(control.decode, (control.ControlError,), (control.encode(control.Attach(1)),)),
    "chat": Target(lambda data: openai.parse(Operation.CHAT, data, STAMP), (ApplianceError,), (_json(_CHAT),)),
    "completion": Target(
        lambda data: openai.parse(Operation.TEXT_COMPLETION, data, STAMP), (ApplianceError,), (_json(_TEXT),)
    ),
    "embeddings": Target(lambda data: openai_embeddings.parse(data, STAMP), (ApplianceError,), (_json(_EMBED),)),
    "grpc-generate": Target(_grpc_generate, (ApplianceError, DecodeError), (_GENERATE.SerializeToString(),)),
    "grpc-embed": Target(
        _grpc_embed,
        (ApplianceError, DecodeError),
        (pb.EmbedRequest(model="m", inputs=[pb.EmbedInput(text="a")]).SerializeToString(),),
    ),
    "policy": Target(_policy, (PolicyError,), (_POLICY,)),
    "machine": Target(lambda data: load_config(_file("athanor.yaml", data)), (ApplianceError,), (_MACHINE,)),
    "keys": Target(_keys, (ApplianceError,), (_json(_KEYS),)),
    "config.json": Target(_model_config, (EngineError,), (_embedded("config.json"),)),
    "safetensors": Target(lambda data: parse_header("x", data, 24), (EngineError,), (_json(_HEADER),)),
    "coded weights": Target(_coded, (EngineError,), (_coded_file(),)),
    "tokenizer.json": Target(lambda data: Tokenizer(data, ""), (EngineError,), (_embedded("tokenizer.json"),)),
    "tokenizer_config.json": Target(_text_files, (EngineError,), (_embedded("tokenizer_config.json"),)),
    "template": Target(_template, (EngineError,), (_TEMPLATE.encode(),)),
    "conversation": Target(
        parse_conversation,
        (EngineError,),
        (_json({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}),),
    ),
    "output": Target(
        _output,
        (EngineError,),
        tuple(bytes((number,)) + _CALL[1:] for number in range(len(FORMATS)))
        + tuple(bytes((number, 7)) + "".join(form.markers).encode() + b"f(a=1)" for number, form in enumerate(FORMATS)),
    ),
    "tools": Target(parse_tools, (EngineError,), (_TOOLS,)),
    "prefill prompt": Target(prefill.prompt, (DecodeError, ValueError), prefill.PROMPTS),
    "prefill answer": Target(prefill.answer, (PrefillCallError,), prefill.ANSWERS),
    "carrier request": Target(carrier.request, (CarrierError,), carrier.REQUESTS),
    "carrier answer": Target(carrier.answer, (CarrierError,), carrier.ANSWERS),
    "carrier store": Target(carrier.reply, (carrier.ReplyRefusedError,), carrier.REPLIES),
}
"""By name."""
