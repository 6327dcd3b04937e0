// Command device-metadata reads a file of device metadata as the library of Kubernetes does for programs in containers.
//
//	device-metadata FILE
//
// The output is one JSON object for each object of the stream: its version, what its validation says (empty: valid), and the object.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/runtime/schema"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

type object struct {
	Version string                          `json:"version"`
	Invalid string                          `json:"invalid"`
	Object  *metadatav1beta1.DeviceMetadata `json:"object"`
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: device-metadata FILE")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "device-metadata:", err)
		os.Exit(1)
	}
}

func run(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	stream, output := json.NewDecoder(file), json.NewEncoder(os.Stdout)
	for stream.More() {
		var found metadatav1beta1.DeviceMetadata
		var version schema.GroupVersionKind
		var invalid error
		// It reads the stream up to the first object that it knows.
		err := devicemetadata.DecodeMetadataFromStream(stream, &found,
			devicemetadata.DecodeMetadataStoreGVKResult(&version),
			devicemetadata.DecodeMetadataWithValidationResult(&invalid))
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		read := object{Version: version.GroupVersion().String(), Object: &found}
		if invalid != nil {
			read.Invalid = invalid.Error()
		}
		if err := output.Encode(read); err != nil {
			return err
		}
	}
	return nil
}
