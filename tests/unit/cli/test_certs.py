"""Certificates: what `kvstore certs` makes is accepted, what is wrong with files is said."""

from __future__ import annotations

import datetime
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvstore.cli.certs import CA_DAYS, make_certificates
from kvstore.cli.main import cli, main
from kvstore.client import certificates
from kvstore.client.certificates import load
from kvstore.client.tls import ANY_INDEX, TlsFiles
from kvstore.errors import ConfigError
from kvstore.net.server import caller_identities
from kvstore.wire.identity import Identity, identities_of

NODE = Identity("node", "n1")


def files(directory: Path, stem: str = "node-n1") -> TlsFiles:
    return TlsFiles(
        ca=directory / "ca.crt", cert=directory / f"{stem}.crt", key=directory / f"{stem}.key"
    )


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "pki", [NODE], hosts=["db.example", "10.0.0.7"])
    return tmp_path / "pki"


def test_what_is_made_is_accepted_and_names_its_owner(pki: Path) -> None:
    loaded = load(files(pki))
    assert loaded.identities == {NODE}
    assert loaded.name_as("node") == "n1"
    assert loaded.name_as("index") == ""


def test_the_ca_signs_and_the_others_end_with_it(pki: Path) -> None:
    make_certificates(pki, [Identity("index", "i1")], days=CA_DAYS + 1)
    ca, own = (
        x509.load_pem_x509_certificate((pki / name).read_bytes())
        for name in ("ca.crt", "index-i1.crt")
    )
    assert own.not_valid_after_utc == ca.not_valid_after_utc
    own.verify_directly_issued_by(ca)
    for cert, is_ca in ((ca, True), (own, False)):
        limits = cert.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (limits.value.ca, limits.critical) == (is_ca, True)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert (usage.value.key_cert_sign, usage.value.digital_signature) == (True, False)
    its = own.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    name = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert its.key_identifier == name.key_identifier
    purposes = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_keys_are_their_owners_only_and_the_ca_stays(pki: Path) -> None:
    ca = (pki / "ca.crt").read_bytes()
    make_certificates(pki, [Identity("index", "i1")])
    assert (pki / "ca.crt").read_bytes() == ca
    keys = sorted(pki.glob("*.key"))
    assert [key.name for key in keys] == ["ca.key", "index-i1.key", "node-n1.key"]
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert stat.S_IMODE(pki.stat().st_mode) == 0o700
    assert load(files(pki, "index-i1")).identities == {Identity("index", "i1")}


def test_names_are_dns_names_of_the_certificate(pki: Path) -> None:
    make_certificates(pki, [Identity("node", "n2")], nodes_are_indexes=True)
    made = x509.load_pem_x509_certificate((pki / "node-n2.crt").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        *("n2.node.kvstore", "n2.index.kvstore", ANY_INDEX),
    ]
    first = x509.load_pem_x509_certificate((pki / "node-n1.crt").read_bytes())
    names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["n1.node.kvstore", "db.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


def test_nothing_is_overwritten(pki: Path) -> None:
    before = {file: file.read_bytes() for file in pki.iterdir()}
    with pytest.raises(ConfigError, match=r"node-n1\.crt would be overwritten"):
        make_certificates(pki, [Identity("node", "n3"), NODE])
    with pytest.raises(ConfigError, match=r"node-n4\.crt would be overwritten"):
        make_certificates(pki, [Identity("node", "n4"), Identity("node", "n4")])
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


@pytest.mark.parametrize("name", ["", "Node", "a..b", "a b", "-a", "../x", "a" * 300])
def test_what_cannot_be_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a name"):
        make_certificates(tmp_path, [Identity("node", name)])
    assert list(tmp_path.iterdir()) == []


def test_a_host_may_not_pass_for_a_component(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no host"):
        make_certificates(tmp_path / "pki", [NODE], hosts=["n2.node.kvstore"])


def test_a_ca_that_is_not_whole_is_not_replaced(pki: Path) -> None:
    (pki / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"restore ca\.crt and ca\.key"):
        make_certificates(pki, [Identity("node", "n5")])


def test_identities_are_exact() -> None:
    dns = ["a.b.node.kvstore", "x.peer.kvstore", "node.kvstore", "index.kvstore"]
    names = [*(("DNS", name) for name in (*dns, "C.CLIENT.KVSTORE")), ("URI", "d.node.kvstore")]
    assert identities_of(names) == {Identity("node", "a.b"), Identity("client", "c")}
    shown = {"peer_dns": [b"n1.node.kvstore", b"\xff"], "other": [b"x"]}
    assert caller_identities(SimpleNamespace(auth_context=lambda: shown)) == {NODE}
    assert caller_identities(SimpleNamespace(auth_context=dict)) == frozenset()


def test_files_that_are_wrong_say_what_to_do(pki: Path, tmp_path: Path) -> None:
    good = files(pki)
    make_certificates(pki, [Identity("node", "n2")])
    make_certificates(tmp_path / "foreign", [NODE])
    text = tmp_path / "text"
    text.write_text("hello")
    foreign = files(tmp_path / "foreign")
    missing = tmp_path / "missing"
    for changes, sentence in (
        ({"cert": missing}, "--cert .*missing cannot be read: No such file"),
        ({"key": pki}, "--key .*pki cannot be read: Is a directory"),
        ({"ca": text}, "--ca .*text is no certificate in PEM form"),
        ({"key": text}, "--key .*text is no private key in PEM form"),
        ({"key": files(pki, "node-n2").key}, "is not the key of --cert"),
        ({"ca": foreign.ca}, "was not issued by --ca"),
    ):
        wrong = {"ca": good.ca, "cert": good.cert, "key": good.key} | changes
        with pytest.raises(ConfigError, match=sentence):
            load(TlsFiles(**wrong))


@pytest.mark.parametrize(("days", "sentence"), [(-1, "valid from"), (400, "expired at")])
def test_the_time_is_looked_at(
    pki: Path, monkeypatch: pytest.MonkeyPatch, days: int, sentence: str
) -> None:
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(certificates, "_now", lambda: then)
    with pytest.raises(ConfigError, match=sentence):
        load(files(pki))


def test_the_command_lists_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = CliRunner().invoke(cli, ["certs", str(tmp_path / "pki"), "--node", "a", "--client", "b"])
    names = [Path(line).name for line in done.stdout.splitlines()]
    assert done.stderr == f"made the directory {tmp_path / 'pki'}\n"
    assert names == [
        *("ca.crt", "ca.key", "node-a.crt", "node-a.key", "client-b.crt", "client-b.key")
    ]
    for arguments, sentence in (
        ([], "name at least one owner"),
        (["--index", "i", "--with-index"], "add --node NAME"),
        (["--node", "a"], "would be overwritten"),
    ):
        monkeypatch.setattr(sys, "argv", ["kvstore", "certs", str(tmp_path / "pki"), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
