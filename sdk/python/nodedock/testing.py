"""A fake host for unit tests of drivers, which need no WebAssembly.

    from nodedock import testing
    testing.bindings("wit")

    import driver

    host = testing.FakeHost()
    host.node("/dev/fuse", 10, 229)
    with host:
        inventory = driver.Discovery().discover(host.context(), None)
"""

import fnmatch
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile


def bindings(wit, world="driver"):
    """Has `componentize-py` generate the bindings (`wit_world`) of a world, for this process. Does nothing if they are there."""
    if importlib.util.find_spec("wit_world") is not None:
        return
    beside = os.path.join(os.path.dirname(sys.executable), "componentize-py")
    tool = beside if os.path.exists(beside) else shutil.which("componentize-py")
    if tool is None:
        raise RuntimeError("componentize-py is not installed: python3 -m pip install componentize-py")
    directory = tempfile.TemporaryDirectory(prefix="nodedock-bindings-")
    subprocess.run([tool, "-d", wit, "-w", world, "bindings", directory.name], check=True)
    sys.path.append(directory.name)
    # As long as the process.
    bindings.directory = directory
    importlib.invalidate_caches()


class FakeHost:
    """A node: files and links below /sys, files, device nodes and prepared claims, all in memory. `with` makes it that of the driver.

    `lines` are the lines of the log as (level, message); `writes` the values written below /sys as (path, value).
    """

    def __init__(self):
        self.files, self.links, self.host_files, self.nodes = {}, {}, {}, {}
        self.claims, self.lines, self.writes, self.failing = {}, [], [], {}
        self.replaced = []

    # The node.

    def file(self, path, content=""):
        """Adds a file below /sys."""
        self.files[path] = content
        return self

    def link(self, path, target):
        """Adds a link below /sys; the target is relative to the link's directory, or to /sys if it begins with a slash."""
        start = "" if target.startswith("/") else os.path.dirname(path)
        self.links[path] = os.path.normpath(os.path.join(start, target.lstrip("/")))
        return self

    def host_file(self, path, content=""):
        """Adds a file outside of /sys and /dev."""
        self.host_files[path] = content
        return self

    def node(self, path, major, minor, sysfs_path=None):
        """Adds a character device below /dev."""
        self.nodes[path] = (major, minor, sysfs_path)
        return self

    def remove(self, path):
        """Removes a file, a link or a node, and what is below it."""
        for kind in (self.files, self.links, self.host_files, self.nodes):
            for key in [key for key in kind if key == path or key.startswith(path + "/")]:
                del kind[key]
        return self

    def fail(self, path, code="io-error"):
        """Makes reads of a path below /sys or of a node fail."""
        self.failing[path] = code
        return self

    def claim(self, uid, *devices, parameters=None):
        """Returns a claim of devices (pool, device), with parameters of the claim as JSON."""
        from wit_world.imports.claims import AllocatedDevice, Claim, ClaimRef, OpaqueParameters, ParametersSource

        allocated = [AllocatedDevice("request", pool, device, None, [], False) for pool, device in devices]
        entries = [] if parameters is None else [OpaqueParameters(ParametersSource.CLAIM, [], parameters)]
        return Claim(ClaimRef("default", uid, uid), allocated, entries, [], [], b"")

    def record(self, claim, memo=b"", is_prepared=True):
        """Returns the record of a claim, and has the host know it as prepared."""
        from wit_world.imports.claims import ClaimRecord

        record = ClaimRecord(claim, is_prepared, memo, "0.1.0", "boot")
        self.claims[claim.id.uid] = record
        return record

    def context(self, config="{}"):
        """Returns the context of a call."""
        from wit_world.imports.common import Context

        return Context("request", "node", "boot", 0, config, [])

    # The functions of the host.

    def __enter__(self):
        for interface, functions in self.functions().items():
            module = importlib.import_module(f"wit_world.imports.{interface}")
            for name, function in functions.items():
                self.replaced.append((module, name, getattr(module, name)))
                setattr(module, name, function)
        return self

    def __exit__(self, *_):
        for module, name, function in reversed(self.replaced):
            setattr(module, name, function)
        self.replaced = []

    def glob_nodes(self, pattern):
        return [self.stat(path) for path in self.matching(pattern, self.nodes)]

    def functions(self):
        return {
            "log": {"write": lambda level, message, fields: self.lines.append((level.name.lower(), message))},
            "sysfs": {
                "read": lambda path: self.read(path).rstrip("\n"),
                "read_bytes": lambda path: self.read(path).encode(),
                "read_dir": self.read_dir,
                "read_link": self.read_link,
                "glob": lambda pattern: self.matching(pattern, self.paths()),
                # Nothing appears while a test waits.
                "wait_for": lambda pattern, milliseconds: self.matching(pattern, self.paths()),
            },
            "sysfs_write": {"write": self.write},
            "host_files": {"read": self.read_host_file},
            "device_nodes": {
                "stat": self.stat,
                "glob": self.glob_nodes,
                "wait_for": lambda pattern, milliseconds: self.glob_nodes(pattern),
            },
            "prepared_claims": {
                "all": lambda after: self.page(lambda claim: True),
                "using_device": lambda pool, device, after: self.page(
                    lambda record: any((one.pool, one.device) == (pool, device) for one in record.claim.devices)
                ),
                "get": self.claims.get,
            },
        }

    def resolve(self, path):
        """Follows the links of a path."""
        for _ in range(40):
            parts = path.split("/")
            prefixes = ["/".join(parts[: end + 1]) for end in range(len(parts))]
            link = next((prefix for prefix in prefixes if prefix in self.links), None)
            if link is None:
                return path
            path = self.links[link] + path[len(link):]
        raise problem("invalid", "outside-sysfs", path)

    def check(self, path):
        if path in self.failing:
            raise problem("unavailable", self.failing[path], path)

    def read(self, path):
        self.check(path)
        real = self.resolve(path)
        if real in self.files:
            return self.files[real]
        raise problem("invalid", "not-a-file", path) if self.children(real) else problem("not-found", "no-such-path", path)

    def read_dir(self, path):
        self.check(path)
        real = self.resolve(path)
        if real in self.files:
            raise problem("invalid", "not-a-directory", path)
        if not self.children(real):
            raise problem("not-found", "no-such-path", path)
        return self.children(real)

    def read_link(self, path):
        self.check(path)
        parent, _, name = path.rpartition("/")
        real = f"{self.resolve(parent)}/{name}" if parent else name
        if real in self.links:
            return self.resolve(real)
        there = real in self.files or self.children(real)
        raise problem("invalid", "not-a-link", path) if there else problem("not-found", "no-such-path", path)

    def children(self, directory):
        prefix = directory + "/"
        below = {key[len(prefix):].split("/")[0] for key in (*self.files, *self.links) if key.startswith(prefix)}
        return sorted(below)

    def paths(self):
        """Returns all paths, also those of directories and those by links."""
        found = set()
        for key in (*self.files, *self.links):
            parts = key.split("/")
            found.update("/".join(parts[: end + 1]) for end in range(len(parts)))
        for link in self.links:
            target = self.resolve(link)
            found.update(link + path[len(target):] for path in list(found) if path.startswith(target + "/"))
        return found

    def matching(self, pattern, paths):
        self.check(pattern)
        return sorted(path for path in paths if matches(pattern.split("/"), path.split("/")))

    def write(self, path, value):
        self.read(path)
        self.files[self.resolve(path)] = value
        self.writes.append((path, value))

    def read_host_file(self, path):
        self.check(path)
        if path not in self.host_files:
            raise problem("not-found", "no-such-path", path)
        return self.host_files[path].rstrip("\n")

    def stat(self, path):
        from wit_world.imports.container_edits import NodeKind
        from wit_world.imports.device_nodes import NodeInfo

        self.check(path)
        if path not in self.nodes:
            raise problem("not-found", "no-such-node", path)
        major, minor, sysfs_path = self.nodes[path]
        return NodeInfo(path, NodeKind.CHARACTER, major, minor, 0o660, 0, 0, sysfs_path)

    def page(self, is_wanted):
        from wit_world.imports.prepared_claims import Page

        return Page([record for record in self.claims.values() if is_wanted(record)], None)


def matches(pattern, path):
    """Returns whether the segments of a path match those of a glob."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(matches(pattern[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and matches(pattern[1:], path[1:])


def problem(kind, code, path):
    from componentize_py_types import Err
    from wit_world.imports.common import Problem, ProblemKind

    return Err(Problem(ProblemKind[kind.replace("-", "_").upper()], code, f"{path}: {code}", None, []))
