import ssl
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedkeep.core.errors import ConfigError
from fedkeep.flower.keys import check_certificate, make_keys

HOSTS = ["link.example.org"]


def test_the_links_certificate_speaks_for_its_hosts_and_for_loopback_and_is_signed_by_our_authority(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"])
    certificate = x509.load_pem_x509_certificate((tmp_path / "link.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [*HOSTS, "localhost", "127.0.0.1"]
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes()))
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    assert context.cert_store_stats()["x509_ca"] == 1
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "link.pem", tmp_path / "link.key")


def test_a_nodes_two_keys_belong_together_and_private_ones_are_private(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["clinic-a", "clinic-b"])
    for name in ("clinic-a", "clinic-b"):
        private = load_ssh_private_key((tmp_path / f"{name}.key").read_bytes(), None)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == load_ssh_public_key((tmp_path / f"{name}.pub").read_bytes())
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.key")} == {0o600}
    assert len(list(tmp_path.glob("*.key"))) == 6


def test_keys_that_are_there_are_kept_when_a_node_is_added(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_keys(tmp_path, hosts=HOSTS, nodes=["a", "b"])
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() - before.keys() == {"b.key", "b.pub"}
    assert before.items() <= after.items()


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def moved(folder, *names):
    for name in names:
        (folder / name).unlink()
    return content(folder)


def test_what_private_keys_that_were_taken_away_belong_to_is_kept(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"])
    before = moved(tmp_path, "a.key", "signer.key", "ca.key", "link.key")
    make_keys(tmp_path, hosts=HOSTS, nodes=["a", "b"])
    assert content(tmp_path).keys() - before.keys() == {"b.key", "b.pub"}
    assert before.items() <= content(tmp_path).items()


def test_a_certificate_is_not_made_without_the_authoritys_key(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=[])
    before = moved(tmp_path, "ca.key", "link.key", "link.pem")
    with pytest.raises(ConfigError, match=r"ca\.pem is there, and its key ca\.key is not"):
        make_keys(tmp_path, hosts=HOSTS, nodes=["b"])
    assert content(tmp_path) == before


def test_a_links_certificate_without_its_authoritys_is_refused(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=[])
    before = moved(tmp_path, "ca.key", "ca.pem")
    with pytest.raises(ConfigError, match=r"link\.pem is there, and the ca\.pem of who signed it is not"):
        make_keys(tmp_path, hosts=HOSTS, nodes=["b"])
    assert content(tmp_path) == before


def test_public_parts_that_a_stop_left_out_are_made_of_the_private_ones(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"])
    before = content(tmp_path)
    moved(tmp_path, "a.pub", "signer.pub", "ca.pem", "link.pem")
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"])
    after = content(tmp_path)
    assert {n: c for n, c in after.items() if not n.endswith(".pem")} == {
        n: c for n, c in before.items() if not n.endswith(".pem")
    }
    link, authority = (x509.load_pem_x509_certificate(after[name]) for name in ("link.pem", "ca.pem"))
    link.verify_directly_issued_by(authority)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "link.pem", tmp_path / "link.key")
    x509.load_pem_x509_certificate(before["link.pem"]).verify_directly_issued_by(authority)


def test_a_host_that_the_links_certificate_lacks_is_refused(tmp_path):
    make_keys(tmp_path, hosts=[*HOSTS, "10.0.0.7"], nodes=["a"])
    before = content(tmp_path)
    make_keys(tmp_path, hosts=["LINK.example.org", "10.0.0.7", "localhost"], nodes=["a"])
    said = r"link\.pem speaks for link\.example\.org, .* and not for 'other\.example\.org'"
    with pytest.raises(ConfigError, match=said):
        make_keys(tmp_path, hosts=[*HOSTS, "other.example.org"], nodes=["a", "b"])
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "host", ["link.example.org:8443", "https://link.example.org", "a/b", "", "a b", "[::1]"]
)
def test_a_host_with_a_port_or_a_path_is_refused_before_anything_is_written(host, tmp_path):
    with pytest.raises(ConfigError, match="A host is a name or an.*ASCII"):
        make_keys(tmp_path / "keys", hosts=[host], nodes=["a"])
    assert not (tmp_path / "keys").exists()


def test_a_key_that_is_none_is_named(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"])
    (tmp_path / "a.pub").unlink()
    (tmp_path / "a.key").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.key is no key that fedkeep made\. Move it away"):
        make_keys(tmp_path, hosts=HOSTS, nodes=["a"])


@pytest.mark.parametrize("name", ["ca", "link", "signer", "../a", "", "a b", "-a"])
def test_a_name_that_is_no_nodes_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(ConfigError, match="A node's name is letters"):
        make_keys(tmp_path / "keys", hosts=HOSTS, nodes=["good", name])
    assert not (tmp_path / "keys").exists()


def test_a_host_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="A host is a name or an address in ASCII; got 'büro'"):
        make_keys(tmp_path, hosts=["büro"], nodes=["a"])


def test_a_certificate_that_is_not_valid_now_says_so(tmp_path):
    make_keys(tmp_path, hosts=HOSTS, nodes=["a"], days=10)
    now = datetime.now(UTC)
    check_certificate(tmp_path / "link.pem", now)
    with pytest.raises(ConfigError, match=r"link.pem expired at 20.*UTC"):
        check_certificate(tmp_path / "link.pem", now + timedelta(days=11))
    with pytest.raises(ConfigError, match=r"valid from 20.* UTC on, and this machine's clock says"):
        check_certificate(tmp_path / "link.pem", now - timedelta(days=1))


def test_a_file_that_is_no_certificate_says_so(tmp_path):
    (tmp_path / "link.pem").write_text("hello")
    with pytest.raises(ConfigError, match="link.pem is no certificate"):
        check_certificate(tmp_path / "link.pem")
    with pytest.raises(ConfigError, match="There is no certificate .*none.pem: No such file"):
        check_certificate(tmp_path / "none.pem")
