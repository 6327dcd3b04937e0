// Two slots as devices: the example driver of Nodedock in JavaScript.
//
// Every call runs in a fresh instance of this program, in the state that `jco` recorded after it ran this file. Variables do not keep
// their value until the next call: state that must persist goes into the memo of a claim.

import * as log from "nodedock:driver/log@0.2.0";
import * as preparedClaims from "nodedock:driver/prepared-claims@0.2.0";
import * as sysfs from "nodedock:driver/sysfs@0.2.0";

const POOL = "slots";
const SLOTS = ["slot-0", "slot-1"];
const MODES = ["normal", "quiet"];
const CPUS = "devices/system/cpu/online";

/** A problem on its way to the host: what is thrown with a `payload` is the error of a WIT result. */
class Refusal extends Error {
  constructor(kind, code, message) {
    super(message);
    this.payload = { kind, code, message, retryAfterMs: undefined, details: [] };
  }
}

export const identity = {
  describe() {
    return {
      name: "golden.nodedock.dev",
      version: "0.1.0",
      summary: "Two slots, the same driver in every language",
      capabilities: {
        sysfsRead: [CPUS],
        sysfsWrite: [],
        hostFiles: [],
        pciDriver: [],
        deviceNodes: [],
        mounts: [],
        hooks: [],
        env: ["GOLDEN_*"],
        netDevices: [],
      },
      limits: { memoryMib: undefined, wallMs: undefined, cpuMs: undefined, concurrentCalls: undefined },
      eventSubsystems: [],
      discoveryPeriodSeconds: undefined,
      annotations: [{ key: "language", value: "javascript" }],
    };
  },
};

export const discovery = {
  discover(_context, _trigger) {
    // For a file that is not granted or does not exist the host throws its problem, which is the result of this call.
    const cpus = sysfs.read(CPUS);
    say("discovered", { devices: String(SLOTS.length), claims: String(countPrepared()) });
    const devices = SLOTS.map((name, index) => slot(index, name, cpus));
    return { pools: [{ name: POOL, devices, sharedCounters: [], extendedResource: undefined, annotations: [] }] };
  },
};

export const preparation = {
  prepare(_context, claims) {
    return claims.map((claim) => ({ uid: claim.id.uid, outcome: outcome(prepare, claim) }));
  },
  unprepare(_context, claims) {
    return claims.map((record) => ({ uid: record.claim.id.uid, outcome: outcome(unprepare, record) }));
  },
};

function say(message, fields) {
  log.write("info", message, Object.entries(fields).map(([key, value]) => ({ key, value })));
}

/** Counts the prepared claims over all pages. */
function countPrepared() {
  let page = preparedClaims.all(undefined);
  let count = page.claims.length;
  while (page.next !== undefined) {
    page = preparedClaims.all(page.next);
    count += page.claims.length;
  }
  return count;
}

/** A problem that is thrown for one claim is that claim's outcome, and the others get theirs. */
function outcome(work, argument) {
  try {
    return { tag: "ok", val: work(argument) };
  } catch (error) {
    if (error.payload === undefined) throw error;
    return { tag: "err", val: error.payload };
  }
}

function slot(index, name, cpus) {
  return {
    name,
    attributes: [
      { name: "index", value: { tag: "int", val: BigInt(index) } },
      { name: "model", value: { tag: "text", val: "Golden Slot" } },
      { name: "firmware", value: { tag: "version", val: "1.2.0" } },
      { name: "spare", value: { tag: "boolean", val: index > 0 } },
      { name: "cpus", value: { tag: "text", val: cpus } },
    ],
    capacities: [],
    taints: [],
    consumes: [],
    allowMultipleAllocations: true,
    identity: [],
    numaNodes: [],
    annotations: [],
  };
}

function prepare(claim) {
  const chosen = claim.devices.map((allocated) => ({ allocated, mode: modeOf(claim, allocated) }));
  const memo = chosen.map(({ allocated, mode }) => `${allocated.device} ${mode}\n`).join("");
  const before = preparedClaims.get(claim.id.uid);
  if (before?.prepared && new TextDecoder().decode(before.memo) !== memo) {
    throw new Refusal("invalid", "prepared-otherwise", "the claim is prepared with other devices or modes");
  }
  say("prepared", { claim: claim.id.name });
  return {
    devices: chosen.map(({ allocated, mode }) => ready(allocated, mode)),
    edits: edits([]),
    annotations: [],
    memo: new TextEncoder().encode(memo),
  };
}

/** What the last of the parameters for this device say: those of the claim come after those of its class. */
function modeOf(claim, allocated) {
  if (allocated.pool !== POOL || !SLOTS.includes(allocated.device)) {
    throw new Refusal("not-found", "no-such-device", `there is no ${allocated.pool}/${allocated.device}`);
  }
  const names = [allocated.request, baseRequest(allocated)];
  const applies = ({ requests }) => requests.length === 0 || requests.some((request) => names.includes(request));
  const last = claim.parameters.filter(applies).at(-1);
  const mode = last === undefined ? MODES[0] : modeIn(last.parameters);
  if (!MODES.includes(mode)) {
    throw new Refusal("invalid", "no-such-mode", `mode "${mode}" is not one of normal, quiet`);
  }
  return mode;
}

// `invalid` is permanent: the host does not retry until the claim changes.
function modeIn(parameters) {
  const bad = () =>
    new Refusal("invalid", "bad-parameters", 'the parameters are not an object with nothing but a text "mode"');
  let found;
  try {
    found = JSON.parse(parameters);
  } catch {
    throw bad();
  }
  const isObject = typeof found === "object" && found !== null && !Array.isArray(found);
  if (!isObject || Object.keys(found).some((key) => key !== "mode")) throw bad();
  const mode = "mode" in found ? found.mode : MODES[0];
  if (typeof mode !== "string") throw bad();
  return mode;
}

function ready(allocated, mode) {
  const name = `GOLDEN_${allocated.device.toUpperCase().replaceAll("-", "_")}`;
  return {
    requests: [baseRequest(allocated)],
    pool: allocated.pool,
    device: allocated.device,
    shareId: allocated.shareId,
    edits: edits([{ key: name, value: mode }]),
    status: undefined,
  };
}

/** The request without the subrequest of a prioritised list. */
function baseRequest(allocated) {
  return allocated.request.split("/")[0];
}

function edits(env) {
  return { env, deviceNodes: [], mounts: [], netDevices: [], hooks: [], additionalGids: [], intelRdt: undefined };
}

function unprepare(record) {
  // A claim whose prepare did not complete has no memo and nothing to unprepare.
  const lines = new TextDecoder().decode(record.memo).split("\n").filter((line) => line !== "");
  for (const line of lines) {
    const [device, mode] = line.split(" ");
    if (!SLOTS.includes(device) || !MODES.includes(mode)) {
      throw new Refusal("internal", "bad-memo", "the memo is not one that this driver writes");
    }
  }
  say("unprepared", { claim: record.claim.id.name });
}
