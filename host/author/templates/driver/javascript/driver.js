// Offers nodes below /dev as devices.
//
// Every call runs in a fresh instance of this program, in the state that `componentize-js` recorded after it ran this file. Variables do
// not keep their value until the next call: state that must persist goes into the memo of a claim.

import * as deviceNodes from "nodedock:driver/device-nodes@@CONTRACT@";

import * as sdk from "./nodedock/sdk.js";
@FACETS@
export const POOL = "nodes";
// Path of the node by the name of its device.
export const NODES = new Map([["fuse", "/dev/fuse"], ["net-tun", "/dev/net/tun"]]);

export const identity = {
  describe() {
    return sdk.driverInfo("my-gpu.example.com", "0.1.0", {
      summary: "Nodes below /dev",
      deviceNodes: [...NODES.values()],
      env: ["MY_GPU_*"],
      eventSubsystems: ["misc"],
    });
  },
};

export const discovery = {
  discover(_context, _trigger) {
    // A node that this machine does not have is not an error.
    const found = [...NODES].flatMap(([name, path]) => deviceNodes.glob(path).map((node) => ({ name, node })));
    const devices = found.map(({ name, node }) => (
      sdk.device(name, { attributes: { minor: node.minor }, identity: [`dev:${node.path}`] })
    ));
    return { pools: [sdk.pool(POOL, devices)] };
  },
};

export const preparation = {
  prepare(_context, claims) {
    return claims.map((claim) => ({ uid: claim.id.uid, outcome: sdk.outcome(prepare, claim) }));
  },
  unprepare(_context, claims) {
    // Nothing of a claim is left on the node.
    return claims.map((record) => ({ uid: record.claim.id.uid, outcome: { tag: "ok", val: undefined } }));
  },
};

function prepare(claim) {
  return sdk.preparedClaim(claim.devices.map(prepareDevice));
}

function prepareDevice(allocated) {
  const path = NODES.get(allocated.device);
  if (path === undefined) throw sdk.Problem.notFound("no-such-device", `there is no device ${allocated.device}`);
  // Throws the host's problem for a node that is gone.
  deviceNodes.stat(path);
  const variable = `MY_GPU_${allocated.device.replaceAll("-", "_").toUpperCase()}`;
  return sdk.prepared(allocated, sdk.edits({ env: { [variable]: path }, nodes: [path] }));
}
