"""The settings of every program: one table, from which flags, checks and pages are made.

    policy: Literal["lru", "reuse"] = _memory(default="lru")("Eviction order: …")
    file_writes_per_day: int | None = _disk(values.SIZE, shown="no limit")("Daily budget …")
    name    kind and choices          group form                    meaning

A form is a name of the value in help texts, or one of `values`, which parses it. Flags and `--help`
(`kvstore.cli.commands`), YAML keys and checks (`reading`) and the reference page
(`scripts/reference.py`) are loops over `table`. A new setting is one field here, and its use where
a node, an index or a router is configured.
"""

# No postponed annotations: the kinds of all fields are read whenever a command starts.
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kvstore.config import defaults, values
from kvstore.config.values import Form, HostPort
from kvstore.errors import ConfigError

_A_CLUSTER: Final = ("index", "index_listen")
_ENTRIES: Final = (defaults.ENTRIES_MIN, defaults.ENTRIES_MAX)


@dataclass(eq=False)
class Setting:
    """One entry of the table: a field of a class of `Settings`, which gives it its `name`; `key` is
    that in YAML, and behind the dashes of the flag.
    """

    group: str
    """Heading on the reference page."""
    form: Form
    meaning: str
    """Text for operators."""
    default: object = None
    """None: not given."""
    shown: str = ""
    """Text for the default, if it is not the value."""
    needs: tuple[str, ...] = ()
    """Names of settings, of which at least one must be given."""
    off: str = ""
    """The flag that switches the setting off again."""
    within: tuple[int, int] | None = None
    """Bounds of a number, both included; K, M and G may stand for thousands."""
    click: tuple[tuple[str, ...], dict[str, Any]] | None = None
    """(further names of the flag, arguments of click.option) of a command's setting, whose value
    click checks; None: `reading` does."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.key, self._owner = name, name.replace("_", "-"), owner

    @property
    def default_text(self) -> str:
        """Default in help texts; empty: none is shown."""
        is_told = self.default is not None and not isinstance(self.default, bool)
        return self.shown or (str(self.default) if is_told else "")

    @property
    def kind(self) -> Any:
        """Type of the value in YAML: that of the form, or the annotation of the field."""
        if self.form.kind is not None:
            return self.form.kind if self.default is not None else self.form.kind | None
        kind = self._owner.__annotations__[self.name]
        return get_type_hints(self._owner)[self.name] if isinstance(kind, str) else kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Values of a Literal; empty: any value."""
        found = (get_args(kind) for kind in _parts(self.kind) if get_origin(kind) is Literal)
        return next(found, ())

    def holds(self, kind: type) -> bool:
        """Whether its value may be of this kind."""
        return any(each is kind or get_origin(each) is kind for each in _parts(self.kind))


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def in_group(group: str) -> Callable[..., Callable[[str], Any]]:
    """Fields of this group on the reference page: the form of the value, then its meaning."""

    def of(form: Form | str = "", **more: Any) -> Callable[[str], Any]:
        made = form if isinstance(form, Form) else Form(form)
        return lambda meaning: Setting(group, made, meaning, **more)

    return of


class Settings:
    """Values of a table."""

    def __init__(self, **given: Any) -> None:
        """`given` by name; all others have their defaults."""
        vars(self).update({row.name: row.default for row in table(type(self))} | given)


def table(kind: type[Settings]) -> list[Setting]:
    """The settings of a program: its own first, then shared ones."""
    own = (each for parent in kind.__mro__ for each in vars(parent).values())
    found: dict[str, Setting] = {}
    for each in own:
        if isinstance(each, Setting):
            found.setdefault(each.name, each)
    return list(found.values())


def refuse_what_does_nothing(settings: Settings) -> None:
    """Raises ConfigError: a setting is there without another that it needs."""
    rows = {row.name: row for row in table(type(settings))}
    given = {
        row.name
        for row in rows.values()
        if (value := getattr(settings, row.name)) and value != row.default
    }
    for name in rows:
        needed = [other for other in rows[name].needs if other in rows]
        if name in given and needed and not given & set(needed):
            flags = " or ".join(f"--{rows[other].key}" for other in needed)
            flag = f"--{rows[name].key}"
            raise ConfigError(f"{flag} does nothing without {flags}: add that, or leave {flag} out")


_memory = in_group("Memory and eviction")
_disk = in_group("Disk tier")
_pages = in_group("Engines and pages")
_events = in_group("KV events")
_cluster = in_group("Cluster")
_front = in_group("Clients")
_workers = in_group("Workers")


def _metrics(default: str) -> Any:
    meaning = "Address of the page, /metrics and /healthz; port 0: any free port."
    return _pages(values.PAGES, default=default)(meaning)


class TlsSettings(Settings):
    """Settings of every component of a cluster."""

    ca: str | None = _cluster("FILE", needs=_A_CLUSTER)("CA certificate of the cluster.")
    cert: str | None = _cluster("FILE", needs=_A_CLUSTER)("Certificate of this process.")
    key: str | None = _cluster("FILE", needs=_A_CLUSTER)("Private key of that certificate.")
    insecure: bool = _cluster(default=False, off="secure")(
        "No TLS and no authentication. For labs."
    )


class DaemonSettings(TlsSettings):
    """Settings shared by node and index."""

    metrics: HostPort | None = _metrics(defaults.DEFAULT_METRICS)
    metrics_beyond_loopback: bool = _pages(default=False, off="metrics-loopback-only")(
        "Allow a --metrics address that other machines reach, such as a pod's."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _pages(default="info")(
        "Lowest level to log."
    )


class TracedSettings(DaemonSettings):
    """Settings shared by programs that serve requests."""

    trace: str | None = _pages(values.COLLECTOR, shown="off")(
        "OpenTelemetry collector (OTLP over gRPC) for a trace of each request; needs the extra"
        " 'trace'."
    )
    trace_sample: int = _pages("PERCENT", default=100, within=(0, 100), needs=("trace",))(
        "Share of traces that begin here to export; requests with a traceparent follow its flag."
    )


class NodeSettings(TracedSettings):
    """Settings of `kvstore node`."""

    dram: str | int = _memory("SIZE|auto", default="auto")(
        "Memory for blocks; auto: half of the available memory."
    )
    hbm: str | int = _memory("SIZE[,gpu=N]", default="0")(
        "GPU memory for copies of blocks that are loaded again and again by engines on that GPU;"
        " CUDA, simulated by tests and not run on a device yet."
    )
    policy: Literal["lru", "reuse"] = _memory(default="lru")(
        "Eviction order: lru evicts the least recently used blocks; reuse evicts blocks that only"
        " one request used before the others."
    )
    quota: dict[str, str | int] | None = _memory("NAME=SHARE")(
        "Dram guaranteed to a model (served name) or tenant, such as llama=30%; repeatable."
    )
    slab: str | int = _memory("SIZE|auto", default="auto")("Unit of dram given to one block size.")
    scrub: str | int | bool = _memory("auto|SIZE|off", default="auto")(
        "Background verification of memory and disk. auto: each once a day, at most 32MiB/s; SIZE:"
        " continuously, that much per second and tier."
    )
    file: str | None = _disk("PATH:SIZE[,shared]")(
        "Keep blocks on disk too; ',shared': several nodes use one directory. The node indexes at"
        " most SIZE / 256KiB blocks; smaller blocks leave a part of SIZE unused."
    )
    file_admission: Literal["all", "second-sight"] = _disk(default="all", needs=("file",))(
        "Blocks to write to disk: all, or those that a second request asks for."
    )
    file_writes_per_day: int | None = _disk(values.SIZE, shown="no limit", needs=("file",))(
        "Daily budget of disk writes. When little is left, only blocks requested twice are written;"
        " then none. Reads continue."
    )
    socket: Path = _pages(values.SOCKET, default=defaults.DEFAULT_SOCKET)(
        "Attach socket of the node."
    )
    allow_uid: frozenset[int] = _pages(values.UIDS, shown="own uid and 0")(
        "Numeric user id whose engines may attach; repeatable."
    )
    events: str | bool = _events("ADDR|off", default="off")(
        f"Publish KV events for indexers, such as {defaults.EXAMPLE_EVENTS}."
    )
    event_hashes: Literal["int", "bytes"] | None = _events(shown="int", needs=("events",))(
        "Form of block hashes in events; choose that of the engines' events."
    )
    engine_events: list[str] | None = _events(
        "NAME=ENDPOINT,space=HEX[,replay=ENDPOINT][,rank=N][,tenant=NAME][,seed=TEXT]",
        needs=_A_CLUSTER,
    )(
        "Read the KV events of an engine without the connector, so that the index covers its own"
        " memory; repeatable. ENDPOINT is ipc:///PATH or tcp://127.0.0.1:PORT."
    )
    node_name: str | None = _cluster(
        "NAME", shown="the name in its certificate, or the host's name"
    )("Name of this node in a shared directory, in events and in a cluster.")
    index: tuple[str, ...] = _cluster(values.REPLICAS)(
        "Replica of the prefix index to publish to and query; repeatable: name all replicas."
    )
    index_listen: HostPort | None = _cluster(values.REPLICA_ADDR)(
        "Run a replica of the prefix index inside this node, on this address; port 0: any free"
        " port."
    )
    index_entries: int | None = _cluster(
        "N", shown=str(defaults.DEFAULT_ENTRIES), needs=("index_listen",), within=_ENTRIES
    )("Locations (block, node and tier) that this replica keeps.")
    peer_listen: HostPort | None = _cluster(values.PEER_ADDR, needs=_A_CLUSTER)(
        "Address where other nodes reach this one; blocks are served to them and fetched from them."
        " Port 0: any free port."
    )
    landing: str | int | bool | None = _cluster(
        "auto|SIZE|off", shown="auto: a sixteenth of dram, at most 256MiB", needs=("peer_listen",)
    )("End of dram to which prefill nodes push blocks; no block is kept in it.")
    transport: str | None = _cluster(
        "NAME[,KEY=VALUE…]",
        shown="tcp; nixl with --insecure where it is installed",
        needs=("peer_listen",),
    )(
        "Transport of blocks between nodes. tcp[,port=NUMBER]: with TLS."
        " nixl[,plugin=NAME][,plugin.OPTION=VALUE] or ucx: for RDMA or trusted networks, neither"
        " encrypted nor authenticated. pace=on: yield to other flows."
    )
    fetch: Literal["auto", "always"] | None = _cluster(shown="auto", needs=("peer_listen",))(
        "Blocks to fetch from other nodes. auto: where fetching takes at most half as long as"
        " computing; always: all."
    )
    drain_s: int = _cluster("SECONDS", default=0, needs=("peer_listen",), within=(0, 3600))(
        "Seconds after SIGTERM to hand the hottest tenth of dram to other nodes, while this one"
        " still serves; a second SIGTERM ends it at once. 0: do not."
    )
    insecure: bool = _cluster(default=False, off="secure")(
        "No TLS and no authentication: index, feeds, transfers, events beyond this machine. For"
        " labs."
    )


class IndexSettings(DaemonSettings):
    """Settings of `kvstore index`."""

    listen: HostPort = _cluster(values.REPLICA_ADDR, default=defaults.DEFAULT_LISTEN)(
        "Address to listen on."
    )
    entries: int = _cluster("N", default=defaults.DEFAULT_ENTRIES, within=_ENTRIES)(
        "Locations (block, node and tier) to keep; the least recently used leave first."
    )
    store: str | None = _cluster("URL", shown="own memory")(
        "Redis or Valkey that several replicas share: redis://HOST:PORT/N, or rediss://… with TLS."
    )
    store_password_file: str | None = _cluster("FILE", needs=("store",))(
        "File with the password of --store."
    )
    store_ca: str | None = _cluster("FILE", shown="CAs of the system", needs=("store",))(
        "CA certificate of --store."
    )
    metrics: HostPort | None = _metrics(defaults.DEFAULT_INDEX_METRICS)
    plain: bool = _cluster(
        default=False, off="compiled", shown="compiled, where the extra is installed"
    )(
        "--plain: ready at once, several times slower. --compiled: needs the extra 'index' and many"
        " seconds before it is ready."
    )


class RouterSettings(TracedSettings):
    """Settings of `kvstore router`."""

    listen: HostPort = _front(values.ROUTER_ADDR, default=defaults.DEFAULT_ROUTER_LISTEN)(
        "Address of the OpenAI-compatible API; port 0: any free port."
    )
    route_listen: HostPort | None = _front(values.ROUTER_ADDR, shown="off")(
        "Address of the gRPC service kvstore.v1.Router."
    )
    picker_listen: HostPort | None = _front(values.ROUTER_ADDR, shown="off")(
        "Address of the endpoint picker for Envoy (external processing)."
    )
    share_port: bool = _front(default=False, off="own-port")(
        "Share the port with other routers of this machine: the kernel spreads connections."
    )
    listen_cert: str | None = _front("FILE", shown="that of --cert", needs=("listen_key",))(
        "Certificate of --listen with its chain, such as a public one."
    )
    listen_key: str | None = _front("FILE", shown="that of --key", needs=("listen_cert",))(
        "Private key of --listen-cert."
    )
    listen_ca: str | None = _front("FILE", shown="that of --ca", needs=("listen_cert", "cert"))(
        "CA of client certificates, which --listen demands when there are no --api-keys."
    )
    api_keys: Path | None = _front(values.FILE, shown="no keys, one tenant")(
        "YAML file with the API keys of each tenant; prefix caches of tenants are kept apart."
    )
    body_max: int = _front(values.BODY, default="128MiB")("Largest body of a request.")
    connections: int = _front("N", default=10_000, within=(1, 1_000_000))(
        "Limit of client connections, at most a quarter of the file descriptors; beyond it the"
        " longest idle one is closed, and if none is idle, new ones wait."
    )
    allowed_origins: tuple[str, ...] = _front(values.ORIGINS, shown="*, like vLLM")(
        "Origin of web pages that may read responses (CORS), * for all, or none; repeatable."
    )
    drain_delay: int = _front("SECONDS", default=5, within=(0, 3600))(
        "Seconds after SIGTERM in which new connections are still accepted, while readiness fails."
    )
    drain_timeout: int = _front("SECONDS", default=600, within=(0, 86_400))(
        "Seconds after that for requests in flight to finish; a second SIGTERM ends them at once."
    )
    policy: Path | None = _front(values.FILE, shown="policy cost with its defaults")(
        "YAML file with the routing policy; read again on SIGHUP."
    )
    receipts: tuple[Path | None, int] = _front(values.RECEIPTS, shown="off")(
        "Append a receipt of each decision to FILE; at half of SIZE the file moves to FILE.1."
    )
    worker: list[str] | None = _workers("NAME=URL[,KEY=VALUE…]")(
        "An engine; repeatable; a /v1 behind the URL is left out. kind: vllm, sglang, tgi, trtllm,"
        " triton, llamacpp, ollama, openai; pool: its pool in the policy; role: both, prefill,"
        " decode, any (as the policy's planner decides); node, engine, tenant, space: its names in"
        " the index; rank: its data-parallel rank, a worker each; block, seed: block size and hash"
        " seed of its prefix cache."
    )
    worker_dns: list[str] | None = _workers("http://HOST:PORT[,KEY=VALUE…]")(
        "An engine at each address of a DNS name, resolved every 5 s; repeatable."
    )
    worker_slices: str | None = _workers("NAMESPACE/SERVICE:PORT[,KEY=VALUE…]")(
        "Engines of a Kubernetes service, by its EndpointSlices; scheme=https for TLS."
    )
    worker_ca: Path | None = _workers(values.FILE, shown="CAs of the system")(
        "CA certificate of https:// engines."
    )
    worker_key_file: str | None = _workers("FILE")(
        "File with the API key of the engines; keys of clients are not forwarded."
    )
    tokenizer: list[str] | None = _workers(
        "MODEL=DIRECTORY", shown="engines render (vLLM: --enable-scale-out)", needs=("index",)
    )("Local tokenizer of a model, used while its tokens equal the engines'; repeatable.")
    index: tuple[str, ...] = _cluster(
        values.REPLICAS, shown="none: the router remembers the prefixes that it sent"
    )("Replica of the prefix index to ask; repeatable.")
    index_timeout: int = _cluster("MS", default=5, within=(1, 1000))(
        "Milliseconds to wait for the index; after that a request is routed without it."
    )
    peer_router: tuple[str, ...] = _cluster(values.ROUTERS, needs=("route_listen",))(
        "--route-listen of another router of the same engines, or a DNS name of several, to count"
        " its requests in flight; repeatable."
    )
    metrics: HostPort | None = _metrics(defaults.DEFAULT_ROUTER_METRICS)
    ca: str | None = _cluster("FILE")("CA certificate of the cluster.")
    cert: str | None = _cluster("FILE")(
        "Certificate of this process in the cluster: for the index, --route-listen and"
        " --picker-listen."
    )
    key: str | None = _cluster("FILE")("Private key of that certificate.")
    insecure: bool = _cluster(default=False, off="secure")(
        "Allow --listen beyond this machine without certificates, and http:// engines on other"
        " machines. For labs."
    )


class AskSettings(TlsSettings):
    """Settings of a command that asks the index instead of one node."""

    index: list[str] | None = _cluster("HOST:PORT")(
        "Query this replica of the prefix index for the whole cluster; repeatable."
    )
    insecure: bool = _cluster(default=False, needs=("index",))(
        "The index runs without TLS. For labs."
    )
