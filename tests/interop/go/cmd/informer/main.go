// Command informer watches claims and slices with the informers of the official client library, as controllers do, and writes what it
// sees to standard output, one JSON object per line.
//
// The informers list, watch, and list again by themselves. Without --reconnect the program fails at the first watch or list that does.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// event is one line on standard output.
type event struct {
	// "add", "update", "delete", of an object; "synced", after the first list of everything; "request", after the head of an answer;
	// "failed", of a list or watch.
	Event    string `json:"event"`
	Resource string `json:"resource,omitempty"`
	// Of an object.
	Namespace       string `json:"namespace,omitempty"`
	Name            string `json:"name,omitempty"`
	UID             string `json:"uid,omitempty"`
	ResourceVersion string `json:"resourceVersion,omitempty"`
	Initial         bool   `json:"initial,omitempty"`
	Deleting        bool   `json:"deleting,omitempty"`
	// Allocated devices of a claim and published ones of a slice, as DRIVER/POOL/DEVICE.
	Devices []string `json:"devices,omitempty"`
	// Of a deletion that a list showed and no watch.
	Unobserved bool `json:"unobserved,omitempty"`
	// Of a request.
	Query  map[string]string `json:"query,omitempty"`
	Status int               `json:"status,omitempty"`
	Error  string            `json:"error,omitempty"`
}

var printing sync.Mutex

func (e event) print() {
	printing.Lock()
	defer printing.Unlock()
	// Standard output needs no reader.
	_ = json.NewEncoder(os.Stdout).Encode(e)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "informer:", err)
		os.Exit(1)
	}
}

func run() error {
	kubeconfig := flag.String("kubeconfig", "", "file that describes the API server")
	reconnect := flag.Bool("reconnect", false, "go on when a list or watch fails, as after a restart of the server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.Wrap(recorded)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	watched := map[string]cache.SharedIndexInformer{
		"resourceclaims": factory.Resource().V1().ResourceClaims().Informer(),
		"resourceslices": factory.Resource().V1().ResourceSlices().Informer(),
	}
	for resource, informer := range watched {
		failed := func(_ context.Context, _ *cache.Reflector, err error) {
			event{Event: "failed", Resource: resource, Error: err.Error()}.print()
			if !*reconnect {
				fail(fmt.Errorf("%s: %w", resource, err))
			}
		}
		if err := informer.SetWatchErrorHandlerWithContext(failed); err != nil {
			return err
		}
		if _, err := informer.AddEventHandler(printer(resource)); err != nil {
			return err
		}
	}
	factory.StartWithContext(ctx)
	if factory.WaitForCacheSyncWithContext(ctx).Err == nil {
		event{Event: "synced"}.print()
	}
	<-ctx.Done()
	factory.Shutdown()
	if cause := context.Cause(ctx); cause != ctx.Err() {
		return cause
	}
	return nil
}

// printer prints the events of an informer.
func printer(resource string) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(object any, initial bool) {
			e := eventOf("add", resource, object)
			e.Initial = initial
			e.print()
		},
		UpdateFunc: func(_, object any) { eventOf("update", resource, object).print() },
		DeleteFunc: func(object any) {
			last, unobserved := object.(cache.DeletedFinalStateUnknown)
			if unobserved {
				object = last.Obj
			}
			e := eventOf("delete", resource, object)
			e.Unobserved = unobserved
			e.print()
		},
	}
}

func eventOf(kind, resource string, object any) event {
	e := event{Event: kind, Resource: resource}
	if meta, ok := object.(metav1.Object); ok {
		e.Namespace, e.Name, e.UID = meta.GetNamespace(), meta.GetName(), string(meta.GetUID())
		e.ResourceVersion, e.Deleting = meta.GetResourceVersion(), meta.GetDeletionTimestamp() != nil
	}
	switch object := object.(type) {
	case *resourceapi.ResourceClaim:
		if object.Status.Allocation != nil {
			for _, result := range object.Status.Allocation.Devices.Results {
				e.Devices = append(e.Devices, result.Driver+"/"+result.Pool+"/"+result.Device)
			}
		}
	case *resourceapi.ResourceSlice:
		for _, device := range object.Spec.Devices {
			e.Devices = append(e.Devices, object.Spec.Driver+"/"+object.Spec.Pool.Name+"/"+device.Name)
		}
	}
	return e
}
