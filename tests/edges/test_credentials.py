"""Who we are, over real TLS: client certificates, tokens that change, and secrets kept."""

import base64
import logging
import ssl
import subprocess

import pytest

from sentinel import history
from sentinel.config import Config
from sentinel.edges.prometheus import Prometheus
from sentinel.errors import ConfigError, DependencyError
from tests.edges.query_server import AT_S, Server, failure, matrix

NAME = "prometheus.test"


def openssl(folder, *words):
    done = subprocess.run(
        ["openssl", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    """ca, server (for NAME alone), client, and a client of another authority; each .pem, .key."""
    folder = tmp_path_factory.mktemp("certs")
    for authority in ("ca", "other"):
        openssl(
            folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", f"/CN={authority}", "-keyout", f"{authority}.key",
            "-out", f"{authority}.pem",
        )  # fmt: skip
    (folder / "server.ext").write_text(f"subjectAltName=DNS:{NAME}\n")
    (folder / "client.ext").write_text("extendedKeyUsage=clientAuth\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl(
            folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr",
        )  # fmt: skip
        kind = "server" if name == "server" else "client"
        openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey",
            f"{authority}.key", "-CAcreateserial", "-days", "2", "-extfile", f"{kind}.ext",
            "-out", f"{name}.pem",
        )  # fmt: skip
    both = (folder / "client.pem").read_text() + (folder / "client.key").read_text()
    (folder / "both.pem").write_text(both)
    openssl(
        folder, "pkey", "-in", "client.key", "-aes256", "-passout", "pass:hunter2", "-out",
        "locked.key",
    )  # fmt: skip
    return folder


@pytest.fixture
def guarded(certs):
    """A server that lets in only who has a certificate of its authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server.pem", certs / "server.key")
    context.load_verify_locations(certs / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    running = Server(tls=context)
    running.answer = lambda r: (200, matrix(({"__name__": "up"}, [[AT_S, "1"]])))
    yield running
    running.close()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.close()


def pull(url, **options):
    prometheus = Prometheus(url, names=("up",), **options)
    return list(prometheus.pull(AT_S, window_s=60.0, deadline_s=10.0).values)


def files(certs, **names):
    return {kind: str(certs / name) for kind, name in names.items()}


# ---- TLS --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [{"cert_file": "client.pem", "key_file": "client.key"}, {"cert_file": "both.pem"}]
)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_client_certificate_lets_us_in(guarded, certs, names, concurrency, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certs / "other.pem"))  # ours goes before it
    access = files(certs, ca_file="ca.pem", **names)
    assert pull(guarded.url, **access, server_name=NAME, concurrency=concurrency) == [1.0]


@pytest.mark.parametrize(
    ("names", "server_name"),
    [
        ({"ca_file": "ca.pem"}, NAME),  # no certificate
        ({"ca_file": "ca.pem", "cert_file": "stranger.pem", "key_file": "stranger.key"}, NAME),
        ({"ca_file": "other.pem", "cert_file": "both.pem"}, NAME),  # not whom we trust
        ({"cert_file": "both.pem"}, NAME),  # nor the system
        ({"ca_file": "ca.pem", "cert_file": "both.pem"}, ""),  # the URL's host is an address
        ({"ca_file": "ca.pem", "cert_file": "both.pem"}, "another.test"),
        ({"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "server.key"}, NAME),
        ({"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "locked.key"}, NAME),
        ({"ca_file": "ca.pem", "cert_file": "missing.pem"}, NAME),
    ],
)
def test_without_the_right_one_it_is_a_clear_error(guarded, certs, names, server_name):
    with pytest.raises(DependencyError) as error:
        pull(guarded.url, **files(certs, **names), server_name=server_name)
    assert guarded.url in str(error.value)
    assert (
        "TLS failed" in str(error.value)
        or "cannot be reached" in str(error.value)
        or ("request failed" in str(error.value))
    )
    assert guarded.requests == []


def written(tmp_path, text):
    (tmp_path / "sentinel.yaml").write_text(text)
    return Config.load(tmp_path / "sentinel.yaml")


def test_the_configuration_reaches_the_connection(guarded, certs, tmp_path):
    (tmp_path / "key.file").write_text("k3y-of-ours\n")
    config = written(
        tmp_path,
        f"""
prometheus:
  url: {guarded.url}
  server_name: {NAME}
  ca_file: {certs}/ca.pem
  cert_file: {certs}/client.pem
  key_file: {certs}/client.key
  headers: {{X-Scope-OrgID: gpu}}
  header_files: {{X-Api-Key: key.file}}
  params: {{dedup: "false"}}
  gzip: on
""",
    )
    config.check_files()
    history.connect(config).pull(AT_S, window_s=60.0, deadline_s=10.0)
    _, _, form, headers = guarded.requests[0]
    assert (headers["X-Scope-OrgID"], headers["X-Api-Key"]) == ("gpu", "k3y-of-ours")
    assert (headers["Accept-Encoding"], form["dedup"]) == ("gzip", "false")


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("client.pem", "client.key", None),
        ("both.pem", "", None),
        ("client.pem", "", "no certificate with its key can be read"),
        ("client.pem", "server.key", "no certificate with its key can be read"),
        ("missing.pem", "client.key", "no such file"),
        ("client.key", "client.key", "no certificate with its key can be read"),
        ("client.pem", "locked.key", "the key is encrypted"),
    ],
)
def test_check_files_loads_certificate_and_key(certs, tmp_path, cert, key, said):
    text = f'prometheus: {{url: "https://p.test", cert_file: "{certs / cert}"'
    config = written(tmp_path, text + (f', key_file: "{certs / key}"}}' if key else "}"))
    if said is None:
        config.check_files()
        return
    with pytest.raises(ConfigError) as error:
        config.check_files()
    assert said.lower() in str(error.value).lower()
    assert cert in str(error.value)


# ---- headers and tokens -----------------------------------------------------------------


def test_a_secret_header_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "key.file").write_text("from-the-file\n")
    base = 'prometheus: {url: "http://127.0.0.1:1", header_files: '
    config = written(tmp_path, base + "{X-Api-Key: key.file}}")
    assert config.prometheus_headers() == {"X-Api-Key": "from-the-file"}
    monkeypatch.setenv("SENTINEL_PROMETHEUS_HEADER_X_API_KEY", "from-the-environment")
    assert config.prometheus_headers() == {"X-Api-Key": "from-the-environment"}
    config = written(tmp_path, base + '{X-Api-Key: ""}}')
    assert config.prometheus_headers() == {"X-Api-Key": "from-the-environment"}
    monkeypatch.delenv("SENTINEL_PROMETHEUS_HEADER_X_API_KEY")
    with pytest.raises(ConfigError, match=r"header_files\[X-Api-Key\]: needs a file, or \$SENTIN"):
        config.check_files()


@pytest.mark.parametrize("content", ["two\nlines-of-hunter2", "hunter2 ünï", "hunter2\x00"])
@pytest.mark.parametrize("key", ["token_file: secret", "header_files: {X-Key: secret}"])
def test_a_secret_that_fits_no_header_is_told_and_not_shown(tmp_path, content, key):
    (tmp_path / "secret").write_text(content)
    config = written(tmp_path, f'prometheus: {{url: "http://127.0.0.1:1", {key}}}')
    with pytest.raises(ConfigError, match="no line of printable ASCII") as error:
        config.check_files()
    assert "hunter2" not in str(error.value)


def test_a_token_that_was_renewed_is_read_anew(server, tmp_path):
    def answer(request):
        good = request.headers["Authorization"] == "Bearer second"
        return (200, matrix()) if good else (401, b"expired")

    server.answer = answer
    (tmp_path / "token").write_text("first")
    config = written(
        tmp_path, f'prometheus: {{url: "{server.url}", token_file: token, concurrency: 1}}'
    )
    prometheus = history.connect(config)

    def ask():
        prometheus.pull(AT_S, window_s=60.0, deadline_s=10.0)

    with pytest.raises(DependencyError, match="refuses our credentials"):
        ask()
    assert len(server.requests) == 1, "the same token is not tried twice"
    (tmp_path / "token").unlink()
    with pytest.raises(DependencyError, match="refuses our credentials"):
        ask()
    (tmp_path / "token").write_text("second")
    ask()
    ask()
    assert [h["Authorization"] for *_, h in server.requests[2:]] == [
        "Bearer first",
        "Bearer second",
        "Bearer second",
    ]


SECRETS = ("p4ssw0rd!", "t0ken-of-ours", "k3y-of-ours")


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("status", [200, 400, 401, 403, 422, 429, 500, 302])
def test_no_secret_is_in_an_error_or_a_log(server, caplog, status, upper):
    caplog.set_level(logging.DEBUG)

    def answer(request):  # as a proxy's debug page may
        told = " ".join(SECRETS + tuple(request.headers.values()))
        told = told.upper() if upper else told
        body = f"<title>{told}</title>".encode() if status == 200 else failure(told)
        return status, body, {"Location": f"http://x.test/{SECRETS[1]}"}

    server.answer = answer
    ways = (
        {"basic_auth": ("user", SECRETS[0])},
        {"headers": {"Authorization": f"Bearer {SECRETS[1]}"}},
        {"headers": {"X-Api-Key": SECRETS[2]}, "secret_headers": ["x-api-key"]},
    )
    for way, secret in zip(ways, SECRETS, strict=True):
        with pytest.raises(DependencyError) as error:
            pull(server.url, **way)
        told = str(error.value).lower()
        assert secret not in told
        assert base64.b64encode(f"user:{secret}".encode()).decode().lower() not in told
        assert secret not in caplog.text.lower()
        chain = (
            error.value.__cause__,
            error.value.__context__ if not (error.value.__suppress_context__) else None,
        )
        assert not any(secret in str(e).lower() for e in chain if e is not None)


def test_a_header_that_no_library_takes_is_not_repeated(server):
    with pytest.raises(DependencyError) as error:
        pull(server.url, headers={"Authorization": "Bearer t0ken-of-ours\n"})
    assert "t0ken" not in str(error.value)
    assert error.value.__suppress_context__


def test_a_password_beyond_latin_letters_is_sent_as_utf_8(server):
    pull(server.url, basic_auth=("ünï", "pässwörd \U0001f511"))
    sent = server.requests[0][3]["Authorization"].split()[1]
    assert base64.b64decode(sent).decode() == "ünï:pässwörd \U0001f511"


def test_proxies_of_the_environment_are_used_with_a_token_too(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("NO_PROXY", "")
    pull("http://prometheus.test:9090", headers={"Authorization": "Bearer t0ken"})
    assert server.requests[0][3]["Host"] == "prometheus.test:9090"
