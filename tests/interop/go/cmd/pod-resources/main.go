// Command pod-resources calls a kubelet's pod-resources socket as monitoring agents and network plugins do: by the bare path, with
// the deadline and the bound on responses of Kubernetes' own client (pkg/kubelet/apis/podresources).
//
//	pod-resources list SOCKET                  every pod, by v1
//	pod-resources allocatable SOCKET           what can be allocated, by v1
//	pod-resources get SOCKET NAMESPACE NAME    one pod, by v1
//	pod-resources old-list SOCKET              every pod, by v1alpha1
//	pod-resources flood SOCKET                 many calls at once, and what became of them
//
// The response is a line of JSON on standard output: the message, or {"code":…,"error":…} for a refusal.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	podresourcesv1alpha1 "k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
)

const (
	deadline    = 10 * time.Second
	answerBytes = 16 << 20
	floodCalls  = 200
)

func main() {
	if len(os.Args) < 3 || (os.Args[1] == "get") != (len(os.Args) == 5) {
		fmt.Fprintln(os.Stderr, "usage: pod-resources list|allocatable|old-list|flood SOCKET, or get SOCKET NAMESPACE NAME")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := run(ctx, os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "pod-resources:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, command, socket string, args []string) error {
	conn, err := dial(ctx, socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := podresourcesv1.NewPodResourcesListerClient(conn)
	var answer proto.Message
	switch command {
	case "list":
		answer, err = client.List(ctx, &podresourcesv1.ListPodResourcesRequest{})
	case "allocatable":
		answer, err = client.GetAllocatableResources(ctx, &podresourcesv1.AllocatableResourcesRequest{})
	case "get":
		answer, err = client.Get(ctx, &podresourcesv1.GetPodResourcesRequest{PodNamespace: args[0], PodName: args[1]})
	case "old-list":
		old := podresourcesv1alpha1.NewPodResourcesListerClient(conn)
		answer, err = old.List(ctx, &podresourcesv1alpha1.ListPodResourcesRequest{})
	case "flood":
		return flood(ctx, client)
	default:
		return fmt.Errorf("%q is no command", command)
	}
	return tell(answer, err)
}

// dial dials as Kubernetes' client does: the path is the target, and grpc derives the :authority from it.
func dial(ctx context.Context, socket string) (*grpc.ClientConn, error) {
	return grpc.DialContext(ctx, socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytes)),
	)
}

func tell(answer proto.Message, err error) error {
	if err != nil {
		return json.NewEncoder(os.Stdout).Encode(map[string]any{
			"code": status.Code(err).String(), "error": status.Convert(err).Message(),
		})
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(answer)
	if err == nil {
		_, err = fmt.Println(string(text))
	}
	return err
}

func flood(ctx context.Context, client podresourcesv1.PodResourcesListerClient) error {
	errs := make([]error, floodCalls)
	var calls sync.WaitGroup
	for i := range errs {
		calls.Go(func() {
			_, errs[i] = client.List(ctx, &podresourcesv1.ListPodResourcesRequest{})
		})
	}
	calls.Wait()
	answered, words := 0, map[string]int{}
	for _, err := range errs {
		if status.Code(err) == codes.OK {
			answered++
		} else {
			words[status.Code(err).String()+": "+status.Convert(err).Message()]++
		}
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"answered": answered, "refused": words})
}
