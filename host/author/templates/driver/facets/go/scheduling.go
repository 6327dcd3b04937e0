package driver

import (
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/bindings/nodedock_driver_common"
	"nodedock-driver/bindings/nodedock_driver_inventory"
	"nodedock-driver/bindings/nodedock_driver_scheduling"
)

// Schedule returns what the scheduler should know beyond the inventory: an entry for each device, to be filled.
func Schedule(_ nodedock_driver_common.Context, inventory nodedock_driver_inventory.Inventory) Result[nodedock_driver_scheduling.Additions, nodedock_driver_common.Problem] {
	var additions nodedock_driver_scheduling.Additions
	for _, pool := range inventory.Pools {
		for _, device := range pool.Devices {
			additions.Devices = append(additions.Devices, nodedock_driver_scheduling.DeviceScheduling{Pool: pool.Name, Device: device.Name})
		}
	}
	return Ok[nodedock_driver_scheduling.Additions, nodedock_driver_common.Problem](additions)
}
