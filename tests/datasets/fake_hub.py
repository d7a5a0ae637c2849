"""A server that answers as the Hugging Face Hub does for one data set: its facts, its tree and its files."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """files: path -> content. asked: the paths that were asked for. Serves until `shutdown`."""

    def __init__(self, repo, files):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repo, self.files, self.asked = repo, files, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def facts(self):
        siblings = [{"rfilename": path, "size": len(content)} for path, content in self.files.items()]
        return {"id": self.repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}

    def tree(self):
        return [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in self.files.items()
        ]


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _send(self, status, content, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _answer(self):
        hub = self.server
        path = self.path.split("?")[0]
        hub.asked.append((self.command, path))
        api = f"/api/datasets/{hub.repo}"
        file = path.removeprefix(f"/datasets/{hub.repo}/resolve/{COMMIT}/")
        if path.startswith(f"{api}/tree/"):
            self._send(200, json.dumps(hub.tree()).encode())
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            self._send(200, json.dumps(hub.facts()).encode())
        elif file in hub.files:
            content = hub.files[file]
            self._send(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)
        elif path.startswith(f"{api}/revision/"):
            self._send(404, b"{}", X_Error_Code="RevisionNotFound")
        else:
            self._send(404, b"{}", X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = _answer
