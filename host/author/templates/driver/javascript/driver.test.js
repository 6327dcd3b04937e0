// Unit tests, with a fake host and without WebAssembly: `node --test driver.test.js`.

import assert from "node:assert/strict";
import test from "node:test";

import { FakeHost } from "./nodedock/testing.js";

const { POOL, discovery, preparation } = await import("./driver.js");

test("claim gets the node while it exists", () => {
  const host = new FakeHost().node("/dev/fuse", 10, 229);
  host.run(() => {
    const { pools } = discovery.discover(host.context(), { tag: "load" });
    assert.deepEqual(pools[0].devices.map(({ name }) => name), ["fuse"]);

    const claim = host.claim("uid-1", [[POOL, "fuse"]]);
    const [{ outcome }] = preparation.prepare(host.context(), [claim]);
    assert.equal(outcome.val.devices[0].edits.deviceNodes[0].path, "/dev/fuse");

    host.remove("/dev/fuse");
    const [refused] = preparation.prepare(host.context(), [claim]);
    assert.equal(refused.outcome.val.code, "no-such-node");
  });
});
