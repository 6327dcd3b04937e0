package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	benchContainer = "main"
	// devicesCheckpoint is the name of the device manager's checkpoint.
	devicesCheckpoint = "kubelet_internal_checkpoint"
	listTime          = 30 * time.Second
)

// deviceTimes are nanoseconds.
type deviceTimes struct {
	Allocate []int64 `json:"allocate"`
}

// benchDevices measures the device manager with a device plugin that answers at once: pods of one device, of which each is gone when the
// next comes, so that an Allocate frees the device of the pod before. It prints the times.
func benchDevices(args []string) error {
	flags := flag.NewFlagSet("bench-devices", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the manager's files, which is empty")
	live := flags.Int("live", 0, "number of pods that keep a device")
	devices := flags.Int("devices", 1, "number of devices")
	calls := flags.Int("calls", 1, "number of pods that come one after the other")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *dir == "" || *devices <= *live {
		return errors.New("--dir is missing, or there are no more --devices than --live pods")
	}
	socket := filepath.Join(*dir, "p.sock")
	plugin, err := startPlugin(socket, *devices)
	if err != nil {
		return err
	}
	defer plugin.stop()
	// The manager removes the sockets in its directory.
	own := filepath.Join(*dir, "device-plugins")
	if err := storeLivePods(own, *live); err != nil {
		return fmt.Errorf("checkpoint of %d pods: %w", *live, err)
	}
	ctx := context.Background()
	logger := klog.FromContext(ctx)
	manager, err := newDeviceManager(logger, filepath.Join(own, "kubelet.sock"), nil, noTopology{})
	if err != nil {
		return err
	}
	// The last of the active pods is the measured one.
	active := make([]*v1.Pod, *live+1)
	for n := range active {
		active[n] = podWithDevice(livePod(n))
	}
	activePods := func() []*v1.Pod { return active }
	err = manager.Start(logger, activePods, sources{ready: true}, containermap.NewContainerMap(), sets.New[string]())
	if err != nil {
		return err
	}
	if err := manager.GetWatcherHandler().RegisterPlugin(ctx, benchResource, socket, []string{pluginapi.Version}, nil); err != nil {
		return err
	}
	if err := untilListed(logger, manager, *devices); err != nil {
		return err
	}
	var times deviceTimes
	for n := range *calls {
		pod := podWithDevice(fmt.Sprintf("pod-%d", n))
		active[*live] = pod
		began := time.Now()
		if err := manager.Allocate(ctx, pod, &pod.Spec.Containers[0], lifecycle.AddOperation); err != nil {
			return err
		}
		times.Allocate = append(times.Allocate, time.Since(began).Nanoseconds())
	}
	return json.NewEncoder(os.Stdout).Encode(times)
}

// untilListed waits until the manager has the plugin's devices.
func untilListed(logger klog.Logger, manager *devicemanager.ManagerImpl, devices int) error {
	for deadline := time.Now().Add(listTime); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		_, allocatable, _ := manager.GetCapacity(logger)
		if count := allocatable[benchResource]; count.Value() == int64(devices) {
			return nil
		}
	}
	return fmt.Errorf("the manager does not have the plugin's %d devices after %s", devices, listTime)
}

// storeLivePods writes the checkpoint of a manager that has allocated a device to each of so many pods.
func storeLivePods(dir string, count int) error {
	manager, err := checkpointmanager.NewCheckpointManager(dir)
	if err != nil {
		return err
	}
	entries := make([]checkpoint.PodDevicesEntry, 0, count)
	for n := range count {
		devices := []string{deviceID(n)}
		response, err := proto.Marshal(allocated(devices))
		if err != nil {
			return err
		}
		entries = append(entries, checkpoint.PodDevicesEntry{
			PodUID: livePod(n), ContainerName: benchContainer, ResourceName: benchResource,
			DeviceIDs: checkpoint.DevicesPerNUMA{numaNode(n): devices}, AllocResp: response,
		})
	}
	return manager.CreateCheckpoint(devicesCheckpoint, checkpoint.New(entries, map[string][]string{benchResource: {}}))
}

func livePod(n int) string {
	return fmt.Sprintf("live-%d", n)
}

// podWithDevice returns a pod of one container with one device. Its UID is its name.
func podWithDevice(name string) *v1.Pod {
	container := v1.Container{Name: benchContainer}
	container.Resources.Limits = v1.ResourceList{benchResource: resource.MustParse("1")}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: benchNamespace, Name: name, UID: types.UID(name)},
		Spec:       v1.PodSpec{Containers: []v1.Container{container}},
	}
}

// noTopology has no affinity for any pod, as the topology manager of a kubelet without a policy.
type noTopology struct{}

func (noTopology) GetAffinity(klog.Logger, string, string) topologymanager.TopologyHint {
	return topologymanager.TopologyHint{}
}

func (noTopology) GetPolicy() topologymanager.Policy { return topologymanager.NewNonePolicy() }

func (noTopology) Name() string { return "none" }
