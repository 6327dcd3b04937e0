// Command cdi-files reads CDI files as container runtimes do, with the CDI library.
//
//	cdi-files DIRECTORY
//
// Fails if the library refuses a file, or cannot give a container one of the devices. The output is a JSON object: the name of each device to
// its nodes, as the file has them and as the container gets them.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// Node is a device node; the type is empty if it has none.
type Node struct {
	Path        string `json:"path"`
	HostPath    string `json:"hostPath,omitempty"`
	Type        string `json:"type"`
	Major       int64  `json:"major"`
	Minor       int64  `json:"minor"`
	Permissions string `json:"permissions,omitempty"`
}

// Device is what a file and a container have of one.
type Device struct {
	File      []Node `json:"file"`
	Container []Node `json:"container"`
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: cdi-files DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "cdi-files:", err)
		os.Exit(1)
	}
}

func run(directory string) error {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(directory), cdi.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	if err := cache.Refresh(); err != nil {
		return err
	}
	for path, failed := range cache.GetErrors() {
		return fmt.Errorf("%s: %w", path, errors.Join(failed...))
	}
	devices := map[string]Device{}
	for _, name := range cache.ListDevices() {
		device := Device{File: []Node{}, Container: []Node{}}
		edits := cache.GetDevice(name)
		nodes := append(edits.GetSpec().ContainerEdits.DeviceNodes, edits.ContainerEdits.DeviceNodes...)
		for _, node := range nodes {
			device.File = append(device.File,
				Node{node.Path, node.HostPath, node.Type, node.Major, node.Minor, node.Permissions})
		}
		container := &oci.Spec{}
		if _, err := cache.InjectDevices(container, name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if container.Linux != nil {
			for _, node := range container.Linux.Devices {
				device.Container = append(device.Container,
					Node{Path: node.Path, Type: node.Type, Major: node.Major, Minor: node.Minor})
			}
		}
		devices[name] = device
	}
	return json.NewEncoder(os.Stdout).Encode(devices)
}
