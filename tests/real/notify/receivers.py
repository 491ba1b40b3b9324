"""`python -m tests.real.notify.receivers KIND`: a server on a port of its own, which it prints first. Then it prints
what it gets.

smtp: a mail server. refuse: one that refuses every recipient. busy: one that refuses twice, for now. web: a webhook.
hang: accepts connections and never answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web
from aiosmtpd.smtp import SMTP, Envelope, Session


def show(value: object) -> None:
    print(json.dumps(value), flush=True)


class Mailbox:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.refused = 0

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: Any
    ) -> str:
        if self.kind == "refuse":
            return "550 5.1.1 no such user"
        if self.kind == "busy" and self.refused < 2:
            self.refused += 1
            return "451 4.7.1 try again later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        content = envelope.content or b""
        text = content if isinstance(content, str) else content.decode("utf-8", "replace")
        show({"to": envelope.rcpt_tos, "from": envelope.mail_from, "text": text})
        return "250 OK"


async def hook(request: web.Request) -> web.Response:
    show({"path": request.path, "body": await request.json()})
    return web.json_response({})


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    show({"connected": True})
    await reader.read()  # never answers
    writer.close()


async def main(kind: str) -> None:
    loop = asyncio.get_running_loop()
    if kind == "web":
        app = web.Application()
        app.router.add_post("/{tail:.*}", hook)
        runner = web.AppRunner(app)
        await runner.setup()
        server = await loop.create_server(runner.server, "127.0.0.1", 0)  # type: ignore[arg-type]
    elif kind == "hang":
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
    else:
        mailbox = Mailbox(kind)
        server = await loop.create_server(lambda: SMTP(mailbox, enable_SMTPUTF8=True), "127.0.0.1", 0)
    show(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
