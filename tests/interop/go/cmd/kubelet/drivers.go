package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// A kubelet's deadlines: the plugin has a second for GetInfo and five for the notification.
const (
	infoDeadline   = time.Second
	notifyDeadline = 5 * time.Second
)

// driver is a registered DRA plugin.
type driver struct {
	socket     string
	connection *grpc.ClientConn
	stop       context.CancelFunc
}

// drivers are the DRA plugins, by their registration sockets.
type drivers struct {
	out       *reporter
	mutex     sync.Mutex
	connected map[string]*driver
}

// follow registers existing and new sockets of the directory, and deregisters removed ones.
func (d *drivers) follow(ctx context.Context, directory string) error {
	if err := os.MkdirAll(directory, 0o750); err != nil {
		return err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	if err := watcher.Add(directory); err != nil {
		return err
	}
	entries, err := os.ReadDir(directory)
	if err != nil {
		return err
	}
	go func() {
		defer watcher.Close()
		for _, entry := range entries {
			d.came(ctx, filepath.Join(directory, entry.Name()))
		}
		for {
			select {
			case <-ctx.Done():
				return
			case event := <-watcher.Events:
				if event.Has(fsnotify.Create) {
					d.came(ctx, event.Name)
				} else if event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename) {
					d.gone(event.Name)
				}
			}
		}
	}()
	return nil
}

func (d *drivers) came(ctx context.Context, socket string) {
	info, err := os.Stat(socket)
	if err != nil || info.Mode()&fs.ModeSocket == 0 || strings.HasPrefix(filepath.Base(socket), ".") {
		return
	}
	if err := d.register(ctx, socket); err != nil {
		d.out.say(map[string]any{"event": "refused", "socket": socket, "error": err.Error()})
	}
}

func (d *drivers) register(ctx context.Context, socket string) error {
	connection, err := dial(socket)
	if err != nil {
		return err
	}
	defer connection.Close()
	client := registerapi.NewRegistrationClient(connection)
	within, cancel := context.WithTimeout(ctx, infoDeadline)
	info, err := client.GetInfo(within, &registerapi.InfoRequest{})
	cancel()
	if err != nil {
		return fmt.Errorf("GetInfo: %w", err)
	}
	if info.Type != registerapi.DRAPlugin || !slices.Contains(info.SupportedVersions, drav1.DRAPluginService) {
		return fmt.Errorf("no DRA plugin that this kubelet takes: %v", info)
	}
	plugin, err := dial(info.Endpoint)
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	d.mutex.Lock()
	if before := d.connected[info.Name]; before != nil {
		before.stop()
	}
	d.connected[info.Name] = &driver{socket: socket, connection: plugin, stop: stop}
	d.mutex.Unlock()
	within, cancel = context.WithTimeout(ctx, notifyDeadline)
	_, err = client.NotifyRegistrationStatus(within, &registerapi.RegistrationStatus{PluginRegistered: true})
	cancel()
	if err != nil {
		d.gone(socket)
		return fmt.Errorf("NotifyRegistrationStatus: %w", err)
	}
	d.out.say(map[string]any{
		"event": "registered", "driver": info.Name, "endpoint": info.Endpoint, "versions": info.SupportedVersions,
	})
	go d.health(running, info.Name, info.SupportedVersions, plugin)
	return nil
}

func (d *drivers) gone(socket string) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	for name, driver := range d.connected {
		if driver.socket == socket {
			driver.stop()
			driver.connection.Close()
			delete(d.connected, name)
			d.out.say(map[string]any{"event": "deregistered", "driver": name})
		}
	}
}

// health writes every list of devices' health, by the newest service that the plugin registers.
func (d *drivers) health(ctx context.Context, name string, versions []string, connection *grpc.ClientConn) {
	say := func(version string, devices []string, err error) {
		event := map[string]any{"event": "health", "driver": name, "version": version, "devices": devices}
		if err != nil {
			event["error"] = err.Error()
		}
		d.out.say(event)
	}
	switch {
	case slices.Contains(versions, healthv1.DRAResourceHealthService):
		client := healthv1.NewDRAResourceHealthClient(connection)
		stream, err := client.NodeWatchResources(ctx, &healthv1.NodeWatchResourcesRequest{})
		for err == nil {
			var message *healthv1.NodeWatchResourcesResponse
			if message, err = stream.Recv(); err == nil {
				var devices []string
				for _, device := range message.GetDevices() {
					id := device.GetDevice()
					devices = append(devices, fmt.Sprintf("%s/%s %v", id.GetPoolName(), id.GetDeviceName(), device.GetHealth()))
				}
				say("v1", devices, nil)
			}
		}
		say("v1", nil, err)
	case slices.Contains(versions, healthv1alpha1.DRAResourceHealthService):
		client := healthv1alpha1.NewDRAResourceHealthClient(connection)
		stream, err := client.NodeWatchResources(ctx, &healthv1alpha1.NodeWatchResourcesRequest{})
		for err == nil {
			var message *healthv1alpha1.NodeWatchResourcesResponse
			if message, err = stream.Recv(); err == nil {
				var devices []string
				for _, device := range message.GetDevices() {
					id := device.GetDevice()
					devices = append(devices, fmt.Sprintf("%s/%s %v", id.GetPoolName(), id.GetDeviceName(), device.GetHealth()))
				}
				say("v1alpha1", devices, nil)
			}
		}
		say("v1alpha1", nil, err)
	}
}

func (d *drivers) connection(name string) (*grpc.ClientConn, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if driver := d.connected[name]; driver != nil {
		return driver.connection, nil
	}
	return nil, fmt.Errorf("DRA driver %s is not registered", name)
}

func (d *drivers) prepare(ctx context.Context, asked command) (any, error) {
	connection, err := d.connection(asked.Driver)
	if err != nil {
		return nil, err
	}
	if asked.Version == "v1beta1" {
		request := &drav1beta1.NodePrepareResourcesRequest{}
		for _, c := range asked.Claims {
			request.Claims = append(request.Claims, &drav1beta1.Claim{Namespace: c.Namespace, Uid: c.UID, Name: c.Name})
		}
		return drav1beta1.NewDRAPluginClient(connection).NodePrepareResources(ctx, request)
	}
	request := &drav1.NodePrepareResourcesRequest{}
	for _, c := range asked.Claims {
		request.Claims = append(request.Claims, &drav1.Claim{Namespace: c.Namespace, Uid: c.UID, Name: c.Name})
	}
	return drav1.NewDRAPluginClient(connection).NodePrepareResources(ctx, request)
}

func (d *drivers) unprepare(ctx context.Context, asked command) (any, error) {
	connection, err := d.connection(asked.Driver)
	if err != nil {
		return nil, err
	}
	if asked.Version == "v1beta1" {
		request := &drav1beta1.NodeUnprepareResourcesRequest{}
		for _, c := range asked.Claims {
			request.Claims = append(request.Claims, &drav1beta1.Claim{Namespace: c.Namespace, Uid: c.UID, Name: c.Name})
		}
		return drav1beta1.NewDRAPluginClient(connection).NodeUnprepareResources(ctx, request)
	}
	request := &drav1.NodeUnprepareResourcesRequest{}
	for _, c := range asked.Claims {
		request.Claims = append(request.Claims, &drav1.Claim{Namespace: c.Namespace, Uid: c.UID, Name: c.Name})
	}
	return drav1.NewDRAPluginClient(connection).NodeUnprepareResources(ctx, request)
}
