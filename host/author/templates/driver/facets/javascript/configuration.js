// The operator's config and the parameters of claims: schemas, and checks of what a schema cannot express.

import { Problem } from "./nodedock/sdk.js";

const CONFIG_SCHEMA = { type: "object", properties: {}, additionalProperties: false };

export const configuration = {
  configSchema() {
    return JSON.stringify(CONFIG_SCHEMA);
  },
  parametersSchema() {
    // There is no schema: the driver has no parameters.
    return undefined;
  },
  validateConfig(_config) {},
  validateParameters(_parameters) {
    throw Problem.invalid("bad-parameters", "this driver has no parameters");
  },
};
