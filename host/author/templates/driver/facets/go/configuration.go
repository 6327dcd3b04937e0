package driver

import nodedock "github.com/nodedock/nodedock/sdk/go"

// ConfigSchema is the JSON Schema of the operator's config.
const ConfigSchema = `{"type": "object", "properties": {}, "additionalProperties": false}`

// ValidateConfig checks what a schema cannot express.
func ValidateConfig(string) error { return nil }

// ValidateParameters checks one entry of a claim or a class.
func ValidateParameters(string) error {
	return nodedock.Invalid("bad-parameters", "this driver has no parameters")
}
