"""A certificate authority for one test run, made by the `openssl` command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path


class Authority:
    """Signs certificates of ``127.0.0.1``; every path is a PEM file."""

    def __init__(self, directory: Path) -> None:
        assert shutil.which("openssl"), "the tests of TLS need the `openssl` command"
        self._directory = directory
        self.ca = directory / "ca.pem"
        self._key = directory / "ca.key"
        _openssl(
            *("req", "-x509", "-days", "2", "-subj", "/CN=a CA of ours", *_NEW_KEY, self._key),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign", "-out", self.ca),
        )

    def sign(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key."""
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request = self._directory / f"{name}.csr"
        extensions = self._directory / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1")
        _openssl("req", "-subj", f"/CN={name}", *_NEW_KEY, key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-days", "2"),
            *("-CAcreateserial", "-extfile", extensions, "-out", certificate),
        )
        return certificate, key

    def server_context(self, *, clients_must_sign: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        context.load_cert_chain(*self.sign("server"))
        if clients_must_sign:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
