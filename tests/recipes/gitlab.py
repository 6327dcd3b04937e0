#!/usr/bin/env python3
"""Answers a GitLab Runner as a GitLab with one job, and writes what the job prints.

    gitlab.py ADDRESS_FILE LOG [--cancel-at TEXT] LINE...

ADDRESS_FILE  gets the address of the server
LOG           gets the log of the job, as the runner sends it
TEXT          the job is cancelled when its log has this text
LINE          a line of the job's script

It ends when the runner has reported the end of the job, with 0 if it succeeded, and 1 if it failed or was cancelled.
"""

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def job(lines):
    commit = "0" * 40
    return {
        "id": 1,
        "token": "job-token",
        "allow_git_fetch": False,
        "job_info": {"id": 1, "name": "recipe", "stage": "test", "project_id": 1, "project_name": "recipe"},
        "git_info": {"repo_url": "http://127.0.0.1/recipe.git", "ref": "main", "sha": commit, "before_sha": commit, "ref_type": "branch"},
        "runner_info": {"timeout": 300},
        "variables": [
            {"key": key, "value": value, "public": True}
            for key, value in {
                "CI_PROJECT_PATH": "recipe/recipe",
                "CI_PROJECT_DIR": "/builds/recipe/recipe",
                "CI_SERVER_URL": "http://127.0.0.1",
                "CI_JOB_ID": "1",
                "GIT_STRATEGY": "none",
            }.items()
        ],
        "steps": [{"name": "script", "script": lines, "timeout": 300, "when": "on_success", "allow_failure": False}],
        "features": {"trace_sections": False},
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, content=None, headers=()):
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if body:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def state(self):
        """Header by which the runner learns that the job is cancelled."""
        cancelled = self.server.cancel_at is not None and self.server.cancel_at in self.server.log
        return [("Job-Status", "canceling" if cancelled else "running"), ("X-GitLab-Trace-Update-Interval", "1")]

    def do_POST(self):
        self.body()
        if not self.path.endswith("/jobs/request"):
            return self.answer(404)
        with self.server.lock:
            first, self.server.given = not self.server.given, True
        self.answer(201, job(self.server.lines)) if first else self.answer(204)

    def do_PATCH(self):
        content = self.body()
        with self.server.lock:
            start = int(self.headers["Content-Range"].split("-")[0])
            self.server.log = self.server.log[:start] + content
            with open(self.server.log_file, "wb") as file:
                file.write(self.server.log)
        self.answer(202, headers=[("Range", f"0-{len(self.server.log)}"), *self.state()])

    def do_PUT(self):
        state = json.loads(self.body()).get("state")
        self.answer(200, headers=self.state())
        if state in ("success", "failed"):
            self.server.result = state
            threading.Thread(target=self.server.shutdown).start()

    def log_message(self, *_):
        pass


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("address_file")
    arguments.add_argument("log")
    arguments.add_argument("--cancel-at")
    arguments.add_argument("lines", nargs="+")
    given = arguments.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.lock, server.given, server.log, server.result = threading.Lock(), False, b"", None
    server.lines, server.log_file = given.lines, given.log
    server.cancel_at = given.cancel_at.encode() if given.cancel_at else None
    with open(given.address_file + ".new", "w") as file:
        file.write(f"http://127.0.0.1:{server.server_port}")
    os.rename(given.address_file + ".new", given.address_file)
    server.serve_forever()
    sys.exit(0 if server.result == "success" else 1)


if __name__ == "__main__":
    main()
