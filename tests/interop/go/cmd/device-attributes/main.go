// Command device-attributes writes the standard attributes of every PCI function of a machine, as the library of Kubernetes finds them.
//
//	device-attributes SYS number|list
//
// SYS is the machine's /sys. The output is a JSON object: address to attribute to value. An attribute that the library refuses is left out.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: device-attributes SYS number|list")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2] == "list"); err != nil {
		fmt.Fprintln(os.Stderr, "device-attributes:", err)
		os.Exit(1)
	}
}

func run(sys string, list bool) error {
	entries, err := os.ReadDir(filepath.Join(sys, "bus/pci/devices"))
	if err != nil {
		return err
	}
	form := deviceattribute.ScalarAttribute
	if list {
		form = deviceattribute.ListAttribute
	}
	machine := deviceattribute.WithFSFromRoot(sys)
	functions := map[string]map[string]any{}
	for _, entry := range entries {
		attributes := map[string]any{}
		add := func(attribute deviceattribute.DeviceAttribute, err error) {
			if err == nil {
				attributes[string(attribute.Name)] = value(attribute.Value)
			}
		}
		add(deviceattribute.GetPCIBusIDAttribute(entry.Name()))
		add(deviceattribute.GetPCIeRootAttributeByPCIBusID(entry.Name(), machine))
		add(deviceattribute.GetNUMANodeAttributeByPCIBusID(entry.Name(), form, machine))
		functions[entry.Name()] = attributes
	}
	return json.NewEncoder(os.Stdout).Encode(functions)
}

func value(attribute resourceapi.DeviceAttribute) any {
	switch {
	case attribute.StringValue != nil:
		return *attribute.StringValue
	case attribute.IntValue != nil:
		return *attribute.IntValue
	default:
		return attribute.IntValues
	}
}
