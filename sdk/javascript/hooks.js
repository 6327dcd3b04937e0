// Hooks of Node's module loader: the interfaces of the host are those of the fake host in use.

/** The functions of each interface. */
export const FUNCTIONS = {
  log: ["write"],
  sysfs: ["read", "readBytes", "readDir", "readLink", "glob", "waitFor"],
  "sysfs-write": ["write"],
  "host-files": ["read", "stat", "glob"],
  "pci-driver": ["bind", "restore"],
  "device-nodes": ["glob", "waitFor", "stat"],
  "net-interfaces": ["all", "get"],
  "prepared-claims": ["all", "usingDevice", "get"],
  progress: ["save"],
};
const PACKAGE = "nodedock:driver/";

export function resolve(specifier, context, next) {
  return specifier.startsWith(PACKAGE) ? { url: specifier, format: "module", shortCircuit: true } : next(specifier, context);
}

export function load(url, context, next) {
  if (!url.startsWith(PACKAGE)) return next(url, context);
  const [name] = url.slice(PACKAGE.length).split("@");
  const functions = FUNCTIONS[name];
  if (functions === undefined) throw new Error(`the contract has no interface ${name} of the host`);
  const lines = functions.map((key) => `export const ${key} = (...values) => host()(${JSON.stringify(name)}, "${key}", values);`);
  const source = [`const host = () => globalThis[Symbol.for("nodedock.call")];`, ...lines].join("\n");
  return { format: "module", source, shortCircuit: true };
}
