// Command protobuf-oracle says how the official client library encodes objects as protobuf.
//
//	protobuf-oracle table
//
// writes every message of the kinds of the local API, with the number, the name in JSON and the type of each field, as
// host/apiserver/src/protobuf/messages.txt has them.
//
//	protobuf-oracle objects SEED COUNT
//
// writes COUNT random objects of each kind, one a line: {"protobuf": base64, "json": the object}.
package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// kinds makes an empty object of each kind.
var kinds = []func() runtime.Object{
	func() runtime.Object { return &corev1.Event{} },
	func() runtime.Object { return &corev1.Namespace{} },
	func() runtime.Object { return &corev1.Node{} },
	func() runtime.Object { return &corev1.Pod{} },
	func() runtime.Object { return &eventsv1.Event{} },
	func() runtime.Object { return &metav1.DeleteOptions{} },
	func() runtime.Object { return &resourcev1.DeviceClass{} },
	func() runtime.Object { return &resourcev1.ResourceClaim{} },
	func() runtime.Object { return &resourcev1.ResourceClaimTemplate{} },
	func() runtime.Object { return &resourcev1.ResourceSlice{} },
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "protobuf-oracle:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "table":
		return writeTable(os.Stdout)
	case len(args) == 3 && args[0] == "objects":
		seed, err := strconv.ParseInt(args[1], 10, 64)
		if err != nil {
			return err
		}
		count, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return writeObjects(seed, count)
	}
	return fmt.Errorf("usage: protobuf-oracle table | objects SEED COUNT")
}

func writeObjects(seed int64, count int) error {
	encoder := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	lines := json.NewEncoder(os.Stdout)
	random := filler(seed)
	for _, empty := range kinds {
		for range count {
			object := empty()
			random.Fill(object)
			object.GetObjectKind().SetGroupVersionKind(kindOf(object))
			encoded, err := runtime.Encode(encoder, object)
			if err != nil {
				return err
			}
			line := map[string]any{"protobuf": base64.StdEncoding.EncodeToString(encoded), "json": object}
			if err := lines.Encode(line); err != nil {
				return err
			}
		}
	}
	return nil
}

func kindOf(object runtime.Object) schema.GroupVersionKind {
	if _, ok := object.(*metav1.DeleteOptions); ok {
		return schema.GroupVersionKind{Version: "v1", Kind: "DeleteOptions"}
	}
	known, _, _ := scheme.Scheme.ObjectKinds(object)
	return known[0]
}
