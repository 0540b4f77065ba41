"""Secrets are blotted out, by their form and by the variables that hold them."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from subprocess import PIPE

import pytest

from coremill import redaction
from coremill.redaction import RedactingStream, know, redact


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize(
    "secret",
    ["hf_SECRETsecretSECRET", "sk-secret-secret-secret-1", "ghp_secretSECRETsecret0", "AKIA" + "SECRETSECRET1234"],
)
def test_by_form(secret: str) -> None:
    assert redact(f"GET failed, token={secret}, sorry") == "GET failed, token=***, sorry"
    for before in ("\x1b[33m", "%3D", "\\n", "\\u001b[0m", "token", "_"):  # colours, and what was escaped
        assert redact(before + secret) == before + "***"


@pytest.mark.parametrize(
    "name",
    [
        "task-classification-bert",
        "/data/mask-language-modelling/x",
        "risk-assessment-model-v2",
        "/models/hf_transformers/bert",
        "highs_and_lows_of_2020",
    ],
)
def test_a_name_is_no_secret(name: str) -> None:
    assert redact(name) == name


def test_a_terminal_that_is_not_utf_8_ends_nothing() -> None:
    code = "from coremill.redaction import guard_output; guard_output({}); print('a \u2588 b')"
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"a \\u2588 b\n"), done.stderr.decode()


def test_what_programs_read_is_utf_8() -> None:
    code = "from coremill.redaction import guard_output, print_for_programs; guard_output({})"
    code += "; print_for_programs('caf\u00e9 \u6a21')"
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode("utf-8")) == (0, "caf\u00e9 \u6a21\n"), done.stderr.decode()


def test_passwords_in_addresses_and_bearers() -> None:
    assert redact("proxy http://user:secret@host:3128/x failed") == "proxy http://***@host:3128/x failed"
    assert redact("Authorization: Bearer secret.secret-secret") == "Authorization: Bearer ***"
    assert redact("see http://127.0.0.1:8000/path") == "see http://127.0.0.1:8000/path"


def test_by_the_variable_that_holds_it() -> None:
    know({"MY_API_KEY": "no form at all, secret", "AUTH_MODE": "disabled", "SSH_AUTH_SOCK": "/tmp/agent.sock.1234"})
    assert redact("it was <no form at all, secret>") == "it was <***>"
    assert redact("disabled /tmp/agent.sock.1234") == "disabled /tmp/agent.sock.1234"


def test_a_stream_blots_out_and_is_else_the_stream() -> None:
    below = io.StringIO()
    stream = RedactingStream(below)
    assert stream.write("hf_SECRETsecretSECRET\n") == len("hf_SECRETsecretSECRET\n")
    print("plain", file=stream)
    stream.writelines(["a", "b\n"])
    assert below.getvalue() == "***\nplain\nab\n" and stream.isatty() is False


def test_a_log_on_a_full_disk_loses_words_and_nothing_else() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    print("lost", file=RedactingStream(Full()), flush=True)

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        print("told", file=RedactingStream(Broken()))


def test_a_closed_pipe_ends_no_command() -> None:
    code = "import os, sys; from coremill.redaction import guard_output; guard_output({}); os.read(0, 1)"
    code += "; print('x' * 100_000); print('y', flush=True); print('z'); os.write(2, b'to the end')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.write(b"go")
        process.stdin.close()
        assert process.stderr.read() == b"to the end"
    assert process.returncode == 0


def test_a_dataset_with_its_config_and_revision_is_no_password() -> None:
    assert redact("hf://wikitext:wikitext-2-raw-v1@main") == "hf://wikitext:wikitext-2-raw-v1@main"
    assert redact("http://user:secret@host:3128/x") == "http://***@host:3128/x"
