package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// plugin is a registered device plugin.
type plugin struct {
	client  pluginapi.DevicePluginClient
	options *pluginapi.DevicePluginOptions
	stop    context.CancelFunc
}

// resources are the device plugins, by the resources that they registered.
type resources struct {
	pluginapi.UnimplementedRegistrationServer
	out       *reporter
	directory string
	mutex     sync.Mutex
	plugins   map[string]*plugin
	server    *grpc.Server
	running   context.Context
}

// serve empties the directory, as a kubelet does when it starts, and listens for plugins.
func (r *resources) serve(ctx context.Context) error {
	if err := os.MkdirAll(r.directory, 0o750); err != nil {
		return err
	}
	entries, err := os.ReadDir(r.directory)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(r.directory, entry.Name())); err != nil {
			return err
		}
	}
	listener, err := net.Listen("unix", filepath.Join(r.directory, "kubelet.sock"))
	if err != nil {
		return err
	}
	r.running = ctx
	r.server = grpc.NewServer()
	pluginapi.RegisterRegistrationServer(r.server, r)
	go r.server.Serve(listener)
	return nil
}

func (r *resources) stop() {
	r.server.Stop()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, plugin := range r.plugins {
		plugin.stop()
	}
	r.plugins = map[string]*plugin{}
}

// restart simulates a restart of the kubelet for plugins.
func (r *resources) restart(ctx context.Context) error {
	r.stop()
	return r.serve(r.running)
}

// Register calls the plugin for its options at once, so the plugin must serve already, and then watches its devices.
func (r *resources) Register(ctx context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if request.Version != pluginapi.Version {
		return nil, fmt.Errorf("version %q is not %q", request.Version, pluginapi.Version)
	}
	connection, err := dial(filepath.Join(r.directory, request.Endpoint))
	if err != nil {
		return nil, err
	}
	client := pluginapi.NewDevicePluginClient(connection)
	options, err := client.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	if err != nil {
		return nil, fmt.Errorf("GetDevicePluginOptions: %w", err)
	}
	running, stop := context.WithCancel(r.running)
	r.mutex.Lock()
	if before := r.plugins[request.ResourceName]; before != nil {
		before.stop()
	}
	r.plugins[request.ResourceName] = &plugin{client: client, options: options, stop: stop}
	r.mutex.Unlock()
	r.out.say(map[string]any{"event": "plugin", "resource": request.ResourceName, "endpoint": request.Endpoint})
	go r.list(running, request.ResourceName, client)
	return &pluginapi.Empty{}, nil
}

func (r *resources) list(ctx context.Context, resource string, client pluginapi.DevicePluginClient) {
	stream, err := client.ListAndWatch(ctx, &pluginapi.Empty{})
	for err == nil {
		var message *pluginapi.ListAndWatchResponse
		if message, err = stream.Recv(); err == nil {
			r.out.say(map[string]any{"event": "devices", "resource": resource, "devices": message.Devices})
		}
	}
	r.out.say(map[string]any{"event": "plugin-gone", "resource": resource, "error": err.Error()})
}

func (r *resources) plugin(resource string) (*plugin, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if plugin := r.plugins[resource]; plugin != nil {
		return plugin, nil
	}
	return nil, fmt.Errorf("no device plugin has registered for %s", resource)
}

func (r *resources) allocate(ctx context.Context, asked command) (any, error) {
	plugin, err := r.plugin(asked.Resource)
	if err != nil {
		return nil, err
	}
	container := &pluginapi.ContainerAllocateRequest{DevicesIds: asked.Devices}
	return plugin.client.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{container},
	})
}

func (r *resources) prefer(ctx context.Context, asked command) (any, error) {
	plugin, err := r.plugin(asked.Resource)
	if err != nil {
		return nil, err
	}
	if !plugin.options.GetPreferredAllocationAvailable {
		return nil, fmt.Errorf("%s has no preference", asked.Resource)
	}
	container := &pluginapi.ContainerPreferredAllocationRequest{AvailableDeviceIDs: asked.Devices, AllocationSize: asked.Size}
	return plugin.client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{container},
	})
}
