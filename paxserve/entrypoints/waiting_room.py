"""What clients hear while the model loads: the port is taken from the first moment on, and every request gets a 503."""

import selectors
import socket
import threading

READ_SECONDS = 0.5
"""How long a client may take to send its request before it is answered anyhow: the others wait meanwhile."""

MAX_READ = 64 * 2**10

BODY = (
    b'{"error":{"message":"The server is starting: the model is not loaded yet.",'
    b'"type":"ServiceUnavailableError","param":null,"code":503}}'
)
ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class WaitingRoom:
    """Answers on a listening socket from a thread of its own, until it is closed; the socket stays open.

    With `is_secret` (TLS) connections are closed without a word, as no key is at hand to say one with.
    """

    def __init__(self, listener: socket.socket, *, is_secret: bool = False) -> None:
        self._listener, self._is_secret = listener, is_secret
        self._wake, self._end = socket.socketpair()
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="waiting-room", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: who connects from now on waits for whoever accepts next. Closing twice is harmless."""
        self._wake.close()
        self._thread.join()
        self._end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._end, selectors.EVENT_READ)
            while not any(key.fileobj is self._end for key, _ in selector.select()):
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    continue  # the client has gone again
                with connection:
                    if not self._is_secret:
                        turn_away(connection)


def turn_away(connection: socket.socket) -> None:
    """Answer one client, after the beginning of its request: else it might miss the answer."""
    try:
        connection.settimeout(READ_SECONDS)
        connection.recv(MAX_READ)
    except TimeoutError:
        pass
    except OSError:
        return
    try:
        connection.sendall(ANSWER)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(MAX_READ)  # what is unread when the socket closes would make the client lose the answer
    except OSError:
        pass
