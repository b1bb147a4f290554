"""Options that several verbs share, said once: a group is a dataclass, and each of its fields is an option.

    @dataclass(frozen=True)
    class NodeFlags:
        http: Annotated[str, typer.Option("--http")] = DEFAULT
        token: Annotated[str | None, typer.Option("--token")] = None

    @verb(app)
    def show(name: Name, *, node: NodeFlags) -> None: ...

Typer sees `show(name, http, token)`; the function gets the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints

import typer

Verb = Callable[..., None]


def verb(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Verb], Verb]:
    """Register a function as a command of `app`, with the options of its groups."""

    def register(function: Verb) -> Verb:
        return app.command(name, **settings)(expand(function))

    return register


def expand(function: Verb) -> Verb:
    """Replace each parameter that is a group by the options of that group, in its place."""
    shown = signature(function, eval_str=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for parameter in shown.parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        groups[parameter.name] = group, [field.name for field in fields(group)]
        for field in fields(group):
            default = Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
            )

    @wraps(function)
    def run(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{field: given.pop(field) for field in names})
        function(**given)

    run.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]  # what Typer looks at
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
