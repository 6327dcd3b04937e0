package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	benchNamespace = "default"
	benchRequest   = "device-0"
	benchPool      = "pool"
	benchDevice    = "gpu-0"
	// claimsCheckpoint is the name of the DRA manager's checkpoint.
	claimsCheckpoint = "dra_manager_state"
)

// claimTimes are nanoseconds.
type claimTimes struct {
	Prepare   []int64 `json:"prepare"`
	Unprepare []int64 `json:"unprepare"`
	// AtOnce is the time of all pairs of --pairs together.
	AtOnce int64 `json:"atOnce"`
}

// benchClaims measures the DRA manager with a plugin that answers at once: pods of one claim, which come and go one after the other, and many
// at once. It prints the times.
func benchClaims(args []string) error {
	flags := flag.NewFlagSet("bench-claims", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the manager's files, which is empty")
	live := flags.Int("live", 0, "number of claims that stay prepared")
	calls := flags.Int("calls", 1, "number of claims that are prepared and unprepared one after the other")
	pairs := flags.Int("pairs", 0, "number of claims that are prepared and unprepared many at once")
	lanes := flags.Int("lanes", 64, "number of them at once")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *dir == "" || *lanes < 1 {
		return errors.New("--dir is missing, or --lanes is less than 1")
	}
	socket := filepath.Join(*dir, "p.sock")
	plugin, err := startPlugin(socket, 0)
	if err != nil {
		return err
	}
	defer plugin.stop()
	if err := storeLiveClaims(*dir, *live); err != nil {
		return fmt.Errorf("checkpoint of %d claims: %w", *live, err)
	}
	ctx := context.Background()
	manager, err := dra.NewManager(klog.FromContext(ctx), inMemory{}, *dir)
	if err != nil {
		return err
	}
	getNode := func(context.Context) (*v1.Node, error) {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bench"}}, nil
	}
	// The manager unprepares in the background what no pod of an empty list has, unless the list is not complete yet.
	if err := manager.Start(ctx, func() []*v1.Pod { return nil }, getNode, sources{ready: false}); err != nil {
		return err
	}
	handler := manager.GetWatcherHandler()
	if err := handler.RegisterPlugin(ctx, benchDriver, socket, []string{drapb.DRAPluginService}, nil); err != nil {
		return err
	}
	var times claimTimes
	for n := range *calls {
		pod := podWithClaim(fmt.Sprintf("pod-%d", n))
		began := time.Now()
		if err := manager.PrepareResources(ctx, pod); err != nil {
			return err
		}
		prepared := time.Now()
		if err := manager.UnprepareResources(ctx, pod); err != nil {
			return err
		}
		times.Prepare = append(times.Prepare, prepared.Sub(began).Nanoseconds())
		times.Unprepare = append(times.Unprepare, time.Since(prepared).Nanoseconds())
	}
	began := time.Now()
	err = sideBySide(*lanes, *pairs, func(n int) error {
		pod := podWithClaim(fmt.Sprintf("at-once-%d", n))
		if err := manager.PrepareResources(ctx, pod); err != nil {
			return err
		}
		return manager.UnprepareResources(ctx, pod)
	})
	times.AtOnce = time.Since(began).Nanoseconds()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(times)
}

// sideBySide does something count times, in so many lanes.
func sideBySide(lanes, count int, do func(int) error) error {
	errs := make([]error, lanes)
	var all sync.WaitGroup
	for lane := range lanes {
		all.Go(func() {
			for n := lane; n < count && errs[lane] == nil; n += lanes {
				errs[lane] = do(n)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// storeLiveClaims writes the checkpoint of a manager that has prepared so many claims.
func storeLiveClaims(dir string, count int) error {
	var list state.ClaimInfoStateList
	for n := range count {
		name := fmt.Sprintf("live-%d", n)
		device := state.Device{
			PoolName: benchPool, DeviceName: benchDevice, RequestNames: []string{benchRequest}, CDIDeviceIDs: []string{cdiDevice(name)},
		}
		list = append(list, state.ClaimInfoState{
			ClaimUID: types.UID(name), ClaimName: name, Namespace: benchNamespace, PodUIDs: sets.New(name),
			DriverState: map[string]state.DriverState{benchDriver: {Devices: []state.Device{device}}},
		})
	}
	checkpoint, err := state.NewCheckpoint(list)
	if err != nil {
		return err
	}
	checkpointer, err := state.NewCheckpointer(dir, claimsCheckpoint)
	if err != nil {
		return err
	}
	return checkpointer.Store(checkpoint)
}

// podWithClaim returns a pod of one claim, whose name and UID are those of the pod.
func podWithClaim(name string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: benchNamespace, Name: name, UID: types.UID(name)},
		Spec:       v1.PodSpec{ResourceClaims: []v1.PodResourceClaim{{Name: "claim", ResourceClaimName: &name}}},
	}
}

func cdiDevice(claim string) string {
	return benchDriver + "/claim=" + claim
}

// sources says whether the kubelet has all pods.
type sources struct{ ready bool }

func (sources) AddSource(string) {}

func (s sources) AllReady() bool { return s.ready }

// inMemory is an API server that answers at once, in this process: what is measured is the manager.
type inMemory struct{ kubernetes.Interface }

func (inMemory) ResourceV1() resourceclient.ResourceV1Interface { return resources{} }

type resources struct {
	resourceclient.ResourceV1Interface
}

func (resources) ResourceClaims(string) resourceclient.ResourceClaimInterface { return claims{} }

func (resources) ResourceSlices() resourceclient.ResourceSliceInterface { return slices{} }

type claims struct {
	resourceclient.ResourceClaimInterface
}

// Get returns a claim for the pod of its name.
func (claims) Get(_ context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	result := resourceapi.DeviceRequestAllocationResult{
		Request: benchRequest, Driver: benchDriver, Pool: benchPool, Device: benchDevice,
	}
	results := []resourceapi.DeviceRequestAllocationResult{result}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: benchNamespace, Name: name, UID: types.UID(name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: types.UID(name)}},
		},
	}, nil
}

// slices are those that a kubelet deletes when it starts.
type slices struct {
	resourceclient.ResourceSliceInterface
}

func (slices) DeleteCollection(context.Context, metav1.DeleteOptions, metav1.ListOptions) error {
	return nil
}
