"""The operator's config and the parameters of claims: schemas, and checks of what a schema cannot express."""

import json

from nodedock import sdk
from wit_world import exports

CONFIG_SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}


class Configuration(exports.Configuration):
    def config_schema(self):
        return json.dumps(CONFIG_SCHEMA)

    def parameters_schema(self):
        # There is no schema: the driver has no parameters.
        return None

    def validate_config(self, config):
        pass

    def validate_parameters(self, parameters):
        raise sdk.invalid("bad-parameters", "this driver has no parameters")
