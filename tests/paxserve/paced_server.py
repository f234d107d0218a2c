"""A real HTTP server that streams completions as vLLM does, at a known pace, to measure the measuring with."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FIRST, NEXT = 0.05, 0.02
"""Seconds before the first token and before each further one."""


class Pacer(BaseHTTPRequestHandler):
    """Streams `max_tokens` chunks; a model of another name, and prompts that start with 13 and 14, go wrong."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.answer(200, {"data": [{"id": "paced"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["model"] != "paced":
            self.answer(404, {"error": {"message": "No such model."}})
        elif body["prompt"][0] == 13:
            self.answer(400, {"error": {"message": "Thirteen."}})
        else:
            self.stream(body)

    def answer(self, status, body):
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def stream(self, body):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = body["max_tokens"]
        for n in range(count):
            time.sleep(NEXT if n else FIRST)
            self.event(
                {"choices": [{"text": "x", "finish_reason": "length" if n == count - 1 else None}], "usage": None}
            )
            if body["prompt"][0] == 14:
                self.event({"error": {"message": "Fourteen."}})
                break
        self.event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}})
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data):
        payload = f"data: {json.dumps(data)}\n\n".encode()
        middle = len(payload) // 2  # an event may come in two pieces
        self.chunk(payload[:middle])
        self.chunk(payload[middle:])

    def chunk(self, payload):
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
        self.wfile.flush()


@contextlib.contextmanager
def running():
    """The server, with its address in `root` and the bodies that it was sent in `bodies`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Pacer) as server:
        server.bodies = []
        server.root = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
