// Helpers for drivers: reads below /sys that tell an absence from a failure, problems, devices, and container edits.
//
// They are thin: every function takes and returns what the contract has, with the fields left out that a driver does not use.

import * as sysfs from "nodedock:driver/sysfs@0.2.0";

// Codes of links that are none: recorded machines have such.
const NOT_LINKS = ["not-a-link", "outside-sysfs"];
const CAPABILITIES = [
  "sysfsRead", "sysfsWrite", "hostFiles", "pciDriver", "deviceNodes", "mounts", "hooks", "env", "netDevices",
];
const LIMITS = ["memoryMib", "wallMs", "cpuMs", "concurrentCalls"];

/** A problem to throw: the host gives it to the caller, and retries by its kind. */
export class Problem extends Error {
  constructor(kind, code, message, { retryAfterMs, details = {} } = {}) {
    super(message);
    this.name = "Problem";
    this.payload = { kind, code, message, retryAfterMs, details: pairs(details) };
  }

  /** A refusal: the host does not retry until the claim or the config changes. */
  static invalid(code, message) {
    return new Problem("invalid", code, message);
  }

  /** Something named in the request does not exist. */
  static notFound(code, message) {
    return new Problem("not-found", code, message);
  }
}

/** Returns whether an error of a read is a fact about the node: nothing exists there, or the kernel has no value now. */
export function isAbsent(error) {
  return error?.payload?.kind === "not-found" || error?.payload?.code === "no-value";
}

/**
 * Returns the content of a file below /sys, or undefined if it does not exist or has no value now. Throws every other problem: a read that
 * failed says nothing about the node.
 */
export function find(path) {
  return present(() => sysfs.read(path), isAbsent);
}

/** Returns the target of a link below /sys, relative to /sys, or undefined if there is no link. Throws every other problem. */
export function findLink(path) {
  return present(() => sysfs.readLink(path), (error) => isAbsent(error) || NOT_LINKS.includes(error?.payload?.code));
}

/**
 * Returns the content of a file as `find` does, parsed, such as an integer; undefined also for content that does not parse, for which
 * `parse` returns undefined. `findParsed(path, hexadecimal)` reads PCI identifiers.
 */
export function findParsed(path, parse = integer) {
  const text = find(path);
  return text === undefined ? undefined : parse(text.trim());
}

/** Parses a decimal integer; undefined for other text. */
export function integer(text) {
  return /^[+-]?\d+$/.test(text) ? Number(text) : undefined;
}

/** Parses `0x10de` and `10de`; undefined for other text. */
export function hexadecimal(text) {
  return /^(0x)?[0-9a-f]+$/i.test(text) ? Number.parseInt(text, 16) : undefined;
}

/** Returns the directories of devices that match a glob below /sys, such as `class/net/*`: links are followed, each once, sorted. */
export function devices(pattern) {
  return [...new Set(sysfs.glob(pattern).map((path) => findLink(path) ?? path))].sort();
}

function present(read, isNone) {
  try {
    return read();
  } catch (error) {
    if (isNone(error)) return undefined;
    throw error;
  }
}

/** Describes a driver. `requests` has capabilities (`deviceNodes: [...]`), limits (`memoryMib: 128`), a summary, events and annotations. */
export function driverInfo(name, version, requests = {}) {
  const { summary = "", eventSubsystems = [], discoveryPeriodSeconds, annotations = {}, ...rest } = requests;
  const unknown = Object.keys(rest).filter((key) => !CAPABILITIES.includes(key) && !LIMITS.includes(key));
  if (unknown.length > 0) throw new TypeError(`the contract has no capabilities or limits ${unknown.join(", ")}`);
  return {
    name,
    version,
    summary,
    capabilities: Object.fromEntries(CAPABILITIES.map((key) => [key, rest[key] ?? []])),
    limits: Object.fromEntries(LIMITS.map((key) => [key, rest[key]])),
    eventSubsystems,
    discoveryPeriodSeconds,
    annotations: pairs(annotations),
  };
}

/** Describes a device. `attributes` are integers, booleans, texts, lists of them, or values of the contract (`{ tag: "version", val: "1.0.0" }`). */
export function device(name, { attributes = {}, ...fields } = {}) {
  return {
    name,
    attributes: Object.entries(attributes).map(([key, value]) => ({ name: key, value: valueOf(key, value) })),
    capacities: [],
    taints: [],
    consumes: [],
    allowMultipleAllocations: false,
    identity: [],
    numaNodes: [],
    annotations: [],
    ...fields,
  };
}

/** Describes a pool of devices. */
export function pool(name, devices, fields = {}) {
  return { name, devices, sharedCounters: [], extendedResource: undefined, annotations: [], ...fields };
}

function valueOf(name, value) {
  const tag = tagOf(value);
  if (tag !== undefined) return { tag, val: tag === "int" ? BigInt(value) : value };
  if (typeof value?.tag === "string") return value;
  const tags = Array.isArray(value) ? new Set(value.map(tagOf)) : new Set();
  const [of] = tags;
  if (tags.size === 1 && of !== undefined) return { tag: `${of}s`, val: of === "int" ? value.map(BigInt) : value };
  throw new TypeError(`attribute ${name} has the value ${String(value)}, which is no integer, boolean, text or list of one of them`);
}

function tagOf(value) {
  if (typeof value === "bigint" || Number.isSafeInteger(value)) return "int";
  return { boolean: "boolean", string: "text" }[typeof value];
}

/** Returns container edits. `env` has texts by name; `nodes` and `mounts` are paths, or `deviceNode(...)` and `mount(...)`. */
export function edits({ env = {}, nodes = [], mounts = [], ...fields } = {}) {
  return {
    env: pairs(env),
    deviceNodes: nodes.map((node) => (typeof node === "string" ? deviceNode(node) : node)),
    mounts: mounts.map((path) => (typeof path === "string" ? mount(path) : path)),
    netDevices: [],
    hooks: [],
    additionalGids: [],
    intelRdt: undefined,
    ...fields,
  };
}

/** Returns a node for a container, at the same path. `fields` are those of the contract's device node, such as `hostPath`. */
export function deviceNode(path, fields = {}) {
  return { path, access: { read: true, write: true }, ...fields };
}

/** Returns a mount for a container, at the same path if there is no other, and read-only. */
export function mount(hostPath, containerPath = hostPath, options = ["ro", "nosuid", "nodev", "bind"]) {
  return { hostPath, containerPath, options, fsType: undefined };
}

/** Returns a prepared device for one of a claim. */
export function prepared(allocated, deviceEdits, status = undefined) {
  const { request, pool: ofPool, device: name, shareId } = allocated;
  // Without the subrequest of a prioritised list.
  return { requests: [request.split("/")[0]], pool: ofPool, device: name, shareId, edits: deviceEdits, status };
}

/** Returns a prepared claim. `memo` are bytes that the driver gets back. */
export function preparedClaim(devices, { memo = new Uint8Array(), annotations = {}, ...fields } = {}) {
  return { devices, edits: edits(), annotations: pairs(annotations), memo, ...fields };
}

/** Returns the outcome of one claim: a problem that the function throws is that of this claim only. */
export function outcome(work, ...values) {
  try {
    return { tag: "ok", val: work(...values) };
  } catch (error) {
    if (error?.payload === undefined) throw error;
    return { tag: "err", val: error.payload };
  }
}

function pairs(texts) {
  return Object.entries(texts).map(([key, value]) => ({ key, value }));
}
