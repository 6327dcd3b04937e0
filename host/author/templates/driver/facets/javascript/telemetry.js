// Values of the devices that change: how often each node is there, which is once or never.

import * as deviceNodes from "nodedock:driver/device-nodes@@CONTRACT@";

import { NODES, POOL } from "./driver.js";

export const telemetry = {
  read(_context) {
    return [...NODES].map(([device, path]) => {
      const value = deviceNodes.glob(path).length;
      return { pool: POOL, device, readings: [{ name: "nodes", value }] };
    });
  },
};
