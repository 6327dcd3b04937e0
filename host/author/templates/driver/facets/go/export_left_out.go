package export_nodedock_driver_left_out

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_left_out"
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/driver"
)

func ListDevices(ctx nodedock_driver_common.Context) Result[[]nodedock_driver_left_out.LeftOutDevice, nodedock_driver_common.Problem] {
	return nodedock.Result(driver.ListDevices(nodedock.Imports(), ctx))
}
