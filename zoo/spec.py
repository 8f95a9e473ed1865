"""A model as data: what it takes and gives per step, what it is made of, where its weights come from.

A `ModelSpec` is frozen, goes to YAML and JSON and back unchanged, and refuses what it does not know. Everything that
is wrong with a text is reported in one SpecError.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from wpk.ir.errors import SpecError
from wpk.ir.types import DType, Type
from wpk.zoo.component import Component, Name, Size, installed_kinds
from wpk.zoo.events import Events, SegmentEvents
from wpk.zoo.part import Part, Seconds, Text, TypeField
from wpk.zoo.ports import SEED, Clock, Feedback, OutputPort, Ports
from wpk.zoo.prefill import AnyComponent, Prefill, written_out
from wpk.zoo.problems import Problem, problems_of, raise_problems, spec_error
from wpk.zoo.sources import Source
from wpk.zoo.tensors import Policy, TensorEntry
from wpk.zoo.text import parse_yaml
from wpk.zoo.wiring import reading_problems, wiring_problems

MAX_UNUSED = 100_000
_RANGE = re.compile(r"\{([0-9]{1,6})\.\.([0-9]{1,6})\}")
Kinds = Mapping[str, type[Component]]
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$", max_length=64)]


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


class Licence(Part):
    """SPDX names of the licences of the published code and weights; attribution: what the weights' licence asks for."""

    code: Text
    weights: Text
    attribution: str = ""

    def __str__(self) -> str:
        return self.code if self.code == self.weights else f"{self.code}, weights {self.weights}"


class Precision(Part):
    """f32: weights, state and arithmetic in float32.

    tf32: as f32, but products with weights may take their factors as TF32 (10 bits of mantissa) where the target has
    tensor cores for that; they sum in f32. Elsewhere it is f32.

    bf16: in components that offer it, matrices, what they multiply, and caches are bf16; products sum in f32, and
    norms, recurrent state and the residual stream stay f32. Other components are as under f32.

    components: another policy for components of these names.
    """

    policy: Policy = "f32"
    components: dict[Name, Policy] = {}


class ModelSpec(Part):
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
    components: Annotated[tuple[AnyComponent, ...], Field(min_length=1)]
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
        parts = data.get("components")
        named = [(c.get("name", c.get("kind")), c) for c in (parts if isinstance(parts, list | tuple) else ())
                 if isinstance(c, dict)]  # fmt: skip
        own = {name: c for name, c in named if isinstance(name, str)}
        return data | {"prefill": {name: written_out(one, own) for name, one in data["prefill"].items()}}

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
