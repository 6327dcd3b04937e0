package driver

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_health"
)

// Check returns the health of the devices: a node that is gone is unhealthy.
func Check(host nodedock.Host, _ nodedock_driver_common.Context) ([]nodedock_driver_health.DeviceHealth, error) {
	var all []nodedock_driver_health.DeviceHealth
	for i, path := range paths {
		nodes, err := host.GlobNodes(path)
		if err != nil {
			return nil, err
		}
		health := nodedock_driver_health.DeviceHealth{Pool: pool, Device: names[i], State: nodedock_driver_health.HealthStateHealthy}
		if len(nodes) == 0 {
			health.State, health.Message = nodedock_driver_health.HealthStateUnhealthy, path+" is gone"
		}
		all = append(all, health)
	}
	return all, nil
}
