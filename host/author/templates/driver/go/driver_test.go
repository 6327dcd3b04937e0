package driver

import (
	"testing"

	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_discovery"
	"github.com/nodedock/nodedock/sdk/go/nodedocktest"
)

// Without WebAssembly: `go test ./driver`.
func TestClaimGetsNodeWhileItExists(t *testing.T) {
	host := nodedocktest.New()
	host.Node("/dev/fuse", 10, 229)
	inventory, err := Discover(host, nodedock_driver_common.Context{}, nodedock_driver_discovery.Trigger{})
	if err != nil || len(inventory.Pools[0].Devices) != 1 {
		t.Fatal(inventory, err)
	}
	claim := nodedocktest.Claim("uid-1", pool, "fuse")
	prepared, err := Prepare(host, nodedock_driver_common.Context{}, claim)
	if err != nil || prepared.Devices[0].Edits.DeviceNodes[0].Path != "/dev/fuse" {
		t.Fatal(prepared, err)
	}
	delete(host.Nodes, "/dev/fuse")
	if _, err := Prepare(host, nodedock_driver_common.Context{}, claim); !nodedock.IsAbsent(err) {
		t.Error(err)
	}
}
