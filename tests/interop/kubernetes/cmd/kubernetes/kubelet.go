package main

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/resourceupdates"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodedock/interop/kubernetes/internal/node"
)

// statusPeriod is that of the node's status, which a kubelet brings up to date less often.
const statusPeriod = 200 * time.Millisecond

// managers are the parts of a kubelet that meet plugins.
type managers struct {
	client  kubernetes.Interface
	node    string
	pods    *node.Pods
	claims  *dra.Manager
	devices *devicemanager.ManagerImpl
	// admission is held while devices are allocated to a pod.
	admission sync.Mutex
}

// kubelet runs the managers on the directories of a kubelet. Commands come as lines of JSON; each is answered with its id, and several
// may be under way. Events: "started", "registered", "deregistered", "refused", "capacity", "health" and "answer".
func kubelet(args []string) error {
	flags := flag.NewFlagSet("kubelet", flag.ContinueOnError)
	root := flags.String("root", "/var/lib/kubelet", "directory of the kubelet")
	kubeconfig := flags.String("kubeconfig", "", "file that says where the API server is")
	nodeName := flags.String("node", "", "name of the node")
	klog.InitFlags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	// The rates are those of a kubelet.
	client, err := node.ClientOf(*kubeconfig, 50, 100)
	if err != nil {
		return err
	}
	kubelet := &managers{client: client, node: *nodeName}
	if err := kubelet.start(context.Background(), *root); err != nil {
		return err
	}
	node.Emit(map[string]any{"event": "started"})
	return node.EachLine(func(line []byte) {
		var asked command
		if err := json.Unmarshal(line, &asked); err != nil {
			node.Emit(map[string]any{"event": "answer", "error": err.Error()})
			return
		}
		go kubelet.answer(context.Background(), asked)
	})
}

func (k *managers) start(ctx context.Context, root string) error {
	for _, dir := range []string{"plugins", "plugins_registry", "device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o750); err != nil {
			return err
		}
	}
	k.pods = node.WatchPods(ctx, k.client, k.node)
	logger := klog.FromContext(ctx)
	var err error
	if k.claims, err = dra.NewManager(logger, k.client, root); err != nil {
		return err
	}
	getNode := func(ctx context.Context) (*v1.Node, error) {
		return k.client.CoreV1().Nodes().Get(ctx, k.node, metav1.GetOptions{})
	}
	if err := k.claims.Start(ctx, k.pods.GetActivePods, getNode, k.pods); err != nil {
		return err
	}
	socket := filepath.Join(root, "device-plugins", "kubelet.sock")
	if k.devices, err = newDeviceManager(logger, socket, nil, topologymanager.NewFakeManager()); err != nil {
		return err
	}
	err = k.devices.Start(logger, k.pods.GetActivePods, k.pods, containermap.NewContainerMap(), sets.New[string]())
	if err != nil {
		return err
	}
	go reportHealth(k.claims.Updates())
	go reportHealth(k.devices.Updates())
	plugins := pluginmanager.NewPluginManager(filepath.Join(root, "plugins_registry"), &record.FakeRecorder{})
	plugins.AddHandler(registerapi.DRAPlugin, reported{k.claims.GetWatcherHandler(), registerapi.DRAPlugin})
	plugins.AddHandler(registerapi.DevicePlugin, reported{k.devices.GetWatcherHandler(), registerapi.DevicePlugin})
	go plugins.Run(ctx, k.pods, ctx.Done())
	go k.updateNode(ctx)
	return servePodResources(ctx, filepath.Join(root, "pod-resources", "kubelet.sock"), k.pods, resourcesOfPods{k.devices, k.claims})
}

// reportHealth says of which pods a device changed its health.
func reportHealth(updates <-chan resourceupdates.Update) {
	for update := range updates {
		node.Emit(map[string]any{"event": "health", "pods": update.PodUIDs})
	}
}

// updateNode writes what the device plugins have into the node's status, whenever it changes.
func (k *managers) updateNode(ctx context.Context) {
	var written v1.NodeStatus
	for range time.Tick(statusPeriod) {
		capacity, allocatable, removed := k.devices.GetCapacity()
		status := v1.NodeStatus{Capacity: capacity, Allocatable: allocatable}
		for _, resource := range removed {
			delete(status.Capacity, v1.ResourceName(resource))
			delete(status.Allocatable, v1.ResourceName(resource))
		}
		if equality.Semantic.DeepEqual(status, written) {
			continue
		}
		patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": status.Capacity, "allocatable": status.Allocatable}})
		if err == nil {
			_, err = k.client.CoreV1().Nodes().Patch(
				ctx, k.node, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "the node's status is not written", "node", k.node)
			continue
		}
		written = status
		node.Emit(map[string]any{"event": "capacity", "capacity": status.Capacity, "allocatable": status.Allocatable})
	}
}
