// Unit tests of the helpers, with the fake host.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { FUNCTIONS } from "../hooks.js";
import { FakeHost, matches } from "../testing.js";

const sdk = await import("../sdk.js");
const log = await import("nodedock:driver/log@0.2.0");
const sysfsWrite = await import("nodedock:driver/sysfs-write@0.2.0");

const DEVICE = "devices/pci0000:00/0000:00:02.0";

function gpu() {
  return new FakeHost()
    .file(`${DEVICE}/vendor`, "0x10de\n")
    .file(`${DEVICE}/numa_node`, "1\n")
    .link("bus/pci/devices/0000:00:02.0", `../../../${DEVICE}`);
}

test("hooks have each function of the contract", () => {
  const contract = readFileSync(new URL("../../../wit/host.wit", import.meta.url), "utf8");
  const camel = (name) => name.replace(/-(.)/g, (_, letter) => letter.toUpperCase());
  const found = {};
  for (const [, name, body] of contract.matchAll(/^interface ([\w-]+) \{(.*?)^\}/gms)) {
    found[name] = [...body.matchAll(/^    ([\w-]+): func/gm)].map(([, key]) => camel(key));
  }
  assert.deepEqual(FUNCTIONS, found);
});

test("device directory is found by its link", () => {
  gpu().run(() => {
    assert.deepEqual(sdk.devices("bus/pci/devices/*"), [DEVICE]);
    assert.equal(sdk.findParsed(`${DEVICE}/numa_node`), 1);
    assert.equal(sdk.findParsed(`${DEVICE}/vendor`, sdk.hexadecimal), 0x10de);
    assert.equal(sdk.find("bus/pci/devices/0000:00:02.0/vendor"), "0x10de");
    assert.equal(sdk.findParsed(`${DEVICE}/vendor`), undefined);
    assert.deepEqual(sdk.devices("class/net/*"), []);
  });
});

test("absence is undefined and failure throws", () => {
  const host = gpu().fail("class/x", "no-value").fail("class/y");
  host.run(() => {
    for (const path of ["class/x", "class/z"]) assert.equal(sdk.find(path), undefined);
    assert.equal(sdk.findLink("devices/pci0000:00"), undefined);
    assert.equal(sdk.findLink("class/z"), undefined);
    for (const read of [sdk.find, sdk.findLink, sdk.findParsed]) {
      assert.throws(() => read("class/y"), (error) => error.payload.code === "io-error");
    }
  });
});

test("attributes have the types of values", () => {
  const attributes = { n: 1, b: true, t: "x", l: [1, 2n], v: { tag: "version", val: "1.0.0" } };
  const { attributes: found } = sdk.device("a", { attributes });
  assert.deepEqual(found.map(({ value }) => value.tag), ["int", "boolean", "text", "ints", "version"]);
  assert.deepEqual(found[3].value.val, [1n, 2n]);
  for (const bad of [1.5, [], [1, "x"], undefined]) {
    assert.throws(() => sdk.device("a", { attributes: { n: bad } }), /attribute n has the value/);
  }
});

test("edits take paths and parts", () => {
  const nodes = ["/dev/a", sdk.deviceNode("/dev/b", { hostPath: "/dev/c" })];
  const found = sdk.edits({ env: { A: "1" }, nodes, mounts: ["/opt/x"] });
  assert.deepEqual(found.deviceNodes.map(({ path, hostPath }) => [path, hostPath]), [["/dev/a", undefined], ["/dev/b", "/dev/c"]]);
  assert.deepEqual([found.env[0].key, found.mounts[0].containerPath, found.hooks], ["A", "/opt/x", []]);
});

test("info refuses unknown requests", () => {
  const info = sdk.driverInfo("a.example.com", "0.1.0", { deviceNodes: ["/dev/a"], memoryMib: 128 });
  assert.deepEqual([info.capabilities.deviceNodes, info.capabilities.env, info.limits.memoryMib], [["/dev/a"], [], 128]);
  assert.throws(() => sdk.driverInfo("a.example.com", "0.1.0", { deviceNode: [] }), /deviceNode/);
});

test("outcome has its claim's problem", () => {
  const refuse = () => {
    throw sdk.Problem.invalid("bad", "no");
  };
  assert.equal(sdk.outcome(refuse).val.code, "bad");
  assert.deepEqual(sdk.outcome(String, 1), { tag: "ok", val: "1" });
  assert.throws(() => sdk.outcome(() => null.x), TypeError);
});

test("prepared device has no subrequest", () => {
  const [allocated] = new FakeHost().claim("uid", [["nodes", "fuse"]]).devices;
  assert.deepEqual(sdk.prepared({ ...allocated, request: "gpu/large" }, sdk.edits()).requests, ["gpu"]);
});

test("log and writes are recorded", () => {
  const host = gpu();
  host.run(() => {
    log.write("info", "found", []);
    sysfsWrite.write("bus/pci/devices/0000:00:02.0/numa_node", "0");
    assert.equal(sdk.find(`${DEVICE}/numa_node`), "0");
    assert.throws(() => sysfsWrite.write("class/none", "0"));
  });
  assert.deepEqual(host.lines, [["info", "found"]]);
  assert.deepEqual(host.writes, [["bus/pci/devices/0000:00:02.0/numa_node", "0"]]);
  assert.throws(() => sdk.find("class/x"), /no fake host is in use/);
});

test("globs keep to segments", () => {
  assert.ok(matches(["class", "*"], ["class", "net"]));
  assert.ok(!matches(["class", "*"], ["class", "net", "eth0"]));
  assert.ok(matches(["**", "eth0"], ["class", "net", "eth0"]));
});
