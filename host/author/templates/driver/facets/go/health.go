package driver

import (
	. "go.bytecodealliance.org/pkg/wit/types"
	"nodedock-driver/bindings/nodedock_driver_common"
	nodes "nodedock-driver/bindings/nodedock_driver_device_nodes"
	"nodedock-driver/bindings/nodedock_driver_health"
)

// Check returns the health of the devices: a node that is gone is unhealthy.
func Check(nodedock_driver_common.Context) Result[[]nodedock_driver_health.DeviceHealth, nodedock_driver_common.Problem] {
	var all []nodedock_driver_health.DeviceHealth
	for i, path := range paths {
		found := nodes.Glob(path)
		if found.IsErr() {
			return Err[[]nodedock_driver_health.DeviceHealth](found.Err())
		}
		health := nodedock_driver_health.DeviceHealth{Pool: pool, Device: names[i], State: nodedock_driver_health.HealthStateHealthy}
		if len(found.Ok()) == 0 {
			health.State, health.Message = nodedock_driver_health.HealthStateUnhealthy, path+" is gone"
		}
		all = append(all, health)
	}
	return Ok[[]nodedock_driver_health.DeviceHealth, nodedock_driver_common.Problem](all)
}
