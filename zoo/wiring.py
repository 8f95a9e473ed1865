"""Who reads what: references between ports and components resolved and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from wpk.zoo.component import Component
from wpk.zoo.problems import Location, Problem, close_hint


class _Output(Protocol):
    @property
    def source(self) -> str: ...


class _Ports(Protocol):
    @property
    def inputs(self) -> Mapping[str, object]: ...
    @property
    def outputs(self) -> Mapping[str, _Output]: ...


def read_by(components: Sequence[Component], index: int, inputs: Sequence[str]) -> tuple[str, ...]:
    """The references of a component, defaults filled in: the component before, for the first the only input port."""
    references = components[index].references
    if references is not None:
        return references
    return (components[index - 1].name if index else inputs[0],)


def wiring_problems(
    ports: _Ports, components: Sequence[Component], feedback: Mapping[str, _Output] = MappingProxyType({})
) -> list[Problem]:
    """All that is wrong with names and references: duplicates, unknown ones, wrong number, cycles, order, dead ends.

    feedback: names that stand for what a component gave one step before.
    """
    inputs = tuple(ports.inputs)
    problems = [
        Problem(("feedback", name), f"the name {name!r} is taken", "distinct names", "an input port")
        for name in feedback
        if name in inputs
    ]
    more, reads = _readings((), components, inputs, tuple(feedback))
    problems += more
    if reads is None:
        return problems
    outputs_of = {c.name: c.outputs() for c in components}
    sources: dict[Location, str] = {("ports", "outputs", n, "from"): port.source for n, port in ports.outputs.items()}
    sources |= {("feedback", name, "from"): entry.source for name, entry in feedback.items()}
    found = (_unknown(where, source, (), outputs_of) for where, source in sources.items())
    problems += [problem for problem in found if problem]
    used = {port.source.partition(".")[0] for port in ports.outputs.values()}
    returns = {name: entry.source.partition(".")[0] for name, entry in feedback.items()}
    return problems or _dead_ends(components, inputs, reads, used, returns)


def reading_problems(where: Location, components: Sequence[Component], inputs: Sequence[str]) -> list[Problem]:
    """All that is wrong with what components read, at `where`.components: names, number, cycles, order."""
    return _readings(where, components, inputs, ())[0]


def _readings(
    where: Location, components: Sequence[Component], inputs: Sequence[str], feedback: Sequence[str]
) -> tuple[list[Problem], dict[str, list[str]] | None]:
    """The problems, and what each component reads; None where names or circles forbid to say."""
    problems = _duplicates(where, components, inputs, feedback)
    if problems:
        return problems, None
    given = (*inputs, *feedback)
    outputs_of = {c.name: c.outputs() for c in components}
    place = {c.name: i for i, c in enumerate(components)}
    reads: dict[str, list[str]] = {}
    for index, component in enumerate(components):
        at = (*where, "components", index, "input")
        if component.references is None and index == 0 and len(inputs) > 1:
            problems.append(Problem(at, f"{component.name!r} must say which input it reads", ", ".join(inputs)))
            continue
        references = read_by(components, index, inputs)
        least, most = component.ARITY
        if not least <= len(references) <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            problems.append(Problem(at, f"number of inputs of {component.kind!r}", wanted, str(len(references))))
        reads[component.name] = []
        for reference in references:
            problem = _unknown(at, reference, given, outputs_of)
            if problem:
                problems.append(problem)
            else:
                reads[component.name].append(reference.partition(".")[0])
    cycle = _cycle(reads)
    if cycle:
        path = " -> ".join(reversed(cycle))
        at = (*where, "components", place[cycle[0]], "input")
        return [*problems, Problem(at, f"components read each other in a circle: {path}", "no cycle")], None
    for index, component in enumerate(components):
        for read in reads.get(component.name, ()):
            if place.get(read, -1) > index:
                hint = f"Move {read!r} before {component.name!r}."
                later = f"{component.name!r} reads {read!r}, which comes after it"
                problems.append(
                    Problem((*where, "components", index, "input"), later, "a component before it", read, hint)
                )
    return problems, reads


def _duplicates(
    where: Location, components: Sequence[Component], inputs: Sequence[str], feedback: Sequence[str]
) -> list[Problem]:
    problems, seen = [], dict.fromkeys(inputs, "an input port") | dict.fromkeys(feedback, "feedback")
    for index, component in enumerate(components):
        if component.name in seen:
            hint = "Give it a `name` of its own."
            message = f"the name {component.name!r} is taken"
            at = (*where, "components", index, "name")
            problems.append(Problem(at, message, "distinct names", seen[component.name], hint))
        seen.setdefault(component.name, f"components[{index}]")
    return problems


def _unknown(
    where: Location, reference: str, inputs: Sequence[str], outputs_of: Mapping[str, tuple[str, ...]]
) -> Problem | None:
    name, dot, output = reference.partition(".")
    known = (*inputs, *outputs_of)
    if name not in known:
        return Problem(
            where, f"nothing is called {name!r}", f"one of {', '.join(known)}", None, close_hint(name, known)
        )
    if dot and output not in outputs_of.get(name, ()):
        wanted = ", ".join(f"{name}.{o}" for o in outputs_of.get(name, ())) or name
        return Problem(where, f"{name!r} has no output {output!r}", wanted, reference)
    return None


def _cycle(reads: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Names along a cycle of "reads", its first one again at the end."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in reads:
            return None
        for read in reads[name]:
            found = visit(read, [*path, name])
            if found:
                return found
        done.add(name)
        return None

    return next((found for name in reads if (found := visit(name, []))), None)


def _dead_ends(
    components: Sequence[Component],
    inputs: Sequence[str],
    reads: Mapping[str, Sequence[str]],
    used: set[str],
    returns: Mapping[str, str],
) -> list[Problem]:
    """Components, input ports and feedback that no output depends on. returns: feedback -> the component it is from."""
    sources = {**reads, **{name: (source,) for name, source in returns.items()}}
    live, waiting = set[str](), list(used)
    while waiting:
        name = waiting.pop()
        if name not in live:
            live.add(name)
            waiting += sources.get(name, ())
    problems = [
        Problem(("components", index, "name"), f"no output depends on {component.name!r}", "a reader", "none")
        for index, component in enumerate(components)
        if component.name not in live
    ]
    problems += [
        Problem((*place, name), f"no output depends on {what} {name!r}", "a reader", "none")
        for place, what, names in ((("ports", "inputs"), "the input", inputs), (("feedback",), "the feedback", returns))
        for name in names
        if name not in live
    ]
    return problems
