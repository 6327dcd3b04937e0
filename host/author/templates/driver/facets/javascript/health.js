// The health of the devices: a node that is gone is unhealthy.

import * as deviceNodes from "nodedock:driver/device-nodes@@CONTRACT@";

import { NODES, POOL } from "./driver.js";

export const health = {
  check(_context) {
    return [...NODES].map(([device, path]) => {
      const isThere = deviceNodes.glob(path).length > 0;
      const message = isThere ? "" : `${path} is gone`;
      return { pool: POOL, device, state: isThere ? "healthy" : "unhealthy", message };
    });
  },
};
