package driver

import (
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/bindings/nodedock_driver_common"
)

const configSchema = `{"type": "object", "properties": {}, "additionalProperties": false}`

// ConfigSchema returns the JSON Schema of the operator's config.
func ConfigSchema() Option[string] { return Some(configSchema) }

// ParametersSchema returns none: the driver has no parameters.
func ParametersSchema() Option[string] { return None[string]() }

// ValidateConfig checks what a schema cannot express.
func ValidateConfig(string) Result[Unit, nodedock_driver_common.Problem] {
	return Ok[Unit, nodedock_driver_common.Problem](Unit{})
}

// ValidateParameters checks one entry of a claim or a class.
func ValidateParameters(string) Result[Unit, nodedock_driver_common.Problem] {
	return Err[Unit](nodedock_driver_common.Problem{
		Kind: nodedock_driver_common.ProblemKindInvalid, Code: "bad-parameters", Message: "this driver has no parameters",
	})
}
