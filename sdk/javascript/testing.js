// A fake host for unit tests of drivers, which need no WebAssembly. Import the driver after this module:
//
//   import { FakeHost } from "./nodedock/testing.js";
//   const { discovery } = await import("./driver.js");
//
//   const host = new FakeHost().node("/dev/fuse", 10, 229);
//   const inventory = host.run(() => discovery.discover(host.context(), { tag: "load" }));

import { register } from "node:module";
import { posix } from "node:path";

register("./hooks.js", import.meta.url);

const CALL = Symbol.for("nodedock.call");
globalThis[CALL] = () => {
  throw new Error("no fake host is in use: call the driver in FakeHost.run");
};

/**
 * A node: files and links below /sys, files, device nodes and prepared claims, all in memory. `lines` has the lines of the log as
 * [level, message], `writes` the values written below /sys as [path, value].
 */
export class FakeHost {
  files = new Map();
  links = new Map();
  hostFiles = new Map();
  nodes = new Map();
  claims = new Map();
  failing = new Map();
  lines = [];
  writes = [];

  /** Adds a file below /sys. */
  file(path, content = "") {
    this.files.set(path, content);
    return this;
  }

  /** Adds a link below /sys; the target is relative to the link's directory, or to /sys if it begins with a slash. */
  link(path, target) {
    const start = target.startsWith("/") ? "/" : `/${posix.dirname(path)}`;
    this.links.set(path, posix.resolve(start, target).slice(1));
    return this;
  }

  /** Adds a file outside of /sys and /dev. */
  hostFile(path, content = "") {
    this.hostFiles.set(path, content);
    return this;
  }

  /** Adds a character device below /dev. */
  node(path, major, minor, sysfsPath = undefined) {
    this.nodes.set(path, { path, kind: "character", major, minor, mode: 0o660, uid: 0, gid: 0, sysfsPath });
    return this;
  }

  /** Removes a file, a link or a node, and what is below it. */
  remove(path) {
    for (const kind of [this.files, this.links, this.hostFiles, this.nodes]) {
      for (const key of [...kind.keys()]) if (key === path || key.startsWith(`${path}/`)) kind.delete(key);
    }
    return this;
  }

  /** Makes reads of a path below /sys or of a node fail. */
  fail(path, code = "io-error") {
    this.failing.set(path, code);
    return this;
  }

  /** Returns a claim of devices, each as [pool, device], with parameters of the claim as JSON. */
  claim(uid, devices, parameters = undefined) {
    const allocated = devices.map(([pool, device]) => (
      { request: "request", pool, device, shareId: undefined, consumed: [], adminAccess: false }
    ));
    const entries = parameters === undefined ? [] : [{ source: "claim", requests: [], parameters }];
    const id = { namespace: "default", name: uid, uid };
    return { id, devices: allocated, parameters: entries, reservedFor: [], annotations: [], progress: new Uint8Array() };
  }

  /** Returns the record of a claim, and has the host know it as prepared. */
  record(claim, memo = new Uint8Array(), prepared = true) {
    const record = { claim, prepared, memo, driverVersion: "0.1.0", bootId: "boot" };
    this.claims.set(claim.id.uid, record);
    return record;
  }

  /** Returns the context of a call. */
  context(config = "{}") {
    return { requestId: "request", nodeName: "node", bootId: "boot", nowMs: 0n, config, facts: [] };
  }

  /** Calls the driver with this host. */
  run(call) {
    const before = globalThis[CALL];
    globalThis[CALL] = (name, key, values) => {
      const found = this.functions()[name]?.[key];
      if (found === undefined) throw new Error(`the fake host has no ${name} ${key}`);
      return found(...values);
    };
    try {
      return call();
    } finally {
      globalThis[CALL] = before;
    }
  }

  #globNodes(pattern) {
    return this.#matching(pattern, this.nodes.keys()).map((path) => this.#stat(path));
  }

  functions() {
    const page = (isWanted) => ({ claims: [...this.claims.values()].filter(isWanted), next: undefined });
    return {
      log: { write: (level, message) => void this.lines.push([level, message]) },
      sysfs: {
        read: (path) => this.#read(path).replace(/\n+$/, ""),
        readBytes: (path) => new TextEncoder().encode(this.#read(path)),
        readDir: (path) => this.#readDir(path),
        readLink: (path) => this.#readLink(path),
        glob: (pattern) => this.#matching(pattern, this.#paths()),
        // Nothing appears while a test waits.
        waitFor: (pattern, _milliseconds) => this.#matching(pattern, this.#paths()),
      },
      "sysfs-write": { write: (path, value) => this.#write(path, value) },
      "host-files": { read: (path) => this.#readHostFile(path) },
      "device-nodes": {
        stat: (path) => this.#stat(path),
        glob: (pattern) => this.#globNodes(pattern),
        waitFor: (pattern, _milliseconds) => this.#globNodes(pattern),
      },
      "prepared-claims": {
        all: () => page(() => true),
        usingDevice: (pool, device) =>
          page(({ claim }) => claim.devices.some((one) => one.pool === pool && one.device === device)),
        get: (uid) => this.claims.get(uid),
      },
    };
  }

  #check(path) {
    if (this.failing.has(path)) throw problem("unavailable", this.failing.get(path), path);
  }

  #resolve(path) {
    let real = path;
    for (let followed = 0; followed < 40; followed += 1) {
      const link = prefixes(real).find((prefix) => this.links.has(prefix));
      if (link === undefined) return real;
      real = this.links.get(link) + real.slice(link.length);
    }
    throw problem("invalid", "outside-sysfs", path);
  }

  #children(directory) {
    const prefix = `${directory}/`;
    const below = [...this.files.keys(), ...this.links.keys()].filter((key) => key.startsWith(prefix));
    return [...new Set(below.map((key) => key.slice(prefix.length).split("/")[0]))].sort();
  }

  #read(path) {
    this.#check(path);
    const real = this.#resolve(path);
    if (this.files.has(real)) return this.files.get(real);
    throw this.#children(real).length > 0 ? problem("invalid", "not-a-file", path) : problem("not-found", "no-such-path", path);
  }

  #readDir(path) {
    this.#check(path);
    const real = this.#resolve(path);
    if (this.files.has(real)) throw problem("invalid", "not-a-directory", path);
    const children = this.#children(real);
    if (children.length === 0) throw problem("not-found", "no-such-path", path);
    return children;
  }

  #readLink(path) {
    this.#check(path);
    const parent = posix.dirname(path);
    const real = parent === "." ? path : `${this.#resolve(parent)}/${posix.basename(path)}`;
    if (this.links.has(real)) return this.#resolve(real);
    const isThere = this.files.has(real) || this.#children(real).length > 0;
    throw isThere ? problem("invalid", "not-a-link", path) : problem("not-found", "no-such-path", path);
  }

  /** Returns all paths, also those of directories and those by links. */
  #paths() {
    const found = new Set([...this.files.keys(), ...this.links.keys()].flatMap(prefixes));
    for (const link of this.links.keys()) {
      const target = this.#resolve(link);
      for (const path of [...found]) if (path.startsWith(`${target}/`)) found.add(link + path.slice(target.length));
    }
    return found;
  }

  #matching(pattern, paths) {
    this.#check(pattern);
    return [...paths].filter((path) => matches(pattern.split("/"), path.split("/"))).sort();
  }

  #write(path, value) {
    this.#read(path);
    this.files.set(this.#resolve(path), value);
    this.writes.push([path, value]);
  }

  #readHostFile(path) {
    this.#check(path);
    if (!this.hostFiles.has(path)) throw problem("not-found", "no-such-path", path);
    return this.hostFiles.get(path).replace(/\n+$/, "");
  }

  #stat(path) {
    this.#check(path);
    if (!this.nodes.has(path)) throw problem("not-found", "no-such-node", path);
    return this.nodes.get(path);
  }
}

/** Returns whether the segments of a path match those of a glob. */
export function matches([first, ...rest], path) {
  if (first === undefined) return path.length === 0;
  if (first === "**") return [...path, ""].some((_, skipped) => matches(rest, path.slice(skipped)));
  const text = first.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
  return path.length > 0 && new RegExp(`^${text}$`, "s").test(path[0]) && matches(rest, path.slice(1));
}

function prefixes(path) {
  const parts = path.split("/");
  return parts.map((_, end) => parts.slice(0, end + 1).join("/"));
}

function problem(kind, code, path) {
  const message = `${path}: ${code}`;
  return Object.assign(new Error(message), { payload: { kind, code, message, retryAfterMs: undefined, details: [] } });
}
