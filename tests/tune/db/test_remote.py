"""Layers on a server: the local copy is fetched, refreshed, and used while the server does not answer."""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from svod.tune.db import TEAM, TuningDB, layers, remote
from svod.tune.db.remote import Remote
from svod.tune.db.transfer import write_records
from tests.tune.db.samples import TARGET, winning

K = "k" * 32


class Server:
    """An HTTP server for one file that counts its requests and can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.asked: list[int] = []
        self.status, self.sent_on = 200, ""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = path.read_bytes()
                etag = f'"{hash(content)}"'
                status = 304 if self.headers.get("If-None-Match") == etag and owner.status == 200 else owner.status
                owner.asked.append(status)
                self.send_response(status)
                self.send_header("ETag", etag)
                if owner.sent_on:
                    self.send_header("Location", owner.sent_on)
                self.end_headers()
                if status == 200:
                    self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                """Nothing is logged."""
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/team.jsonl"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("svod.config.data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    write_records(tmp_path / "team.jsonl", winning(0.5, "aa"))
    served = Server(tmp_path / "team.jsonl")
    yield served
    served.close()


def winner(tmp_path: Path, url: str) -> tuple[Any, list[Any]]:
    with TuningDB.open(f"{tmp_path / 'own.db'}{os.pathsep}{url}") as db:
        return db.winner(K, TARGET), db.skipped


def test_a_file_on_a_server_is_a_layer(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    found, skipped = winner(tmp_path, server.url)
    assert found is not None and found.layer == TEAM and not skipped
    assert winner(tmp_path, server.url)[0] == found and server.asked == [200], "asked once an hour"
    monkeypatch.setattr(remote, "ASKED_EVERY", 0.0)
    copy = Remote(server.url).copy
    copy.with_suffix(".json").write_text(copy.with_suffix(".json").read_text().replace('"ask_after": ', '"ask_after": 0, "x": '))
    assert winner(tmp_path, server.url)[0] == found and server.asked == [200, 304]
    write_records(tmp_path / "team.jsonl", winning(0.4, "bb"))
    found, _ = winner(tmp_path, server.url)
    assert found is not None and found.linear == "bb" and server.asked == [200, 304, 200]


def test_an_address_is_said_whole(tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.status = 503
    with caplog.at_level(logging.WARNING, "svod"):
        _, [skipped] = winner(tmp_path, server.url)
    assert skipped.where == skipped.source == server.url
    assert f"records of {server.url} were skipped, the first: " in caplog.text and caplog.text.count(f"({server.url})") == 1


def test_the_copy_serves_while_the_server_does_not(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ASKED_EVERY", 0.0)
    found, _ = winner(tmp_path, server.url)
    server.status = 503
    again, skipped = winner(tmp_path, server.url)
    assert again == found and "the copy of" in skipped[0].reason and "503" not in skipped[0].where
    assert winner(tmp_path, server.url) == (found, []) and server.asked == [200, 503], "it is not asked again at once"


def test_a_page_that_asks_to_log_in_replaces_no_copy(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ASKED_EVERY", 0.0)
    found, _ = winner(tmp_path, server.url)
    (tmp_path / "team.jsonl").write_text("<html>\n<form>" + "x" * 100_000)
    again, skipped = winner(tmp_path, server.url)
    assert again == found is not None and "is not a file of svod's tuning records" in skipped[0].reason
    assert "the copy of" in skipped[0].reason and server.asked == [200, 200]


def test_a_server_that_is_not_there_is_said(tmp_path: Path, server: Server) -> None:
    server.close()
    found, skipped = winner(tmp_path, server.url)
    assert found is None and "there is no copy of it here" in skipped[0].reason


@pytest.mark.parametrize("url", ["http://example.invalid/x.jsonl", "http://10.0.0.1/x.jsonl"])
def test_plain_http_is_refused(tmp_path: Path, url: str, server: Server) -> None:
    found, skipped = winner(tmp_path, url)
    assert found is None and "only https is used" in skipped[0].reason


def test_a_server_that_sends_on_to_plain_http_is_refused(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Server(tmp_path / "team.jsonl")
    server.status, server.sent_on = 302, other.url
    monkeypatch.setattr(remote, "_check_scheme", lambda url: (_ for _ in ()).throw(ValueError("only https is used")) if url == other.url
                        else None)
    found, skipped = winner(tmp_path, server.url)
    other.close()
    assert found is None and "only https is used" in skipped[0].reason


def test_what_is_too_large_is_refused(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_DOWNLOAD_BYTES", 100)
    found, skipped = winner(tmp_path, server.url)
    assert found is None and "MiB" in skipped[0].reason and not Remote(server.url).exists()


def test_what_is_no_database_is_said(tmp_path: Path, server: Server) -> None:
    (tmp_path / "team.jsonl").write_bytes(b"<html>\xff")
    found, skipped = winner(tmp_path, server.url)
    assert found is None and "is not a file of svod's tuning records" in skipped[0].reason


def test_a_path_that_is_not_there_is_said(tmp_path: Path) -> None:
    found, skipped = winner(tmp_path, str(tmp_path / "nowhere.jsonl"))
    assert found is None and "there is no such file" in skipped[0].reason
