package driver

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_inventory"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_scheduling"
)

// Schedule returns what the scheduler should know beyond the inventory: an entry for each device, to be filled.
func Schedule(_ nodedock.Host, _ nodedock_driver_common.Context, inventory nodedock_driver_inventory.Inventory) (nodedock_driver_scheduling.Additions, error) {
	var additions nodedock_driver_scheduling.Additions
	for _, pool := range inventory.Pools {
		for _, device := range pool.Devices {
			additions.Devices = append(additions.Devices, nodedock_driver_scheduling.DeviceScheduling{Pool: pool.Name, Device: device.Name})
		}
	}
	return additions, nil
}
