// Package driver offers nodes below /dev as devices.
//
// Every call runs in a fresh instance of this program. Variables do not keep their value until the next call: state that must persist
// goes into the memo of a claim.
package driver

import (
	"strings"

	. "go.bytecodealliance.org/pkg/wit/types"
	. "nodedock-driver/bindings/nodedock_driver_claims"
	"nodedock-driver/bindings/nodedock_driver_common"
	edits "nodedock-driver/bindings/nodedock_driver_container_edits"
	nodes "nodedock-driver/bindings/nodedock_driver_device_nodes"
	"nodedock-driver/bindings/nodedock_driver_discovery"
	"nodedock-driver/bindings/nodedock_driver_identity"
	"nodedock-driver/bindings/nodedock_driver_inventory"
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

func Discover(nodedock_driver_common.Context, nodedock_driver_discovery.Trigger) Result[nodedock_driver_inventory.Inventory, Problem] {
	found := nodedock_driver_inventory.Pool{Name: pool}
	for i, path := range paths {
		listed := nodes.Glob(path)
		if listed.IsErr() {
			return Err[nodedock_driver_inventory.Inventory](listed.Err())
		}
		// A node that this machine does not have is not an error.
		for _, node := range listed.Ok() {
			minor := nodedock_driver_inventory.MakeAttributeValueInt(int64(node.Minor))
			found.Devices = append(found.Devices, nodedock_driver_inventory.Device{
				Name:       names[i],
				Attributes: []nodedock_driver_inventory.Attribute{{Name: "minor", Value: minor}},
				Identity:   []string{"dev:" + path},
			})
		}
	}
	inventory := nodedock_driver_inventory.Inventory{Pools: []nodedock_driver_inventory.Pool{found}}
	return Ok[nodedock_driver_inventory.Inventory, Problem](inventory)
}

func Prepare(_ nodedock_driver_common.Context, claims []Claim) []PrepareOutcome {
	var outcomes []PrepareOutcome
	for _, claim := range claims {
		outcomes = append(outcomes, PrepareOutcome{Uid: claim.Id.Uid, Outcome: prepare(claim)})
	}
	return outcomes
}

func Unprepare(_ nodedock_driver_common.Context, records []ClaimRecord) []UnprepareOutcome {
	var outcomes []UnprepareOutcome
	for _, record := range records {
		// Nothing of a claim is left on the node.
		outcomes = append(outcomes, UnprepareOutcome{Uid: record.Claim.Id.Uid, Outcome: Ok[Unit, Problem](Unit{})})
	}
	return outcomes
}

func prepare(claim Claim) Result[PreparedClaim, Problem] {
	var prepared PreparedClaim
	for _, allocated := range claim.Devices {
		device := prepareDevice(allocated)
		if device.IsErr() {
			return Err[PreparedClaim](device.Err())
		}
		prepared.Devices = append(prepared.Devices, device.Ok())
	}
	return Ok[PreparedClaim, Problem](prepared)
}

func prepareDevice(allocated AllocatedDevice) Result[PreparedDevice, Problem] {
	for i, path := range paths {
		if names[i] != allocated.Device {
			continue
		}
		// A node that is gone is the host's problem.
		if found := nodes.Stat(path); found.IsErr() {
			return Err[PreparedDevice](found.Err())
		}
		variable := "MY_GPU_" + strings.ToUpper(strings.ReplaceAll(allocated.Device, "-", "_"))
		node := edits.DeviceNode{Path: path, Access: edits.NodeAccessRead | edits.NodeAccessWrite}
		// Without the subrequest of a prioritised list.
		request, _, _ := strings.Cut(allocated.Request, "/")
		return Ok[PreparedDevice, Problem](PreparedDevice{
			Requests: []string{request},
			Pool:     allocated.Pool,
			Device:   allocated.Device,
			ShareId:  allocated.ShareId,
			Edits: edits.ContainerEdits{
				Env:         []KeyValue{{Key: variable, Value: path}},
				DeviceNodes: []edits.DeviceNode{node},
			},
		})
	}
	return Err[PreparedDevice](Problem{Kind: nodedock_driver_common.ProblemKindNotFound, Code: "no-such-device", Message: allocated.Device})
}
