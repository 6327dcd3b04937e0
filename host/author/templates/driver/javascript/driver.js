// Offers nodes below /dev as devices.
//
// Every call runs in a fresh instance of this program, in the state that `componentize-js` recorded after it ran this file. Variables do
// not keep their value until the next call: state that must persist goes into the memo of a claim.

import * as deviceNodes from "nodedock:driver/device-nodes@@CONTRACT@";

const POOL = "nodes";
// Path of the node by the name of its device.
const NODES = new Map([["fuse", "/dev/fuse"], ["net-tun", "/dev/net/tun"]]);

/** What is thrown with a `payload` is the problem of the call. */
class Refusal extends Error {
  constructor(kind, code, message) {
    super(message);
    this.payload = { kind, code, message, retryAfterMs: undefined, details: [] };
  }
}

export const identity = {
  describe() {
    return {
      name: "my-gpu.example.com",
      version: "0.1.0",
      summary: "Nodes below /dev",
      capabilities: {
        sysfsRead: [],
        sysfsWrite: [],
        hostFiles: [],
        pciDriver: [],
        deviceNodes: [...NODES.values()],
        mounts: [],
        hooks: [],
        env: ["MY_GPU_*"],
        netDevices: [],
      },
      limits: { memoryMib: undefined, wallMs: undefined, cpuMs: undefined, concurrentCalls: undefined },
      eventSubsystems: ["misc"],
      discoveryPeriodSeconds: undefined,
      annotations: [],
    };
  },
};

export const discovery = {
  discover(_context, _trigger) {
    // A node that this machine does not have is not an error.
    const devices = [...NODES].flatMap(([name, path]) => deviceNodes.glob(path).map((node) => device(name, node)));
    return { pools: [{ name: POOL, devices, sharedCounters: [], extendedResource: undefined, annotations: [] }] };
  },
};

export const preparation = {
  prepare(_context, claims) {
    return claims.map((claim) => ({ uid: claim.id.uid, outcome: outcome(prepare, claim) }));
  },
  unprepare(_context, claims) {
    // Nothing of a claim is left on the node.
    return claims.map((record) => ({ uid: record.claim.id.uid, outcome: { tag: "ok", val: undefined } }));
  },
};

/** A problem that is thrown for one claim is that claim's outcome, and the others get theirs. */
function outcome(work, argument) {
  try {
    return { tag: "ok", val: work(argument) };
  } catch (error) {
    if (error.payload === undefined) throw error;
    return { tag: "err", val: error.payload };
  }
}

function device(name, node) {
  return {
    name,
    attributes: [{ name: "minor", value: { tag: "int", val: BigInt(node.minor) } }],
    capacities: [],
    taints: [],
    consumes: [],
    allowMultipleAllocations: false,
    identity: [`dev:${node.path}`],
    numaNodes: [],
    annotations: [],
  };
}

function prepare(claim) {
  return { devices: claim.devices.map(prepareDevice), edits: edits([], []), annotations: [], memo: new Uint8Array() };
}

function prepareDevice(allocated) {
  const path = NODES.get(allocated.device);
  if (path === undefined) throw new Refusal("not-found", "no-such-device", allocated.device);
  // Throws the host's problem for a node that is gone.
  deviceNodes.stat(path);
  const variable = `MY_GPU_${allocated.device.replaceAll("-", "_").toUpperCase()}`;
  return {
    // Without the subrequest of a prioritised list.
    requests: [allocated.request.split("/")[0]],
    pool: allocated.pool,
    device: allocated.device,
    shareId: allocated.shareId,
    edits: edits([{ key: variable, value: path }], [{ path, access: { read: true, write: true } }]),
    status: undefined,
  };
}

function edits(env, nodes) {
  return { env, deviceNodes: nodes, mounts: [], netDevices: [], hooks: [], additionalGids: [], intelRdt: undefined };
}
