package export_nodedock_driver_health

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_health"
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/driver"
)

func Check(ctx nodedock_driver_common.Context) Result[[]nodedock_driver_health.DeviceHealth, nodedock_driver_common.Problem] {
	return nodedock.Result(driver.Check(nodedock.Imports(), ctx))
}
