// Command device-plugin is a device plugin as vendors write them in Go: it serves on its own socket, registers on kubelet.sock,
// which it dials by its bare path, and registers again whenever that socket is replaced. It writes events to standard output, one JSON
// object per line.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	kubeletSocket = "kubelet.sock"
	// Longer than a node's agent needs for a response.
	deadline = 10 * time.Second
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "device-plugin:", err)
		os.Exit(1)
	}
}

func run() error {
	resource := flag.String("resource", "go.example.com/device", "the extended resource")
	directory := flag.String("device-plugins-dir", pluginapi.DevicePluginPath, "directory with kubelet.sock")
	devices := flag.String("devices", "device-0,device-1", "IDs of the devices, by comma")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	// The watch starts before the check, so that no new socket is missed.
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	if err := watcher.Add(*directory); err != nil {
		return err
	}
	plugin := &plugin{resource: *resource, directory: *directory, devices: strings.Split(*devices, ",")}
	defer plugin.stop()
	if err := plugin.start(ctx); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-watcher.Errors:
			return err
		case event := <-watcher.Events:
			if filepath.Base(event.Name) != kubeletSocket || !event.Has(fsnotify.Create) {
				continue
			}
			plugin.stop()
			if err := plugin.start(ctx); err != nil {
				return err
			}
		}
	}
}

type plugin struct {
	pluginapi.UnimplementedDevicePluginServer
	resource, directory string
	devices             []string
	server              *grpc.Server
	stopped             chan struct{}
}

// start serves, then registers.
func (p *plugin) start(ctx context.Context) error {
	name := strings.ReplaceAll(p.resource, "/", "_") + ".sock"
	socket := filepath.Join(p.directory, name)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	p.server, p.stopped = grpc.NewServer(), make(chan struct{})
	pluginapi.RegisterDevicePluginServer(p.server, p)
	go func() {
		if err := p.server.Serve(listener); err != nil {
			fmt.Fprintln(os.Stderr, "device-plugin: serve:", err)
		}
	}()
	return p.register(ctx, name)
}

func (p *plugin) stop() {
	close(p.stopped)
	p.server.Stop()
}

// register dials as NVIDIA's plugin does and the sample of Kubernetes: a bare path and a dialer, from which grpc derives the :authority.
func (p *plugin) register(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	conn, err := grpc.DialContext(ctx, filepath.Join(p.directory, kubeletSocket),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithBlock(),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
	)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: endpoint, ResourceName: p.resource,
	})
	if err != nil {
		say(map[string]any{"event": "refused", "why": err.Error()})
		return fmt.Errorf("register: %w", err)
	}
	say(map[string]any{"event": "registered"})
	return nil
}

func (p *plugin) GetDevicePluginOptions(
	context.Context, *pluginapi.Empty,
) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(
	_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse],
) error {
	list := &pluginapi.ListAndWatchResponse{}
	for _, id := range p.devices {
		list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	stopped := p.stopped
	if err := stream.Send(list); err != nil {
		return err
	}
	say(map[string]any{"event": "listed", "devices": p.devices})
	select {
	case <-stopped:
	case <-stream.Context().Done():
	}
	return nil
}

func (p *plugin) Allocate(
	_ context.Context, request *pluginapi.AllocateRequest,
) (*pluginapi.AllocateResponse, error) {
	response := &pluginapi.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		say(map[string]any{"event": "allocate", "devices": container.DevicesIds})
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerAllocateResponse{
			Envs: map[string]string{"GO_DEVICES": strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}

var saying sync.Mutex

func say(event map[string]any) {
	saying.Lock()
	defer saying.Unlock()
	// Standard output needs no reader.
	_ = json.NewEncoder(os.Stdout).Encode(event)
}
