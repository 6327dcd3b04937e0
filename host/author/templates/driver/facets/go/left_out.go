package driver

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_left_out"
)

// ListDevices returns the devices that the driver does not offer: nodes that this machine does not have.
func ListDevices(host nodedock.Host, _ nodedock_driver_common.Context) ([]nodedock_driver_left_out.LeftOutDevice, error) {
	var all []nodedock_driver_left_out.LeftOutDevice
	for _, path := range paths {
		nodes, err := host.GlobNodes(path)
		if err != nil {
			return nil, err
		}
		if len(nodes) == 0 {
			all = append(all, nodedock_driver_left_out.LeftOutDevice{Name: path, Reason: "the node does not exist: load its kernel module"})
		}
	}
	return all, nil
}
