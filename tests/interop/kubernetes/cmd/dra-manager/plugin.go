package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"nodedock/interop/kubernetes/internal/node"
)

const (
	benchDriver   = "bench.example.com"
	benchResource = "bench.example.com/device"
)

// plugin is a DRA driver and a device plugin on one socket, which answer at once and store nothing. It ends when its standard input does.
func plugin(args []string) error {
	flags := flag.NewFlagSet("plugin", flag.ContinueOnError)
	socket := flags.String("socket", "", "path of the socket")
	devices := flags.Int("devices", 0, "number of devices of the device plugin")
	if err := flags.Parse(args); err != nil {
		return err
	}
	listener, err := net.Listen("unix", *socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	drapb.RegisterDRAPluginServer(server, claimPlugin{})
	pluginapi.RegisterDevicePluginServer(server, devicePlugin{devices: *devices})
	go func() {
		node.UntilInputEnds()
		os.Exit(0)
	}()
	node.Emit(map[string]any{"event": "started"})
	return server.Serve(listener)
}

// pluginProcess is this program as a plugin, in a process of its own.
type pluginProcess struct {
	command *exec.Cmd
	input   io.Closer
}

// startPlugin returns when the plugin listens. It ends with this process, however that ends.
func startPlugin(socket string, devices int) (*pluginProcess, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	command := exec.Command(program, "plugin", "--socket", socket, "--devices", strconv.Itoa(devices))
	command.Stderr = os.Stderr
	input, err := command.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	started := &pluginProcess{command: command, input: input}
	if _, err := bufio.NewReader(output).ReadString('\n'); err != nil {
		started.stop()
		return nil, fmt.Errorf("the plugin does not start: %w", err)
	}
	return started, nil
}

func (p *pluginProcess) stop() {
	p.input.Close()
	// It ends with its input.
	_ = p.command.Wait()
}

type claimPlugin struct {
	drapb.UnimplementedDRAPluginServer
}

func (claimPlugin) NodePrepareResources(
	_ context.Context, request *drapb.NodePrepareResourcesRequest,
) (*drapb.NodePrepareResourcesResponse, error) {
	claims := make(map[string]*drapb.NodePrepareResourceResponse, len(request.Claims))
	for _, claim := range request.Claims {
		device := &drapb.Device{
			RequestNames: []string{benchRequest}, PoolName: benchPool, DeviceName: benchDevice, CdiDeviceIds: []string{cdiDevice(claim.Uid)},
		}
		claims[claim.Uid] = &drapb.NodePrepareResourceResponse{Devices: []*drapb.Device{device}}
	}
	return &drapb.NodePrepareResourcesResponse{Claims: claims}, nil
}

func (claimPlugin) NodeUnprepareResources(
	_ context.Context, request *drapb.NodeUnprepareResourcesRequest,
) (*drapb.NodeUnprepareResourcesResponse, error) {
	claims := make(map[string]*drapb.NodeUnprepareResourceResponse, len(request.Claims))
	for _, claim := range request.Claims {
		claims[claim.Uid] = &drapb.NodeUnprepareResourceResponse{}
	}
	return &drapb.NodeUnprepareResourcesResponse{Claims: claims}, nil
}

type devicePlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	devices int
}

func (devicePlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

// ListAndWatch sends one list: devices of two NUMA nodes in turn, all of them healthy.
func (p devicePlugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	list := &pluginapi.ListAndWatchResponse{}
	for n := range p.devices {
		list.Devices = append(list.Devices, &pluginapi.Device{
			ID:       deviceID(n),
			Health:   pluginapi.Healthy,
			Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: numaNode(n)}}},
		})
	}
	if err := stream.Send(list); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (devicePlugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	answer := &pluginapi.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, allocated(container.DevicesIds))
	}
	return answer, nil
}

func allocated(devices []string) *pluginapi.ContainerAllocateResponse {
	return &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"DEVICES": strings.Join(devices, ",")}}
}

func deviceID(n int) string {
	return fmt.Sprintf("device-%05d", n)
}

func numaNode(n int) int64 {
	return int64(n % 2)
}
