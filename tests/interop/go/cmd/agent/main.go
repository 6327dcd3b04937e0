// Command agent dials Unix sockets as the agents of a node do: by their bare path, from which grpc derives the :authority
// "%2Fpath%2Fto%2Fsocket".
//
//	agent node-api SOCKET              lists Nodedock's drivers twice, and writes the responses in hex
//	agent register SOCKET              calls a registration socket as the kubelet, and writes the plugin's GetInfo
//	agent prepare SOCKET CLAIM...      registers the plugin at SOCKET and calls it to prepare claims, each NAMESPACE/NAME/UID
//	agent unprepare SOCKET CLAIM...    the same, to unprepare them
//
// Each response is a line on standard output, of JSON unless stated otherwise.
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerv1 "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The kubelet's deadline of a connection, longer than that of most calls.
const deadline = 10 * time.Second

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: agent node-api|register|prepare|unprepare SOCKET [NAMESPACE/NAME/UID]...")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := run(ctx, os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, command, socket string, claims []string) error {
	switch command {
	case "node-api":
		return listDrivers(ctx, socket)
	case "register":
		_, err := register(ctx, socket)
		return err
	case "prepare", "unprepare":
		return onClaims(ctx, command, socket, claims)
	default:
		return fmt.Errorf("%q is no command", command)
	}
}

// dial dials as the kubelet does (pkg/kubelet/pluginmanager/operationexecutor): a bare path, a dialer, no authority.
func dial(ctx context.Context, socket string) (*grpc.ClientConn, error) {
	return grpc.DialContext(ctx, socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithBlock(),
		grpc.FailOnNonTempDialError(true),
		grpc.WithReturnConnectionError(),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
	)
}

// listDrivers calls twice: the second call finds the authority in the table of header compression.
func listDrivers(ctx context.Context, socket string) error {
	conn, err := dial(ctx, socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	for range 2 {
		// The request has no required fields, and unknown fields of a response are preserved.
		answer := &emptypb.Empty{}
		if err := conn.Invoke(ctx, "/nodedock.node.v1.Node/ListDrivers", &emptypb.Empty{}, answer); err != nil {
			return err
		}
		fmt.Println(hex.EncodeToString(answer.ProtoReflect().GetUnknown()))
	}
	return nil
}

func register(ctx context.Context, socket string) (*registerv1.PluginInfo, error) {
	conn, err := dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	client := registerv1.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerv1.InfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("GetInfo: %w", err)
	}
	print(map[string]any{
		"type": info.Type, "name": info.Name, "endpoint": info.Endpoint, "versions": info.SupportedVersions,
	})
	_, err = client.NotifyRegistrationStatus(ctx, &registerv1.RegistrationStatus{PluginRegistered: true})
	if err != nil {
		return nil, fmt.Errorf("NotifyRegistrationStatus: %w", err)
	}
	return info, nil
}

func onClaims(ctx context.Context, command, socket string, texts []string) error {
	claims, err := parseClaims(texts)
	if err != nil {
		return err
	}
	info, err := register(ctx, socket)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix:"+info.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	plugin := drav1.NewDRAPluginClient(conn)
	var answer proto.Message
	if command == "prepare" {
		answer, err = plugin.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: claims})
	} else {
		answer, err = plugin.NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{Claims: claims})
	}
	if err != nil {
		return err
	}
	print(answer)
	return nil
}

func parseClaims(texts []string) ([]*drav1.Claim, error) {
	if len(texts) == 0 {
		return nil, errors.New("which claims?")
	}
	var claims []*drav1.Claim
	for _, text := range texts {
		parts := strings.Split(text, "/")
		if len(parts) != 3 {
			return nil, fmt.Errorf("%q is not NAMESPACE/NAME/UID", text)
		}
		claims = append(claims, &drav1.Claim{Namespace: parts[0], Name: parts[1], Uid: parts[2]})
	}
	return claims, nil
}

func print(answer any) {
	// Standard output needs no reader.
	_ = json.NewEncoder(os.Stdout).Encode(answer)
}
