package export_nodedock_driver_scheduling

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_inventory"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_scheduling"
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/driver"
)

func Schedule(ctx nodedock_driver_common.Context, inventory nodedock_driver_inventory.Inventory) Result[nodedock_driver_scheduling.Additions, nodedock_driver_common.Problem] {
	return nodedock.Result(driver.Schedule(nodedock.Imports(), ctx, inventory))
}
