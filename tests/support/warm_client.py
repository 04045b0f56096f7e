"""The client of tests/support/warm_python.py, which explains it: `client.py ADDRESS WORDS...`.

It starts in milliseconds, since it runs without site-packages and imports little.
"""

import ctypes
import json
import os
import signal
import socket
import sys

PASSED_ON = signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def main(address: str, words: list[str]) -> None:
    """Ends as the program does that the server runs, or becomes the real Python."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this ends with its parent
    request = {"words": words, "folder": os.getcwd(), "variables": dict(os.environ)}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(text)
        answers = server.makefile()
        pid = int(answers.readline())
        if pid:
            for each in PASSED_ON:
                signal.signal(each, lambda number, _: os.kill(pid, number))
            code = int(answers.readline())
    if not pid:
        os.execv(sys.executable, [sys.executable, *words])
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(sys.argv[1], sys.argv[2:])
