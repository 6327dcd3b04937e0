package export_nodedock_driver_discovery

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_discovery"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_inventory"
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/driver"
)

func Discover(ctx nodedock_driver_common.Context, trigger nodedock_driver_discovery.Trigger) Result[nodedock_driver_inventory.Inventory, nodedock_driver_common.Problem] {
	return nodedock.Result(driver.Discover(nodedock.Imports(), ctx, trigger))
}
