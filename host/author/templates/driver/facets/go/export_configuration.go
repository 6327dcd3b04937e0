package export_nodedock_driver_configuration

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/driver"
)

func ConfigSchema() Option[string] { return Some(driver.ConfigSchema) }

// There is no schema: the driver has no parameters.
func ParametersSchema() Option[string] { return None[string]() }

func ValidateConfig(config string) Result[Unit, nodedock_driver_common.Problem] {
	return nodedock.Done(driver.ValidateConfig(config))
}

func ValidateParameters(parameters string) Result[Unit, nodedock_driver_common.Problem] {
	return nodedock.Done(driver.ValidateParameters(parameters))
}
