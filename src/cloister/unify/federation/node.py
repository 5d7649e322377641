"""An owner's SuperNode, our place behind it, and the knock on the coordinator's door before it is started."""

from __future__ import annotations

import base64
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloister.errors import CloisterError, PeerDied, PeerUnreachable, TrustError, UsageError, WrongKey
from cloister.unify.artefacts import shown
from cloister.unify.keys import PRIVATE, Key

from . import flower
from .guard import KEY_HEADER, KNOCK, SIGNATURE_HEADER, TIME_HEADER
from .protocol import OwnerSide, Said

KNOCK_SECONDS = 20.0
RETRIES = 3  # of the SuperNode by itself; then we knock again, which says what is wrong


def trusting(certificate: Path) -> ssl.SSLContext:
    """TLS with nobody but the coordinator whose certificate this is."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(str(certificate))
    except OSError as error:
        reason = "it is no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise UsageError(
            f"{certificate} cannot be read: {reason}.",
            advice="The coordinator sends its certificate (tls-certificate.pem) with its address.",
        ) from None
    return context


def knock(address: str, key: Key, context: ssl.SSLContext) -> str:
    """The name under which the coordinator knows us. `PeerUnreachable` if nobody is there yet: try again later."""
    import httpx

    time = datetime.now(UTC).isoformat()
    headers = {
        KEY_HEADER: base64.b64encode(key.public.pem).decode(),
        SIGNATURE_HEADER: base64.b64encode(key.sign_for_node(time.encode())).decode(),
        TIME_HEADER: time,
    }
    try:
        with httpx.Client(verify=context, timeout=KNOCK_SECONDS) as client:
            answer = client.get(f"https://{address}{KNOCK}", headers=headers)
            found = answer.json() if len(answer.content) < 10_000 else {}
    except (httpx.InvalidURL, UnicodeError):
        raise UsageError(
            f"{shown(address)} is no address.", advice="Name HOST:PORT, as the coordinator said."
        ) from None
    except httpx.HTTPError as error:
        raise _not_there(address, error) from None
    except ValueError:
        found = {}
    if answer.status_code == 200 and isinstance(found.get("owner"), str):
        return str(found["owner"])
    if found.get("why") == "clock":
        raise TrustError(
            "The coordinator's clock and ours are more than five minutes apart.",
            advice="Set this machine's clock, and ask the coordinator about its own.",
        )
    if found.get("why") == "key":
        raise WrongKey(
            f"The coordinator has invited nobody with this key (fingerprint {key.fingerprint}).",
            advice=f"Send it {key.folder}/party-key.pub, or use the key that you sent.",
        )
    raise PeerUnreachable(f"At {address} is something else than a coordinator (it answered {answer.status_code}).")


def _not_there(address: str, error: Exception) -> CloisterError:
    said = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        if "ostname mismatch" in said or "IP address mismatch" in said:
            return TrustError(
                f"The coordinator's certificate is not for {address}.",
                advice="Use the name that it told you; it may add names with `cloister unify coordinator --name`.",
            )
        return TrustError(
            f"Whoever is at {address} has another certificate than the one that you were given.",
            advice="Ask the coordinator, over a channel that you trust, for its certificate. Do not go on without.",
        )
    if "WRONG_VERSION_NUMBER" in said or "SSL" in said.upper():
        return PeerUnreachable(f"At {address} nobody speaks TLS as a coordinator does ({shown(said, 120)}).")
    return PeerUnreachable(f"Nobody answers at {address} ({shown(said, 120)}).")


class Node:
    """The SuperNode as a child process. What arrives for it we answer."""

    def __init__(self, address: str, home: Path, key: Key, certificate: Path) -> None:
        secret_file, self._port = home / "secret", flower.free_port()
        self._secret = flower.fresh_secret(secret_file)
        self._child = flower.Child(
            "supernode",
            [
                *("--superlink", address, "--root-certificates", str(certificate)),
                *("--auth-supernode-private-key", str(key.folder / PRIVATE)),
                *("--host", "127.0.0.1", "--port", str(self._port), "--max-retries", str(RETRIES)),
                *("--isolation", "process", "--superexec-auth-secret-file", str(secret_file)),
            ],
            home,
        )
        try:
            self._child.wait_for_port(self._port)
        except BaseException:
            self.close()
            raise
        self._runtime = flower.runtime(f"127.0.0.1:{self._port}", None, self._secret)

    def serve(self, side: OwnerSide) -> bool:
        """Answer one message, if one waits. `PeerDied` if the connection to the coordinator is lost."""
        import httpx

        try:
            self._child.check()
            token = flower.acquire(self._runtime, "flwr-clientapp")
            if token:
                self._answer(token, side)
            return bool(token)
        except (httpx.HTTPError, PeerDied):
            raise PeerDied("The connection to the coordinator is lost.") from None

    def _answer(self, token: str, side: OwnerSide) -> None:
        from flwr.app import Message
        from flwr.common.constant import SubStatus
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

        client: Any = flower.runtime(f"127.0.0.1:{self._port}", None, self._secret, token)
        try:
            message, context, _, _ = pull_task_input(client)  # the app in it is not looked at
            try:
                answer = side.answer(flower.said(message))
            except CloisterError as error:
                answer = Said({"is": "failed", "why": error.code})
            push_message(client, Message(flower.content(answer), reply_to=message), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            client.close()

    def close(self) -> None:
        """End the SuperNode."""
        self._child.close()
