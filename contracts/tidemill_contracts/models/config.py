"""A model's configuration as structured fields, read from a Hugging Face ``config.json``.

Reads and checks; it does not judge whether a model is supported. What a contract might have to
refuse (scaled RoPE, biases, quantisation, experts) is a field here, so that nothing is ignored
silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tidemill_contracts.models.errors import CheckpointError, UnsupportedModel

CONFIG_FILE = "config.json"

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields that matchers, builders and validators read; `extra` holds the rest."""

    model_id: str
    """The directory or Hub id, for messages only: nothing is ever selected by it."""
    architectures: tuple[str, ...]
    model_type: str
    vocab_size: int
    """Rows of the embedding, those that pad the tokenizer's vocabulary included."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Even; independent of ``hidden_size / num_attention_heads``."""
    max_position_embeddings: int
    """The longest row in tokens; where YaRN extends the context, the extended one."""
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    torch_dtype: str
    """One of `DTYPES`: what the checkpoint was saved in; float32 where the file does not say."""
    eos_token_ids: tuple[int, ...] = ()
    rope_type: str = "default"
    rope_scaling: Mapping[str, object] = field(default_factory=dict)
    """The RoPE parameters other than type and theta, as found; empty for plain RoPE. YaRN's always
    include ``original_max_position_embeddings``."""
    hidden_act: str = "silu"
    attention_bias: bool = False
    sliding_window: int | None = None
    """Tokens that a windowed layer sees; ``None`` where every layer sees them all."""
    num_experts: int = 0
    """Of each mixture-of-experts layer; 0 for a dense model."""
    num_experts_per_tok: int = 0
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 0
    """Of one expert; ``intermediate_size`` is that of a dense layer."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are scaled to add up to one."""
    decoder_sparse_step: int = 1
    """Every so many layers have experts; the others are dense."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are dense whatever `decoder_sparse_step` says."""
    quantization: Mapping[str, object] | None = None
    """``quantization_config`` as found."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """What the file holds besides."""

    def describe(self) -> str:
        """For error messages: which model this is, in its own words."""
        return _describe(self.model_id, self.architectures, self.model_type)

    @classmethod
    def from_hf(cls, raw: Mapping[str, object], model_id: str) -> ModelConfig:
        """The fields of a parsed ``config.json``.

        Both spellings of transformers 4 and 5 are read: ``rope_theta`` and ``rope_scaling``, or
        ``rope_parameters``; ``torch_dtype`` or ``dtype``.

        Raises `CheckpointError` naming the field that is missing, of a wrong type or inconsistent,
        and `UnsupportedModel` where the language model is nested in a multimodal one.
        """
        raw = {name: value for name, value in raw.items() if value is not None}
        fields = _Fields(raw, model_id)
        architectures = fields.strings("architectures")
        model_type = fields.text("model_type", default="")
        description = _describe(model_id, architectures, model_type)
        if "text_config" in raw and "hidden_size" not in raw:
            raise UnsupportedModel(
                f"{description} nests its language model in text_config:"
                " multimodal models are not supported."
            )
        fields.subject = description

        hidden_size = fields.positive("hidden_size")
        heads = fields.positive("num_attention_heads")
        kv_heads = fields.positive("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise fields.error(
                "num_key_value_heads", f"{heads} attention heads do not divide into {kv_heads}"
            )
        if "head_dim" not in raw and hidden_size % heads:
            raise fields.error(
                "head_dim", f"is missing, and hidden_size {hidden_size} / {heads} heads is no size"
            )
        head_dim = fields.positive("head_dim", default=hidden_size // heads)
        if head_dim % 2:
            raise fields.error("head_dim", f"is {head_dim}, but RoPE pairs halves of a head")
        layers = fields.positive("num_hidden_layers")
        vocab_size = fields.positive("vocab_size")
        max_positions = fields.positive("max_position_embeddings")
        rope = _rope(fields)
        if rope.type == "yarn":
            rope, max_positions = _yarn(fields, rope, max_positions)

        config = cls(
            model_id=model_id,
            architectures=architectures,
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.positive_float("rms_norm_eps"),
            rope_theta=rope.theta,
            rope_type=rope.type,
            rope_scaling=rope.scaling,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            torch_dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields, vocab_size),
            hidden_act=fields.text("hidden_act"),
            attention_bias=fields.flag("attention_bias"),
            sliding_window=_sliding_window(fields, layers),
            num_experts=_num_experts(fields),
            num_experts_per_tok=fields.count("num_experts_per_tok"),
            moe_intermediate_size=fields.count("moe_intermediate_size"),
            norm_topk_prob=fields.flag("norm_topk_prob"),
            decoder_sparse_step=fields.positive("decoder_sparse_step", default=1),
            mlp_only_layers=fields.counts("mlp_only_layers"),
            quantization=fields.mapping("quantization_config"),
        )
        rest = {name: value for name, value in raw.items() if name not in fields.read}
        object.__setattr__(config, "extra", MappingProxyType(rest))
        return config


def load_config(model_dir: str | Path) -> ModelConfig:
    """Reads ``config.json`` of a model directory.

    Raises `CheckpointError` where the directory or the file is missing, the file is not a JSON
    object, or a field is at fault.
    """
    return ModelConfig.from_hf(read_raw_config(model_dir), str(model_dir))


def read_raw_config(model_dir: str | Path) -> dict[str, object]:
    """``config.json`` as it stands.

    Raises `CheckpointError` where the directory or the file is missing or the file is not a JSON
    object.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such model directory.")
    path = directory / CONFIG_FILE
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {CONFIG_FILE}: not a model directory.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object.")
    return raw


def describe_raw(raw: Mapping[str, object], model_id: str) -> str:
    """`ModelConfig.describe` of a configuration whose fields have not been read."""
    listed = raw.get("architectures")
    architectures = tuple(map(str, listed)) if isinstance(listed, list) else ()
    return _describe(model_id, architectures, str(raw.get("model_type", "")))


def _describe(model_id: str, architectures: tuple[str, ...], model_type: str) -> str:
    architecture = ", ".join(architectures) or "unknown"
    return f"{model_id} (architecture {architecture}, model_type {model_type!r})"


class _Fields:
    """Typed access to a raw configuration; every complaint names the field."""

    def __init__(self, raw: Mapping[str, object], subject: str) -> None:
        self.raw = raw
        self.subject = subject
        self.read: set[str] = set()

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{CONFIG_FILE} of {self.subject}: {name}: {problem}.")

    def _typed(self, name: str, expected: type | tuple[type, ...], words: str) -> object | None:
        """The field's value, ``None`` where it is absent."""
        self.read.add(name)
        value = self.raw.get(name)
        if value is None:
            return None
        # A JSON true is a Python int: no number field means it.
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise self.error(name, f"expected {words}, found {value!r}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self._typed(name, int, "an integer")
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        assert isinstance(value, int)
        if value <= 0:
            raise self.error(name, f"must be positive, found {value}")
        return value

    def count(self, name: str) -> int:
        value = self._typed(name, int, "an integer")
        assert value is None or isinstance(value, int)
        if value is not None and value < 0:
            raise self.error(name, f"must not be negative, found {value}")
        return value or 0

    def positive_float(self, name: str) -> float:
        value = self._typed(name, (int, float), "a number")
        if value is None:
            raise self.error(name, "is missing")
        assert isinstance(value, int | float)
        return self.checked_positive(name, float(value))

    def checked_positive(self, name: str, value: float) -> float:
        if not (math.isfinite(value) and value > 0):
            raise self.error(name, f"must be positive, found {value}")
        return value

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, bool, "true or false"))

    def text(self, name: str, default: str | None = None) -> str:
        value = self._typed(name, str, "a string")
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        assert isinstance(value, str)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._typed(name, list, "a list of strings")
        if value is None:
            return ()
        assert isinstance(value, list)
        if not all(isinstance(item, str) for item in value):
            raise self.error(name, f"expected a list of strings, found {value!r}")
        return tuple(value)

    def counts(self, name: str) -> tuple[int, ...]:
        value = self._typed(name, list, "a list of integers")
        if value is None:
            return ()
        assert isinstance(value, list)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.error(name, f"expected a list of integers, found {value!r}")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, object] | None:
        value = self._typed(name, dict, "an object")
        if value is None:
            return None
        assert isinstance(value, dict)
        return MappingProxyType(dict(value))


@dataclass(frozen=True, slots=True)
class _Rope:
    theta: float
    type: str
    scaling: Mapping[str, object]


def _rope(fields: _Fields) -> _Rope:
    """RoPE of either spelling; where both are given they have to agree."""
    found: dict[str, dict[str, object]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        parameters = fields.mapping(name)
        if parameters:
            found[name] = {key: value for key, value in parameters.items() if value is not None}

    thetas: dict[str, float] = {}
    if "rope_theta" in fields.raw:
        thetas["rope_theta"] = fields.positive_float("rope_theta")
    types: dict[str, str] = {}
    scaling: dict[str, object] = {}
    for name, parameters in found.items():
        theta = parameters.pop("rope_theta", None)
        if theta is not None:
            path = f"{name}.rope_theta"
            if isinstance(theta, bool) or not isinstance(theta, int | float):
                raise fields.error(path, f"expected a number, found {theta!r}")
            thetas[path] = fields.checked_positive(path, float(theta))
        # Early transformers 4 wrote `type`.
        kinds = {key: parameters.pop(key) for key in ("rope_type", "type") if key in parameters}
        for key, kind in kinds.items():
            if not isinstance(kind, str):
                raise fields.error(f"{name}.{key}", f"expected a string, found {kind!r}")
            types[f"{name}.{key}"] = kind
        if parameters and not kinds:
            raise fields.error(f"{name}.rope_type", f"is missing beside {parameters!r}")
        scaling.update(parameters)

    for values in (thetas, types):
        if len(set(values.values())) > 1:
            raise fields.error(
                " and ".join(values), f"disagree: {', '.join(map(str, values.values()))}"
            )
    if not thetas:
        raise fields.error("rope_theta", "is missing")
    rope_type = next(iter(types.values()), "default")
    return _Rope(
        theta=next(iter(thetas.values())),
        type=rope_type,
        scaling=MappingProxyType({} if rope_type == "default" else scaling),
    )


_YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_YARN_PARAMETERS = {"factor", "original_max_position_embeddings", "truncate", *_YARN_NUMBERS}


def _yarn(fields: _Fields, rope: _Rope, max_positions: int) -> tuple[_Rope, int]:
    """YaRN's parameters, checked, and the longest row that they allow.

    The factor multiplies the original length, whatever ``max_position_embeddings`` says: Qwen's
    recipe leaves it at the unscaled length, transformers writes the scaled one, and neither may
    be scaled again. Where the original length is not given, ``max_position_embeddings`` is taken
    for it, as in transformers, and is not extended.
    """
    where = "rope_parameters" if "rope_parameters" in fields.raw else "rope_scaling"
    scaling = dict(rope.scaling)
    if unknown := sorted(scaling.keys() - _YARN_PARAMETERS):
        raise fields.error(f"{where}.{unknown[0]}", "is no parameter of YaRN")

    def number(name: str) -> float:
        value = scaling[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.error(f"{where}.{name}", f"expected a number, found {value!r}")
        return fields.checked_positive(f"{where}.{name}", float(value))

    if "factor" not in scaling:
        raise fields.error(f"{where}.factor", "is missing")
    if number("factor") < 1:
        raise fields.error(f"{where}.factor", f"must be 1 or more, found {scaling['factor']}")
    for name in _YARN_NUMBERS:
        if name in scaling:
            number(name)
    if not isinstance(scaling.get("truncate", True), bool):
        raise fields.error(f"{where}.truncate", "expected true or false")
    original = scaling.setdefault("original_max_position_embeddings", None)
    if original is None:
        scaling["original_max_position_embeddings"] = max_positions
    elif isinstance(original, bool) or not isinstance(original, int) or original <= 0:
        name = f"{where}.original_max_position_embeddings"
        raise fields.error(name, f"expected a positive integer, found {original!r}")
    else:
        max_positions = max(max_positions, int(number("factor") * original))
    return _Rope(rope.theta, rope.type, MappingProxyType(scaling)), max_positions


def _num_experts(fields: _Fields) -> int:
    """Qwen's name for it, or the one that transformers 5 writes."""
    found = {
        name: fields.count(name)
        for name in ("num_experts", "num_local_experts")
        if name in fields.raw
    }
    if len(set(found.values())) > 1:
        raise fields.error(" and ".join(found), f"disagree: {', '.join(map(str, found.values()))}")
    return next(iter(found.values()), 0)


def _dtype(fields: _Fields) -> str:
    name = "dtype" if "dtype" in fields.raw else "torch_dtype"
    fields.read.update(("dtype", "torch_dtype"))
    value = fields.text(name, default="float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.error(name, f"expected one of {', '.join(DTYPES)}, found {value!r}")
    return value


def _eos_token_ids(fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    name = "eos_token_id"
    fields.read.add(name)
    value = fields.raw.get(name, [])
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise fields.error(name, f"expected an integer or a list of them, found {value!r}")
        if not 0 <= token < vocab_size:
            raise fields.error(name, f"{token} lies outside the vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _sliding_window(fields: _Fields, layers: int) -> int | None:
    """The window, where at least one layer uses it.

    Qwen3's files carry a window that is switched off, and one that starts after the last layer:
    ``layer_types`` decides where it is given, else ``use_sliding_window`` and
    ``max_window_layers`` (the first windowed layer), as in transformers.
    """
    window = fields.positive("sliding_window", default=0)
    use_window = fields.flag("use_sliding_window")
    first_windowed = fields.count("max_window_layers")
    layer_types = fields.strings("layer_types")
    if layer_types:
        if len(layer_types) != layers:
            raise fields.error("layer_types", f"has {len(layer_types)} entries, expected {layers}")
        windowed = any(kind != "full_attention" for kind in layer_types)
    else:
        windowed = use_window and first_windowed < layers
    if not windowed:
        return None
    if not window:
        raise fields.error("sliding_window", "is missing, though layers use it")
    return window
