"""A model as data: what it takes and gives per step, what it is made of, where its weights come from.

A `ModelSpec` is frozen, goes to YAML and JSON and back unchanged, and refuses what it does not know. Everything that
is wrong with a text is reported in one SpecError.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from wpk.ir.errors import GraphError, SpecError
from wpk.ir.types import DType, Type, i32, parse_type
from wpk.zoo.component import Component, Count, Name, Reference, Size, installed_kinds, parse_component
from wpk.zoo.problems import Problem, problems_of, raise_problems, spec_error
from wpk.zoo.sources import Source
from wpk.zoo.tensors import Policy, TensorEntry
from wpk.zoo.wiring import reading_problems, wiring_problems

MAX_BYTES = 1 << 20  # of a spec's text
SEED = i32(2)
MAX_UNUSED = 100_000
_RANGE = re.compile(r"\{([0-9]{1,6})\.\.([0-9]{1,6})\}")
Kinds = Mapping[str, type[Component]]
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$", max_length=64)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4000)]
Seconds = Annotated[float, Field(ge=0.0, le=3600.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


def _parse_type(value: Any) -> Type:
    if isinstance(value, Type):
        return value
    try:
        return parse_type(value)
    except (GraphError, AttributeError):
        raise ValueError("wanted a type such as f32[512]: f32, bf16, i32 or bool with sizes of at least 1") from None


TypeField = Annotated[Type, PlainValidator(_parse_type), PlainSerializer(str, return_type=str)]


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError("wanted versions such as '>=1,<2'") from None
    return text


def _ranges(named: dict[str, Type]) -> dict[str, Type]:
    """Refuse ranges that are none, and more names than a checkpoint has."""
    total = sum(math.prod(max(0, int(hi) - int(lo) + 1) for lo, hi in _RANGE.findall(name)) for name in named)
    if not named or 1 <= total <= MAX_UNUSED:
        return named
    raise ValueError(f"wanted ranges such as {{1..3}} and at most {MAX_UNUSED} names, found {total}")


def _each(name: str) -> Iterator[str]:
    """The names that a name with ranges stands for."""
    match = _RANGE.search(name)
    if match is None:
        yield name
        return
    for number in range(int(match[1]), int(match[2]) + 1):
        yield from _each(f"{name[: match.start()]}{number}{name[match.end() :]}")


def _component(data: Any, info: ValidationInfo) -> Component:
    return parse_component(data, (info.context or {}).get("kinds") or installed_kinds())


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Licence(_Part):
    """SPDX names of the licences of the published code and weights; attribution: what the weights' licence asks for."""

    code: Text
    weights: Text
    attribution: str = ""

    def __str__(self) -> str:
        return self.code if self.code == self.weights else f"{self.code}, weights {self.weights}"


class Clock(_Part):
    """What drives the model: samples of the main input per step, at `sample_rate` hertz; steps served by one beat."""

    sample_rate: Size
    samples_per_step: Size
    steps_per_beat: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1

    @property
    def step_ms(self) -> float:
        return 1000.0 * self.samples_per_step / self.sample_rate


class InputPort(_Part):
    """What a session is given every step. sample_rate in hertz, for audio.

    A seed, i32[2], is not given with a step: it is the session's own, said when it joins, and keys its random numbers.
    """

    type: TypeField
    kind: Literal["audio", "features", "tokens", "seed"]
    sample_rate: Size | None = None


class Vocabulary(_Part):
    """What tokens spell. pieces: of the tokens 0, 1, ...; in them "\u2581" is a space (SentencePiece).

    silent: tokens that spell nothing, such as padding or a blank; so do those without a piece.
    """

    pieces: Annotated[tuple[Annotated[str, StringConstraints(max_length=200)], ...], Field(min_length=1)]
    silent: tuple[Count, ...] = ()

    def spell(self, tokens: Iterable[int]) -> str:
        """The tokens' pieces one after the other."""
        return "".join(self.pieces[t] for t in tokens if 0 <= t < len(self.pieces) and t not in self.silent)

    def text(self, spelled: str) -> str:
        """What pieces say, without spaces at the ends."""
        return spelled.replace("\u2581", " ").strip()


class OutputPort(_Part):
    """What a session gives every step.

    from: COMPONENT or COMPONENT.OUTPUT. labels: names of a vector's entries. sample_rate in hertz, for audio.
    latency_samples: how far, in samples of the clock, it lies behind the input of its step. vocabulary: what its
    tokens spell.
    """

    type: TypeField
    kind: Literal["probability", "logit", "audio", "features", "tokens"]
    source: Reference = Field(alias="from")
    labels: tuple[Name, ...] = ()
    sample_rate: Size | None = None
    latency_samples: Count = 0
    vocabulary: Vocabulary | None = None


class Ports(_Part):
    inputs: Annotated[dict[Name, InputPort], Field(min_length=1)]
    outputs: Annotated[dict[Name, OutputPort], Field(min_length=1)]


class Feedback(_Part):
    """What a component gave one step before, under a name that components may read like an input port.

    from: COMPONENT or COMPONENT.OUTPUT. initial: every value in a session's first step.
    """

    type: TypeField
    source: Reference = Field(alias="from")
    initial: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0


class PrefillInput(_Part):
    """What components are fed in a prefill, a row a step: written out, or the rows of a tensor of the checkpoint.

    type: of a row. values: all rows' numbers, one after the other. tensor: its name; shape: its shape, where that is
    not [steps, *row].
    """

    type: TypeField
    values: tuple[float, ...] = ()
    tensor: str = ""
    shape: tuple[Size, ...] = ()

    @model_validator(mode="after")
    def _one_source(self) -> PrefillInput:
        if bool(self.values) == bool(self.tensor):
            raise ValueError("wanted either 'values' or 'tensor'")
        if self.shape and not self.tensor:
            raise ValueError("wanted 'shape' with a tensor alone")
        if len(self.values) % self.type.size:
            raise ValueError(f"wanted values for whole rows of {self.type}, found {len(self.values)}")
        return self


class Prefill(_Part):
    """Steps that components of the model have behind them when a session joins: a prompt, a voice.

    They run once, when a profile is loaded, through `components`; what these keep is then the initial state of the
    model's components of the same names. An entry of `components` is written like one of the model's, or
    {use: NAME, ...}: the model's component of that name with other fields, its `kind` too. steps: how many.
    """

    steps: Size
    inputs: Annotated[dict[Name, PrefillInput], Field(min_length=1)]
    components: Annotated[
        tuple[Annotated[SerializeAsAny[Component], BeforeValidator(_component)], ...], Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _rows_are_steps(self) -> Prefill:
        for name, given in self.inputs.items():
            rows = (math.prod(given.shape) if given.shape else len(given.values)) // given.type.size
            if (given.values or given.shape) and rows != self.steps:
                raise ValueError(f"wanted {self.steps} rows of the input {name!r}, found {rows}")
        return self


class Precision(_Part):
    """f32: weights, state and arithmetic in float32.

    bf16: in components that offer it, matrices, what they multiply, and caches are bf16; products sum in f32, and
    norms, recurrent state and the residual stream stay f32. Other components are as under f32.

    components: another policy for components of these names.
    """

    policy: Policy = "f32"
    components: dict[Name, Policy] = {}


class SegmentEvents(_Part):
    """Stretches where a probability is high (voice activity).

    port: of the probability, one value a step. A segment opens at the first of `onset_steps` consecutive steps with
    probability >= onset and closes at the first of `offset_steps` with probability < offset. Then, in seconds:
    silences shorter than min_silence_s are closed, segments shorter than min_speech_s dropped, both ends moved out by
    pad_s.
    """

    kind: Literal["segments"] = "segments"
    port: Name
    onset: Probability = 0.5
    offset: Probability = 0.35
    onset_steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    offset_steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    min_speech_s: Seconds = 0.0
    min_silence_s: Seconds = 0.0
    pad_s: Seconds = 0.0


class PeakEvents(_Part):
    """Moments where a probability peaks (beats, onsets).

    port: of the probabilities. labels: those of its entries whose sum is the activation, and which name the peak: the
    largest one. A peak is a local maximum >= threshold; of two closer than min_distance_s the higher stays. Step n
    stands for the moment n * step + offset_s. Steps before start_step mean nothing yet.
    """

    kind: Literal["peaks"] = "peaks"
    port: Name
    labels: Annotated[tuple[Name, ...], Field(min_length=1)]
    threshold: Probability = 0.5
    min_distance_s: Seconds = 0.0
    offset_s: Annotated[float, Field(ge=-3600.0, le=3600.0)] = 0.0
    start_step: Count = 0


Events = Annotated[SegmentEvents | PeakEvents, Field(discriminator="kind")]


class ModelSpec(_Part):
    """A model of the zoo.

    reference: where the architecture is described. context: steps of history that caches have room for where nobody
    says another number. operators: versions that the model may be built with, for operators that it names; others
    may have any. tensors: parameter path COMPONENT.PARAMETER -> tensor of the checkpoint (see `zoo.tensors`).
    unused_tensors: tensors that the checkpoint holds and the model leaves unused, with their types; {1..3} in a name
    stands for each of these numbers. ignored_tensors: globs of others. events: what is read out
    of the outputs. reply_s: seconds after the end of its input in which a session may still answer.
    """

    name: Slug
    version: Annotated[int, Field(strict=True, ge=1)]
    task: Literal["vad", "denoise", "beat", "asr", "voice", "text"]
    description: Text
    licence: Licence
    reference: str = ""
    weights: Source
    clock: Clock
    context: Size = 1
    ports: Ports
    feedback: dict[Name, Feedback] = {}
    components: Annotated[
        tuple[Annotated[SerializeAsAny[Component], BeforeValidator(_component)], ...], Field(min_length=1)
    ]
    prefill: dict[Name, Prefill] = {}
    operators: dict[str, Annotated[str, AfterValidator(_specifier)]] = {}
    precision: Precision = Precision()
    tensors: dict[str, TensorEntry] = {}
    unused_tensors: Annotated[dict[Text, TypeField], AfterValidator(_ranges)] = {}
    ignored_tensors: tuple[Text, ...] = ()
    events: Events | None = None
    reply_s: Seconds = 0.0

    @model_validator(mode="before")
    @classmethod
    def _components_used_again(cls, data: Any) -> Any:
        """Every {use: NAME, ...} of a prefill written out, with the model's component of that name."""
        if not isinstance(data, dict) or not isinstance(data.get("prefill"), dict):
            return data
        own = {c.get("name", c.get("kind")): c for c in data.get("components", ()) if isinstance(c, dict)}
        return data | {"prefill": {name: _written_out(one, own) for name, one in data["prefill"].items()}}

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        raise_problems(
            self.name,
            [
                *wiring_problems(self.ports, self.components, self.feedback),
                *self._prefill_problems(),
                *self._port_problems(),
                *self._precision_problems(),
                *self._event_problems(),
            ],
        )
        return self

    def _prefill_problems(self) -> list[Problem]:
        found, own = [], {part.name for part in self.components}
        started: dict[str, str] = {}
        for name, prefill in self.prefill.items():
            where = ("prefill", name)
            problems = reading_problems(where, prefill.components, tuple(prefill.inputs))
            found += problems
            mine = [part.name for part in prefill.components if part.name in own]
            if not mine and not problems:
                wanted = f"one of {', '.join(sorted(own))}"
                found.append(Problem((*where, "components"), "no component of the model among them", wanted))
            for part in mine:
                if started.setdefault(part, name) != name:
                    other = f"prefill {started[part]!r}"
                    found.append(Problem((*where, "components"), f"{part!r} has a start already", "one prefill", other))
        return found

    @property
    def behind(self) -> dict[str, int]:
        """Component -> steps that it has behind it when a session joins."""
        return {part.name: prefill.steps for prefill in self.prefill.values() for part in prefill.components}

    def _precision_problems(self) -> list[Problem]:
        names, others = {part.name for part in self.components}, self.precision.components
        problems = [
            Problem(("precision", "components", name), f"no component is called {name!r}", ", ".join(sorted(names)))
            for name in others
            if name not in names
        ]
        refusing = {part.name: part for part in self.components if self.policy_of(part) not in part.POLICIES}
        for name, part in refusing.items():
            place = ("precision", *(("components", name) if name in others else ("policy",)))
            policy, offered = self.policy_of(part), " or ".join(part.POLICIES)
            problems.append(Problem(place, f"kind {part.kind!r} has no {policy} arithmetic yet", offered, policy))
        return problems

    def policy_of(self, part: Component) -> Policy:
        """The precision of one of its components."""
        return self.precision.components.get(part.name, self.precision.policy)

    def _port_problems(self) -> list[Problem]:
        found = []
        sides = (("inputs", self.ports.inputs), ("outputs", self.ports.outputs))
        for side, name, port in ((side, name, port) for side, ports in sides for name, port in ports.items()):
            place = ("ports", side, name)
            if (port.kind == "audio") != (port.sample_rate is not None):
                found.append(
                    Problem((*place, "sample_rate"), "audio ports have a sample rate, others none",
                            "a rate in hertz" if port.kind == "audio" else "none", str(port.sample_rate))
                )  # fmt: skip
            elif port.sample_rate is not None:
                count, rest = divmod(self.clock.samples_per_step * port.sample_rate, self.clock.sample_rate)
                wanted = None if rest or not count else Type(DType.F32, (count,))
                if port.type != wanted:
                    step = f"{self.clock.step_ms:g} ms at {port.sample_rate} Hz"
                    samples = f"{wanted or 'a whole number of samples'}: {step}"
                    found.append(Problem((*place, "type"), "samples of one step", samples, str(port.type)))
            if isinstance(port, OutputPort) and port.vocabulary and port.kind != "tokens":
                found.append(Problem((*place, "vocabulary"), "what has a vocabulary are tokens", "tokens", port.kind))
            if port.kind == "seed" and port.type != SEED:
                found.append(Problem((*place, "type"), "a seed is 64 bits", str(SEED), str(port.type)))
            if isinstance(port, OutputPort) and port.labels and len(port.labels) != port.type.size:
                wanted_labels = f"{port.type.size}, one for each value of {port.type}"
                found.append(Problem((*place, "labels"), "number of labels", wanted_labels, str(len(port.labels))))
        return found

    def _event_problems(self) -> list[Problem]:
        if self.events is None:
            return []
        port = self.ports.outputs.get(self.events.port)
        if port is None or port.kind != "probability":
            known = ", ".join(n for n, p in self.ports.outputs.items() if p.kind == "probability") or "an output of it"
            return [Problem(("events", "port"), "events are read from probabilities", known, self.events.port)]
        if isinstance(self.events, SegmentEvents):
            if port.type.size != 1:
                return [Problem(("events", "port"), "segments need one value a step", "f32[1]", str(port.type))]
            return []
        missing = [label for label in self.events.labels if label not in port.labels]
        if missing:
            wanted = ", ".join(port.labels) or f"labels of the port {self.events.port!r}"
            return [Problem(("events", "labels"), "labels of the port", wanted, ", ".join(missing))]
        return []

    @property
    def unused(self) -> dict[str, Type]:
        """Every tensor of the checkpoint that the model is known to leave unused."""
        return {each: type for name, type in self.unused_tensors.items() for each in _each(name)}

    @property
    def latency_samples(self) -> int:
        """How far the latest output lies behind its input, in samples of the clock: what flushing takes."""
        return max(port.latency_samples for port in self.ports.outputs.values())

    # --- text -----------------------------------------------------------------------------------------------------
    @classmethod
    def from_data(cls, data: Any, source: str = "spec", kinds: Kinds | None = None) -> ModelSpec:
        """A spec from plain data. source: what messages call it. kinds: component classes, else the installed ones.

        Raises SpecError with every problem.
        """
        kinds = installed_kinds() if kinds is None else kinds
        if not isinstance(data, dict):
            found = "nothing" if data is None else type(data).__name__
            raise SpecError(f"{source} is no spec", wanted="a mapping with name, version, components, ...", found=found)
        try:
            return cls.model_validate(data, context={"kinds": kinds})
        except ValidationError as error:
            raise spec_error(source, problems_of(error, cls, kinds, data)) from None

    @classmethod
    def from_yaml(cls, text: str, source: str = "spec", kinds: Kinds | None = None) -> ModelSpec:
        """A spec from YAML, which JSON is too."""
        return cls.from_data(parse_yaml(text, source), source, kinds)

    @classmethod
    def from_json(cls, text: str, source: str = "spec", kinds: Kinds | None = None) -> ModelSpec:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{source} is no JSON", wanted="JSON", found=str(error)) from None
        return cls.from_data(data, source, kinds)

    def to_data(self) -> dict[str, Any]:
        """Plain data without what goes without saying (defaults)."""
        data = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        for part in data["components"]:
            if part.get("name") == part["kind"]:
                del part["name"]
        if self.events is not None:
            data["events"] = {"kind": self.events.kind, **data["events"]}
        return data

    def to_yaml(self) -> str:
        options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 120, "default_flow_style": None}
        return str(yaml.safe_dump(self.to_data(), **options))

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False) + "\n"


def _written_out(prefill: Any, own: Mapping[Any, Any]) -> Any:
    if not isinstance(prefill, dict) or not isinstance(prefill.get("components"), list | tuple):
        return prefill
    parts = []
    for part in prefill["components"]:
        used = own.get(part.get("use")) if isinstance(part, dict) else None
        if used is not None:
            given = {k: v for k, v in part.items() if k != "use"}
            part = {k: v for k, v in used.items() if k != "input"} | {"name": part["use"]} | given
        parts.append(part)
    return prefill | {"components": parts}


# --- YAML ---------------------------------------------------------------------------------------------------------
class _Loader(yaml.SafeLoader):
    """YAML's safe subset, more strictly: no key twice, no aliases; and 1e-5 is a number, as in YAML 1.2."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call, unused-ignore]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not used in specs", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is no text", key.start_mark)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Plain data of a YAML text. Raises SpecError that says where it is wrong."""
    if len(text) > MAX_BYTES:
        raise SpecError(f"{source} is too long for a spec", wanted=f"at most {MAX_BYTES} bytes", found=len(text))
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise SpecError(f"{source} is no YAML of a spec: {place}", wanted="YAML", found=error.problem) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError(f"{source} is no YAML of a spec", wanted="YAML", found=str(error)) from None
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # a tag such as !!bool on another text
        found, hint = f"{type(error).__name__}: {error}", "check the values that carry a tag (`!!`); specs need none"
        raise SpecError(
            f"{source} is no YAML of a spec", wanted="values that fit their tags", found=found, hint=hint
        ) from None
