"""The pages of docs/reference, written from the code: flags from the parsers of `launch`, endpoints from the HTTP API's own
description, metrics from `/metrics` of a router.

Owns the form of these pages. Knows nothing that the code does not say. `python -m tests.docs.reference` writes them.
"""

import argparse
import asyncio
import html
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.main import build_parser
from router.api.guard import NeededKey, key_needed
from tests.router.calls import get, post
from tests.router.fakes import MODEL, Site

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
WIDTH = 100
MADE = "*This page is written by `python -m tests.docs.reference` from the code; a test compares the two.*"
FAMILIES = {
    "Fleets": ("local", "ray", "router", "prefill", "decode"),
    "Benchmarks under load": ("bench serve", "bench compare", "bench trace"),
}
"""Commands that share most of their flags: each flag stands once for all of them."""
KEYS = {
    NeededKey.NONE: "no key",
    NeededKey.API: "an API key, where the router has `--api-keys`",
    NeededKey.CONTROL: "the control key, where the router has `--control-key`",
    NeededKey.EITHER: "an API key (for its own requests) or the control key",
}


def pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    return {"flags.md": flags_page(), "endpoints.md": endpoints_page(), "metrics.md": metrics_page()}


def item(head: str, text: str, depth: int = 0) -> str:
    """One entry of a list, wrapped."""
    indent = "    " * depth
    line = f"{head}: {escape(text)}" if text else head
    return textwrap.fill(
        line, WIDTH, initial_indent=f"{indent}- ", subsequent_indent=f"{indent}  ", break_on_hyphens=False, break_long_words=False
    )


def paragraph(text: str) -> str:
    return textwrap.fill(escape(" ".join(text.split())), WIDTH, break_on_hyphens=False, break_long_words=False)


def escape(text: str) -> str:
    """Text as Markdown shows it unchanged: what looks like HTML or emphasis outside of code is escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else html.escape(part, quote=False).replace("*", "\\*") for part in parts)


MATTERS = (
    "model",
    "served-name",
    "prefill",
    "decode",
    "tp",
    "kv-memory",
    "context-tokens",
    "max-running",
    "chunk-tokens",
    "cluster-key",
)
"""Flags that most fleets need."""


def flags_page() -> str:
    commands = dict(_commands(build_parser(), ""))
    lines = ["# Flags", "", MADE, "", paragraph("Each entry: the flag, its default, and the commands that take it.")]
    lines += ["", "A flag can be given [in a file and as a variable](../operate/configuration.md) too."]
    lines += ["", paragraph("`--insecure`, and any other flag whose values are on and off, means `on` when it is given alone.")]
    named = ", ".join(f"`--{name}`" for name in MATTERS)
    lines += ["", paragraph(f"The ten flags that matter most: {named}. The others have defaults that most fleets keep.")]
    shared = {name for names in FAMILIES.values() for name in names}
    for title, names in FAMILIES.items():
        lines += ["", f"## {title}", ""]
        lines += [item(f"**`launch {name}`**", str(commands[name].description)) for name in names]
        lines += _shared_flags({name: commands[name] for name in names})
    for name, parser in commands.items():
        if name not in shared:
            lines += ["", f"## launch {name}", "", paragraph(str(parser.description or ""))]
            for title, actions in _groups(parser):
                lines += ["", f"**{title}**", "", *(item(_flag_head(action), _flag_help(action)) for action in actions)]
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, by its words after `launch`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                words = f"{path} {name}".strip()
                subcommands = [*_commands(inner, words)]
                yield from subcommands or [(words, inner)]


def _groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            yield {"options": "Other"}.get(group.title or "", group.title or ""), actions


def _shared_flags(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    """Flags of several commands, each once, under the title of its group."""
    sections: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, parser in commands.items():
        for title, actions in _groups(parser):
            for action in actions:
                entry = (_flag_head(action), _flag_help(action))
                sections.setdefault(title, {}).setdefault(entry, []).append(name)
    for title, entries in sections.items():
        yield from ("", f"### {title}", "")
        for (head, explanation), names in entries.items():
            yield item(f"{head} [{', '.join(name.removeprefix('bench ') for name in names)}]", explanation)


def _flag_head(action: argparse.Action) -> str:
    name = action.option_strings[0] if action.option_strings else str(action.metavar)
    default = " ".join(action.default) if isinstance(action.default, list) else action.default
    return f"**`{name}`**" + ("" if default in (None, "") or default is False else f" (`{default}`)")


def _flag_help(action: argparse.Action) -> str:
    """Without the default, which stands beside the flag."""
    explanation = re.sub(r" \(default: [^()]*\)$", "", str(action.help)).replace("%%", "%")
    return explanation + (f" (one of {', '.join(map(str, action.choices))})" if action.choices else "")


def endpoints_page() -> str:
    app = Site().app
    description = app.openapi()
    lines = ["# Endpoints", "", MADE, "", paragraph(description["info"]["description"])]
    lines += ["", "A running router shows the same, with the fields of answers, at `/openapi.json` and `/docs`."]
    lines += ["", 'Errors have the body `{"error": {"message", "type", "param", "code"}}`, by status:', ""]
    error = {"$ref": "#/components/schemas/ErrorBody"}
    refusals = {
        status: answer["description"]
        for operations in description["paths"].values()
        for operation in operations.values()
        for status, answer in operation["responses"].items()
        if status != "default" and answer["content"].get("application/json", {}).get("schema") == error
    }
    lines += [item(f"**{status}**", refusals[status]) for status in sorted(refusals)]
    for tag in description["tags"]:
        lines += ["", f"## {tag['name']}", "", paragraph(tag["description"])]
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                if operation["tags"] == [tag["name"]]:
                    lines += _endpoint(f"{method.upper()} {path}", key_needed(path, app.control_paths), operation, description)
    return "\n".join(lines) + "\n"


def _endpoint(name: str, needed: NeededKey, operation: Mapping[str, Any], description: Mapping[str, Any]) -> Iterator[str]:
    statuses = ", ".join(status for status in operation["responses"] if status.isdecimal())
    yield from ("", f"### {name}", "", paragraph(f"{operation['summary']}. {operation['description']}"), "")
    yield paragraph(f"Needs {KEYS[needed]}. Statuses: {statuses}.")
    parameters = [one for one in operation.get("parameters", ()) if one["in"] != "path"]
    if parameters:
        yield from ("", "Parameters of the URL:", "")
        yield from (item(f"`{one['name']}`", str(one.get("description", ""))) for one in parameters)
    if "requestBody" in operation:
        schemas = description["components"]["schemas"]
        ((kind, body),) = operation["requestBody"]["content"].items()
        what = "Fields of the body" if kind == "application/json" else f"Parts of the body ({kind})"
        yield from ("", f"{what}:", "", *_fields(body["schema"], schemas, 0, ()))


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int, above: tuple[str, ...]) -> Iterator[str]:
    """The fields of an object; those of objects within stand below the field that holds them."""
    required = schema.get("required", ())
    name = schema.get("$ref", "")
    if name:
        schema, above = schemas[name.rpartition("/")[2]], (*above, name)
        required = schema.get("required", ())
    for field, inner in schema.get("properties", {}).items():
        kinds, objects, text = _kind(inner, schemas)
        default = f" = `{json.dumps(inner['default'])}`" if inner.get("default") not in (None, "", [], {}) else ""
        need = ", required" if field in required else ""
        yield item(f"**`{field}`** ({kinds}{need}){default}", inner.get("description", text), depth)
        for one in objects:
            if one["$ref"] not in above:
                yield from _fields(one, schemas, depth + 1, above)


def _kind(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]], str]:
    """What a value is in words, the objects in it, and what the value itself says of its meaning."""
    if "$ref" in schema:
        named = schemas[schema["$ref"].rpartition("/")[2]]
        if "properties" in named:
            return "object", [schema], named.get("description", "")
        kinds, objects, text = _kind(named, schemas)
        return kinds, objects, text or named.get("description", "")
    if "anyOf" in schema:
        parts = [_kind(one, schemas) for one in schema["anyOf"] if one.get("type") != "null"]
        texts = [text for *_, text in parts if text]
        return (
            " or ".join(dict.fromkeys(kinds for kinds, *_ in parts)),
            [one for part in parts for one in part[1]],
            " ".join(texts),
        )
    text = schema.get("description", "")
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"]), [], text
    if schema.get("type") == "array" and schema.get("items"):
        kinds, objects, inner = _kind(schema["items"], schemas)
        return f"list of {kinds}{_range(schema, 'Items', 'long')}", objects, text or inner
    kind = str(schema.get("type", "any"))
    return f"{kind}{_limits(schema)}{_range(schema, 'Length', 'long')}", [], text


def _range(schema: Mapping[str, Any], of: str, word: str) -> str:
    least, most = schema.get(f"min{of}"), schema.get(f"max{of}")
    if most is None:
        return ""
    return f", {least} to {most} {word}" if least else f", at most {most} {word}"


def _limits(schema: Mapping[str, Any]) -> str:
    """The range of a number. The ends of the integers that a message can carry go without saying."""
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    bounds = [f"{sign} {schema[name]}" for name, sign in signs if name in schema and abs(schema[name]) < 2**31]
    return " " + " and ".join(bounds) if bounds else ""


def metrics_page() -> str:
    text = asyncio.run(_metrics())
    helps = dict(re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE))
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    lines = ["# Metrics", "", MADE, ""]
    lines += [
        paragraph("What `/metrics` of a router has, in the format of Prometheus: its own figures and those of every instance.")
    ]
    lines += [
        "",
        paragraph("Times are explained in [the guide](../operate/metrics.md), with pictures of what each one spans."),
        "",
    ]
    for name, kind in kinds:
        if not name.endswith("_created"):
            found = re.findall(rf"^{name}(?:_bucket)?\{{(.*)\}} ", text, re.MULTILINE)
            labels = [label for label in dict.fromkeys(re.findall(r'(\w+)="', " ".join(found))) if label != "le"]
            lines.append(item(f"**`{name}`** ({kind}{', by ' + ', '.join(labels) if labels else ''})", helps[name]))
    return "\n".join(lines) + "\n"


async def _metrics() -> str:
    async with Site() as site:
        await post(site, "/v1/completions", {"model": MODEL, "prompt": "a"})
        return (await get(site, "/metrics")).text


def write(report: Callable[[str], object]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        report(f"wrote docs/reference/{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    write(print)
