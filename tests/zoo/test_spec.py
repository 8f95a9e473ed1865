"""Specs as text: what goes in comes out, and what is wrong is said, all of it, with a mend."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.zoo.specs import SMALL, chain, small
from wpk.ir.errors import SpecError
from wpk.ir.types import f32
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.component import installed_kinds
from wpk.zoo.spec import ModelSpec
from wpk.zoo.tensors import TensorRef


def refused(data: Any) -> str:
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_data(data, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml")
    return str(caught.value)


def port(**changes: Any) -> dict[str, Any]:
    return {"type": "f32[1]", "kind": "probability", "from": "head"} | changes


# --- round trip ---------------------------------------------------------------------------------------------------
def test_a_spec_is_what_its_text_says() -> None:
    spec = ModelSpec.from_yaml(SMALL)
    assert spec.ports.inputs["audio"].type == f32(80)
    assert spec.ports.outputs["speech"].source == "head"
    assert spec.clock.step_ms == 10.0 and spec.latency_samples == 0
    assert [c.name for c in spec.components] == ["audio_window", "spectrum", "magnitude", "log", "lstm", "head"]
    assert spec.components[3].floor == 1e-5  # type: ignore[attr-defined]  # YAML 1.1 would read a text
    assert str(spec.licence) == "MIT"


def test_yaml_and_json_give_the_same_spec_again() -> None:
    spec = ModelSpec.from_data(
        small(
            operators={"linear": ">=1,<2"},
            tensors={
                "head.weight": {"tensor": "w:0", "shape": [12, 1]},
                "lstm.*": "rnn.*",
                "head.bias": {"tensor": "b", "shape": [2], "rows": [[1, 2]]},
            },
            ignored_tensors=["unused.*"],
            events={"kind": "segments", "port": "speech", "onset": 0.7},
            context=40,
        )
    )
    for again in (
        ModelSpec.from_yaml(spec.to_yaml()),
        ModelSpec.from_yaml(spec.to_json()),
        ModelSpec.from_json(spec.to_json()),
        ModelSpec.model_validate_json(spec.model_dump_json()),
        ModelSpec.model_validate(spec.model_dump()),
    ):
        assert again == spec
    assert spec.tensors["head.weight"] == TensorRef(tensor="w:0", shape=(12, 1))
    assert ModelSpec.from_yaml(spec.to_yaml()).to_yaml() == spec.to_yaml()


@pytest.mark.parametrize("kind", installed_kinds())
def test_every_kind_says_what_it_is(kind: str) -> None:
    cls = installed_kinds()[kind]
    assert cls.__doc__ and kind == cls.KIND
    assert cls.model_config.get("frozen") and cls.model_config.get("extra") == "forbid"


def test_a_spec_cannot_be_changed() -> None:
    spec = ModelSpec.from_yaml(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        spec.version = 2
    with pytest.raises(ValueError, match="frozen"):
        spec.components[0].name = "other"


def test_a_default_is_not_written() -> None:
    text = ModelSpec.from_yaml(SMALL).to_yaml()
    assert "steps_per_beat" not in text and "context" not in text
    assert "{kind: magnitude}" in text


# --- keys and values ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "path", "near"),
    [
        ({"licens": {}}, "mine.yaml: licens", "licence"),
        ({"clock": {"sample_rate": 8000, "samples_per_step": 80, "steps_per_beats": 2}}, "clock.steps_per_beats",
         "steps_per_beat"),
        ({"ports": {"inputs": {"audio": {"type": "f32[80]", "kind": "audio", "samplerate": 8000}}, "outputs": {}}},
         "ports.inputs.audio.samplerate", "sample_rate"),
        ({"weights": {"pypi": "a", "version": "1", "files": [{"path": "a", "sha265": "0" * 64}]}},
         "weights.files[0].sha265", "sha256"),
        ({"weights": {"synthetic": 1, "gian": 2.0}}, "weights.gian", "gain"),
        ({"components": [{"kind": "dense", "unit": 3}]}, "components[0].unit", "units"),
        ({"components": [{"kind": "filterbank", "bank": {"kind": "mel", "band": 3}}]}, "components[0].bank.band",
         "bands"),
        ({"tensors": {"a.b": {"tensor": "c", "row": [[0, 1]]}}}, "tensors.a.b.row", "rows"),
        ({"events": {"kind": "segments", "port": "speech", "onsett": 1}}, "events.onsett", "onset"),
        ({"precision": {"polcy": "f32"}}, "precision.polcy", "policy"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_path_and_a_close_one(changes: dict[str, Any], path: str, near: str) -> None:
    message = refused(small(**changes))
    assert f"{path}: unknown key" in message
    assert f"Did you mean '{near}'" in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "Not A Slug"}, "name: a text that does not fit"),
        ({"name": "../up"}, "name: a text that does not fit"),
        ({"version": 0}, "version: a value that does not fit; wanted greater than or equal to 1; found 0"),
        ({"version": "1"}, "version: a value that does not fit; wanted a valid integer; found '1'"),
        ({"task": "vaad"}, "task: a value that does not fit; wanted 'vad'"),
        ({"weights": {"pypi": "a", "version": 1.0, "files": []}}, "weights.version: a value that does not fit; "
         "wanted a valid string; found 1.0. Put it in quotes."),
        ({"weights": {"hf": "a/b", "synthetic": 1}}, "exactly one of the keys hf, pypi, path, synthetic"),
        ({"operators": {"linear": "about 1"}}, "operators.linear: wanted versions such as '>=1,<2'"),
        ({"components": []}, "components"),
        ({"components": ["dense"]}, "components[0]: a component without a kind"),
        ({"components": [{"units": 3}]}, "components[0]: a component without a kind"),
        ({"components": [{"kind": "dens", "units": 3}]}, "components[0].kind: unknown component kind 'dens'; wanted"),
        ({"components": [{"kind": "dens", "units": 3}]}, "Did you mean 'dense'?"),
        ({"components": [{"kind": "dense", "units": 0}]}, "components[0].units: a value that does not fit; wanted"),
        ({"components": [{"kind": "dense", "units": 1e9}]}, "components[0].units"),
        ({"components": [{"kind": "dense", "units": 3, "activation": "swish"}]}, "components[0].activation"),
        ({"components": [{"kind": "dense"}]}, "components[0].units: the key 'units' is missing"),
        ({"components": [{"kind": "log", "offset": float("nan")}]}, "components[0].offset"),
        ({"tensors": {"a": {"tensor": "b", "rows": [[0, 1]]}}}, "rows are of a stored shape"),
        ({"tensors": {"a": {"tensor": "b", "axes": [1, 1]}}}, "axes in some order"),
        ({"tensors": {"a": 3}}, "tensors.a"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_path(changes: dict[str, Any], says: str) -> None:
    assert says in refused(small(**changes))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    message = refused({"name": "x", "version": "one", "clocks": {}, "components": [{"kind": "dense"}, {"kind": "huh"}]})
    assert "problems:" in message
    for part in (
        "version:",
        "clocks:",
        "components[0].units:",
        "components[1].kind:",
        "licence:",
        "weights:",
        "ports:",
    ):
        assert f"\n  {part}" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no spec"),
        ("- a\n- b\n", "found list"),
        ("name: x\nname: y\n", "line 2, column 1"),
        ("name: x\nname: y\n", "the key 'name' is there twice"),
        ("a: &x [1]\nb: *x\n", "aliases are not used"),
        ("name: [\n", "line 2"),
        ("1: x\n", "the key 1 is no text"),
        ("a: !!python/object/apply:os.getcwd []\n", "no YAML of a spec"),
        ("a: \x00", "no YAML of a spec"),
        ("x" * (1 << 21), "too long"),
        ("[" * 5000, "no YAML of a spec"),
    ],
)
def test_what_is_no_spec_at_all_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=r"mine\.yaml") as caught:
        ModelSpec.from_yaml(text, "mine.yaml")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1e999999', "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"mine\.json is no JSON"):
        ModelSpec.from_json(text, "mine.json")


# --- ports and events ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"type": "f32[81]"},
            "ports.inputs.audio.type: samples of one step; wanted f32[80]: 10 ms at 8000 Hz; found f32[81]",
        ),
        ({"type": "f32[0]"}, "ports.inputs.audio.type: wanted a type such as f32[512]"),
        ({"type": "f64[80]"}, "ports.inputs.audio.type: wanted a type such as f32[512]"),
        ({"type": 80}, "ports.inputs.audio.type: wanted a type such as f32[512]"),
        ({"type": "i32[80]"}, "wanted f32[80]"),
        ({"sample_rate": None}, "audio ports have a sample rate"),
        ({"kind": "features"}, "audio ports have a sample rate, others none"),
        ({"sample_rate": 8001}, "wanted a whole number of samples"),
    ],
)
def test_an_audio_port_holds_the_samples_of_one_step(changes: dict[str, Any], says: str) -> None:
    audio = {"type": "f32[80]", "kind": "audio", "sample_rate": 8000} | changes
    assert says in refused(small(ports={"inputs": {"audio": audio}, "outputs": {"speech": port()}}))


def test_an_audio_port_may_have_a_rate_of_its_own() -> None:
    data = small()
    data["ports"]["inputs"]["audio"] |= {"type": "f32[160]", "sample_rate": 16000}
    assert ModelSpec.from_data(data).ports.inputs["audio"].type == f32(160)


@pytest.mark.parametrize(
    ("events", "outputs", "says"),
    [
        ({"kind": "segments", "port": "speach"}, {}, "events.port: events are read from probabilities; wanted speech"),
        ({"kind": "segments", "port": "y"}, {"y": port(kind="logit")}, "events are read from probabilities"),
        ({"kind": "segments", "port": "y"}, {"y": port(type="f32[2]")}, "segments need one value a step"),
        ({"kind": "peaks", "port": "speech", "labels": ["beat"]}, {}, "events.labels: labels of the port"),
        ({"kind": "peeks", "port": "speech"}, {}, "events"),
        (None, {"y": port(labels=["a", "b"])}, "ports.outputs.y.labels: number of labels"),
    ],
)
def test_events_are_read_from_ports_that_have_them(events: Any, outputs: dict[str, Any], says: str) -> None:
    data = small(events=events)
    data["ports"]["outputs"] |= outputs
    assert says in refused(data)


# --- wiring -------------------------------------------------------------------------------------------------------
def wired(*parts: dict[str, Any]) -> dict[str, Any]:
    """Parts, then the head that reads the last of them."""
    return small(components=[*parts, {"kind": "slice", "name": "head", "start": 0, "stop": 1}])


def test_two_components_of_one_name_are_refused() -> None:
    message = refused(wired({"kind": "dense", "units": 3}, {"kind": "dense", "units": 4}))
    assert "components[1].name: the name 'dense' is taken; wanted distinct names; found components[0]" in message
    assert "the name 'audio' is taken; wanted distinct names; found an input port" in refused(
        wired({"kind": "dense", "units": 3, "name": "audio"})
    )


def test_a_cycle_is_named() -> None:
    message = refused(
        wired(
            {"kind": "combine", "name": "a", "function": "add", "input": ["audio", "c"]},
            {"kind": "dense", "name": "b", "units": 80},
            {"kind": "dense", "name": "c", "units": 80, "input": "b"},
        )
    )
    assert "components read each other in a circle: a -> b -> c -> a" in message


def test_a_component_that_reads_itself_is_a_cycle() -> None:
    message = refused(wired({"kind": "combine", "name": "a", "function": "add", "input": ["audio", "a"]}))
    assert "in a circle: a -> a" in message


def test_a_component_that_reads_a_later_one_is_told_to_move() -> None:
    message = refused(
        wired(
            {"kind": "combine", "name": "a", "function": "add", "input": ["audio", "b"]},
            {"kind": "dense", "name": "b", "units": 80, "input": "audio"},
            {"kind": "combine", "name": "c", "function": "add", "input": ["a", "b"]},
        )
    )
    assert "components[0].input: 'a' reads 'b', which comes after it" in message and "Move 'b' before 'a'." in message


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        ("audoi", "nothing is called 'audoi'; wanted one of audio, a, head. Did you mean 'audio'?"),
        ("audio.left", "'audio' has no output 'left'"),
        ("A b", "components[0].input"),
        (["audio", "audio"], "number of inputs of 'dense'; wanted 1; found 2"),
        ([], "number of inputs of 'dense'; wanted 1; found 0"),
    ],
)
def test_a_reference_to_nothing_is_refused(reads: Any, says: str) -> None:
    assert says in refused(wired({"kind": "dense", "name": "a", "units": 3, "input": reads}))


def test_an_output_comes_from_a_component() -> None:
    for source in ("haed", "audio", "head.second"):
        data = small()
        data["ports"]["outputs"]["speech"]["from"] = source
        assert "ports.outputs.speech.from:" in refused(data)


def test_what_no_output_depends_on_is_refused() -> None:
    data = small()
    data["components"] = [{"kind": "dense", "name": "lost", "units": 3}, {**data["components"][0], "input": "audio"},
                          *data["components"][1:]]  # fmt: skip
    assert "components[0].name: no output depends on 'lost'" in refused(data)
    data = small()
    data["ports"]["inputs"]["extra"] = {"type": "f32[3]", "kind": "features"}
    data["components"][0]["input"] = "audio"
    assert "ports.inputs.extra: no output depends on the input 'extra'" in refused(data)


def test_with_two_inputs_the_first_component_says_which_it_reads() -> None:
    with pytest.raises(SpecError, match="'dense' must say which input it reads; wanted a, b"):
        chain([{"kind": "dense", "units": 3}], {"a": "f32[2]", "b": "f32[2]"}, "f32[3]")


def test_the_error_of_one_problem_has_its_parts() -> None:
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_data(small(version=0), "mine.yaml")
    error = json.loads(json.dumps(caught.value.as_dict()))
    assert error["wanted"] == "greater than or equal to 1" and error["found"] == "0"
    assert error["message"] == "mine.yaml: version: a value that does not fit"


@pytest.mark.parametrize(
    "value", ["!!bool abc", "!!timestamp abc", "!!int ''", "!!float abc", "!!binary é", "!!map abc"]
)
def test_tags_on_values_that_do_not_fit_are_spec_errors(value: str) -> None:
    with pytest.raises(SpecError, match=r"mine\.yaml is no YAML of a spec") as caught:
        ModelSpec.from_yaml(f"name: {value}\n", "mine.yaml")
    assert caught.value.wanted and caught.value.found


def test_a_seed_is_two_words() -> None:
    ports = small()["ports"]
    seeded = {"inputs": ports["inputs"] | {"seed": {"type": "i32[1]", "kind": "seed"}}, "outputs": ports["outputs"]}
    with pytest.raises(SpecError, match=r"ports.inputs.seed.type: a seed is 64 bits; wanted i32\[2\]"):
        ModelSpec.from_data(small(ports=seeded))


# --- tensors that are known and not read ---
def test_unused_tensors_may_be_named_by_ranges() -> None:
    spec = ModelSpec.from_data(small(unused_tensors={"a.{1..2}.b.{9..10}": "f32[2,3]", "c": "i32[]"}))
    assert list(spec.unused) == ["a.1.b.9", "a.1.b.10", "a.2.b.9", "a.2.b.10", "c"]
    assert str(spec.unused["a.2.b.9"]) == "f32[2,3]"
    assert ModelSpec.from_yaml(spec.to_yaml()) == spec


@pytest.mark.parametrize("name", ["a.{3..2}", "a.{0..999999}.{0..999999}"])
def test_a_range_of_nothing_or_too_much_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"unused_tensors: wanted ranges such as \{1..3\} and at most 100000 names"):
        ModelSpec.from_data(small(unused_tensors={name: "f32[]"}))


# --- precision ----------------------------------------------------------------------------------------------------
def test_a_component_may_have_a_precision_of_its_own() -> None:
    spec = ModelSpec.from_data(small(precision={"policy": "bf16", "components": {"head": "f32"}}))
    assert {part.name: spec.policy_of(part) for part in spec.components} == {
        "audio_window": "bf16", "spectrum": "bf16", "magnitude": "bf16", "log": "bf16", "lstm": "bf16", "head": "f32",
    }  # fmt: skip
    assert ModelSpec.from_yaml(spec.to_yaml()) == spec


def test_under_tf32_weights_are_f32_and_their_products_may_be_tf32() -> None:
    spec = ModelSpec.from_data(small(precision={"components": {"head": "tf32"}}))
    assert ModelSpec.from_yaml(spec.to_yaml()) == spec
    assert expected_tensors(spec) == expected_tensors(ModelSpec.from_data(small()))
    graph = build_graph(spec)
    found = {node.op: node.attributes["products"] for node in graph.nodes if "products" in node.attributes}
    assert found == {"lstm": "f32", "linear": "tf32"}
    whole = build_graph(ModelSpec.from_data(small(precision={"policy": "tf32"})))
    assert {node.attributes["products"] for node in whole.nodes if "products" in node.attributes} == {"tf32"}


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ({"haed": "f32"}, "precision.components.haed: no component is called 'haed'"),
        ({"head": "f16"}, "precision.components.head: a value that does not fit"),
    ],
)
def test_a_precision_of_nothing_is_refused(components: dict[str, str], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        ModelSpec.from_data(small(precision={"policy": "bf16", "components": components}))
    assert says in str(refused.value)
