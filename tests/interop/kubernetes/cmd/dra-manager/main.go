// Command dra-manager is the part of a kubelet that meets DRA drivers: its DRA manager and its plugin manager. It is built with the newest
// Kubernetes that the docs name (dra-manager.mod), beside the managers of the program kubernetes.
//
// As kubelet, commands come as lines of JSON, each is answered with its id. Events: "started", "registered", "deregistered", "refused",
// "health" and "answer". As bench-claims and bench-devices, it measures the DRA manager and the device manager with a plugin that answers at
// once in a process of its own (plugin), and prints the times in nanoseconds as one object of JSON.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodedock/interop/kubernetes/internal/node"
)

// command is what a test asks of the manager, about one pod.
type command struct {
	ID        uint64 `json:"id"`
	Do        string `json:"do"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
}

type kubelet struct {
	client kubernetes.Interface
	node   string
	pods   *node.Pods
	claims *dra.Manager
}

func main() {
	parts := map[string]func([]string) error{
		"kubelet": runKubelet, "bench-claims": benchClaims, "bench-devices": benchDevices, "plugin": plugin,
	}
	if len(os.Args) < 2 || parts[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: dra-manager kubelet|bench-claims|bench-devices|plugin [FLAGS]")
		os.Exit(2)
	}
	if err := parts[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "dra-manager %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}

// runKubelet takes the arguments of the program kubernetes for its kubelet.
func runKubelet(args []string) error {
	flags := flag.NewFlagSet("kubelet", flag.ContinueOnError)
	root := flags.String("root", "/var/lib/kubelet", "directory of the kubelet")
	kubeconfig := flags.String("kubeconfig", "", "file that says where the API server is")
	name := flags.String("node", "", "name of the node")
	klog.InitFlags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	client, err := node.ClientOf(*kubeconfig, 50, 100)
	if err != nil {
		return err
	}
	k := &kubelet{client: client, node: *name}
	ctx := context.Background()
	if err := k.start(ctx, *root); err != nil {
		return err
	}
	node.Emit(map[string]any{"event": "started"})
	return node.EachLine(func(line []byte) {
		var asked command
		if err := json.Unmarshal(line, &asked); err != nil {
			node.Emit(map[string]any{"event": "answer", "error": err.Error()})
			return
		}
		go k.answer(ctx, asked)
	})
}

func (k *kubelet) start(ctx context.Context, root string) error {
	for _, dir := range []string{"plugins", "plugins_registry"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o750); err != nil {
			return err
		}
	}
	k.pods = node.WatchPods(ctx, k.client, k.node)
	var err error
	if k.claims, err = dra.NewManager(klog.FromContext(ctx), k.client, root); err != nil {
		return err
	}
	getNode := func(ctx context.Context) (*v1.Node, error) {
		return k.client.CoreV1().Nodes().Get(ctx, k.node, metav1.GetOptions{})
	}
	if err := k.claims.Start(ctx, k.pods.GetActivePods, getNode, k.pods); err != nil {
		return err
	}
	go func() {
		// A kubelet syncs these pods at once.
		for update := range k.claims.Updates() {
			node.Emit(map[string]any{"event": "health", "pods": update.PodUIDs})
		}
	}()
	plugins := pluginmanager.NewPluginManager(filepath.Join(root, "plugins_registry"), &record.FakeRecorder{})
	plugins.AddHandler(registerapi.DRAPlugin, reported{k.claims.GetWatcherHandler()})
	go plugins.Run(ctx, k.pods, ctx.Done())
	return nil
}

// answer carries a command out. The time is that of the manager, without the wait for the pod to be bound to the node.
func (k *kubelet) answer(ctx context.Context, asked command) {
	answer := map[string]any{"event": "answer", "id": asked.ID, "do": asked.Do}
	pod, err := k.pods.WhenBound(ctx, asked.Namespace, asked.Pod)
	began := time.Now()
	if err == nil {
		answer["result"], err = k.carryOut(ctx, asked, pod)
	}
	answer["us"] = time.Since(began).Microseconds()
	if err != nil {
		answer["error"] = err.Error()
	}
	node.Emit(answer)
}

func (k *kubelet) carryOut(ctx context.Context, asked command, pod *v1.Pod) (any, error) {
	switch asked.Do {
	case "bound":
		return nil, nil
	case "prepare":
		return k.prepare(ctx, pod)
	case "unprepare":
		return nil, k.claims.UnprepareResources(ctx, pod)
	}
	return nil, fmt.Errorf("no command %q", asked.Do)
}

// prepare returns the CDI devices of each container.
func (k *kubelet) prepare(ctx context.Context, pod *v1.Pod) (any, error) {
	if err := k.claims.PrepareResources(ctx, pod); err != nil {
		return nil, err
	}
	containers := map[string][]string{}
	for i := range pod.Spec.Containers {
		container := &pod.Spec.Containers[i]
		resources, err := k.claims.GetResources(pod, container)
		if err != nil {
			return nil, err
		}
		devices := []string{}
		for _, device := range resources.CDIDevices {
			devices = append(devices, device.Name)
		}
		containers[container.Name] = devices
	}
	return containers, nil
}

// reported is a plugin handler whose calls are events.
type reported struct {
	cache.PluginHandler
}

func (r reported) RegisterPlugin(ctx context.Context, name, endpoint string, versions []string, timeout *time.Duration) error {
	err := r.PluginHandler.RegisterPlugin(ctx, name, endpoint, versions, timeout)
	event := map[string]any{"event": "registered", "kind": registerapi.DRAPlugin, "name": name, "endpoint": endpoint, "versions": versions}
	if err != nil {
		event["event"], event["error"] = "refused", err.Error()
	}
	node.Emit(event)
	return err
}

func (r reported) DeRegisterPlugin(ctx context.Context, name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(ctx, name, endpoint)
	node.Emit(map[string]any{"event": "deregistered", "kind": registerapi.DRAPlugin, "name": name, "endpoint": endpoint})
}
