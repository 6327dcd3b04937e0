package export_nodedock_driver_telemetry

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_telemetry"
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/driver"
)

func Read(ctx nodedock_driver_common.Context) Result[[]nodedock_driver_telemetry.DeviceReadings, nodedock_driver_common.Problem] {
	return nodedock.Result(driver.Read(nodedock.Imports(), ctx))
}
