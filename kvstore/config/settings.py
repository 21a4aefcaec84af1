"""The settings of every program: one table, from which flags, checks and pages are made.

    policy: Literal["lru", "reuse"] = _memory("Eviction order: …", default="lru")
    name    kind and choices          group   meaning

Flags and `--help` (`kvstore.cli.commands`), YAML keys and checks (`reading`) and the reference page
(`scripts/reference.py`) are loops over `table`. A new setting is one field here, and its use where
a node or an index is configured. Imports the standard library only: `--help` answers at once.
"""

# No postponed annotations: the kinds of all fields are read whenever a command starts.
import functools
from collections.abc import Callable
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kvstore.config.defaults import (
    DEFAULT_ENTRIES,
    DEFAULT_INDEX_METRICS,
    DEFAULT_LISTEN,
    DEFAULT_METRICS,
    DEFAULT_ROUTER_LISTEN,
    DEFAULT_ROUTER_METRICS,
    DEFAULT_SOCKET,
    ENTRIES_MAX,
    ENTRIES_MIN,
    EXAMPLE_EVENTS,
)
from kvstore.errors import ConfigError

_A_CLUSTER: Final = ("index", "index_listen")
_ENTRIES: Final = (ENTRIES_MIN, ENTRIES_MAX)


class Setting:
    """One entry of the table: a field of a class of `Settings`.

    Args:
        group: heading on the reference page.
        meaning: for operators.
        default: None: not given.
        metavar: name of the value in help texts.
        shown: text for the default, if it is not the value.
        needs: names of settings, of which at least one must be given.
        off: the flag that switches the setting off again.
        within: bounds of a number, both included; K, M and G may stand for thousands.
    """

    name: str
    key: str
    """Name in YAML, and behind the dashes of the flag."""

    def __init__(
        self,
        group: str,
        meaning: str,
        *,
        default: object = None,
        metavar: str = "",
        shown: str = "",
        needs: tuple[str, ...] = (),
        off: str = "",
        within: tuple[int, int] | None = None,
    ) -> None:
        self.group, self.meaning, self.default, self.metavar = group, meaning, default, metavar
        self.needs, self.off, self.within = needs, off, within
        is_told = default is not None and not isinstance(default, bool)
        self.default_text = shown or (str(default) if is_told else "")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.key, self._owner = name, name.replace("_", "-"), owner

    @property
    def kind(self) -> Any:
        """Type of the value in YAML: the annotation of the field."""
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


def in_group(group: str) -> Callable[..., Any]:
    """Fields of this group on the reference page: as `Setting`, of the type of its value."""
    return functools.partial(Setting, group)


class Settings:
    """Values of a table."""

    def __init__(self, **values: Any) -> None:
        """`values` by name; all others have their defaults."""
        vars(self).update({row.name: row.default for row in table(type(self))} | values)


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
    meaning = "Address of /metrics and /healthz; port 0: any free port."
    return _pages(meaning, default=default, metavar="ADDR|off")


class TlsSettings(Settings):
    """Settings of every component of a cluster."""

    ca: str | None = _cluster("CA certificate of the cluster.", metavar="FILE", needs=_A_CLUSTER)
    cert: str | None = _cluster("Certificate of this process.", metavar="FILE", needs=_A_CLUSTER)
    key: str | None = _cluster("Private key of that certificate.", metavar="FILE", needs=_A_CLUSTER)
    insecure: bool = _cluster(
        "No TLS and no authentication. For labs.", default=False, off="secure"
    )


class DaemonSettings(TlsSettings):
    """Settings shared by node and index."""

    metrics: str | int | bool = _metrics(DEFAULT_METRICS)
    metrics_beyond_loopback: bool = _pages(
        "Allow a --metrics address that other machines reach, such as a pod's.",
        default=False,
        off="metrics-loopback-only",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _pages(
        "Lowest level to log.", default="info"
    )


class NodeSettings(DaemonSettings):
    """Settings of `kvstore node`."""

    dram: str | int = _memory(
        "Memory for blocks; auto: half of the available memory.",
        default="auto",
        metavar="SIZE|auto",
    )
    hbm: str | int = _memory(
        "GPU memory for copies of blocks that are loaded again and again by engines on that GPU;"
        " CUDA, simulated by tests and not run on a device yet.",
        default="0",
        metavar="SIZE[,gpu=N]",
    )
    policy: Literal["lru", "reuse"] = _memory(
        "Eviction order: lru evicts the least recently used blocks; reuse evicts blocks that only"
        " one request used before the others.",
        default="lru",
    )
    quota: dict[str, str | int] | None = _memory(
        "Dram guaranteed to a model (served name) or tenant, such as llama=30%; repeatable.",
        metavar="NAME=SHARE",
    )
    slab: str | int = _memory(
        "Unit of dram given to one block size.", default="auto", metavar="SIZE|auto"
    )
    scrub: str | int | bool = _memory(
        "Background verification of memory and disk. auto: each once a day, at most 32MiB/s; SIZE:"
        " continuously, that much per second and tier.",
        default="auto",
        metavar="auto|SIZE|off",
    )
    file: str | None = _disk(
        "Keep blocks on disk too; ',shared': several nodes use one directory. The node indexes at"
        " most SIZE / 256KiB blocks; smaller blocks leave a part of SIZE unused.",
        metavar="PATH:SIZE[,shared]",
    )
    file_admission: Literal["all", "second-sight"] = _disk(
        "Blocks to write to disk: all, or those that a second request asks for.",
        default="all",
        needs=("file",),
    )
    file_writes_per_day: str | int | None = _disk(
        "Daily budget of disk writes. Near its end only blocks of second-sight are written, then"
        " none; reads continue.",
        metavar="SIZE",
        shown="no limit",
        needs=("file",),
    )
    socket: str = _pages("Attach socket of the node.", default=DEFAULT_SOCKET, metavar="PATH")
    allow_uid: list[int | str] | int | str | None = _pages(
        "Numeric user id whose engines may attach; repeatable.",
        metavar="UID",
        shown="own uid and 0",
    )
    events: str | bool = _events(
        f"Publish KV events for indexers, such as {EXAMPLE_EVENTS}.",
        default="off",
        metavar="ADDR|off",
    )
    event_hashes: Literal["int", "bytes"] | None = _events(
        "Form of block hashes in events; choose that of the engines' events.",
        shown="int",
        needs=("events",),
    )
    engine_events: list[str] | None = _events(
        "Read the KV events of an engine without the connector, so that the index covers its own"
        " memory; repeatable. ENDPOINT is ipc:///PATH or tcp://127.0.0.1:PORT.",
        metavar="NAME=ENDPOINT,space=HEX[,replay=ENDPOINT][,rank=N][,tenant=NAME][,seed=TEXT]",
        needs=_A_CLUSTER,
    )
    node_name: str | None = _cluster(
        "Name of this node in a shared directory, in events and in a cluster.",
        metavar="NAME",
        shown="the name in its certificate, or the host's name",
    )
    index: list[str] | str | None = _cluster(
        "Replica of the prefix index to publish to and query; repeatable: name all replicas.",
        metavar="HOST:PORT",
    )
    index_listen: str | None = _cluster(
        "Run a replica of the prefix index inside this node, on this address; port 0: any free"
        " port.",
        metavar="ADDR",
    )
    index_entries: int | None = _cluster(
        "Locations (block, node and tier) that this replica keeps.",
        metavar="N",
        shown=str(DEFAULT_ENTRIES),
        needs=("index_listen",),
        within=_ENTRIES,
    )
    peer_listen: str | None = _cluster(
        "Address where other nodes reach this one; blocks are served to them and fetched from them."
        " Port 0: any free port.",
        metavar="ADDR",
        needs=_A_CLUSTER,
    )
    landing: str | int | bool | None = _cluster(
        "End of dram to which prefill nodes push blocks; no block is kept in it.",
        metavar="auto|SIZE|off",
        shown="auto: a sixteenth of dram, at most 256MiB",
        needs=("peer_listen",),
    )
    transport: str | None = _cluster(
        "Transport of blocks between nodes. tcp[,port=NUMBER]: with TLS."
        " nixl[,plugin=NAME][,plugin.OPTION=VALUE] or ucx: for RDMA or trusted networks, neither"
        " encrypted nor authenticated. pace=on: yield to other flows.",
        metavar="NAME[,KEY=VALUE…]",
        shown="tcp; nixl with --insecure where it is installed",
        needs=("peer_listen",),
    )
    fetch: Literal["auto", "always"] | None = _cluster(
        "Blocks to fetch from other nodes. auto: where fetching takes at most half as long as"
        " computing; always: all.",
        shown="auto",
        needs=("peer_listen",),
    )
    insecure: bool = _cluster(
        "No TLS and no authentication: index, feeds, transfers, events beyond this machine. For"
        " labs.",
        default=False,
        off="secure",
    )


class IndexSettings(DaemonSettings):
    """Settings of `kvstore index`."""

    listen: str = _cluster("Address to listen on.", default=DEFAULT_LISTEN, metavar="ADDR")
    entries: int = _cluster(
        "Locations (block, node and tier) to keep; the least recently used leave first.",
        default=DEFAULT_ENTRIES,
        metavar="N",
        within=_ENTRIES,
    )
    store: str | None = _cluster(
        "Redis or Valkey that several replicas share: redis://HOST:PORT/N, or rediss://… with TLS.",
        metavar="URL",
        shown="own memory",
    )
    store_password_file: str | None = _cluster(
        "File with the password of --store.", metavar="FILE", needs=("store",)
    )
    store_ca: str | None = _cluster(
        "CA certificate of --store.", metavar="FILE", shown="CAs of the system", needs=("store",)
    )
    metrics: str | int | bool = _metrics(DEFAULT_INDEX_METRICS)
    plain: bool = _cluster(
        "--plain: ready at once, several times slower. --compiled: needs the extra 'index' and many"
        " seconds before it is ready.",
        default=False,
        off="compiled",
        shown="compiled, where the extra is installed",
    )


class RouterSettings(DaemonSettings):
    """Settings of `kvstore router`."""

    listen: str = _front(
        "Address of the OpenAI-compatible API; port 0: any free port.",
        default=DEFAULT_ROUTER_LISTEN,
        metavar="ADDR",
    )
    route_listen: str | None = _front(
        "Address of the gRPC service kvstore.v1.Router.", metavar="ADDR", shown="off"
    )
    picker_listen: str | None = _front(
        "Address of the endpoint picker for Envoy (external processing).",
        metavar="ADDR",
        shown="off",
    )
    share_port: bool = _front(
        "Share the port with other routers of this machine: the kernel spreads connections.",
        default=False,
        off="own-port",
    )
    listen_cert: str | None = _front(
        "Certificate of --listen with its chain, such as a public one.",
        metavar="FILE",
        shown="that of --cert",
        needs=("listen_key",),
    )
    listen_key: str | None = _front(
        "Private key of --listen-cert.",
        metavar="FILE",
        shown="that of --key",
        needs=("listen_cert",),
    )
    listen_ca: str | None = _front(
        "CA of client certificates, which --listen demands when there are no --api-keys.",
        metavar="FILE",
        shown="that of --ca",
        needs=("listen_cert", "cert"),
    )
    api_keys: str | None = _front(
        "YAML file with the API keys of each tenant; prefix caches of tenants are kept apart.",
        metavar="FILE",
        shown="no keys, one tenant",
    )
    body_max: str | int = _front("Largest body of a request.", default="128MiB", metavar="SIZE")
    connections: int = _front(
        "Limit of client connections, at most a quarter of the file descriptors; beyond it the"
        " longest idle one is closed, and if none is idle, new ones wait.",
        default=10_000,
        metavar="N",
        within=(1, 1_000_000),
    )
    allowed_origins: list[str] | None = _front(
        "Origin of web pages that may read responses (CORS), * for all, or none; repeatable.",
        metavar="ORIGIN",
        shown="*, like vLLM",
    )
    drain_delay: int = _front(
        "Seconds after SIGTERM in which new connections are still accepted, while readiness fails.",
        default=5,
        metavar="SECONDS",
        within=(0, 3600),
    )
    drain_timeout: int = _front(
        "Seconds after that for requests in flight to finish; a second SIGTERM ends them at once.",
        default=600,
        metavar="SECONDS",
        within=(0, 86_400),
    )
    policy: str | None = _front(
        "YAML file with the routing policy; read again on SIGHUP.",
        metavar="FILE",
        shown="policy cost with its defaults",
    )
    receipts: str | None = _front(
        "Append a receipt of each decision to FILE; at half of SIZE the file moves to FILE.1.",
        metavar="FILE[:SIZE]",
        shown="off",
    )
    worker: list[str] | None = _workers(
        "An engine; repeatable. kind: vllm, sglang, tgi, trtllm, triton, llamacpp, ollama, openai;"
        " pool: its pool in the policy; role: both, prefill, decode, any (as the policy's planner"
        " decides); node, engine: its names in the index; block, seed: block size and hash seed of"
        " its prefix cache.",
        metavar="NAME=URL[,KEY=VALUE…]",
    )
    worker_dns: list[str] | None = _workers(
        "An engine at each address of a DNS name, resolved every 5 s; repeatable.",
        metavar="http://HOST:PORT[,KEY=VALUE…]",
    )
    worker_slices: str | None = _workers(
        "Engines of a Kubernetes service, by its EndpointSlices; scheme=https for TLS.",
        metavar="NAMESPACE/SERVICE:PORT[,KEY=VALUE…]",
    )
    worker_ca: str | None = _workers(
        "CA certificate of https:// engines.", metavar="FILE", shown="CAs of the system"
    )
    worker_key_file: str | None = _workers(
        "File with the API key of the engines; keys of clients are not forwarded.", metavar="FILE"
    )
    tokenizer: list[str] | None = _workers(
        "Local tokenizer of a model, used while its tokens equal the engines'; repeatable.",
        metavar="MODEL=DIRECTORY",
        shown="engines render (vLLM: --enable-scale-out)",
        needs=("index",),
    )
    index: list[str] | str | None = _cluster(
        "Replica of the prefix index to ask; repeatable.",
        metavar="HOST:PORT",
        shown="none: the router remembers the prefixes that it sent",
    )
    index_timeout: int = _cluster(
        "Milliseconds to wait for the index; after that a request is routed without it.",
        default=5,
        metavar="MS",
        within=(1, 1000),
    )
    peer_router: list[str] | None = _cluster(
        "--route-listen of another router of the same engines, or a DNS name of several, to count"
        " its requests in flight; repeatable.",
        metavar="HOST:PORT",
        needs=("route_listen",),
    )
    metrics: str | int | bool = _metrics(DEFAULT_ROUTER_METRICS)
    ca: str | None = _cluster("CA certificate of the cluster.", metavar="FILE")
    cert: str | None = _cluster(
        "Certificate of this process in the cluster: for the index, --route-listen and"
        " --picker-listen.",
        metavar="FILE",
    )
    key: str | None = _cluster("Private key of that certificate.", metavar="FILE")
    insecure: bool = _cluster(
        "Allow --listen beyond this machine without certificates, and http:// engines on other"
        " machines. For labs.",
        default=False,
        off="secure",
    )


class AskSettings(TlsSettings):
    """Settings of a command that asks the index instead of one node."""

    index: list[str] | None = _cluster(
        "Query this replica of the prefix index for the whole cluster; repeatable.",
        metavar="HOST:PORT",
    )
    insecure: bool = _cluster(
        "The index runs without TLS. For labs.", default=False, needs=("index",)
    )
