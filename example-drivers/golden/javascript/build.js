// node build.js WIT OUTPUT: makes golden.js a component.

import { writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

import { componentize } from "@bytecodealliance/componentize-js";

const [witPath, output] = process.argv.slice(2);
if (output === undefined) throw new Error("usage: node build.js WIT OUTPUT");
const { component } = await componentize({
  sourcePath: fileURLToPath(new URL("golden.js", import.meta.url)),
  witPath,
  worldName: "driver",
  // A driver has no network, and what imports it is refused.
  disableFeatures: ["http", "fetch-event"],
});
await writeFile(output, component);
