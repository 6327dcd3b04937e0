package driver

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_telemetry"
)

// Read returns values of the devices that change: how often each node is there, which is once or never.
func Read(host nodedock.Host, _ nodedock_driver_common.Context) ([]nodedock_driver_telemetry.DeviceReadings, error) {
	var all []nodedock_driver_telemetry.DeviceReadings
	for i, path := range paths {
		nodes, err := host.GlobNodes(path)
		if err != nil {
			return nil, err
		}
		reading := nodedock_driver_telemetry.Reading{Name: "nodes", Value: float64(len(nodes))}
		readings := nodedock_driver_telemetry.DeviceReadings{Pool: pool, Device: names[i], Readings: []nodedock_driver_telemetry.Reading{reading}}
		all = append(all, readings)
	}
	return all, nil
}
