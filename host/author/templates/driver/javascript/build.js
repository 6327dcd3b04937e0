// node build.js WIT OUTPUT: builds a component from driver.js.

import { writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

import { componentize } from "@bytecodealliance/componentize-js";

const [witPath, output] = process.argv.slice(2);
if (output === undefined) throw new Error("usage: node build.js WIT OUTPUT");
const { component } = await componentize({
  sourcePath: fileURLToPath(new URL("driver.js", import.meta.url)),
  witPath,
  worldName: "driver",
  // A driver has none of these, and the host refuses a file that imports the network.
  disableFeatures: ["stdio", "clocks", "random", "http", "fetch-event"],
});
await writeFile(output, component);
