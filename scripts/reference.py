"""Makes the reference pages of the documentation from the code.

    python scripts/reference.py     # rewrites them; `make docs` does so first

    reference/cli.md        every command and its flags
    reference/settings.md   flags, YAML keys and defaults of node and index; keys of the connector
    reference/reasons.md    why blocks and requests miss: words and sentences of `kvstore explain`
    reference/routing.md    the policy file of the router, and terms of its receipts
    reference/metrics.md    the tables of `kvstore.obs.metrics`, and the counters of vLLM's /metrics
    adr/index.md            number, title and status of each ADR

Does not cover: `reference/dependencies.md`, which is written by hand and compared with
`pyproject.toml` by `tests/docs/test_readme.py`.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvstore.cli.main import cli
from kvstore.config.settings import IndexSettings, NodeSettings, RouterSettings, Setting, table
from kvstore.connector.config import ConnectorConfig
from kvstore.engine.why.reasons import CLASSES, Reason
from kvstore.obs.metrics import INDEX_METRICS, METRICS, ROUTER_METRICS, Metric
from kvstore.obs.reasons import word
from kvstore.routing.decide import Dropped
from kvstore.routing.learning import LEAST, MOST
from kvstore.routing.policy import (
    ModelPool,
    ModelRule,
    PolicyAhead,
    PolicyChoice,
    PolicyCosts,
    PolicyLearning,
    PolicyLimits,
    PolicyPlanner,
    PolicyProbes,
    PolicyRaces,
    PolicySplit,
    PoolRoles,
    RoutingPolicy,
    ServiceClass,
)
from kvstore.routing.pressure import Rung
from kvstore.routing.receipts import Preparation, Receipt, RouteOutcome
from kvstore.routing.rows import Term
from kvstore.routing.split import SplitReason
from kvstore.routing.values import PrefixTrust

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "kvstore" / "docs"
_NOTE: Final = "<!-- Made by scripts/reference.py from the code: change it there. -->\n"
_ON_COMMANDS: Final = """
Every command answers `--help`. Exit status 2: a wrong flag or setting, named in one sentence on
stderr. Exit status 1: the node or the index is unreachable, or a finding that the command
describes.
"""
_ON_SETTINGS: Final = """
Sizes take a unit, such as `64GiB`. `--config FILE` reads YAML with the keys below; flags take
precedence. An unknown key or a wrong value stops the start with one sentence that names it. The
node reads its settings once at start. [Sizing](../guides/sizing.md) explains the values that
matter.
"""
_ON_METRICS: Final = """
`/metrics` of a node is on `127.0.0.1:9464`, that of `kvstore index` on `127.0.0.1:9471`,
of `kvstore router` on `127.0.0.1:9472`;
`/healthz` beside it says `ok`, or `ok, but …` with the reason. The label `tier` is `dram`, `file`
(the disk tier), `hbm` or `peer` (another node).
[Troubleshooting](../guides/troubleshooting.md) names the metric for each symptom.
"""
_ON_CLASSES: Final = """
`reason` of `kvstore_blocks_missed_total`, by [reason](reasons.md) of `kvstore explain`:
"""
_ON_ENGINES: Final = """
Counters in the engine's own `/metrics`, with vLLM's labels `model_name` and `engine` as well.
vLLM's periodic log line has them in short.
"""
_ON_REASONS: Final = """
`kvstore explain` and `kvstore inspect prefix` give a reason for each range of blocks and for each
request; several sentences share one. `--json` has the reason as `reason` or `outcome`, the sentence
as `text`, and the result of a search on other nodes as `sought`.
[Troubleshooting](../guides/troubleshooting.md#a-request-missed) names remedies.
"""
_ON_POLICY: Final = """
YAML for `kvstore router --policy FILE`, read again on SIGHUP. Every key is optional, and an unknown
one is refused; seconds unless the name says otherwise. `kvstore route replay` shows the effect of
another policy on recorded requests.
"""
_ON_RECEIPTS: Final = """
One JSON line per decision in `--receipts FILE`, shown by `kvstore route explain`. Columns have one
entry for each of `workers`.
"""
_ON_COSTS: Final = (
    "Policy `cost` predicts with these values. A worker's achieved times scale each term of its"
    f" TTFT, by {LEAST:g} to {MOST:g}: correct a value that is further off."
)
_SECTIONS_OF_A_POLICY: Final[tuple[tuple[str, type[msgspec.Struct], str], ...]] = (
    ("Policy file", RoutingPolicy, ""),
    ("costs", PolicyCosts, _ON_COSTS),
    ("choice", PolicyChoice, ""),
    ("limits", PolicyLimits, ""),
    ("probes", PolicyProbes, ""),
    ("learning", PolicyLearning, ""),
    ("split", PolicySplit, "Prefill on a prefill worker or on the decode worker."),
    (
        "races",
        PolicyRaces,
        "Hedged requests: a second worker for a streamed request whose first byte is late.",
    ),
    ("planner", PolicyPlanner, "Roles of workers with `role=any`, by the demand of their pool."),
    ("planner.pools.NAME", PoolRoles, ""),
    ("ahead", PolicyAhead, "Prefetch by nodes; pins of clients."),
    ("classes.NAME", ServiceClass, "Given `classes` replace all of these:"),
    ("models.NAME", ModelRule, ""),
    ("models.NAME.pools[]", ModelPool, ""),
)
_TERMS: Final = {
    "base": "TTFT of an empty prompt on an idle worker",
    "queue": "prefills ahead",
    "load": "blocks from the tiers of its node or another, unless hidden by the queue",
    "compute": "prefill of uncached tokens",
    "interference": "slowdown of the prefill by running streams, and vice versa",
    "link": "transfer of blocks from the prefill to the decode engine",
    "others": "delay of other requests and evicted prefixes; not part of the predicted TTFT",
    "cold": "load of a LoRA adapter that does not run there; not part of the predicted TTFT",
    "late": "unusual silence of the engine; not part of the predicted TTFT",
}
_WORDS: Final[dict[Any, str]] = {
    Dropped.DOWN: "connection refused, unhealthy or silent; tried if no other worker is left",
    Dropped.DRAINING: "takes no new requests",
    Dropped.BREAKER: "circuit breaker open after failures in a row; tried before one that is down",
    Dropped.TERMINATING: "its pod terminates; tried before one that is down",
    Dropped.SUBSET: "not among the workers that the gateway allows",
    Dropped.MODEL: "does not serve the model",
    Dropped.ADAPTER: "does not list the LoRA adapter",
    Dropped.FAILED_BEFORE: "an earlier attempt of this request failed there",
    Dropped.MEDIA: "has refused images, audio or video of this model; tried after one that is down",
    Dropped.CONTEXT: "prompt and output exceed its context length; tried last",
    Dropped.RESTS: "answered 429 within 250 ms; tried before the other last resorts",
    Dropped.QUEUE: "`limits.queue_max` is reached",
    Dropped.RUNNING: "`limits.running_max` is reached",
    Dropped.MEMORY: (
        "requests wait in its engine, and this one would fill its KV cache beyond"
        " `limits.memory_ceiling`"
    ),
    Dropped.LANE: "a prefill worker that is full, or reserved for shorter prompts",
    PrefixTrust.EXACT: "the index has every update of the node",
    PrefixTrust.CATCHING_UP: "the index lacks updates: prefixes may be longer",
    PrefixTrust.STALE: "no recent heartbeat of the node",
    PrefixTrust.APPROXIMATE: "no response of the index: prefixes that this router sent there",
    PrefixTrust.NONE: "no source: routed by load",
    Rung.PREFIX_STALE: "prefix lengths were stale",
    Rung.PREFIX_APPROXIMATE: "prefix lengths were those that this router sent",
    Rung.LOAD_ONLY: "routed by load",
    Rung.NO_RACE: "hedging was disabled",
    Rung.HELD: "waited in the router",
    Rung.SPLIT_REFUSED: "prefill on the decode engine: the prefill queue was full or failed",
    Rung.RETRIED: "an earlier attempt failed",
    Rung.LAST_RESORT: "no worker was fit: one that is down, failing or too small was tried",
    SplitReason.NO_PREFILLERS: "no prefill engine serves the model",
    SplitReason.OFF: "by policy, or by the request",
    SplitReason.SHORT: "too few uncached tokens",
    SplitReason.LONG: "remote: many uncached tokens",
    SplitReason.BUSY_DECODE: "remote: the decode engine has many streams",
    SplitReason.PREFILL_QUEUE: "local: the prefill queue is full",
    SplitReason.FELL_BACK: "local: every prefill engine failed",
}
_ON_DECISIONS: Final = """
One record per subject: what holds now, why, what was rejected, what we gave up, how we would notice
that it is wrong. Read 1 to 4 first. Earlier states are in the log of the repository.
"""
_COMMANDS: Final = (
    *("node", "inspect", "explain", "top", "doctor", "clear", "upgrade", "fsck", "index", "router"),
    *("route", "certs", "plan", "up", "demo"),
)


def pages() -> dict[str, str]:
    """The text of each page, by its path below the documentation."""
    return {
        "reference/cli.md": cli_page(),
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
        "reference/reasons.md": reasons_page(),
        "reference/routing.md": routing_page(),
        "adr/index.md": decisions_page(),
    }


def cli_page() -> str:
    """Every command with its flags."""
    assert set(_COMMANDS) == set(cli.commands), "a command has no place on the page"
    parts = [
        "# Commands",
        _NOTE,
        _one_line(_ON_COMMANDS) + "\n",
    ]
    for name in _COMMANDS:
        command = cli.commands[name]
        about, examples = _help_of(command)
        parts += [f"## kvstore {name}\n", about]
        if not isinstance(command, click.Group):
            parts.append(_table(("flag", "meaning"), _flag_rows(command)))
        parts.append(f"```text\n{examples}\n```\n")
        for part, its in command.commands.items() if isinstance(command, click.Group) else ():
            parts += [f"### kvstore {name} {part}\n", _help_of(its)[0]]
            parts.append(_table(("flag", "meaning"), _flag_rows(its)))
    return "\n".join(parts)


def settings_page() -> str:
    """Settings of the node, of the index, and of the connector."""
    node, index = table(NodeSettings), table(IndexSettings)
    parts = ["# Settings", _NOTE, _one_line(_ON_SETTINGS) + "\n", "## kvstore node\n"]
    for title in dict.fromkeys(row.group for row in node):
        parts += [f"### {title}\n", settings_table(row for row in node if row.group == title)]
    parts += [
        *("## kvstore index\n", settings_table(index)),
        *("## kvstore router\n", settings_table(table(RouterSettings))),
        "## Connector\n",
        "Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. None is required.\n",
        _table(("key", "default", "values", "meaning"), _connector_rows()),
    ]
    return "\n".join(parts)


def metrics_page() -> str:
    """Every metric of node, index and engine."""
    header = ("name", "type", "labels", "meaning")
    parts = [
        "# Metrics",
        _NOTE,
        _one_line(_ON_METRICS) + "\n",
        "## Node\n",
        _table(header, map(_metric_row, METRICS)),
        _one_line(_ON_CLASSES) + "\n",
        _table(("class", "reasons"), _class_rows()),
        "## Index\n",
        "A node with `--index-listen` exports these too, except `kvstore_index_info`.\n",
        _table(header, map(_metric_row, INDEX_METRICS)),
        "## Router\n",
        _table(header, map(_metric_row, ROUTER_METRICS)),
        "## Engine\n",
        _one_line(_ON_ENGINES) + "\n",
        _table(("name", "labels", "meaning"), _engine_rows()),
    ]
    return "\n".join(parts)


def _class_rows() -> list[tuple[str, str]]:
    words: dict[str, dict[str, None]] = {its: {} for its in CLASSES.values()}
    for reason in filter(None, Reason):
        words[CLASSES[reason]][f"`{word(reason)}`"] = None
    return [(f"`{its}`", ", ".join(of)) for its, of in words.items()]


def reasons_page() -> str:
    """Every reason of a miss."""
    other = [reason for reason in Reason if reason >= Reason.NO_ANSWER_YET]
    own = [reason for reason in filter(None, Reason) if reason not in other]
    header = ("reason", "sentence")
    return "\n".join(
        [
            "# Reasons",
            _NOTE,
            _one_line(_ON_REASONS) + "\n",
            "## Blocks and requests\n",
            _table(header, map(_reason_row, own)),
            "## Other nodes\n",
            _table(header, map(_reason_row, other)),
        ]
    )


def _reason_row(reason: Reason) -> tuple[str, str]:
    return f"`{word(reason)}`", _cell(re.sub(r"\{(\w+)\}", r"`\1`", reason.text))


def routing_page() -> str:
    """Keys of the policy file, fields and words of receipts."""
    terms = [(f"`{name}`", its) for name, its in _TERMS.items()]
    assert {term.name.lower() for term in Term} <= _TERMS.keys()
    words: tuple[tuple[type[enum.StrEnum | Dropped], str], ...] = (
        (Dropped, "filtered"),
        (PrefixTrust, "index_trust"),
        (Rung, "degraded"),
        (SplitReason, "split_reason"),
    )
    return "\n".join(
        (
            "# Routing\n" + _NOTE + "\n" + _one_line(_ON_POLICY) + "\n",
            *(_policy_section(title, kind, text) for title, kind, text in _SECTIONS_OF_A_POLICY),
            f"## Receipts\n\n{_one_line(_ON_RECEIPTS)}\n\n{_fields_of_a_receipt(Receipt)}",
            f"### outcome\n\n{_fields_of_a_receipt(RouteOutcome)}",
            f"### outcome.prepared[]\n\n{_fields_of_a_receipt(Preparation)}",
            "### terms, policy `cost`\n\n" + _table(("term", "seconds of"), terms),
            *(_values_of(field, kind) for kind, field in words),
        )
    )


def _policy_section(title: str, kind: type[msgspec.Struct], text: str) -> str:
    told = _docstrings(ROOT / "kvstore" / "routing" / "policy.py", kind.__name__)
    fields = msgspec.structs.fields(kind)
    rows = [(f"`{f.name}`", _yaml_default(f), _cell(told.get(f.name, ""))) for f in fields]
    head = f"{'##' if kind is RoutingPolicy else '###'} {title}\n\n"
    made = head + (text + "\n\n" if text else "") + _table(("key", "default", ""), rows)
    if kind is not ServiceClass:
        return made
    names = [field.name for field in fields]
    classes = [
        (f"`{name}`", *(_class_cell(getattr(each, field)) for field in names))
        for name, each in RoutingPolicy().classes.items()
    ]
    return made + "\n" + _table(("class", *names), classes)


def _class_cell(value: float | tuple[str, ...] | None) -> str:
    """None: no limit."""
    return f"{value:g}" if isinstance(value, int | float) else ", ".join(value or ()) or "–"


def _fields_of_a_receipt(kind: type[msgspec.Struct]) -> str:
    told = _docstrings(ROOT / "kvstore" / "routing" / "receipts.py", kind.__name__)
    rows = [(f"`{f.name}`", _cell(told.get(f.name, ""))) for f in msgspec.structs.fields(kind)]
    return _table(("field", ""), rows)


def _values_of(field: str, kind: type[enum.StrEnum | Dropped]) -> str:
    said = {each: each.word if isinstance(each, Dropped) else each.value for each in kind}
    rows = [(f"`{said[each]}`", _WORDS[each]) for each in kind if each.value]
    return f"### Values of {field}\n\n" + _table(("value", "meaning"), rows)


def _yaml_default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    if isinstance(value, msgspec.Struct) or field.name == "classes":
        return "see below"
    return f"`{msgspec.json.encode(value).decode()}`"


def decisions_page() -> str:
    """All ADRs."""
    rows = []
    for path in sorted((DOCS / "adr").glob("[0-9]*.md")):
        text = path.read_text()
        heading = re.match(r"# (\d+)\. (.+)", text)
        status = re.search(r"^Status: (.+?)(?:\n\n|\n#)", text, re.DOTALL | re.MULTILINE)
        assert heading is not None, f"{path.name} has no number and title"
        assert status is not None, f"{path.name} has no status"
        rows.append(
            (heading[1], f"[{_cell(heading[2])}]({path.name})", _cell(status[1]).rstrip("."))
        )
    return "\n".join(
        [
            "# Decisions",
            _NOTE,
            _one_line(_ON_DECISIONS) + "\n",
            _table(("number", "title", "status"), rows),
        ]
    )


def _flag_rows(command: click.Command) -> list[tuple[str, str]]:
    with click.Context(command, info_name=command.name) as context:
        records = [parameter.get_help_record(context) for parameter in command.params]
    return [(f"`{_cell(record[0])}`", _cell(record[1])) for record in records if record]


def _help_of(command: click.Command) -> tuple[str, str]:
    """(paragraphs, usage and examples) of the help."""
    with click.Context(command, info_name=f"kvstore {command.name}") as context:
        usage = _one_line(command.get_usage(context).removeprefix("Usage: "))
    paragraphs, verbatim = [], []
    for part in inspect.cleandoc(command.help or "").split("\n\n"):
        if part.startswith("\b"):
            verbatim += [
                "",
                *part.removeprefix("\b").strip("\n").replace("\n\b\n", "\n\n").split("\n"),
            ]
        else:
            paragraphs.append(_one_line(part).replace("<", "&lt;") + "\n")
    return "\n".join(paragraphs), "\n".join([f"Usage: {usage}", *verbatim])


def settings_table(rows: Iterable[Setting]) -> str:
    """Settings as the page shows them."""
    header = ("flag", "YAML key", "default", "meaning")
    return _table(
        header, ((_flag(row), f"`{row.key}`", _default(row), _cell(row.meaning)) for row in rows)
    )


def _flag(row: Setting) -> str:
    choices = f"[{'|'.join(row.choices)}]" if row.choices else row.form.metavar
    other = f"/ --{row.off}" if row.off else choices
    return f"`{_cell(f'--{row.key} {other}')}`"


def _default(row: Setting) -> str:
    return _cell(row.default_text) or ("–" if row.default is None else "off")


def _connector_rows() -> list[tuple[str, ...]]:
    told = _docstrings(ROOT / "connector" / "config.py", "ConnectorConfig")
    schema = msgspec.json.schema(ConnectorConfig)["$defs"]["ConnectorConfig"]["properties"]
    rows: list[tuple[str, ...]] = []
    for field in msgspec.structs.fields(ConnectorConfig):
        default = msgspec.json.encode(field.default).decode().strip('"')
        values = _values(schema[field.name])
        rows.append((f"`{field.name}`", default, values, _cell(told[field.name])))
    return rows


def _values(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "integer":
        least, most = schema["minimum"], schema.get("maximum")
        return f"{least} to {most}" if most is not None else f"{least} or more"
    return {"boolean": "`true`, `false`", "string": "text"}[schema["type"]]


def _docstrings(path: Path, name: str) -> dict[str, str]:
    """The texts below the fields of a class."""
    tree = ast.parse(path.read_text())
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    texts: dict[str, str] = {}
    field = ""
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
        elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[field] = _one_line(str(node.value.value))
    return texts


def _metric_row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.name}`", metric.kind, labels, _cell(metric.help)


def _engine_rows() -> list[tuple[str, ...]]:
    """From the source: importing it needs vLLM."""
    tree = ast.parse((ROOT / "connector" / "stats.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_METRICS":
            table = ast.literal_eval(node.value)
            return [_engine_row(title.removesuffix("}"), text) for title, text in table.items()]
    raise AssertionError("connector/stats.py has no _METRICS")


def _engine_row(title: str, text: str) -> tuple[str, ...]:
    name, _, label = title.partition("{")
    return f"`vllm:kvstore_{name}_total`", f"`{label}`" if label else "", _cell(text)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return re.sub(r"\|  (?=\|)", "| ", text) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write all pages."""
    for name, text in pages().items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
