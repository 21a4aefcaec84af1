"""The guide "systemd and Compose": both take what it shows, the command line takes its commands,
and neither takes away what a node needs."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvstore import __version__
from kvstore.connector.config import parse_config
from kvstore.units import GIB
from tests.docs.commands import index_config, node_config, parse, router_config
from tests.kit.programs import need
from tests.unit.deploy.test_images import ROLES

PAGE: Final = Path(__file__).resolve().parents[3] / "kvstore" / "docs" / "guides" / "services.md"
PROGRAM: Final = "/opt/kvstore/bin/kvstore"
SOCKET: Final = "/run/kvstore/node.sock"
EXPOSURE_MAX: Final = 4.0
"""Of 10, as systemd counts it; a unit without any protection has 9.6."""
HARDENING: Final = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "LimitMEMLOCK": "infinity",
    "RuntimeDirectory": "kvstore",
    "StateDirectory": "kvstore",
    "KillSignal": "SIGTERM",
    "KillMode": "mixed",
    "AmbientCapabilities": "CAP_SYS_NICE",
    "CapabilityBoundingSet": "CAP_SYS_NICE",
}


def fenced(language: str) -> str:
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(found)


# ── systemd ──────────────────────────────────────────────────────────────────────────────────────


def unit() -> dict[str, str]:
    """Directives of the service, each once."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(fenced("ini").replace("\\\n", " "))
    assert parser.sections() == ["Unit", "Service", "Install"]
    return dict(parser["Service"])


def verdict(folder: Path, text: str, *command: str) -> str:
    """What systemd says of a unit, whose program is one that exists here."""
    need("systemd-analyze")
    path = folder / "kvstore.service"
    path.write_text(text.replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", *command, str(path)], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert verdict(tmp_path, fenced("ini"), "verify", "--man=no") == ""


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("ProtectSystem=strict", "ProtectSystm=strict", "Unknown key"),
        (PROGRAM, "/opt/kvstore/bin/missing", "not executable"),
    ],
)
def test_a_wrong_line_of_the_unit_is_seen(
    tmp_path: Path, right: str, wrong: str, named: str
) -> None:
    text = fenced("ini").replace(right, wrong)
    assert named in verdict(tmp_path, text, "verify", "--man=no")


def test_the_unit_is_hardened(tmp_path: Path) -> None:
    told = verdict(tmp_path, fenced("ini"), "security", "--offline=true")
    (exposure,) = re.findall(r"Overall exposure level for kvstore.service: ([\d.]+)", told)
    assert float(exposure) <= EXPOSURE_MAX
    assert HARDENING.items() <= unit().items()


def test_its_commands_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    program, command, *flags = unit()["ExecStart"].split()
    assert (program, command) == (PROGRAM, "node")
    config = node_config(flags, monkeypatch)
    assert (str(config.socket), config.dram_bytes) == (SOCKET, 64 * GIB)
    program, *arguments = unit()["ExecReload"].split()
    assert program == PROGRAM
    name, given = parse(arguments)
    assert (name, str(given["socket"])) == ("upgrade", SOCKET)


def test_the_node_writes_to_directories_that_the_unit_makes() -> None:
    """With ProtectSystem=strict all others are read-only, /home is empty and /tmp its own."""
    made = {
        f"/run/{unit()['RuntimeDirectory']}": unit()["RuntimeDirectoryMode"],
        f"/var/lib/{unit()['StateDirectory']}": unit()["StateDirectoryMode"],
    }
    _, _, *flags = unit()["ExecStart"].split()
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    tier = given["--file"].partition(":")[0]
    assert made == {str(Path(SOCKET).parent): "0711", tier: "0700"}
    assert given["--allow-uid"], "0711 is for users other than the node's own"
    assert "--socket" in given
    assert "--config" not in given


def test_nothing_that_a_node_needs_is_taken_away() -> None:
    """The table of the guide says why; addresses are of TCP, the socket and name look-ups."""
    rows = re.findall(r"^\| `(\w+)(?:=\w+)?` \|", PAGE.read_text(), re.MULTILINE)
    assert {"PrivateUsers", "RestrictRealtime", "PrivateNetwork", "ProcSubset"} < set(rows)
    assert unit().keys() & {*rows, "DynamicUser", "PrivateIPC", "IPAddressDeny"} == set()
    families = set(unit()["RestrictAddressFamilies"].split())
    assert families == {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}
    assert unit()["RestartPreventExitStatus"] == "2", "settings that are refused stay so"


# ── Compose ──────────────────────────────────────────────────────────────────────────────────────


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(fenced("yaml"))["services"]
    return found


def given(role: str) -> list[str]:
    """Flags of its command."""
    command, *flags = services()[role]["command"]
    assert command == role
    return list(flags)


def composed(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    need("docker-compose")
    (folder / "compose.yaml").write_text(text)
    command = ("docker-compose", "-f", str(folder / "compose.yaml"), "config", "-q")
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_compose_takes_the_file(tmp_path: Path) -> None:
    done = composed(tmp_path, fenced("yaml"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("read_only: true", "readonly: true", "readonly"),
        ("blocks: {}", "block: {}", "blocks"),
        ("memlock: -1", "memlock: all", "memlock"),
    ],
)
def test_a_wrong_line_of_the_file_is_seen(
    tmp_path: Path, right: str, wrong: str, named: str
) -> None:
    done = composed(tmp_path, fenced("yaml").replace(right, wrong))
    assert done.returncode != 0
    assert named in done.stderr


def test_services_run_the_images_that_are_built() -> None:
    wanted = {role: f"kvstore-{role}:{__version__}" for role in ROLES}
    wanted["engine"] = f"vllm-kvstore:{__version__}"
    assert {name: each["image"] for name, each in services().items()} == wanted


def test_services_have_no_rights_and_a_read_only_root() -> None:
    for name, each in services().items():
        assert each["cap_drop"] == ["ALL"]
        assert each["security_opt"] == ["no-new-privileges:true"]
        assert each.get("user", "10001:10001") == "10001:10001", "that of the image"
        if name in ROLES:
            assert (each["read_only"], each["tmpfs"]) == (True, ["/tmp"])
        assert not {"privileged", "pid", "ipc", "cap_add", "devices"} & each.keys()


def test_node_and_engine_share_a_socket_and_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    node, engine = services()["node"], services()["engine"]
    config = node_config(given("node"), monkeypatch)
    assert str(config.socket) == SOCKET
    assert config.allow_uid == {0, 10001}, "root always is"
    assert node["volumes"] == ["socket:/run/kvstore", "blocks:/var/lib/kvstore"]
    assert engine["volumes"][0] == "socket:/run/kvstore:ro"
    assert node["ulimits"]["memlock"] == engine["ulimits"]["memlock"] == -1
    assert "shm_size" in engine
    assert "shm_size" not in node, "its memory is no file of /dev/shm"
    kinds = yaml.safe_load(fenced("yaml"))["volumes"]
    assert kinds.keys() == {"socket", "blocks"}
    assert kinds["socket"]["driver_opts"]["o"] == "uid=10001,gid=10001,mode=0711"


def test_the_engine_loads_the_connector() -> None:
    command = services()["engine"]["command"]
    flag = command.index("--kv-transfer-config")
    config = yaml.safe_load(command[flag + 1])  # JSON, over several lines
    assert parse_config(config["kv_connector_extra_config"]).socket == SOCKET
    assert config["kv_connector_module_path"] == "kvstore.connector"
    assert {"--prefix-caching-hash-algo=sha256_cbor", "--enable-scale-out"} < set(command)


def test_services_find_each_other_on_loopback() -> None:
    assert {each["network_mode"] for each in services().values()} == {"host"}
    index_flags = dict(flag.split("=", 1) for flag in given("index") if "=" in flag)
    replica = index_config(given("index")).listen
    assert f"{replica.host}:{replica.port}" == index_flags["--listen"] == "127.0.0.1:9470"
    for role in ("node", "router"):
        assert f"--index={index_flags['--listen']}" in given(role)
    (name,) = [flag.partition("=")[2] for flag in given("node") if flag.startswith("--node-name")]
    assert f"--worker=engine=http://127.0.0.1:8000,node={name}" in given("router")
    assert {"--host=127.0.0.1", "--port=8000"} < set(services()["engine"]["command"])
    listening = re.findall(r"--(?:peer-)?listen=(\S+):\d+", fenced("yaml"))
    assert set(listening) == {"127.0.0.1"}, "--insecure"


def test_a_router_may_drain() -> None:
    config = router_config(given("router"))
    grace_s = int(services()["router"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.drain_delay + config.drain_timeout
