// Devices that the driver does not offer: nodes that this machine does not have.

import * as deviceNodes from "nodedock:driver/device-nodes@@CONTRACT@";

import { NODES } from "./driver.js";

export const leftOut = {
  listDevices(_context) {
    const missing = [...NODES.values()].filter((path) => deviceNodes.glob(path).length === 0);
    return missing.map((name) => ({ name, reason: "the node does not exist: load its kernel module" }));
  },
};
