// Package driver offers nodes below /dev as devices.
//
// Every call runs in a fresh instance of this program. Variables do not keep their value until the next call: state that must persist
// goes into the memo of a claim.
package driver

import (
	"strings"

	nodedock "github.com/nodedock/nodedock/sdk/go"
	claims "github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	edits "github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_container_edits"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_discovery"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_identity"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_inventory"
)

const pool = "nodes"

// The nodes by the names of their devices.
var names, paths = []string{"fuse", "net-tun"}, []string{"/dev/fuse", "/dev/net/tun"}

func Describe() nodedock_driver_identity.DriverInfo {
	return nodedock_driver_identity.DriverInfo{
		Name:            "my-gpu.example.com",
		Version:         "0.1.0",
		Summary:         "Nodes below /dev",
		Capabilities:    nodedock_driver_identity.Capabilities{DeviceNodes: paths, Env: []string{"MY_GPU_*"}},
		EventSubsystems: []string{"misc"},
	}
}

func Discover(host nodedock.Host, _ nodedock_driver_common.Context, _ nodedock_driver_discovery.Trigger) (nodedock_driver_inventory.Inventory, error) {
	found := nodedock_driver_inventory.Pool{Name: pool}
	for i, path := range paths {
		// A node that this machine does not have is not an error.
		nodes, err := host.GlobNodes(path)
		if err != nil {
			return nodedock_driver_inventory.Inventory{}, err
		}
		for _, node := range nodes {
			found.Devices = append(found.Devices, nodedock_driver_inventory.Device{
				Name:       names[i],
				Attributes: []nodedock_driver_inventory.Attribute{nodedock.Int("minor", int64(node.Minor))},
				Identity:   []string{"dev:" + path},
			})
		}
	}
	return nodedock_driver_inventory.Inventory{Pools: []nodedock_driver_inventory.Pool{found}}, nil
}

func Prepare(host nodedock.Host, _ nodedock_driver_common.Context, claim claims.Claim) (claims.PreparedClaim, error) {
	return nodedock.PrepareEach(claim, func(allocated claims.AllocatedDevice) (edits.ContainerEdits, error) {
		for i, path := range paths {
			if names[i] == allocated.Device {
				return nodeEdits(host, allocated.Device, path)
			}
		}
		return edits.ContainerEdits{}, nodedock.NotFound("no-such-device", "there is no device %s", allocated.Device)
	})
}

func Unprepare(nodedock.Host, nodedock_driver_common.Context, claims.ClaimRecord) error {
	// Nothing of a claim is left on the node.
	return nil
}

func nodeEdits(host nodedock.Host, device, path string) (edits.ContainerEdits, error) {
	// A node that is gone is the host's problem.
	if _, err := host.StatNode(path); err != nil {
		return edits.ContainerEdits{}, err
	}
	variable := "MY_GPU_" + strings.ToUpper(strings.ReplaceAll(device, "-", "_"))
	return edits.ContainerEdits{
		Env:         []nodedock_driver_common.KeyValue{nodedock.Env(variable, path)},
		DeviceNodes: []edits.DeviceNode{nodedock.Node(path)},
	}, nil
}
