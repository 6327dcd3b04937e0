package nodedocktest

import (
	"errors"
	"slices"
	"testing"

	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_container_edits"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_log"
)

const device = "devices/pci0000:00/0000:00:02.0"

func gpu() *Host {
	host := New()
	host.Files[device+"/vendor"] = "0x10de\n"
	host.Files[device+"/numa_node"] = "1\n"
	host.Link("bus/pci/devices/0000:00:02.0", "../../../"+device)
	return host
}

func TestDeviceDirectoryIsFoundByLink(t *testing.T) {
	host := gpu()
	found, err := nodedock.Devices(host, "bus/pci/devices/*")
	if err != nil || !slices.Equal(found, []string{device}) {
		t.Fatal(found, err)
	}
	if number, is, err := nodedock.FindParsed(host, device+"/numa_node", nodedock.ParseInt); number != 1 || !is || err != nil {
		t.Error(number, is, err)
	}
	if vendor, is, err := nodedock.FindParsed(host, device+"/vendor", nodedock.ParseHex); vendor != 0x10de || !is || err != nil {
		t.Error(vendor, is, err)
	}
	if _, is, err := nodedock.FindParsed(host, device+"/vendor", nodedock.ParseInt); is || err != nil {
		t.Error("text was parsed", err)
	}
	if text, is, err := nodedock.Find(host, "bus/pci/devices/0000:00:02.0/vendor"); text != "0x10de" || !is || err != nil {
		t.Error(text, is, err)
	}
	if none, err := nodedock.Devices(host, "class/net/*"); len(none) != 0 || err != nil {
		t.Error(none, err)
	}
}

func TestAbsenceIsFalseAndFailureIsAnError(t *testing.T) {
	host := gpu()
	host.Failing["class/x"], host.Failing["class/y"] = "no-value", "io-error"
	for _, path := range []string{"class/x", "class/z"} {
		if _, is, err := nodedock.Find(host, path); is || err != nil {
			t.Error(path, is, err)
		}
	}
	for _, path := range []string{"devices/pci0000:00", "class/z"} {
		if _, is, err := nodedock.FindLink(host, path); is || err != nil {
			t.Error(path, is, err)
		}
	}
	var problem *nodedock.Problem
	if _, _, err := nodedock.Find(host, "class/y"); !errors.As(err, &problem) || problem.Code != "io-error" {
		t.Error(err)
	}
	if _, _, err := nodedock.FindLink(host, "class/y"); !errors.As(err, &problem) {
		t.Error(err)
	}
	host.Failing["class/*"] = "io-error"
	if _, err := nodedock.Devices(host, "class/*"); err == nil {
		t.Error("a failed glob has no devices")
	}
}

func TestOutcomesAreOfEachClaim(t *testing.T) {
	prepare := func(claim nodedock_driver_claims.Claim) (nodedock_driver_claims.PreparedClaim, error) {
		return nodedock.PrepareEach(claim, func(allocated nodedock_driver_claims.AllocatedDevice) (nodedock_driver_container_edits.ContainerEdits, error) {
			if allocated.Device == "b" {
				return nodedock_driver_container_edits.ContainerEdits{}, nodedock.NotFound("no-such-device", "%s", allocated.Device)
			}
			return nodedock_driver_container_edits.ContainerEdits{
				DeviceNodes: []nodedock_driver_container_edits.DeviceNode{nodedock.Node("/dev/a")},
				Env:         []nodedock_driver_common.KeyValue{nodedock.Env("A", "1")},
			}, nil
		})
	}
	first := Claim("1", "pool", "a")
	first.Devices[0].Request = "gpu/large"
	outcomes := nodedock.PrepareOutcomes([]nodedock_driver_claims.Claim{first, Claim("2", "pool", "b")}, prepare)
	prepared := outcomes[0].Outcome.Ok().Devices[0]
	if prepared.Requests[0] != "gpu" || prepared.Edits.DeviceNodes[0].Path != "/dev/a" {
		t.Error(prepared)
	}
	if refused := outcomes[1].Outcome; !refused.IsErr() || refused.Err().Code != "no-such-device" {
		t.Error(refused)
	}
	if defect := nodedock.ProblemOf(errors.New("broken")); defect.Kind != nodedock_driver_common.ProblemKindInternal {
		t.Error(defect)
	}
	ended := nodedock.UnprepareOutcomes([]nodedock_driver_claims.ClaimRecord{{Claim: first}}, func(nodedock_driver_claims.ClaimRecord) error { return nil })
	if ended[0].Uid != "1" || ended[0].Outcome.IsErr() {
		t.Error(ended)
	}
}

func TestNodesLogAndWritesAreRecorded(t *testing.T) {
	host := gpu()
	host.Node("/dev/fuse", 10, 229)
	if nodes, err := host.GlobNodes("/dev/*"); err != nil || len(nodes) != 1 || nodes[0].Minor != 229 {
		t.Error(nodes, err)
	}
	if _, err := host.StatNode("/dev/none"); !nodedock.IsAbsent(err) {
		t.Error(err)
	}
	host.Log(nodedock_driver_log.LevelInfo, "found", nodedock.Env("count", "1"))
	if err := host.Write("bus/pci/devices/0000:00:02.0/numa_node", "0"); err != nil {
		t.Error(err)
	}
	if err := host.Write("class/none", "0"); !nodedock.IsAbsent(err) {
		t.Error(err)
	}
	if text, err := host.Read(device + "/numa_node"); text != "0" || err != nil {
		t.Error(text, err)
	}
	if host.Lines[0] != "found count=1" || len(host.Writes) != 1 {
		t.Error(host.Lines, host.Writes)
	}
}

func TestGlobsKeepToSegments(t *testing.T) {
	if !matches([]string{"class", "*"}, []string{"class", "net"}) || !matches([]string{"**", "eth0"}, []string{"class", "net", "eth0"}) {
		t.Error("a path was not matched")
	}
	if matches([]string{"class", "*"}, []string{"class", "net", "eth0"}) {
		t.Error("a star matched a slash")
	}
}
