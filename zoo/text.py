"""A spec's text: YAML, read strictly."""

from __future__ import annotations

import re
from typing import Any

import yaml

from wpk.ir.errors import SpecError

MAX_BYTES = 1 << 20  # of a spec's text


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
