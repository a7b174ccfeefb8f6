"""Who may send what: keys, hosts, content types, sizes."""

import http.client

import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine
from rlnumba.errors import ConfigError
from rlnumba.model.transformer import load_model
from tests.serve.conftest import MODEL, NAME, Reply, connect, request, running
from tests.serve.fuzz import CONTROL_GETS, GATED_GOOD, GETS, GOOD

BODY = {"prompt": "ab", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(tokenizer):
    """A server with a key, which a page may read."""
    engine = Engine(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=2))
    with running(engine, tokenizer, api_key="s3cret", allowed_origins=("https://page.example",)) as process:
        yield process


OPEN = ["/health", "/ping"]
ROUTES = [path.replace("{name:path}", NAME) for path in (*GETS, *GOOD, *GATED_GOOD, *CONTROL_GETS) if path not in OPEN]
ROUTES += ["/docs", "/", "/health/x"]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/completions/", "//v1/models", "/V1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_no_route_answers_without_the_key(locked, path, method):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
        {"authorization": "Basic s3cret"},
    ):
        reply = request(locked, path, b"x" * 100 if method == "POST" else None, method, headers)
        assert reply.status == 401 and reply.json["error"]["code"] == "invalid_api_key"
        assert reply.json["error"]["type"] == "authentication_error" and reply.headers["www-authenticate"] == "Bearer"


def test_the_key_opens_and_probes_need_none(locked):
    opened = {"authorization": "bearer s3cret", "host": "anything.example"}
    assert request(locked, "/v1/completions", BODY, headers=opened).status == 200
    assert request(locked, "/v1/models", headers=opened).status == 200
    assert [request(locked, path).status for path in ("/health", "/ping", "/health/")] == [200, 200, 200]
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked.url + "/v1", api_key="x", max_retries=0).models.list()


def test_a_page_of_an_allowed_origin_may_ask(locked, server):
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    reply = request(locked, "/v1/completions", method="OPTIONS", headers=ask)
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://page.example"
    other = request(locked, "/v1/completions", method="OPTIONS", headers=ask | {"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in request(server, "/v1/models", headers=ask).headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:9", 200),
        ("rebound.example", 400),
        ("", 400),
        ("10.0.0.1", 400),
    ],
)
def test_without_a_key_the_host_is_this_machine(server, host, status):
    assert request(server, "/v1/completions", BODY, headers={"host": host}).status == status


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_no_form_of_a_page_is_taken(server, kind):
    reply = request(server, "/v1/completions", BODY, headers={"content-type": kind})
    assert reply.status == 400 and "application/json" in reply.json["error"]["message"]


def test_json_may_name_its_encoding(server):
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert request(server, "/v1/completions", BODY, headers=kind).status == 200


def test_a_large_body_is_refused_by_its_header(server):
    connection = connect(server)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(1 << 40))
    connection.endheaders()
    assert Reply(connection.getresponse()).status == 413
    connection.close()


def test_a_large_body_is_refused_while_it_comes(server):
    connection = connect(server)

    def pieces():
        for _ in range(64):
            yield b"x" * (1 << 16)

    try:
        connection.request(
            "POST", "/v1/completions", pieces(), {"content-type": "application/json"}, encode_chunked=True
        )
        reply = Reply(connection.getresponse())
        assert reply.status == 413 and reply.json["error"]["type"] == "invalid_request_error"
    except (BrokenPipeError, ConnectionResetError, http.client.HTTPException):
        pass  # the server has closed the connection in the middle of the body
    finally:
        connection.close()
    assert request(server, "/v1/completions", BODY).status == 200


def test_a_host_that_others_reach_needs_a_key():
    from rlnumba.serve.settings import ServerSettings

    for host in ("0.0.0.0", "::", "example.com", "10.0.0.1"):
        with pytest.raises(ConfigError, match="--api-key"):
            ServerSettings((NAME,), "", host=host)
        assert "s3cret" not in repr(ServerSettings((NAME,), "", host=host, api_key="s3cret"))
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        ServerSettings((NAME,), "", host=host)
